"""PaddleOCR-VL (transformers 5.24, modeling_paddleocr_vl.py): packed patches in a SigLIP, with learned positions and
rotation by row and column, squares of them merged image by image behind it, and a Llama with positions of three kinds.

Where patches lie, and between which learned positions, is taken as computed before, as a collator may.
"""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import pixels
from zsim.model.architecture import Vision
from zsim.model.decoder import head, run_block
from zsim.model.families import clip, llama
from zsim.model.families.qwen_vision import QwenAttention, QwenRotary
from zsim.model.families.towers import Convolution, PositionTable, given, images_of
from zsim.model.families.vlm import Combined, QwenTextModel, VisionLanguageModel, vision_of
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, LayerNorm, Linear, Module, Net


class Embeddings(Module):
    kind = "embedding"
    class_name = "PaddleOCRVisionEmbeddings"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        kernel = (vision.channels, vision.patch, vision.patch)
        self.patch_embedding = Convolution(net, "Conv2d", kernel, net.arch.hidden, bias=True)
        self.position_embedding = PositionTable(net, vision.positions, net.arch.hidden)

    def buffers_bytes(self) -> int:
        return 8 * self.position_embedding.weight.shape[0]

    def index_buffers_bytes(self) -> int:
        return self.buffers_bytes()

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches, width = pixel_values.shape[0], self.net.arch.hidden
        corners, weights = given(self.net, (patches, 4), "int64"), given(self.net, (patches, 4, 1), "float32")
        x = F.reshape(self.patch_embedding(pixel_values, (patches, width, 1, 1)), patches, width)
        positions = F.sum_middle(F.mul(self.position_embedding(corners), weights))
        return F.add(x, F.to(positions, x.dtype))


class TowerAttention(QwenAttention):
    def __init__(self, net: Net, vision: Vision) -> None:
        Module.__init__(self, net)
        self.class_name, self.vision, self.windowed = "PaddleOCRVisionAttention", vision, False
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, Linear(net, net.arch.hidden, net.arch.hidden, bias=True))

    def heads(self, x: Tensor) -> list[Tensor]:
        shape = (x.shape[0], self.net.arch.heads, self.net.arch.head_dim)
        return [F.reshape(self.children[name](x), *shape) for name in ("q_proj", "k_proj", "v_proj")]

    def projected(self, out: Tensor) -> Tensor:
        return self.children["out_proj"](out)


class Layer(Module):
    kind = "residual"
    class_name = "PaddleOCRVisionEncoderLayer"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.layer_norm1 = LayerNorm(net, net.arch.hidden)
        self.self_attn = TowerAttention(net, vision)
        self.layer_norm2 = LayerNorm(net, net.arch.hidden)
        self.mlp = clip.ClipMLP(net)
        self.mlp.class_name = "PaddleOCRVisionMLP"

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        residual = x
        x = self.layer_norm1(x)
        x = self.self_attn(x, *tables)
        x = F.add(residual, x)
        residual = x
        x = self.layer_norm2(x)
        x = self.mlp(x)
        return F.add(residual, x)


class Encoder(Module):
    kind = "copy"
    class_name = "PaddleOCRVisionEncoder"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.layers = Blocks(net, net.arch.kinds, lambda _index: Layer(net, vision), role="")
        self.rotary_pos_emb = QwenRotary(net, "PaddleOCRVisionRotaryEmbedding")

    def forward(self, embeds: Tensor) -> Tensor:
        x = embeds
        tables = self.rotary_pos_emb(x, given(self.net, (x.shape[0], 2), "int64"))
        if self.net.layers_save(x):
            self.net.tape.share(*tables)
        for layer in self.layers:
            x = run_block(self.net, layer, x, *tables)
        return x


class Transformer(Module):
    class_name = "PaddleOCRVisionTransformer"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.embeddings = Embeddings(net, vision)
        self.encoder = Encoder(net, vision)
        self.post_layernorm = LayerNorm(net, net.arch.hidden)

    def forward(self, pixel_values: Tensor) -> Tensor:
        embeds = self.embeddings(pixel_values)
        return self.post_layernorm(self.encoder(embeds))


class Tower(Module):
    class_name = "PaddleOCRVisionModel"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.vision_model = Transformer(net, vision)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.vision_model(pixel_values)


class Projector(Module):
    """Image by image."""

    kind = "copy"
    class_name = "PaddleOCRProjector"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        vision = vision_of(net)
        self.merge, self.width = vision.merge, vision.blocks.hidden
        inner = self.width * self.merge**2
        self.pre_norm = LayerNorm(net, self.width)
        self.linear_1 = Linear(net, inner, inner, bias=True)
        self.act = Activation(net, "gelu")
        self.linear_2 = Linear(net, inner, net.arch.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = pixels.grid(vision_of(self.net), images_of(self.net))
        m, d, count = self.merge, self.width, x.shape[0] // (rows * columns)
        chunks, features = F.split(x, [rows * columns] * count, dim=0), []
        for chunk in chunks:
            chunk = self.pre_norm(chunk)
            chunk = F.transpose(F.reshape(chunk, 1, rows // m, m, columns // m, m, d), 2, 3)
            chunk = F.reshape(chunk, rows * columns // m**2, m**2 * d)
            out = self.linear_1(chunk)
            out = self.act(out)
            out = self.linear_2(out)
            features.append(out)
        return F.cat(features, dim=0)


class TextModel(QwenTextModel):
    def block(self, prefix: str, index: int) -> Module:
        return llama.Block(self.net, prefix, index)


class PaddleModel(Combined):
    class_name = "PaddleOCRVLModel"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.visual = Tower(net.tower(), vision_of(net))
        self.language_model = TextModel(net, "PaddleOCR")
        self.projector = Projector(net)

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        net, vision = self.net, vision_of(self.net)
        images = images_of(net)
        count, (rows, columns) = batch * images.per_sequence, pixels.grid(vision, images)
        shape = (count * rows * columns, vision.channels, vision.patch, vision.patch)
        pixel_values = F.to(given(net, shape, "float32"), net.dtype)
        last = self.visual(pixel_values)
        features = F.split(self.projector(last), [pixels.image_tokens(vision, images)] * count, dim=0)
        return features, (last, *features)


class PaddleOCRVLForConditionalGeneration(VisionLanguageModel):
    class_name = "PaddleOCRVLForConditionalGeneration"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        if net.attention == "eager" and net.images is not None:
            raise NotModeled("eager attention in PaddleOCR-VL", field="attention", accepted="flash, sdpa")
        self.model = PaddleModel(net)
        self.lm_head = head(net, self.model.language_model.embed_tokens)

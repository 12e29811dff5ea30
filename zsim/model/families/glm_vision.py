"""GLM-4.1V and GLM-4.5V (transformers 5.24, modeling_glm4v.py, modeling_glm4v_moe.py): Qwen2.5-VL's patches under
positions that are sampled from a learned grid, merged by a convolution, and the text model of GLM-4 or GLM-4.5 with
positions of time, row and column. GLM-OCR (modeling_glm_ocr.py) has no such grid, and norms its tower's queries and
keys; its layer that predicts further tokens is not built."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import pixels
from zsim.model.architecture import Vision
from zsim.model.decoder import head, run_block
from zsim.model.families import deepseek, glm, llama
from zsim.model.families.moe_relatives import GlmAttention
from zsim.model.families.phi import Phi3MLP
from zsim.model.families.qwen_vision import QwenAttention, QwenPatches, QwenRotary
from zsim.model.families.towers import Convolution, PositionTable, given
from zsim.model.families.vlm import MRotary, QwenModel, QwenTextModel, VisionLanguageModel, vision_of
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, LayerNorm, Linear, Module, Net, RMSNorm

PREFIXES = {"glm4v": "Glm4v", "glm4v_moe": "Glm4vMoe", "glm46v": "Glm4v", "glm_ocr": "GlmOcr"}
MLPS = {"Glm4v": "Glm4VisionMlp", "Glm4vMoe": "Glm4vMoeisionMlp", "GlmOcr": "GlmOcrVisionMlp"}  # as they are written


def norm(net: Net, prefix: str, width: int) -> RMSNorm:
    return RMSNorm(net, width, f"{prefix}RMSNorm")


class TowerMLP(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str, width: int) -> None:
        super().__init__(net)
        self.class_name = MLPS[prefix]
        bias = prefix == "GlmOcr" and net.arch.attention_bias
        self.gate_proj = Linear(net, net.arch.hidden, width, bias)
        self.up_proj = Linear(net, net.arch.hidden, width, bias)
        self.down_proj = Linear(net, width, net.arch.hidden, bias)
        self.act_fn = Activation(net, net.arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.mul(self.act_fn(self.gate_proj(x)), self.up_proj(x)))


class NormedAttention(QwenAttention):
    def __init__(self, net: Net, vision: Vision, class_name: str, windowed: bool) -> None:
        super().__init__(net, vision, class_name, windowed)
        self.q_norm = norm(net, "GlmOcr", net.arch.head_dim)
        self.k_norm = norm(net, "GlmOcr", net.arch.head_dim)

    def heads(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().heads(x)
        q = self.q_norm(q)
        k = self.k_norm(k)
        return [q, k, v]


class TowerBlock(Module):
    kind = "residual"

    def __init__(self, net: Net, vision: Vision, prefix: str, width: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}VisionBlock"
        self.norm1, self.norm2 = norm(net, prefix, net.arch.hidden), norm(net, prefix, net.arch.hidden)
        ocr, bias = prefix == "GlmOcr", net.arch.attention_bias
        attention = NormedAttention if ocr else QwenAttention
        self.attn = attention(net, vision, f"{prefix}VisionAttention", windowed=False)
        self.attn.qkv = Linear(net, net.arch.hidden, 3 * net.arch.hidden, bias)
        self.attn.proj = Linear(net, net.arch.hidden, net.arch.hidden, ocr and bias)
        self.mlp = TowerMLP(net, prefix, net.arch.intermediate if ocr else width)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        x = F.add(x, self.attn(self.norm1(x), *tables))
        return F.add(x, self.mlp(self.norm2(x)))


class Embeddings(Module):
    """Positions between those of a square of them, for every patch."""

    kind = "embedding"

    def __init__(self, net: Net, vision: Vision, prefix: str) -> None:
        super().__init__(net)
        self.class_name, self.side = f"{prefix}VisionEmbeddings", vision.positions
        self.position_embedding = PositionTable(net, self.side**2, net.arch.hidden)

    def forward(self, x: Tensor, images: int) -> Tensor:
        tape, (patches, width), side = self.net.tape, x.shape, self.side
        tape.read(self.position_embedding.weight)
        table = F.permute(F.reshape(self.position_embedding.weight, side, side, width), 2, 0, 1)
        table = F.to(F.reshape(table, 1, *table.shape), "float32")
        numbers = tape.empty((patches,), "int64")
        within = F.pointwise(numbers, shape=(images, patches), dtype="bool")
        sequences = F.pointwise(within, shape=(patches,), dtype="int64")
        del within
        sizes = [F.pointwise(F.pointwise(sequences), dtype="float32") for _ in range(2)]
        where = [F.pointwise(F.pointwise(F.pointwise(F.pointwise(size)))) for size in sizes]
        grid = F.pointwise(*where, shape=(1, patches, 1, 2))
        wide = pixels.sampled(table, grid)
        positions = F.to(F.permute(F.reshape(wide, width, patches), 1, 0), x.dtype)
        return F.add(x, positions)


class Merger(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str, width: int, between: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}VisionPatchMerger"
        self.proj = Linear(net, width, width)
        self.post_projection_norm = LayerNorm(net, width)
        self.gate_proj = Linear(net, width, between)
        self.up_proj = Linear(net, width, between)
        self.down_proj = Linear(net, between, width)
        self.act1 = Activation(net, "nn.gelu")
        self.act_fn = Activation(net, net.arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        x = self.act1(self.post_projection_norm(x))
        return self.down_proj(F.mul(self.act_fn(self.gate_proj(x)), self.up_proj(x)))


class Tower(Module):
    kind = "copy"

    def __init__(self, net: Net, vision: Vision, prefix: str, width: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}VisionModel"
        self.vision, self.width, hidden = vision, width, net.arch.hidden
        self.embeddings = Embeddings(net, vision, prefix) if vision.positions else None
        self.patch_embed = QwenPatches(net, vision, f"{prefix}VisionPatchEmbed", bias=True)
        self.rotary_pos_emb = QwenRotary(net, f"{prefix}VisionRotaryEmbedding")
        self.blocks = Blocks(net, net.arch.kinds, lambda _index: TowerBlock(net, vision, prefix, width))
        between = net.arch.intermediate if vision.positions else width * vision.channels
        self.merger = Merger(net, prefix, width, between)
        self.post_conv_layernorm = norm(net, prefix, hidden) if vision.positions else None
        self.downsample = Convolution(net, "Conv2d", (hidden, vision.merge, vision.merge), width, bias=True)
        self.post_layernorm = norm(net, prefix, hidden)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        net, merge, patches = self.net, self.vision.merge, pixel_values.shape[0]
        assert net.images is not None
        rows, columns = pixels.grid(self.vision, net.images)
        places, images = given(net, (patches, 2), "int64"), patches // (rows * columns)
        x = self.patch_embed(pixel_values)
        if self.post_conv_layernorm:
            x = self.post_conv_layernorm(x)
        tables = self.rotary_pos_emb(x, places)
        lengths = net.tape.empty((images,), "int32") if self.embeddings else None  # noqa: F841  lives to the end
        if net.layers_save(x):
            net.tape.share(*tables)
        if self.embeddings:
            x = self.embeddings(x, images)
        for block in self.blocks:
            x = run_block(net, block, x, *tables)
        x = self.post_layernorm(x)
        x = F.permute(F.reshape(x, -1, merge, merge, x.shape[-1]), 0, 3, 1, 2)
        x = F.reshape(self.downsample(x, (patches // merge**2, self.width, 1, 1)), -1, self.width)
        return x, self.merger(x)


class TextAttention(llama.Attention):
    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotary = cos.shape[-1]
        q_turned, q_passed = F.narrow(q, -1, rotary), F.narrow(q, -1, q.shape[-1] - rotary)
        k_turned, k_passed = F.narrow(k, -1, rotary), F.narrow(k, -1, k.shape[-1] - rotary)
        q = glm.rotate_neighbours(q_turned, cos, sin)
        k = glm.rotate_neighbours(k_turned, cos, sin)
        q = F.cat((q, q_passed))
        return q, F.cat((k, k_passed))


class TextBlock(glm.Glm4Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        for part in self.children.values():
            if isinstance(part, RMSNorm):
                part.class_name = f"{prefix.removesuffix('Text')}RMSNorm"

    def attention(self, prefix: str, index: int) -> llama.Attention:
        return TextAttention(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        mlp = Phi3MLP(self.net)
        mlp.class_name = f"{prefix}MLP"
        return mlp


def earlier(net: Net) -> bool:
    """Before transformers 5, when experts were modules."""
    return bool(net.arch.moe and net.arch.moe.modules)


class EarlierAttention(GlmAttention):
    """Each layer took its sections of all tables."""

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotated(q, k, self._chosen(cos), self._chosen(sin))

    def _chosen(self, table: Tensor) -> Tensor:
        _, _, b, s, width = table.shape
        return F.unsqueeze(F.pointwise(table, shape=(b, s, width)), 1)


class EarlierRotary(MRotary):
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        _, b, s = positions.shape
        wide = F.pointwise(positions, dtype="float32")
        angles = F.pointwise(wide, shape=(3, b, s, self.dim // 2))
        angles = F.cat((angles, angles))
        cos = F.pointwise(F.pointwise(angles))
        sin = F.pointwise(F.pointwise(angles))
        return F.to(cos, x.dtype), F.to(sin, x.dtype)


class ExpertsBlock(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return (EarlierAttention if earlier(self.net) else GlmAttention)(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        sparse = self.net.arch.kinds[index].sparse
        return deepseek.experts(self.net, prefix) if sparse else llama.MLP(self.net, prefix)


class TextModel(QwenTextModel):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, f"{prefix}Text")
        self.class_name, self.norm.class_name = f"{prefix}TextModel", f"{prefix}RMSNorm"
        width = net.arch.rotary_dim or net.arch.head_dim
        self.rotary_emb = (EarlierRotary if earlier(net) else MRotary)(net, width, f"{prefix}TextRotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        return (ExpertsBlock if self.net.arch.moe else TextBlock)(self.net, prefix, index)


class GlmModel(QwenModel):
    def __init__(self, net: Net, prefix: str) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}Model"
        self.visual = Tower(net.tower(), vision_of(net), prefix, net.arch.hidden)
        self.language_model = TextModel(net, prefix)
        for block in self.visual.blocks:
            block.called_again = earlier(net)  # as llama.Block


class Glm4vForConditionalGeneration(VisionLanguageModel):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        prefix = PREFIXES[net.arch.family]
        self.class_name = f"{prefix}ForConditionalGeneration"
        self.model = GlmModel(net, prefix)
        if net.arch.family == "glm46v":  # GLM-4.6V: classes of its own around the parts of GLM-4.1V
            self.class_name, self.model.class_name = "Glm46VForConditionalGeneration", "Glm46VModel"
        self.lm_head = head(net, self.model.language_model.embed_tokens)

"""Idefics 3 and SmolVLM (transformers 5.24, modeling_idefics3.py, modeling_smolvlm.py): SigLIP over the squares of an
image, whose patches are merged by four and more, and a Llama."""

from __future__ import annotations

from math import ceil

from zsim.model import functional as F
from zsim.model import pixels
from zsim.model.architecture import Vision
from zsim.model.decoder import head
from zsim.model.families import clip, internvl, llava, towers
from zsim.model.families.vlm import Combined, VisionLanguageModel, vision_of
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, LayerNorm, Linear, Module, Net, require_grad

PREFIXES = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}


class Embeddings(Module):
    """Positions are computed from the patches that are no padding. The whole of it is its tower's input embedding."""

    kind = "embedding"

    def __init__(self, net: Net, vision: Vision, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}VisionEmbeddings"
        self.side = vision.image_size // vision.patch
        kernel = (vision.channels, vision.patch, vision.patch)
        self.patch_embedding = towers.Convolution(net, "Conv2d", kernel, net.arch.hidden, bias=True)
        self.position_embedding = towers.PositionTable(net, self.side**2, net.arch.hidden)

    def forward(self, pixel_values: Tensor, mask: Tensor) -> Tensor:
        count, width = pixel_values.shape[0], self.net.arch.hidden
        patches = self.patch_embedding(pixel_values, (count, width, self.side, self.side))
        embeddings = F.transpose(F.reshape(patches, count, width, -1), 1, 2)
        return require_grad(self.net, F.add(embeddings, self._positions(mask)), copied=False)

    def _positions(self, mask: Tensor) -> Tensor:
        tape, side = self.net.tape, self.side
        count = mask.shape[0]
        step = 1 / side
        bounds = tape.empty((ceil((1.0 - step) / step),), "float32")  # noqa: F841  all these live to the end
        places = tape.empty((count, side * side), "int64")
        sums = [F.pointwise(mask, shape=(count,), dtype="int64") for _ in range(2)]
        steps = [F.pointwise(each, dtype="float32") for each in sums]
        indices = [tape.empty((side,), "float32") for _ in range(2)]  # noqa: F841
        parts = [F.pointwise(each, shape=(count, side)) for each in steps]
        parts = [F.pointwise(each) for each in parts]
        buckets = [F.pointwise(each, dtype="int64") for each in parts]
        found = F.pointwise(F.pointwise(buckets[0]), buckets[1], shape=(count, side, side))
        places = F.pointwise(F.reshape(mask, count, -1), found, places, shape=(count, side * side), dtype="int64")
        return self.position_embedding(places)


class Layer(clip.SiglipLayer):
    """No unit of FSDP: its attention is (_no_split_modules)."""

    def __init__(self, net: Net, prefix: str) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}EncoderLayer"
        self.self_attn = clip.ClipAttention(net)
        self.self_attn.class_name, self.self_attn.role = f"{prefix}VisionAttention", "unit"
        self.layer_norm1 = LayerNorm(net, net.arch.hidden)
        self.mlp = clip.ClipMLP(net)
        self.mlp.class_name = f"{prefix}VisionMLP"
        self.layer_norm2 = LayerNorm(net, net.arch.hidden)


class Encoder(clip.ClipEncoder):
    def __init__(self, net: Net, prefix: str) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}Encoder"
        self.layers = Blocks(net, net.arch.kinds, lambda _index: Layer(net, prefix), role="")


class Tower(Module):
    def __init__(self, net: Net, vision: Vision, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}VisionTransformer"
        self.embeddings = Embeddings(net, vision, prefix)
        self.encoder = Encoder(net, prefix)
        self.post_layernorm = LayerNorm(net, net.arch.hidden)

    def forward(self, pixel_values: Tensor, mask: Tensor) -> Tensor:
        x = self.embeddings(pixel_values, mask)
        x = self.encoder(x, [])
        return self.post_layernorm(x)


class Projection(Module):
    def __init__(self, net: Net, inputs: int, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}SimpleMLP"
        self.proj = Linear(net, inputs, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Connector(Module):
    kind = "copy"

    def __init__(self, net: Net, vision: Vision, prefix: str) -> None:
        super().__init__(net)
        self.class_name, self.merge = f"{prefix}Connector", vision.merge
        self.modality_projection = Projection(net, vision.blocks.hidden * vision.merge**2, prefix)

    def forward(self, x: Tensor) -> Tensor:
        n, patches, width = x.shape
        side = round(patches**0.5)
        x = F.reshape(internvl.shuffled(F.reshape(x, n, side, side, width), self.merge), n, -1, width * self.merge**2)
        return self.modality_projection(x)


class IdeficsModel(Combined):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.prefix, self.class_name = prefix, f"{prefix}Model"
        self.vision_model = Tower(net.tower(), vision_of(net), prefix)
        self.connector = Connector(net, vision_of(net), prefix)
        self.text_model = llava.text_model(net)

    @property
    def language_model(self):  # type: ignore[no-untyped-def, override]
        return self.text_model

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Squares that are all zero would be taken for padding and left out."""
        net, vision, images = self.net, vision_of(self.net), towers.images_of(self.net)
        each = images.per_sequence * pixels.squares_in_all(vision, images)
        count, side = batch * each, vision.image_size
        shape = (count, vision.channels, side, side)
        pixel_values = F.to(towers.given(net, shape, "float32"), net.dtype)
        real = F.pointwise(
            F.pointwise(F.pointwise(pixel_values, dtype="bool"), shape=(count,), dtype="int64"), dtype="bool"
        )
        per_sequence = F.pointwise(real, shape=(batch,), dtype="int64")  # noqa: F841
        pixel_values = F.pointwise(pixel_values, real)
        mask = F.pointwise(towers.given(net, (count, side, side), "int64"))
        rows = side // vision.patch
        seen = F.pointwise(F.pointwise(mask, shape=(count, rows, rows)), dtype="bool")
        last = self.vision_model(pixel_values, seen)
        projected = self.connector(last)
        features = [F.reshape(part, -1, part.shape[-1]) for part in F.split(projected, [each] * batch, dim=0)]
        return features, (last, *features)


class IdeficsForConditionalGeneration(VisionLanguageModel):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        prefix = PREFIXES[net.arch.family]
        self.class_name = f"{prefix}ForConditionalGeneration"
        self.model = IdeficsModel(net, prefix)
        self.lm_head = head(net, self.model.text_model.embed_tokens)

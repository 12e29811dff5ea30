"""Vision-language models of transformers 5.24: a tower's features take the places of image tokens in the text model."""

from __future__ import annotations

from typing import Any

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import pixels
from zsim.model import products as P
from zsim.model.architecture import Vision
from zsim.model.attention import Rotary
from zsim.model.decoder import CausalLM, head
from zsim.model.families import clip, gemma, llama, moe, qwen_vision, towers
from zsim.model.graph import Tensor
from zsim.model.layers import Linear, Module, Net, Weight


def vision_of(net: Net) -> Vision:
    assert net.arch.vision is not None
    return net.arch.vision


class Combined(Module):
    """What stands between root and parts: `features` of the images, merged into the embedded tokens."""

    kind = "copy"
    language_model: llama.Model
    masks = 1  # kinds of placeholders that are looked for
    listed = True  # features come image by image

    def forward(self, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The last hidden states, and what the tower returned, which is part of the model's output."""
        embeds = self.language_model.embed_tokens(ids)
        parts, outputs = self.features(ids.shape[0])
        features = F.to(F.cat(parts, dim=0) if self.listed else parts[0], embeds.dtype)
        masks = self._placeholders(ids)
        embeds = pixels.masked_scatter(embeds, masks[0], features)
        return self.language_model(None, embeds, *self.read_by_layers(masks[0], outputs)), outputs

    def read_by_layers(self, mask: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the text model's layers get of the tower besides."""
        return ()

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        raise NotImplementedError

    def squares(self, batch: int) -> Tensor:
        """The pixels of all images, where the tower takes squares of one size."""
        vision = vision_of(self.net)
        count, side = batch * towers.images_of(self.net).per_sequence, vision.image_size
        return towers.given(self.net, (count, vision.channels, side, side), "float32")

    def _placeholders(self, ids: Tensor) -> list[Tensor]:
        masks = [F.reshape(F.pointwise(ids, dtype="bool"), *ids.shape, 1) for _ in range(self.masks)]
        for mask in masks:
            F.pointwise(mask, shape=(), dtype="int64")
        return masks


class VisionLanguageModel(CausalLM):
    """The root. A subclass makes its `Combined`."""

    model: Combined

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        if net.loss == "fused" and net.arch.family == "llama4":  # whose text model returns logits
            raise NotModeled("a fused loss of llama4", field="loss", accepted="hf")
        if net.sequence_parallel_size > 1:
            raise NotModeled(f"sequence parallelism of {net.arch.family}", field="sequence_parallel_size", accepted="1")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _outputs = self.model(ids)
        return self.finish(hidden, labels, self.lm_head)

    lm_head: Linear


# Gemma 3


class Gemma3Projector(Module):
    """Patches averaged over squares, normed, and a product with a parameter of its own."""

    kind = "pointwise"
    class_name = "Gemma3MultiModalProjector"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        vision, width = vision_of(net), net.arch.hidden
        self.side = vision.image_size // vision.patch
        self.tokens = self.side // vision.pool
        self.mm_input_projection_weight = Weight(net, vision.blocks.hidden, width)
        self.mm_soft_emb_norm = gemma.RMSNorm(net, vision.blocks.hidden, "Gemma3RMSNorm")
        self.avg_pool = AveragePool(net, self.tokens)

    def forward(self, x: Tensor) -> Tensor:
        count, _, width = x.shape
        turned = F.transpose(x, 1, 2)
        turned = F.reshape(turned, count, width, self.side, self.side)
        turned = F.contiguous(turned)
        pooled = self.avg_pool(turned)
        pooled = F.reshape(pooled, count, width, -1)
        pooled = F.transpose(pooled, 1, 2)
        normed = self.mm_soft_emb_norm(pooled)
        return P.linear(normed, self.mm_input_projection_weight, conv1d=True)


class AveragePool(Module):
    kind = "pointwise"
    class_name = "AvgPool2d"

    def __init__(self, net: Net, side: int) -> None:
        super().__init__(net)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        return pixels.average(x, self.side)


class Gemma3Model(Combined):
    class_name = "Gemma3Model"
    listed = False

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.vision_tower = clip.SiglipTower(net.tower(), vision_of(net))
        self.multi_modal_projector = Gemma3Projector(net)
        self.language_model = gemma.Model(net, "Gemma3Text")

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        last = self.vision_tower(self.squares(batch))
        features = self.multi_modal_projector(last)
        return [features], (last, features)


class Gemma3ForConditionalGeneration(VisionLanguageModel):
    class_name = "Gemma3ForConditionalGeneration"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        if net.attention not in ("efficient", "eager") and net.images is not None:
            raise NotModeled(
                f"{net.attention} attention in Gemma 3, whose image tokens see each other under a mask",
                field="attention", accepted="efficient (SDPA with a mask), eager",
            )  # fmt: skip
        self.model = Gemma3Model(net)
        self.lm_head = head(net, self.model.language_model.embed_tokens)


# PaliGemma


class PaliGemmaProjector(Module):
    class_name = "PaliGemmaMultiModalProjector"
    role = "unit"  # PaliGemma's _no_split_modules

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.linear = Linear(net, vision_of(net).blocks.hidden, net.arch.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class PaliGemmaModel(Combined):
    class_name = "PaliGemmaModel"
    listed = False

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.vision_tower = clip.SiglipTower(net.tower(), vision_of(net))
        self.multi_modal_projector = PaliGemmaProjector(net)
        self.language_model = gemma.Model(net, {"gemma": "Gemma", "gemma2": "Gemma2"}[vision_of(net).text])

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        last = self.vision_tower(self.squares(batch))
        features = self.multi_modal_projector(last)
        return [features], (last, features)


class PaliGemmaForConditionalGeneration(VisionLanguageModel):
    class_name = "PaliGemmaForConditionalGeneration"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        accepted = ("eager",) if net.arch.softcap else ("efficient", "eager")
        if net.attention not in accepted and net.images is not None:
            raise NotModeled(
                f"{net.attention} attention in PaliGemma, whose image and prompt see each other under a mask",
                field="attention", accepted=", ".join(accepted),
            )  # fmt: skip
        self.model = PaliGemmaModel(net)
        self.lm_head = head(net, self.model.language_model.embed_tokens)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return gemma.capped(self.net, head(hidden))


# Qwen


class MRotary(Rotary):
    """Positions of time, row and column, [3, b, s]; each takes its sections of the frequencies."""

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        _, b, s = positions.shape
        wide = F.pointwise(positions, dtype="float32")
        angles = F.pointwise(wide, shape=(3, b, s, self.dim // 2))
        del wide
        cos = F.pointwise(F.pointwise(angles))
        sin = F.pointwise(F.pointwise(angles))
        sin = self._recomposed(sin)
        cos = self._recomposed(cos)
        tables = F.to(cos, x.dtype), F.to(sin, x.dtype)
        del cos, sin
        if self.net.layers_save(x):
            self.net.tape.share(*tables)
        return tables

    def _recomposed(self, table: Tensor) -> Tensor:
        _, b, s, half = table.shape
        chosen = F.pointwise(table, shape=(b, s, half))
        return F.cat((chosen, chosen))


class QwenTextModel(llama.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.class_name = f"{prefix}TextModel"
        self.rotary_emb = MRotary(net, net.arch.head_dim, f"{prefix}RotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        block = super().block(prefix, index)
        block.children["mlp"].class_name = "Qwen2MLP"
        return block

    def positions(self, tokens: Tensor) -> Tensor:
        """Of time, row and column, as a collator hands them over."""
        return towers.given(self.net, (3, *tokens.shape[:2]), "int64")


class QwenModel(Combined):
    masks = 2

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Model"
        self.visual = TOWERS[prefix](net.tower(), vision_of(net), net.arch.hidden)
        self.language_model = self.text_model(prefix)

    def text_model(self, prefix: str) -> llama.Model:
        return (Qwen3TextModel if prefix.startswith("Qwen3") else QwenTextModel)(self.net, prefix)

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        net, vision = self.net, vision_of(self.net)
        images = towers.images_of(net)
        count = batch * images.per_sequence
        rows, columns = pixels.grid(vision, images)
        values = vision.channels * vision.frames * vision.patch**2
        pixel_values = F.to(towers.given(net, (count * rows * columns, values), "float32"), net.dtype)
        last, merged, *read = self.visual(pixel_values)
        sizes = [pixels.image_tokens(vision, images)] * count
        features = F.split(merged, sizes, dim=0)
        layers = [part for layer in (read[0] if read else ()) for part in F.split(layer, sizes, dim=0)]
        return features, (last, *features, *layers)

    def read_by_layers(self, mask: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        layers = len(vision_of(self.net).read_layers)
        if not layers:
            return ()
        count = (len(outputs) - 1) // (layers + 1)
        parts = [outputs[1 + count * layer : 1 + count * (layer + 1)] for layer in range(1, layers + 1)]
        places = F.reshape(mask, *mask.shape[:2])
        return (places, *(F.cat(part, dim=0) for part in parts))


class Qwen3TextModel(QwenTextModel):
    """Qwen3VLTextModel: after each of the first layers what the tower's layers saw is added at the image tokens."""

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, f"{prefix}Text")
        self.class_name = f"{prefix}TextModel"
        self.rotary_emb = InterleavedRotary(net, net.arch.head_dim, f"{prefix}TextRotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        if self.net.arch.moe:
            return moe.Block(self.net, prefix, index)
        block = llama.Model.block(self, prefix, index)
        block.children["mlp"].fused = False  # apply_liger_kernel_to_qwen3_vl has no SwiGLU
        return block

    def between(self, number: int, x: Tensor, extra: tuple[Tensor, ...]) -> Tensor:
        if not 0 <= number < len(extra) - 1:
            return x
        mask, seen = extra[0], F.to(extra[1 + number], x.dtype)
        x = pixels.copied(x)
        mine = F.add(pixels.selected(x, mask, seen.shape[0]), seen)
        return pixels.put(x, mask, mine)


class InterleavedRotary(MRotary):
    """Writes rows and columns over the positions of time."""

    def _recomposed(self, table: Tensor) -> Tensor:
        chosen = F.select(table, 0)
        return F.cat((chosen, chosen))


TOWERS: dict[str, Any] = {
    "Qwen2VL": qwen_vision.Qwen2Tower,
    "Qwen2_5_VL": qwen_vision.Qwen25Tower,
    "Qwen3VL": qwen_vision.Qwen3Tower,
    "Qwen3VLMoe": qwen_vision.Qwen3MoeTower,
    "Qwen3_5": qwen_vision.Qwen35Tower,
    "Qwen3_5Moe": qwen_vision.Qwen35MoeTower,
}
PREFIXES = {
    "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe",
}  # fmt: skip


class QwenForConditionalGeneration(VisionLanguageModel):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        prefix = PREFIXES[net.arch.family]
        self.class_name = f"{prefix}ForConditionalGeneration"
        self.model = self.combined(prefix)
        self.lm_head = head(net, self.model.language_model.embed_tokens)

    def combined(self, prefix: str) -> QwenModel:
        return QwenModel(self.net, prefix)

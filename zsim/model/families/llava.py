"""LLaVA and what is built like it: LLaVA-NeXT and OneVision, Aya Vision and Command A Vision, Pixtral, Mistral 3,
LightOnOCR and InternVL (transformers 5.24): a tower, a projector of two products, and a text model of another
family."""

from __future__ import annotations

from typing import Any

from zsim.model import functional as F
from zsim.model import pixels
from zsim.model.architecture import Vision
from zsim.model.decoder import head
from zsim.model.families import clip, internvl, llama, pixtral, relatives, towers
from zsim.model.families.vlm import Combined, VisionLanguageModel, vision_of
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, LayerNorm, Linear, Module, Net, RMSNorm, Weight

TEXT = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def text_model(net: Net) -> llama.Model:
    family = vision_of(net).text
    if family == "ministral3":
        return relatives.MinistralModel(net, "Ministral3")
    if family == "mistral4":
        from zsim.model.families import moe_further

        return moe_further.LatentModel(net, "Mistral4")
    if family == "cohere2":
        from zsim.model.families import cohere

        return cohere.CohereModel(net, "Cohere2")
    return llama.Model(net, TEXT[family])


class Projector(Module):
    """LlavaMultiModalProjector and its like. `inputs`: width of what it takes."""

    kind = "activation"

    def __init__(self, net: Net, prefix: str, inputs: int) -> None:
        super().__init__(net)
        vision, width = vision_of(net), net.arch.hidden
        self.class_name = f"{prefix}MultiModalProjector"
        self.linear_1 = Linear(net, inputs, width, vision.projector_bias)
        self.act = Activation(net, vision.projector_activation)
        self.linear_2 = Linear(net, width, width, vision.projector_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_1(x)
        x = self.act(x)
        return self.linear_2(x)


class LlavaModel(Combined):
    prefix = "Llava"
    tower: Any = clip.ClipTower

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.class_name = f"{self.prefix}Model"
        self.vision_tower = self.tower(net.tower(), vision_of(net))
        self.multi_modal_projector = self.projector(vision_of(net))
        self.language_model = text_model(net)

    def projector(self, vision: Vision) -> Module:
        return Projector(self.net, self.prefix, vision.blocks.hidden)

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        outputs = self.vision_tower(self.squares(batch))
        features = F.unbind(self.projected(outputs[0]), 0)
        return features, (*outputs[:2], *features)

    def projected(self, seen: Tensor) -> Tensor:
        vision = vision_of(self.net)
        chosen = seen if vision.keeps_class_token else F.narrow(seen, 1, seen.shape[1] - 1)
        return self.multi_modal_projector(chosen)


class LlavaForConditionalGeneration(VisionLanguageModel):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        model = MODELS[net.arch.family, vision_of(net).blocks.family]
        self.class_name = f"{model.prefix}ForConditionalGeneration"
        self.model = model(net)
        self.lm_head = head(net, self.model.language_model.embed_tokens)


# LLaVA-NeXT


class LlavaNextModel(LlavaModel):
    """Images cut into squares, which are laid side by side again, cut to the image's shape, each row with an end."""

    prefix = "LlavaNext"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.image_newline = Weight(net, net.arch.hidden)

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        vision, images = vision_of(self.net), towers.images_of(self.net)
        count, squares = batch * images.per_sequence, pixels.squares_in_all(vision, images)
        shape = (count, squares, vision.channels, vision.image_size, vision.image_size)
        pixel_values = F.pointwise(towers.given(self.net, shape, "float32"), shape=(count * squares, *shape[2:]))
        outputs = self.vision_tower(pixel_values)
        projected = self.projected(outputs[0])
        features = [self.packed(each) for each in F.split(projected, [squares] * count, dim=0)]
        return features, (*outputs[:2], *features)

    def packed(self, x: Tensor) -> Tensor:
        vision, images = vision_of(self.net), towers.images_of(self.net)
        rows, columns = pixels.squares(vision, images)
        side = vision.image_size // vision.patch
        base, x = F.select(x, 0), F.narrow(x, 0, rows * columns)
        x = F.permute(F.reshape(x, rows, columns, side, side, -1), 4, 0, 2, 1, 3)
        x = F.contiguous(x)
        x = F.reshape(x, x.shape[0], rows * side, columns * side)
        kept = pixels.unpadded(vision, images)
        x = self.shrunk(F.narrow(F.narrow(x, 1, kept[0]), 2, kept[1]))
        ends = F.expand(F.reshape(self.image_newline, -1, 1, 1), (*x.shape[:2], 1))
        x = F.cat((x, ends))
        x = F.transpose(F.reshape(x, x.shape[0], -1), 0, 1)
        return F.cat((base, x), dim=0)

    def shrunk(self, x: Tensor) -> Tensor:
        return x


class Resampler(Module):
    """Of frames of a video, which are not simulated: an average or a maximum, without parameters."""

    class_name = "LlavaNextVideoPooler"


class LlavaNextVideoModel(LlavaNextModel):
    """With images."""

    prefix = "LlavaNextVideo"
    masks = 2

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.vision_resampler = Resampler(net)


class OnevisionModel(LlavaNextModel):
    """SigLIP in CLIP's place; features of large images are interpolated, and several images are not cut."""

    prefix = "LlavaOnevision"
    tower = clip.SiglipFeatures
    masks = 2

    def projected(self, seen: Tensor) -> Tensor:
        return self.multi_modal_projector(seen)

    def packed(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            return super().packed(x)
        return F.cat((F.select(x, 0), F.reshape(self.image_newline, 1, -1)), dim=0)

    def shrunk(self, x: Tensor) -> Tensor:
        kept = pixels.shrunk(vision_of(self.net), x.shape[1], x.shape[2])
        if kept == x.shape[1:]:
            return x
        return F.select(pixels.interpolated(F.reshape(x, 1, *x.shape), kept), 0)


# Aya Vision and Command A Vision


class ShuffledProjector(Module):
    """Squares of patches side by side, and a gated product of two; Aya Vision norms them first."""

    kind = "activation"

    def __init__(self, net: Net, prefix: str, vision: Vision) -> None:
        super().__init__(net)
        self.class_name, self.merge = f"{prefix}MultiModalProjector", vision.merge
        inputs, between = vision.blocks.hidden * vision.merge**2, vision.adapter
        self.layernorm = LayerNorm(net, inputs) if prefix == "AyaVision" else None
        self.linear_1 = Linear(net, inputs, between, bias=True)
        self.act = Activation(net, "silu")
        if prefix != "AyaVision":
            self.act.class_name = "SiLU"
        self.linear_2 = Linear(net, between // 2, net.arch.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        features = internvl.shuffled(F.reshape(x, x.shape[0], side, side, -1), self.merge)
        if self.layernorm is not None:
            features = self.layernorm(features)
        y = self.linear_1(features)
        half = y.shape[-1] // 2
        up, gate = F.split(y, [half, half])
        y = F.mul(self.act(gate), up)
        return self.linear_2(y)


class AyaModel(LlavaModel):
    prefix = "AyaVision"
    tower: Any = clip.SiglipFeatures
    listed = False

    def projector(self, vision: Vision) -> Module:
        return ShuffledProjector(self.net, self.prefix, vision)

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        outputs = self.vision_tower(self.squares(batch))
        pooled = self.multi_modal_projector(outputs[0])
        features = F.reshape(pooled, pooled.shape[0], -1, pooled.shape[-1])
        return [features], (*outputs, features)


class CommandModel(AyaModel):
    prefix = "Cohere2Vision"
    tower = clip.SiglipTower

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        last = self.vision_tower(self.squares(batch))
        pooled = self.multi_modal_projector(last)
        features = F.reshape(pooled, pooled.shape[0], -1, pooled.shape[-1])
        return [features], (last, features)


# Pixtral


class PixtralModel(LlavaModel):
    """LLaVA with images of any size, packed."""

    tower = pixtral.PixtralTower

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        vision, images = vision_of(self.net), towers.images_of(self.net)
        count, rows, columns = batch * images.per_sequence, *pixels.grid(vision, images)
        shape = (count, vision.channels, rows * vision.patch, columns * vision.patch)
        last = self.vision_tower(towers.given(self.net, shape, "float32"))
        projected = self.multi_modal_projector(self.taken(last))
        packed = F.reshape(projected, -1, projected.shape[-1])
        features = F.split(packed, [packed.shape[0] // count] * count, dim=0)
        return features, (last, *features)

    def taken(self, last: Tensor) -> Tensor:
        return last


class Mistral3Projector(Projector):
    """Normed, and each square of patches side by side becomes one."""

    def __init__(self, net: Net, prefix: str, inputs: int) -> None:
        Module.__init__(self, net)
        self.norm = RMSNorm(net, inputs, f"{prefix}RMSNorm")
        self.patch_merger = pixtral.PatchMerger(net, vision_of(net))
        projector = Projector(net, prefix, inputs)
        self.class_name = projector.class_name
        for name, part in projector.children.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = self.patch_merger(x)
        return super().forward(x)


class Mistral3Model(PixtralModel):
    prefix = "Mistral3"

    def projector(self, vision: Vision) -> Module:
        return Mistral3Projector(self.net, self.prefix, vision.blocks.hidden)

    def taken(self, last: Tensor) -> Tensor:
        return F.reshape(last, *last.shape[1:])


# InternVL


class LightOnProjector(Mistral3Projector):
    def __init__(self, net: Net, prefix: str, inputs: int) -> None:
        super().__init__(net, prefix, inputs)
        self.patch_merger.class_name = f"{prefix}PatchMerger"


class LightOnModel(Mistral3Model):
    """LightOnOCR: Mistral 3's parts under other names, and a text model of Qwen3."""

    prefix = "LightOnOcr"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        names = {"vision_tower": "vision_encoder", "multi_modal_projector": "vision_projection"}
        self.children = {names.get(name, name): part for name, part in self.children.items()}

    def projector(self, vision: Vision) -> Module:
        return LightOnProjector(self.net, self.prefix, vision.blocks.hidden)


class InternVLProjector(Projector):
    """Normed before."""

    def __init__(self, net: Net, prefix: str, inputs: int) -> None:
        super().__init__(net, prefix, inputs)
        self.layer_norm = LayerNorm(net, inputs)
        self.children = {"layer_norm": self.layer_norm, **self.children}  # registered first

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer_norm(x))


class InternVLModel(LlavaModel):
    prefix = "InternVL"
    tower = internvl.InternVLTower
    listed = False

    def projector(self, vision: Vision) -> Module:
        return InternVLProjector(self.net, self.prefix, vision.blocks.hidden * vision.merge**2)

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        net, vision = self.net, vision_of(self.net)
        pixel_values = F.to(self.squares(batch), net.dtype)
        last, captured = self.vision_tower(pixel_values)
        seen = F.narrow(last, 1, last.shape[1] - 1)
        side = vision.image_size // vision.patch
        shuffled = internvl.shuffled(F.reshape(seen, seen.shape[0], side, side, -1), vision.merge)
        shuffled = F.reshape(shuffled, shuffled.shape[0], -1, shuffled.shape[-1])
        features = self.multi_modal_projector(shuffled)
        return [features], (last, captured, features)


MODELS: dict[tuple[str, str], type[LlavaModel]] = {  # family and its tower
    ("llava", "clip_vision_model"): LlavaModel,
    ("llava", "pixtral"): PixtralModel,
    ("llava_next", "clip_vision_model"): LlavaNextModel,
    ("llava_next_video", "clip_vision_model"): LlavaNextVideoModel,
    ("llava_onevision", "siglip_vision_model"): OnevisionModel,
    ("aya_vision", "siglip_vision_model"): AyaModel,
    ("cohere2_vision", "siglip_vision_model"): CommandModel,
    ("mistral3", "pixtral"): Mistral3Model,
    ("lighton_ocr", "pixtral"): LightOnModel,
    ("internvl", "internvl_vision"): InternVLModel,
}

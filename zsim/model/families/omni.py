"""What Qwen2.5-Omni and Qwen3-Omni think with (transformers 5.24, modeling_qwen2_5_omni.py and
modeling_qwen3_omni_moe.py): the towers of Qwen2.5-VL and Qwen3-VL, and one of sounds that is given nothing."""

from __future__ import annotations

from dataclasses import replace

from zsim.model import functional as F
from zsim.model.architecture import Sound, Vision
from zsim.model.decoder import head
from zsim.model.families import moe, qwen_vision
from zsim.model.families.vlm import InterleavedRotary, QwenModel, QwenTextModel, VisionLanguageModel, vision_of
from zsim.model.families.vlm import Qwen3TextModel as Qwen3VLTextModel
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, LayerNorm, Linear, Module, ModuleList, Net, Weight

# ---------------------------------------------------------------------------------------------------- sounds


class Held(Module):
    """A weight, and perhaps a bias, of a module that is never called."""

    def __init__(self, net: Net, class_name: str, *shape: int, bias: bool = False) -> None:
        super().__init__(net)
        self.class_name = class_name
        self.weight = Weight(net, *shape)
        self.bias = Weight(net, shape[0]) if bias else None


class SoundAttention(Module):
    def __init__(self, net: Net, prefix: str, sound: Sound, key_bias: bool) -> None:
        super().__init__(net)
        self.class_name, width = f"{prefix}AudioAttention", sound.hidden
        self.k_proj = Linear(net, width, width, key_bias)
        self.v_proj = Linear(net, width, width, bias=True)
        self.q_proj = Linear(net, width, width, bias=True)
        self.out_proj = Linear(net, width, width, bias=True)


class SoundLayer(Module):
    def __init__(self, net: Net, prefix: str, sound: Sound, key_bias: bool) -> None:
        super().__init__(net)
        self.class_name, width = f"{prefix}AudioEncoderLayer", sound.hidden
        self.self_attn = SoundAttention(net, prefix, sound, key_bias)
        self.self_attn_layer_norm = LayerNorm(net, width)
        self.fc1 = Linear(net, width, sound.intermediate, bias=True)
        self.fc2 = Linear(net, sound.intermediate, width, bias=True)
        self.final_layer_norm = LayerNorm(net, width)


class SoundTower(Module):
    def __init__(self, net: Net, prefix: str, sound: Sound) -> None:
        super().__init__(net)
        self.class_name, self.sound = f"{prefix}AudioEncoder", sound
        apart = replace(net, layer_keys=(), checkpointed=())
        width, second = sound.hidden, prefix == "Qwen2_5Omni"
        if second:
            self.conv1 = Held(net, "Conv1d", width, sound.inputs, 3, bias=True)
            self.conv2 = Held(net, "Conv1d", width, width, 3, bias=True)
            self.audio_bos_eos_token = Held(net, "Embedding", 2, sound.outputs)
        self.layers = Blocks(
            apart, (None,) * sound.layers, lambda _index: SoundLayer(net, prefix, sound, key_bias=not second)
        )
        self.ln_post = LayerNorm(net, width)
        if second:
            self.proj = Linear(net, width, sound.outputs, bias=True)
            return
        middle, left = sound.between, (((sound.inputs + 1) // 2 + 1) // 2 + 1) // 2
        self.conv2d1 = Held(net, "Conv2d", middle, 1, 3, 3, bias=True)
        self.conv2d2 = Held(net, "Conv2d", middle, middle, 3, 3, bias=True)
        self.conv2d3 = Held(net, "Conv2d", middle, middle, 3, 3, bias=True)
        self.conv_out = Linear(net, middle * left, width)
        self.proj1 = Linear(net, width, width, bias=True)
        self.proj2 = Linear(net, width, sound.outputs, bias=True)

    def buffers_bytes(self) -> int:
        return 4 * self.sound.positions * self.sound.hidden


# ---------------------------------------------------------------------------------------------------- Qwen2.5-Omni


class Attention(qwen_vision.QwenAttention):
    """Three projections in place of one."""

    def __init__(self, net: Net, vision: Vision, class_name: str, windowed: bool) -> None:
        Module.__init__(self, net)
        self.vision, self.class_name, self.windowed = vision, class_name, windowed
        width = net.arch.hidden
        self.q = Linear(net, width, width, bias=True)
        self.k = Linear(net, width, width, bias=True)
        self.v = Linear(net, width, width, bias=True)
        self.proj = Linear(net, width, width, bias=True)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [F.reshape(project(x), x.shape[0], self.net.arch.heads, -1) for project in (self.q, self.k, self.v)]


class Block(qwen_vision.QwenBlock):
    def attention(self, vision: Vision, class_name: str, windowed: bool) -> qwen_vision.QwenAttention:
        return Attention(self.net, vision, class_name, windowed)


class Tower(qwen_vision.Qwen25Tower):
    role = "unit"
    class_name = "Qwen2_5OmniVisionEncoder"
    prefix = "Qwen2_5Omni"
    returns_early = True
    layer = Block


class TextModel(QwenTextModel):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.class_name = f"{prefix}ThinkerTextModel"


# ---------------------------------------------------------------------------------------------------- Qwen3-Omni


class Merger(qwen_vision.Qwen3Merger):
    """Its two products are in a list."""

    def __init__(self, net: Net, vision: Vision, prefix: str, width: int, after: bool) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}VisionPatchMerger"
        self.inner, self.after = net.arch.hidden * vision.merge**2, after
        self.ln_q = LayerNorm(net, self.inner if after else net.arch.hidden)
        self.mlp = ModuleList(
            net,
            [
                Linear(net, self.inner, self.inner, bias=True),
                Activation(net, "nn.gelu"),
                Linear(net, self.inner, width, bias=True),
            ],
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.reshape(self.ln_q(F.reshape(x, -1, self.inner) if self.after else x), -1, self.inner)
        for part in self.mlp.children.values():
            x = part(x)
        return x


class Tower3(qwen_vision.Qwen3Tower):
    role = "unit"
    prefix = "Qwen3OmniMoe"
    merging = Merger

    def __init__(self, net: Net, vision: Vision, width: int) -> None:
        super().__init__(net, vision, width)
        self.class_name = f"{self.prefix}VisionEncoder"
        listed = self.children.pop("deepstack_merger_list")
        self.children = {"merger_list": listed, **self.children}  # registered first


class TextModel3(Qwen3VLTextModel):
    def __init__(self, net: Net, prefix: str) -> None:
        QwenTextModel.__init__(self, net, f"{prefix}ThinkerText")
        self.class_name = f"{prefix}ThinkerTextModel"
        self.norm.class_name = f"{prefix}TextRMSNorm"
        self.rotary_emb = InterleavedRotary(net, net.arch.head_dim, f"{prefix}ThinkerTextRotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        return moe.Block(self.net, prefix, index)


# ---------------------------------------------------------------------------------------------------- the models


class OmniModel(QwenModel):
    masks = 3

    def __init__(self, net: Net, prefix: str) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}ThinkerModel"
        third = prefix.startswith("Qwen3")
        if net.arch.sound is not None:
            self.audio_tower = SoundTower(net, prefix, net.arch.sound)
        self.visual = (Tower3 if third else Tower)(net.tower(), vision_of(net), net.arch.hidden)
        self.language_model = (TextModel3 if third else TextModel)(net, prefix)

    def _placeholders(self, ids: Tensor) -> list[Tensor]:
        image, _video, sound = super()._placeholders(ids)
        return [image, sound]  # one name for those of videos and of sounds


PREFIXES = {"qwen2_5_omni_thinker": "Qwen2_5Omni", "qwen3_omni_moe_thinker": "Qwen3OmniMoe"}


class ThinkerForConditionalGeneration(VisionLanguageModel):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        prefix = PREFIXES[net.arch.family]
        self.class_name = f"{prefix}ThinkerForConditionalGeneration"
        self.model = OmniModel(net, prefix)
        self.lm_head = head(net, self.model.language_model.embed_tokens)

"""EXAONE 4.5 (transformers 5.24, modeling_exaone4_5.py): Qwen2.5-VL's tower with fewer heads of keys and values,
before EXAONE 4."""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model.architecture import Vision
from zsim.model.decoder import head
from zsim.model.families import qwen_vision, relatives
from zsim.model.families.vlm import QwenModel, VisionLanguageModel, vision_of
from zsim.model.graph import Tensor
from zsim.model.layers import Linear, Module, Net

PREFIX = "Exaone4_5_"


class Attention(qwen_vision.QwenAttention):
    def __init__(self, net: Net, vision: Vision, class_name: str, windowed: bool) -> None:
        Module.__init__(self, net)
        self.vision, self.class_name, self.windowed = vision, class_name, windowed
        arch = net.arch
        self.proj = Linear(net, arch.hidden, arch.hidden, bias=True)
        self.qkv = Linear(net, arch.hidden, (arch.heads + 2 * arch.kv_heads) * arch.head_dim, bias=True)

    def heads(self, x: Tensor) -> list[Tensor]:
        d, kv = self.net.arch.head_dim, self.net.arch.kv_heads * self.net.arch.head_dim
        parts = F.split(self.qkv(x), [self.net.arch.heads * d, kv, kv])
        return [F.reshape(part, x.shape[0], -1, d) for part in parts]


class Block(qwen_vision.QwenBlock):
    def attention(self, vision: Vision, class_name: str, windowed: bool) -> qwen_vision.QwenAttention:
        return Attention(self.net, vision, class_name, windowed)


class Tower(qwen_vision.Qwen25Tower):
    class_name = f"{PREFIX}VisionModel"
    prefix = PREFIX
    layer = Block

    def __init__(self, net: Net, vision: Vision, width: int) -> None:
        super().__init__(net, vision, width)
        self.patch_embed.class_name = f"{PREFIX}PatchEmbed"


class Model(QwenModel):
    def __init__(self, net: Net) -> None:
        Module.__init__(self, net)
        self.class_name = f"{PREFIX}Model"
        self.visual = Tower(net.tower(), vision_of(net), net.arch.hidden)
        self.language_model = relatives.Exaone4Model(net, "Exaone4")


class Exaone45ForConditionalGeneration(VisionLanguageModel):
    class_name = f"{PREFIX}ForConditionalGeneration"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        if net.attention == "eager" and net.images is not None:
            what = "eager attention in EXAONE 4.5's tower, whose heads share keys and values"
            raise NotModeled(what, field="attention", accepted="sdpa, flash, flash3")
        self.model = Model(net)
        self.lm_head = head(net, self.model.language_model.embed_tokens)

"""Gemma 4's audio tower (transformers 5.24, modeling_gemma4.py): its parameters alone. It is given nothing."""

from __future__ import annotations

from dataclasses import replace

from zsim.model.architecture import Sound, Vision
from zsim.model.families.gemma4 import RMSNorm
from zsim.model.families.gemma4_vision import ClippableLinear
from zsim.model.layers import Blocks, LayerNorm, Linear, Module, Net, Weight


class Kernel(Module):
    """A convolution without a bias."""

    def __init__(self, net: Net, class_name: str, *shape: int) -> None:
        super().__init__(net)
        self.class_name = class_name
        self.weight = Weight(net, *shape)


class Subsampling(Module):
    class_name = "Gemma4AudioSubSampleConvProjectionLayer"

    def __init__(self, net: Net, inputs: int, outputs: int) -> None:
        super().__init__(net)
        self.conv = Kernel(net, "Conv2d", outputs, inputs, 3, 3)
        self.norm = LayerNorm(net, outputs, bias=False)


class Projection(Module):
    class_name = "Gemma4AudioSubSampleConvProjection"

    def __init__(self, net: Net, sound: Sound) -> None:
        super().__init__(net)
        first, second = sound.channels
        self.layer0 = Subsampling(net, 1, first)
        self.layer1 = Subsampling(net, first, second)
        self.input_proj_linear = Linear(net, first // 4 * second, sound.hidden)


class FeedForward(Module):
    class_name = "Gemma4AudioFeedForward"

    def __init__(self, net: Net, sound: Sound, limits: Vision) -> None:
        super().__init__(net)
        width = sound.hidden
        self.ffw_layer_1 = ClippableLinear(net, limits, width, 4 * width)
        self.ffw_layer_2 = ClippableLinear(net, limits, 4 * width, width)
        self.pre_layer_norm = RMSNorm(net, width)
        self.post_layer_norm = RMSNorm(net, width)


class Attention(Module):
    class_name = "Gemma4AudioAttention"

    def __init__(self, net: Net, sound: Sound, limits: Vision) -> None:
        super().__init__(net)
        width = sound.hidden
        self.per_dim_scale = Weight(net, width // sound.heads)
        self.q_proj = ClippableLinear(net, limits, width, width)
        self.k_proj = ClippableLinear(net, limits, width, width)
        self.v_proj = ClippableLinear(net, limits, width, width)
        self.post = ClippableLinear(net, limits, width, width)
        self.relative_k_proj = Linear(net, width, width)

    def buffers_bytes(self) -> int:
        return super().buffers_bytes() + 4  # softcap


class LightConvolution(Module):
    class_name = "Gemma4AudioLightConv1d"

    def __init__(self, net: Net, sound: Sound, limits: Vision) -> None:
        super().__init__(net)
        width = sound.hidden
        self.linear_start = ClippableLinear(net, limits, width, 2 * width)
        self.linear_end = ClippableLinear(net, limits, width, width)
        self.depthwise_conv1d = Kernel(net, "Gemma4AudioCausalConv1d", width, 1, sound.kernel)
        self.pre_layer_norm = RMSNorm(net, width)
        self.conv_norm = RMSNorm(net, width)


class Layer(Module):
    class_name = "Gemma4AudioLayer"

    def __init__(self, net: Net, sound: Sound, limits: Vision) -> None:
        super().__init__(net)
        self.feed_forward1 = FeedForward(net, sound, limits)
        self.feed_forward2 = FeedForward(net, sound, limits)
        self.self_attn = Attention(net, sound, limits)
        self.lconv1d = LightConvolution(net, sound, limits)
        self.norm_pre_attn = RMSNorm(net, sound.hidden)
        self.norm_post_attn = RMSNorm(net, sound.hidden)
        self.norm_out = RMSNorm(net, sound.hidden)


class AudioTower(Module):
    class_name = "Gemma4AudioModel"

    def __init__(self, net: Net, sound: Sound, vision: Vision) -> None:
        super().__init__(net)
        limits = replace(vision, clips=sound.clips)
        apart = replace(net, layer_keys=(), checkpointed=())
        self.sound = sound
        self.subsample_conv_projection = Projection(net, sound)
        self.layers = Blocks(apart, (None,) * sound.layers, lambda _index: Layer(net, sound, limits))
        self.output_proj = Linear(net, sound.hidden, sound.outputs, bias=True)

    def buffers_bytes(self) -> int:
        return 4 * (self.sound.hidden // 2) + self.sound.layers * next(iter(self.layers)).buffers_bytes()

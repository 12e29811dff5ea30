"""Llama 4 with its tower (transformers 5.24, modeling_llama4.py): squares of an image, a token of the class behind the
patches, which are merged and projected in the tower, and once more before the text model."""

from __future__ import annotations

from typing import Any, cast

from zsim.model import functional as F
from zsim.model import pixels
from zsim.model.architecture import Vision
from zsim.model.attention import rotate_complex
from zsim.model.decoder import run_block
from zsim.model.families import llama4, towers
from zsim.model.families.clip import ClipMLP
from zsim.model.families.internvl import shuffled
from zsim.model.families.vlm import VisionLanguageModel, vision_of
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, LayerNorm, Linear, Module, Net, Weight, require_grad


class Unfold(Module):
    kind = "copy"
    class_name = "Unfold"

    def __init__(self, net: Net, patch: int) -> None:
        super().__init__(net)
        self.patch = patch

    def forward(self, x: Tensor) -> Tensor:
        return pixels.unfold(x, self.patch)


class UnfoldConvolution(Module):
    kind = "copy"
    class_name = "Llama4UnfoldConvolution"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.unfold = Unfold(net, vision.patch)
        self.linear = Linear(net, vision.channels * vision.patch**2, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.unfold(x)
        x = F.permute(x, 0, 2, 1)
        x = self.linear(x)
        return require_grad(self.net, x, copied=True)


class VisionRotary(Module):
    """A table that is made with the model, [patches, 1, head_dim / 2] complex."""

    class_name = "Llama4VisionRotaryEmbedding"

    def __init__(self, net: Net, patches: int) -> None:
        super().__init__(net)
        self.shape = (patches, 1, net.arch.head_dim // 2)

    def buffers_bytes(self) -> int:
        return 8 * self.shape[0] * self.shape[2]

    def complex_buffers_bytes(self) -> int:
        return self.buffers_bytes()

    def forward(self) -> Tensor:
        return towers.given(self.net, self.shape, "complex64")


class Attention(Module):
    kind = "rotary"
    class_name = "Llama4VisionAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        width = net.arch.hidden
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, Linear(net, width, width, bias=True))

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor | None]:
        shape = (*x.shape[:2], -1, self.net.arch.head_dim)
        q, k = F.reshape(self.q_proj(x), *shape), F.reshape(self.k_proj(x), *shape)
        v = F.reshape(self.v_proj(x), *shape)
        q, k = rotate_complex(q, k, table)
        q, k, v = F.transpose(q, 1, 2), F.transpose(k, 1, 2), F.transpose(v, 1, 2)
        out, weights = towers.attend(self.net, q, k, v, upcast=False)
        out = F.reshape(out, *x.shape)
        return self.o_proj(out), weights


class Layer(Module):
    kind = "residual"
    class_name = "Llama4VisionEncoderLayer"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.self_attn = Attention(net)
        self.mlp = ClipMLP(net)
        self.mlp.class_name = "Llama4VisionMLP"
        self.input_layernorm = LayerNorm(net, net.arch.hidden)
        self.post_attention_layernorm = LayerNorm(net, net.arch.hidden)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, table)
        x = F.add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return F.add(residual, x)


class Encoder(Module):
    class_name = "Llama4VisionEncoder"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.layers = Blocks(net, net.arch.kinds, lambda _index: Layer(net))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        for block in self.layers:
            x = run_block(self.net, block, x, table)
        return x


class AdapterMLP(Module):
    kind = "activation"
    class_name = "Llama4VisionMLP2"

    def __init__(self, net: Net, width: int) -> None:
        super().__init__(net)
        self.fc1 = Linear(net, net.arch.intermediate, width)
        self.fc2 = Linear(net, width, width)
        self.activation_fn = Activation(net, "nn.gelu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.activation_fn(x)
        return self.activation_fn(self.fc2(x))


class Adapter(Module):
    kind = "copy"
    class_name = "Llama4VisionPixelShuffleMLP"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.merge = vision.merge
        self.mlp = AdapterMLP(net, vision.adapter)

    def forward(self, x: Tensor) -> Tensor:
        n, patches, width = x.shape
        side = round(patches**0.5)
        x = shuffled(F.reshape(x, n, side, side, width), self.merge)
        return self.mlp(F.reshape(x, n, -1, x.shape[-1]))


class Llama4Tower(Module):
    kind = "copy"
    class_name = "Llama4VisionModel"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        width, patches = net.arch.hidden, (vision.image_size // vision.patch) ** 2 + 1
        self.patch_embedding = UnfoldConvolution(net, vision)
        self.class_embedding = Weight(net, width)
        self.positional_embedding_vlm = Weight(net, patches, width)
        self.rotary_embedding = VisionRotary(net, patches)
        self.layernorm_pre = LayerNorm(net, width)
        self.layernorm_post = LayerNorm(net, width)
        self.model = Encoder(net)
        self.vision_adapter = Adapter(net, vision)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patch_embedding(pixel_values)
        count, patches, width = x.shape
        x = F.cat((x, F.expand(self.class_embedding, (count, 1, width))), dim=1)
        x = F.reshape(x, count, 1, patches + 1, width)
        x = F.add(x, self.positional_embedding_vlm)
        x = self.layernorm_pre(x)
        x = F.reshape(x, count, -1, width)
        table = self.rotary_embedding()
        last = self.model(x, table)
        x = self.layernorm_post(last)
        x = F.narrow(x, 1, patches)
        return self.vision_adapter(x)


class Projector(Module):
    class_name = "Llama4MultiModalProjector"

    def __init__(self, net: Net, inputs: int) -> None:
        super().__init__(net)
        self.linear_1 = Linear(net, inputs, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_1(x)


class TextModel(llama4.Llama4ForCausalLM):
    """Returns logits."""

    role = ""

    def forward(self, embeds: Tensor) -> Tensor:  # type: ignore[override]
        return self.lm_head(self.model(None, embeds))


class Llama4ForConditionalGeneration(VisionLanguageModel):
    """Without a model of its own between: what it makes of the images lives to the loss. Pixels come in the dtype of
    the weights, as nothing casts them. (transformers 5.24 itself fails where this class returns; as it means to.)"""

    class_name = "Llama4ForConditionalGeneration"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        vision = vision_of(net)
        self.vision_model = Llama4Tower(net.tower(), vision)
        self.multi_modal_projector = Projector(net, vision.adapter)
        self.language_model = TextModel(net)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        net, vision, images = self.net, vision_of(self.net), towers.images_of(self.net)
        count = ids.shape[0] * images.per_sequence * pixels.squares_in_all(vision, images)
        side = vision.image_size
        embeds = self.language_model.model.embed_tokens(ids)
        last = self.vision_model(towers.given(net, (count, vision.channels, side, side), net.dtype))
        flat = F.reshape(last, -1, last.shape[-1])
        projected = F.to(self.multi_modal_projector(flat), embeds.dtype)
        mask = F.reshape(F.pointwise(ids, dtype="bool"), *ids.shape, 1)
        F.pointwise(mask, shape=(), dtype="int64")
        embeds = pixels.masked_scatter(embeds, mask, projected)
        return self.finish(embeds, labels, cast(Any, self.language_model))

    def logits_of(self, hidden: Tensor, head: Any) -> Tensor:
        return head(hidden)

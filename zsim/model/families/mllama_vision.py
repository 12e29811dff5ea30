"""The tower of Llama 3.2 Vision (transformers 5.24, modeling_mllama.py): all squares of an image, the empty ones as
well, in one sequence under a mask; layers, and others with gates behind them."""

from __future__ import annotations

from dataclasses import replace

from zsim.model import functional as F
from zsim.model import pixels
from zsim.model.architecture import Tiles, Vision
from zsim.model.attention import split_heads
from zsim.model.families.clip import ClipConvolution, ClipMLP
from zsim.model.families.towers import PositionTable, attend, given, images_of
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, LayerNorm, Linear, Module, Net, Weight


def tiles_of(net: Net) -> Tiles:
    vision = net.arch.vision
    assert vision is not None
    assert vision.tiles is not None
    return vision.tiles


def tanh(gate: Tensor) -> Tensor:
    return F.activation_by_result(gate)


class RatioEmbedding(Module):
    """One vector per square, by the shape of its image."""

    kind = "embedding"
    class_name = "MllamaPrecomputedAspectRatioEmbedding"

    def __init__(self, net: Net, tiles: Tiles) -> None:
        super().__init__(net)
        self.tiles = tiles.most
        self.embedding = PositionTable(net, tiles.ratios + 1, tiles.most * net.arch.hidden)
        self.gate = Weight(net, 1)

    def forward(self, x: Tensor, ratios: Tensor) -> Tensor:
        embeddings = self.embedding(ratios)
        embeddings = F.reshape(embeddings, -1, self.tiles, 1, self.net.arch.hidden)
        embeddings = F.mul(embeddings, tanh(self.gate))
        return F.add(x, embeddings)


class PositionEmbedding(Module):
    kind = "embedding"
    class_name = "MllamaPrecomputedPositionEmbedding"

    def __init__(self, net: Net, tiles: Tiles, patches: int) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.shape = (tiles.most, patches, width)
        self.gate = Weight(net, 1)
        self.embedding = Weight(net, patches, width)
        self.tile_embedding = PositionTable(net, tiles.ratios + 1, tiles.most * patches * width)

    def forward(self, x: Tensor, ratios: Tensor) -> Tensor:
        _, patches, width = self.shape
        position = F.mul(F.scale(tanh(self.gate)), self.embedding)
        x = F.add(x, F.reshape(position, 1, 1, patches, width))
        tile = self.tile_embedding(ratios)
        tile = F.reshape(tile, x.shape[0], *self.shape)
        gated = F.mul(tanh(self.gate), tile)
        return F.add(x, gated)


class Attention(Module):
    kind = "copy"
    class_name = "MllamaVisionAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        width = net.arch.hidden
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, Linear(net, width, width))

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        d = self.net.arch.head_dim
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = split_heads(q, d), split_heads(k, d), split_heads(v, d)
        out, weights = attend(self.net, q, k, v, mask)
        out = F.reshape(out, *out.shape[:2], -1)
        out = self.o_proj(out)
        return out, weights


class Layer(Module):
    """Checkpointing knows nothing of it."""

    kind = "residual"
    class_name = "MllamaVisionEncoderLayer"

    def __init__(self, net: Net, gated: bool) -> None:
        super().__init__(net)
        self.self_attn = Attention(net)
        self.mlp = ClipMLP(net)
        self.mlp.class_name = "MllamaVisionMLP"
        self.input_layernorm = LayerNorm(net, net.arch.hidden)
        self.post_attention_layernorm = LayerNorm(net, net.arch.hidden)
        self.gate_attn = Weight(net, 1) if gated else None
        self.gate_ffn = Weight(net, 1) if gated else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, mask)
        if self.gate_attn is not None:
            x = F.mul(tanh(self.gate_attn), x)
        x = F.add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        if self.gate_ffn is not None:
            x = F.mul(tanh(self.gate_ffn), x)
        return F.add(residual, x)


class Encoder(Module):
    """Returns what each layer does, and the last of it by itself."""

    class_name = "MllamaVisionEncoder"

    def __init__(self, net: Net, gated: bool) -> None:
        super().__init__(net)
        # each by itself: what all of them return lives to the end of the tower
        self.layers = Blocks(net, net.arch.kinds, lambda _index: Layer(net, gated))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for block in self.layers:
            x = block(x, mask)
            states.append(F.reshape(x, *x.shape))  # which the layers behind do not read
        return x, states


class MllamaTower(Module):
    kind = "copy"
    class_name = "MllamaVisionModel"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        assert vision.tiles is not None
        self.vision, self.tiles, width = vision, vision.tiles, net.arch.hidden
        self.side = vision.image_size // vision.patch
        kernel = (vision.channels, vision.patch, vision.patch)
        self.patch_embedding = ClipConvolution(net, "Conv2d", kernel, width, bias=False)
        self.class_embedding = Weight(net, width)
        self.gated_positional_embedding = PositionEmbedding(net, self.tiles, self.side**2 + 1)
        self.pre_tile_positional_embedding = RatioEmbedding(net, self.tiles)
        self.post_tile_positional_embedding = RatioEmbedding(net, self.tiles)
        self.layernorm_pre = LayerNorm(net, width)
        self.layernorm_post = LayerNorm(net, width)
        local, keys = net.arch.layers, net.layer_keys
        behind = replace(net.arch, kinds=self.tiles.global_kinds)
        self.transformer = Encoder(replace(net, layer_keys=keys[:local]), gated=False)
        self.global_transformer = Encoder(replace(net, arch=behind, layer_keys=keys[local:]), gated=True)

    def forward(self, batch: int) -> Tensor:
        net, tiles, width, side = self.net, self.tiles.most, self.net.arch.hidden, self.side
        count, patches = batch * images_of(net).per_sequence, side**2 + 1
        size = self.vision.image_size
        ratios = given(net, (count, 1), "int64")
        pixel_values = given(net, (count * tiles, self.vision.channels, size, size), "float32")
        patch_embeds = self.patch_embedding(F.to(pixel_values, net.dtype), (count * tiles, width, side, side))
        x = F.transpose(F.reshape(patch_embeds, count * tiles, width, -1), 1, 2)
        x = F.reshape(x, count, tiles, -1, width)
        x = self.pre_tile_positional_embedding(x, ratios)
        x = F.reshape(x, count * tiles, -1, width)
        x = F.cat((F.expand(self.class_embedding, (count * tiles, 1, width)), x), dim=1)
        x = F.reshape(x, count, tiles, patches, width)
        x = self.gated_positional_embedding(x, ratios)
        x = self.layernorm_pre(x)
        padded = -(-patches // 8) * 8
        x = pixels.padded(x, padded)
        mask = self._mask(count, padded, x.needs_grad)
        x = F.reshape(x, count, -1, width)
        last, states = self.transformer(x, mask)
        x = self.layernorm_post(last)
        x = F.reshape(x, count, tiles, padded, width)
        x = self.post_tile_positional_embedding(x, ratios)
        x = F.reshape(x, count, tiles * padded, width)
        x, _behind = self.global_transformer(x, mask)
        x = F.narrow(F.reshape(x, count, tiles, padded, width), 2, patches)
        x = F.reshape(x, batch, -1, tiles, patches, width)
        chosen = [states[layer] for layer in self.tiles.read]
        read = pixels.stacked(chosen)
        read = F.narrow(F.reshape(read, count, tiles, padded, -1), 2, patches)
        read = F.reshape(read, batch, -1, tiles, patches, read.shape[-1])
        return F.cat((x, read))

    def _mask(self, count: int, padded: int, needs_grad: bool) -> Tensor:
        """_prepare_aspect_ratio_attention_mask: a product of what is empty with itself."""
        net, tiles = self.net, self.tiles.most
        rows = F.pointwise(given(net, (count, tiles, 1, 1), "int64"), dtype=net.dtype)
        rows = F.pointwise(rows, shape=(count, tiles, padded, 1))
        rows = F.pointwise(rows)
        length = tiles * padded
        product = net.tape.empty((count, length, length), net.dtype)
        net.tape.gemm(length, length, 1, net.dtype, count)
        mask = F.reshape(F.pointwise(product), count, 1, length, length)
        if needs_grad and net.attention != "eager":
            net.tape.share(mask)
        return mask

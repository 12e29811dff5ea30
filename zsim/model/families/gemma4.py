"""Gemma 4's decoder (transformers 5.24, modeling_gemma4.py): layers of full attention with heads of their own width,
last layers that read the keys and values of earlier ones, an embedding for each layer, experts beside the MLP."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.architecture import Architecture
from zsim.model.attention import Rotary, attend, causal_mask, dense_mask, positions, rotate, shared_mask
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.families import llama, moe
from zsim.model.families.gemma import ScaledEmbedding, capped
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Linear, Module, Net, Weight

Shared = dict[bool, tuple[Tensor, Tensor]]  # keys and values that later layers read, of layers with a window and others
Masks = dict[bool, Tensor | None]  # of layers with a window and others
TEXT = "Gemma4Text"


def sharing(arch: Architecture) -> tuple[str, ...]:
    """`Gemma4TextConfig.kv_sharing_modes`: layers that "reuse" keys and values of the last one of their type that makes
    some, which keeps ("store") them, whether or not somebody reads them."""
    if arch.gemma.streams and not arch.gemma.shared_layers:  # Gemma 3n
        return ("",) * arch.layers
    first = arch.layers - arch.gemma.shared_layers
    makers = {kind.sliding: layer for layer, kind in enumerate(arch.kinds[:first])}
    return tuple(
        "reuse" if layer >= first else "store" if makers[kind.sliding] == layer else ""
        for layer, kind in enumerate(arch.kinds)
    )


class RMSNorm(Module):
    """In float32, the weight too; the root is a power, which keeps what it is of."""

    kind = "norm"
    class_name = "Gemma4RMSNorm"

    def __init__(self, net: Net, width: int, scaled: bool = True) -> None:
        super().__init__(net)
        self.weight = Weight(net, width) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        out = self._norm(F.to(x, "float32"))
        if self.weight is not None:
            out = F.mul(out, F.to(self.weight, "float32"))
        return F.to(out, x.dtype)

    def _norm(self, x: Tensor) -> Tensor:
        mean_squared = F.shift(F.mean_last(F.power(x)))
        return F.mul(x, F.power(mean_squared))


class LayerEmbedding(ScaledEmbedding):
    """Of all layers at once. No input embedding, which alone frameworks and checkpointing treat apart."""

    role = ""

    def forward(self, indices: Tensor) -> Tensor:
        return F.scale(P.embedding(indices, self.weight))


class Attention(Module):
    kind = "rotary"

    def __init__(self, net: Net, index: int) -> None:
        super().__init__(net)
        arch, own = net.arch, net.arch.gemma
        self.class_name = f"{TEXT}Attention"
        self.sliding = arch.kinds[index].sliding
        self.window = arch.window if self.sliding else None
        self.mode = sharing(arch)[index]
        self.head_dim = d = arch.head_dim if self.sliding else own.full_head_dim
        width = (arch.kv_heads if self.sliding else own.full_kv_heads) * d
        self.q_proj = Linear(net, arch.hidden, arch.heads * d, arch.attention_bias)
        self.q_norm = RMSNorm(net, d)
        if self.mode != "reuse":
            self.k_norm = RMSNorm(net, d)
            self.v_norm = RMSNorm(net, d, scaled=False)
            self.k_proj = Linear(net, arch.hidden, width, arch.attention_bias)
            both = own.values_are_keys and not self.sliding
            self.v_proj = None if both else Linear(net, arch.hidden, width, arch.attention_bias)
        self.o_proj = Linear(net, arch.heads * d, arch.hidden, arch.output_bias)

    def forward(
        self, shared: Shared, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        q = self.heads(self.q_proj(x))
        q = self.q_norm(q)
        q = rotated(q, cos, sin)
        q = F.transpose(q, 1, 2)
        if self.mode == "reuse":
            k, v = shared[self.sliding]
        else:
            k = self.heads(self.k_proj(x))
            v = k if self.v_proj is None else self.heads(self.v_proj(x))
            k = self.k_norm(k)
            k = rotated(k, cos, sin)
            k = F.transpose(k, 1, 2)
            v = self.v_norm(v)
            v = F.transpose(v, 1, 2)
        if self.mode == "store":
            shared[self.sliding] = k, v
        out, weights = attend(self.net, q, k, v, mask, self.window, self.net.arch.attention_dropout)
        out = self.o_proj(out)
        return out, weights

    def heads(self, x: Tensor) -> Tensor:
        return F.reshape(x, *x.shape[:2], -1, self.head_dim)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of [b, s, h, d]."""
    return rotate(x, F.unsqueeze(cos, 2), F.unsqueeze(sin, 2))


class Router(Module):
    """Its weights for the chosen experts stay in float32."""

    kind = "router"
    class_name = f"{TEXT}Router"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.norm = RMSNorm(net, net.arch.hidden, scaled=False)
        self.proj = Linear(net, net.arch.hidden, net.arch.experts.experts)
        self.scale = Weight(net, net.arch.hidden)
        self.per_expert_scale = Weight(net, net.arch.experts.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.norm(x)
        x = F.scale(F.mul(x, self.scale))
        scores = self.proj(x)
        probabilities = P.softmax(F.to(scores, "float32"))
        values, chosen = P.topk(probabilities, self.net.arch.experts.top_k)
        values = F.divide(values, F.sum_last(values), in_place=True)
        values = F.mul(values, P.gather(self.per_expert_scale, chosen))
        return probabilities, values, chosen


class Block(Module):
    kind = "residual"
    class_name = f"{TEXT}DecoderLayer"

    def __init__(self, net: Net, index: int) -> None:
        super().__init__(net)
        arch, own = net.arch, net.arch.gemma
        width = arch.hidden
        self.self_attn = Attention(net, index)
        wide = own.double_wide and self.self_attn.mode == "reuse"
        self.mlp = llama.MLP(net, TEXT, arch.intermediate * (2 if wide else 1))
        self.input_layernorm = RMSNorm(net, width)
        self.post_attention_layernorm = RMSNorm(net, width)
        self.pre_feedforward_layernorm = RMSNorm(net, width)
        self.post_feedforward_layernorm = RMSNorm(net, width)
        if own.layer_width:
            self.act_fn = Activation(net, arch.activation)
            self.per_layer_input_gate = Linear(net, width, own.layer_width)
            self.per_layer_projection = Linear(net, own.layer_width, width)
            self.post_per_layer_input_norm = RMSNorm(net, width)
        self.sparse = arch.kinds[index].sparse
        if self.sparse:
            self.router = Router(net)
            self.experts = moe.Experts(net, TEXT)
            self.post_feedforward_layernorm_1 = RMSNorm(net, width)
            self.post_feedforward_layernorm_2 = RMSNorm(net, width)
            self.pre_feedforward_layernorm_2 = RMSNorm(net, width)

    def buffers_bytes(self) -> int:
        return super().buffers_bytes() + 4  # layer_scalar

    def forward(self, shared: Shared, x: Tensor, *given: Tensor) -> Tensor:
        """`given`: the layer's own embedding, if there is one, and what attention takes."""
        layer_input, context = (given[0], given[1:]) if self.net.arch.gemma.layer_width else (None, given)
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(shared, x, *context)
        x = self.post_attention_layernorm(x)
        x = F.add(residual, x)
        residual = x
        x = self.pre_feedforward_layernorm(x)
        x = self.mlp(x)
        if self.sparse:
            dense = self.post_feedforward_layernorm_1(x)
            flat = F.reshape(residual, -1, residual.shape[-1])
            _probabilities, weights, chosen = self.router(flat)
            routed = self.pre_feedforward_layernorm_2(flat)
            routed = self.experts(routed, chosen, weights)
            routed = F.reshape(routed, *residual.shape)
            routed = self.post_feedforward_layernorm_2(routed)
            x = F.add(dense, routed)
        x = self.post_feedforward_layernorm(x)
        x = F.add(residual, x)
        if layer_input is not None:
            residual = x
            x = self.per_layer_input_gate(x)
            x = self.act_fn(x)
            x = F.mul(x, layer_input)
            x = self.per_layer_projection(x)
            x = self.post_per_layer_input_norm(x)
            x = F.add(residual, x)
        return F.scale_in_place(x)


class Model(Module):
    kind = "copy"
    class_name = f"{TEXT}Model"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch, own = net.arch, net.arch.gemma
        self.embed_tokens = ScaledEmbedding(net, arch.vocab, arch.hidden)
        self.embed_tokens.class_name = f"{TEXT}ScaledWordEmbedding"
        self.layers = Blocks(net, kinds(arch), lambda index: Block(net, index))
        self.norm = RMSNorm(net, arch.hidden)
        self.norm.role = "norm"
        self.rotary_emb = Rotary(net, arch.head_dim, f"{TEXT}RotaryEmbedding")
        self.widths = {kind.sliding: arch.head_dim if kind.sliding else own.full_head_dim for kind in arch.kinds}
        if own.layer_width:
            width = arch.layers * own.layer_width
            self.embed_tokens_per_layer = LayerEmbedding(net, own.layer_vocab, width)
            self.embed_tokens_per_layer.class_name = f"{TEXT}ScaledWordEmbedding"
            self.per_layer_model_projection = Linear(net, arch.hidden, width)
            self.per_layer_projection_norm = RMSNorm(net, own.layer_width)

    def buffers_bytes(self) -> int:
        """Rotary frequencies of each type of layer, twice; what embeddings and each layer's result are multiplied
        with."""
        scales = 2 if self.net.arch.gemma.layer_width else 1
        return 4 * (sum(self.widths.values()) + scales + self.net.arch.layers)

    def forward(
        self,
        ids: Tensor | None,
        embeds: Tensor | None = None,
        layer_inputs: Tensor | None = None,
        position_ids: Tensor | None = None,
        masks: Masks | None = None,
    ) -> Tensor:
        """All but `ids`: what a multimodal model hands over instead of them."""
        net = self.net
        check(net)
        if embeds is None:
            assert ids is not None
            embeds = self.embed_tokens(ids)
        if net.arch.gemma.layer_width:
            if layer_inputs is None:
                assert ids is not None
                layer_inputs = self.layer_inputs(ids)
            layer_inputs = self.projected(embeds, layer_inputs)
            if net.layers_save(embeds) or net.checkpointing != "none":  # every block saves a part of it, or is given it
                net.tape.share(layer_inputs)
        if position_ids is None or masks is None:
            position_ids = positions(net, embeds if ids is None else ids)
            masks = masks_of(net, *embeds.shape[:2])
        x = embeds
        tables = {sliding: self.tables(x, position_ids, sliding) for sliding in self.widths}
        shared: Shared = {}
        for number, block in self.layers.numbered():
            sliding = net.arch.kinds[number].sliding
            with net.tape.before_each_block():
                layer_input = None if layer_inputs is None else F.select(layer_inputs, 2)
            x = run_block(net, block, x, layer_input, *tables[sliding], masks[sliding], shared=shared)
        return self.norm(x)

    def layer_inputs(self, ids: Tensor) -> Tensor:
        """[b, s, layers, width]"""
        arch = self.net.arch
        return F.reshape(self.embed_tokens_per_layer(ids), *ids.shape, arch.layers, arch.gemma.layer_width)

    def projected(self, embeds: Tensor, layer_inputs: Tensor) -> Tensor:
        projection = F.scale(self.per_layer_model_projection(embeds))
        projection = F.reshape(projection, *layer_inputs.shape)
        projection = self.per_layer_projection_norm(projection)
        return F.scale(F.add(projection, layer_inputs))

    def tables(self, x: Tensor, position_ids: Tensor, sliding: bool) -> tuple[Tensor, Tensor]:
        self.rotary_emb.dim = self.widths[sliding]
        return self.rotary_emb(x, position_ids)


class Gemma4ForCausalLM(CausalLM):
    class_name = "Gemma4ForCausalLM"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.model = self.decoder()
        self.lm_head = head(net, self.model.embed_tokens)

    def decoder(self) -> Any:  # a module with `embed_tokens`
        return Model(self.net)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.model(ids), labels, self.lm_head)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return capped(self.net, head(hidden))


def kinds(arch: Architecture) -> tuple[Hashable, ...]:
    """Layers that run alike. To the last of a type no gradient of shared keys and values has come yet, and to the last
    none of the embeddings of layers. What the first one is given the projection of these has kept already."""
    last = {kind.sliding: layer for layer, kind in enumerate(arch.kinds)}
    projected = bool(arch.gemma.layer_width and not arch.gemma.streams)
    return tuple(
        (kind, mode, last[kind.sliding] == layer, projected and layer == 0)
        for layer, (kind, mode) in enumerate(zip(arch.kinds, sharing(arch), strict=True))
    )


def masks_of(net: Net, b: int, s: int) -> Masks:
    """Of layers with a window and of others; of bools even where a batch is padded."""
    if net.attention != "efficient":
        return {False: causal_mask(net, b, s), True: causal_mask(net, b, s, net.arch.window)}
    masks = (shared_mask(net, F.expand(dense_mask(net, 1, s, "bool"), (b, 1, s, s))) for _ in range(2))
    return dict(zip((False, True), masks, strict=True))


def check(net: Net) -> None:
    """What this family is not simulated with."""
    if net.sequence_parallel_size > 1:
        raise NotModeled(f"sequence parallelism of {net.arch.family}", field="sequence_parallel_size", accepted="1")

"""Gemma 3n's decoder (transformers 5.24, modeling_gemma3n.py): several residual streams of which one goes through a
layer and the others are predicted and corrected (AltUp), a narrow path beside attention (Laurel), activations cut below
a quantile, and what Gemma 4 has of it: last layers that read the keys and values of earlier ones, an embedding for each
layer."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import Rotary, attend, mask_of_kind, positions
from zsim.model.decoder import run_block
from zsim.model.families import gemma4
from zsim.model.families.cohere import subtract
from zsim.model.families.gemma import ScaledEmbedding
from zsim.model.families.gemma3n_operations import (
    add_behind,
    add_to_view,
    deviation,
    mean_first,
    repeated,
    root,
    stack,
    subtract_row,
)
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Linear, Module, ModuleList, Net, Weight

TEXT = "Gemma3nText"


class RMSNorm(gemma4.RMSNorm):
    class_name = "Gemma3nRMSNorm"


# ---------------------------------------------------------------------------------------------------- layers


class Attention(Module):
    kind = "rotary"
    class_name = f"{TEXT}Attention"

    def __init__(self, net: Net, index: int) -> None:
        super().__init__(net)
        arch, d = net.arch, net.arch.head_dim
        self.sliding = arch.kinds[index].sliding
        self.window = arch.window if self.sliding else None
        self.mode = gemma4.sharing(arch)[index]
        self.q_proj = Linear(net, arch.hidden, arch.heads * d, arch.attention_bias)
        self.q_norm = RMSNorm(net, d)
        if self.mode != "reuse":
            self.k_proj = Linear(net, arch.hidden, arch.kv_heads * d, arch.attention_bias)
            self.v_proj = Linear(net, arch.hidden, arch.kv_heads * d, arch.attention_bias)
            self.k_norm = RMSNorm(net, d)
            self.v_norm = RMSNorm(net, d, scaled=False)
        self.o_proj = Linear(net, arch.heads * d, arch.hidden, arch.output_bias)

    def forward(
        self, shared: gemma4.Shared, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        q = self.q_norm(self.heads(self.q_proj(x)))
        q = F.transpose(gemma4.rotated(q, cos, sin), 1, 2)
        if self.mode == "reuse":
            k, v = shared[self.sliding]
        else:
            k = self.k_norm(self.heads(self.k_proj(x)))
            k = F.transpose(gemma4.rotated(k, cos, sin), 1, 2)
            v = F.transpose(self.v_norm(self.heads(self.v_proj(x))), 1, 2)
        if self.mode == "store":
            shared[self.sliding] = k, v
        out, weights = attend(self.net, q, k, v, mask, self.window, self.net.arch.attention_dropout)
        out = self.o_proj(out)
        return out, weights

    def heads(self, x: Tensor) -> Tensor:
        return F.reshape(x, *x.shape[:2], -1, self.net.arch.head_dim)


class Laurel(Module):
    kind = "residual"
    class_name = f"{TEXT}LaurelBlock"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        width, rank = net.arch.hidden, net.arch.gemma.laurel_rank
        self.linear_left = Linear(net, width, rank)
        self.linear_right = Linear(net, rank, width)
        self.post_laurel_norm = RMSNorm(net, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear_left(x)
        y = self.linear_right(y)
        normed = self.post_laurel_norm(y)
        return F.add(x, normed)


class MLP(Module):
    kind = "activation"
    class_name = f"{TEXT}MLP"

    def __init__(self, net: Net, cut: bool) -> None:
        super().__init__(net)
        arch, self.cut = net.arch, cut
        self.gate_proj = Linear(net, arch.hidden, arch.intermediate)
        self.up_proj = Linear(net, arch.hidden, arch.intermediate)
        self.down_proj = Linear(net, arch.intermediate, arch.hidden)
        self.act_fn = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if self.cut:
            gate = self.above(gate)
        activations = self.act_fn(gate)
        up = self.up_proj(x)
        return self.down_proj(F.mul(activations, up))

    def above(self, x: Tensor) -> Tensor:
        """`_gaussian_topk`"""
        mean = F.mean_last(x)
        spread = deviation(x)
        quantile = self.net.tape.empty((1,), x.dtype)  # a number, which is made in each call
        cutoff = F.add(mean, F.mul(spread, quantile))
        return F.activation_by_result(subtract_row(x, cutoff))


class AltUp(Module):
    """Never called as a module: all it has are methods."""

    kind = "router"
    class_name = f"{TEXT}AltUp"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        width, n = net.arch.hidden, net.arch.gemma.streams
        self.streams = n
        self.correct_output_scale = Weight(net, width)
        self.correction_coefs = Linear(net, n, n)
        self.prediction_coefs = Linear(net, n, n * n)
        self.modality_router = Linear(net, width, n)
        self.router_norm = RMSNorm(net, width)

    def buffers_bytes(self) -> int:
        return super().buffers_bytes() + 4  # router_input_scale

    def modalities(self, x: Tensor) -> Tensor:
        inputs = F.scale(self.router_norm(x))
        routed = self.modality_router(inputs)
        return F.to(F.activation_by_result(F.to(routed, "float32")), x.dtype)

    def predict(self, x: Tensor) -> Tensor:
        """Of [streams, b, s, width]"""
        n, b, s, _ = x.shape
        modalities = self.modalities(F.select(x, 0))
        self.net.tape.read(self.prediction_coefs.weight)  # which is clamped first
        coefs = F.permute(F.reshape(self.prediction_coefs(modalities), b, s, n, n), 0, 1, 3, 2)
        predictions = P.matmul(F.permute(x, 1, 2, 3, 0), coefs, "router")
        predictions = F.permute(predictions, 3, 0, 1, 2)
        predictions = add_to_view(predictions, x)
        return F.contiguous(predictions)

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        n = self.streams
        modalities = self.modalities(activated)
        innovation = subtract(activated, F.select(predictions, 0))
        innovation = repeated(innovation, n)
        self.net.tape.read(self.correction_coefs.weight)
        weight = F.clamped(self.correction_coefs.weight, 2)
        coefs = F.shift(P.linear(modalities, weight))
        coefs = F.permute(coefs, 2, 0, 1)
        coefs = F.reshape(coefs, *coefs.shape, 1)
        corrected = F.mul(innovation, coefs)
        return F.add(corrected, predictions, in_place=True)

    def scaled(self, x: Tensor) -> Tensor:
        self.net.tape.read(self.correct_output_scale)
        return F.mul(x, self.correct_output_scale)


class Block(Module):
    kind = "residual"
    class_name = f"{TEXT}DecoderLayer"

    def __init__(self, net: Net, index: int) -> None:
        super().__init__(net)
        arch, own, width = net.arch, net.arch.gemma, net.arch.hidden
        self.self_attn = Attention(net, index)
        self.mlp = MLP(net, arch.kinds[index].cut)
        self.input_layernorm = RMSNorm(net, width)
        self.post_attention_layernorm = RMSNorm(net, width)
        self.pre_feedforward_layernorm = RMSNorm(net, width)
        self.post_feedforward_layernorm = RMSNorm(net, width)
        self.act_fn = Activation(net, arch.activation)
        self.altup = AltUp(net)
        self.holds = self.altup.correction_coefs.weight, self.altup.correct_output_scale
        self.laurel = Laurel(net)
        self.per_layer_input_gate = Linear(net, width, own.layer_width)
        self.per_layer_projection = Linear(net, own.layer_width, width)
        self.post_per_layer_input_norm = RMSNorm(net, width)

    def forward(self, shared: gemma4.Shared, x: Tensor, layer_input: Tensor, *context: Tensor) -> Tensor:
        predictions = self.altup.predict(x)
        active_prediction = F.select(predictions, 0)
        active_prediction_normed = self.input_layernorm(active_prediction)
        laurel_output = self.laurel(active_prediction_normed)
        attn, _weights = self.self_attn(shared, active_prediction_normed, *context)
        attn = self.post_attention_layernorm(attn)
        attn_gated = F.add(active_prediction, attn)
        attn_laurel = F.scale(F.add(attn_gated, laurel_output))
        attn_norm = self.pre_feedforward_layernorm(attn_laurel)
        attn_ffw = self.mlp(attn_norm)
        attn_ffw_norm = self.post_feedforward_layernorm(attn_ffw)
        attn_ffw_laurel_gated = F.add(attn_laurel, attn_ffw_norm)
        corrected = self.altup.correct(predictions, attn_ffw_laurel_gated)
        first = F.clone(F.select(corrected, 0))
        first = self.altup.scaled(first)
        first = self.per_layer_input_gate(first)
        first = self.act_fn(first)
        first = F.mul(first, layer_input)
        first = self.per_layer_projection(first)
        first = self.post_per_layer_input_norm(first)
        add_behind(corrected, first)
        return corrected


class Model(gemma4.Model):
    class_name = f"{TEXT}Model"

    def __init__(self, net: Net) -> None:
        Module.__init__(self, net)
        arch, own = net.arch, net.arch.gemma
        self.embed_tokens = ScaledEmbedding(net, arch.vocab, arch.hidden)
        self.embed_tokens.class_name = f"{TEXT}ScaledWordEmbedding"
        self.layers = Blocks(net, gemma4.kinds(arch), lambda index: Block(net, index))
        self.norm = RMSNorm(net, arch.hidden)
        self.norm.role = "norm"
        self.rotary_emb = Rotary(net, arch.head_dim, "Gemma3nRotaryEmbedding")
        self.types = sorted({kind.sliding for kind in arch.kinds})
        width = arch.layers * own.layer_width
        self.embed_tokens_per_layer = gemma4.LayerEmbedding(net, own.layer_vocab, width)
        self.embed_tokens_per_layer.class_name = f"{TEXT}ScaledWordEmbedding"
        self.per_layer_model_projection = Linear(net, arch.hidden, width)
        self.per_layer_projection_norm = RMSNorm(net, own.layer_width)
        others = own.streams - 1
        self.altup_projections = ModuleList(net, [Linear(net, arch.hidden, arch.hidden) for _ in range(others)])
        self.altup_unembed_projections = ModuleList(net, [Linear(net, arch.hidden, arch.hidden) for _ in range(others)])

    def buffers_bytes(self) -> int:
        """Frequencies of each type of layer, twice; scales of both embeddings and of layers' inputs."""
        return self.layers.buffers_bytes() + 4 * (len(self.types) * self.net.arch.head_dim + 4)

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        net = self.net
        gemma4.check(net)
        embeds = self.embed_tokens(ids)
        layer_inputs = self.projected(embeds, self.layer_inputs(ids))
        if net.layers_save(embeds) or net.checkpointing != "none":  # every block saves a part of it, or is given it
            net.tape.share(layer_inputs)
        position_ids = positions(net, ids)
        b, s = ids.shape
        if net.attention == "efficient":
            masks = gemma4.masks_of(net, b, s)
        else:
            masks = {sliding: mask_of_kind(net, b, s, sliding) for sliding in (False, True)}
        magnitude = self.magnitude(embeds)
        x = self.streams(embeds, [embeds] * (net.arch.gemma.streams - 1), magnitude, self.altup_projections)
        tables = {sliding: self.rotary_emb(x, position_ids) for sliding in self.types}
        shared: gemma4.Shared = {}
        for number, block in self.layers.numbered():
            sliding = net.arch.kinds[number].sliding
            with net.tape.before_each_block():
                layer_input = F.select(layer_inputs, 2)
            x = run_block(net, block, x, layer_input, *tables[sliding], masks[sliding], shared=shared)
        magnitude = self.magnitude(F.select(x, 0))
        rest = [F.select(x, 0) for _ in range(net.arch.gemma.streams - 1)]
        x = self.streams(F.select(x, 0), rest, magnitude, self.altup_unembed_projections)
        x = mean_first(x)
        return self.norm(x)

    def layer_inputs(self, ids: Tensor) -> Tensor:
        arch = self.net.arch
        inside = F.pointwise(F.pointwise(ids, dtype="bool"), F.pointwise(ids, dtype="bool"))
        ids = F.pointwise(ids, inside)
        embedded = self.embed_tokens_per_layer(ids)
        return F.reshape(embedded, *ids.shape, arch.layers, arch.gemma.layer_width)

    def magnitude(self, x: Tensor) -> Tensor:
        return F.power(F.mean_last(F.power(x)))

    def streams(self, first: Tensor, others: list[Tensor], magnitude: Tensor, projections: Module) -> Tensor:
        """[streams, b, s, width], each of the others projected and as large as the first."""
        found = [first]
        for project, other in zip(projections.children.values(), others, strict=True):
            current = project(other)
            new_magnitude = F.mean_last(F.power(current))
            new_magnitude = root(F.clamped(new_magnitude, 1))
            current = F.divide(F.mul(current, magnitude), new_magnitude)
            found.append(current)
        return stack(found)


class Gemma3nForCausalLM(gemma4.Gemma4ForCausalLM):
    class_name = "Gemma3nForCausalLM"

    def decoder(self) -> Model:
        return Model(self.net)

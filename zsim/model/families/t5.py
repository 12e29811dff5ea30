"""T5, FLAN-T5 and mT5 (transformers 5.24, modeling_t5.py): an encoder and a decoder that reads it in every layer.

Distances between tokens have a learned bias, which the first layer of each stack makes and all others share. Eager
attention adds it to the scores; SDPA is handed it as a mask, and runs torch's memory-efficient kernel.
"""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import causal_mask, split_heads
from zsim.model.decoder import CausalLM, Head, run_block
from zsim.model.families.bert import masked_loss
from zsim.model.families.towers import PositionTable
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Dropout, Embedding, Linear, Module, ModuleList, Net, Weight

PREFIXES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}


class T5Norm(Module):
    """Keeps its input in its own dtype and in float32."""

    kind = "norm"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}LayerNorm"
        self.weight = Weight(net, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        variance = F.mean_last(F.power(F.to(x, "float32")))
        x = F.mul(x, F.rsqrt(F.shift(variance)))
        if self.weight.dtype != "float32":
            x = F.to(x, self.weight.dtype)
        return F.mul(self.weight, x)


class Attention(Module):
    """`biased`: it makes the bias of its stack. `causal`: of a decoder looking at itself."""

    kind = "softmax"

    def __init__(self, net: Net, prefix: str, biased: bool, causal: bool, crosses: bool) -> None:
        super().__init__(net)
        arch = net.arch
        inner = arch.heads * arch.head_dim
        self.class_name = f"{prefix}Attention"
        self.causal, self.crosses = causal, crosses
        self.q = Linear(net, arch.hidden, inner)
        self.k = Linear(net, arch.hidden, inner)
        self.v = Linear(net, arch.hidden, inner)
        self.o = Linear(net, inner, arch.hidden)
        if biased:
            self.relative_attention_bias = PositionTable(net, arch.pair.buckets, arch.heads)

    def forward(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """The bias comes back in a list: a gradient comes to it apart, where another layer reads it."""
        d = self.net.arch.head_dim
        q = split_heads(self.q(x), d)
        read = x if memory is None else memory
        k, v = split_heads(self.k(read), d), split_heads(self.v(read), d)
        if bias is None:
            bias = self._zeros(q, k) if self.crosses else self._bias(q.shape[2])
        out, weights = self._attended(q, k, v, mask, bias)
        out = F.contiguous(F.reshape(out, *x.shape[:2], -1))
        return self.o(out), [handed_on(bias)], weights

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        net, dropout = self.net, self.net.arch.dropout
        if net.attention != "eager":
            added = F.contiguous(F.masked_fill(bias, self._triangle(q.shape[2])) if self.causal else bias)
            added = F.expand(added, (q.shape[0], *added.shape[1:]))
            out = flash_attention(q, k, v, "efficient", mask=added)
            return F.contiguous(F.transpose(out, 1, 2)), None
        weights = F.scale(P.matmul(q, F.transpose(k, 2, 3)))
        weights = F.add(weights, bias)
        if mask is not None:
            weights = F.add(weights, mask)
        weights = F.to(P.softmax(F.to(weights, "float32")), weights.dtype) if net.older(4, 49) else P.softmax(weights)
        weights = F.dropout(weights, dropout)
        out = P.matmul(weights, v)
        return F.contiguous(F.transpose(out, 1, 2)), weights

    def _triangle(self, tokens: int) -> Tensor:
        """Which keys a query may see, made in every layer."""
        tape = self.net.tape
        numbers = [tape.empty((tokens,), "int64") for _ in range(2)]
        return F.pointwise(*numbers, shape=(1, 1, tokens, tokens), dtype="bool")

    def _zeros(self, q: Tensor, k: Tensor) -> Tensor:
        """The bias between decoder and encoder, which checkpointing makes require a gradient that nobody reads."""
        tape = self.net.tape
        zeros = tape.empty((1, q.shape[1], q.shape[2], k.shape[2]), q.dtype)
        tape.memory(0, zeros.nbytes, "copy")
        if self.net.checkpointing != "none":
            leaf = zeros.detach()

            def backward(g: Tensor) -> tuple[()]:
                tape.unread += [leaf, g]
                return ()

            tape.link((), backward, zeros)
        elif self.net.attention != "eager":
            tape.share(zeros)
        return zeros

    def _bias(self, tokens: int) -> Tensor:
        """`compute_bias`: distances, their buckets, and a row of the table for each."""
        tape = self.net.tape
        square = (tokens, tokens)
        queries = F.pointwise(tape.empty((tokens,), "int64"))
        keys = tape.empty((tokens,), "int64")
        distances = F.pointwise(keys, queries, shape=square)
        buckets = self._buckets(distances)
        values = F.permute(self.relative_attention_bias(buckets), 2, 0, 1)
        return F.reshape(values, 1, *values.shape)

    def _buckets(self, distances: Tensor) -> Tensor:
        """`_relative_position_bucket`, an operation at a time."""
        if self.causal:
            behind = F.pointwise(F.pointwise(distances, F.pointwise(distances)))
            found = None
        else:
            found = F.pointwise(F.pointwise(F.pointwise(F.pointwise(distances, dtype="bool"), dtype="int64")))
            behind = F.pointwise(distances)
        small = F.pointwise(behind, dtype="bool")
        far, _held = self._far(behind)
        far = F.pointwise(far)
        far = F.pointwise(far, F.pointwise(far))
        chosen = F.pointwise(small, behind, far, dtype="int64")
        if found is None:
            return F.pointwise(chosen)
        found.tape.memory(found.nbytes + chosen.nbytes, found.nbytes)
        return found

    def _far(self, behind: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logarithms as integers, and what is alive as long."""
        far = F.pointwise(F.pointwise(behind, dtype="float32"))
        far = F.pointwise(F.pointwise(far))
        return F.pointwise(F.pointwise(far), dtype="int64"), None


class AttentionLayer(Module):
    kind = "residual"

    def __init__(self, net: Net, prefix: str, name: str, attention: Attention) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Layer{'Self' if name == 'SelfAttention' else 'Cross'}Attention"
        setattr(self, name, attention)
        self.attention = name
        self.layer_norm = T5Norm(net, prefix)
        self.dropout = Dropout(net, net.arch.dropout)

    def forward(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        normed = self.layer_norm(x)
        out, bias_out, weights = self.children[self.attention](normed, memory, mask, bias)
        return F.add(x, self.dropout(out)), bias_out, weights


class Dense(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.gated = arch.pair.gated
        self.class_name = f"{prefix}DenseGatedActDense" if self.gated else f"{prefix}DenseActDense"
        for name in ("wi_0", "wi_1") if self.gated else ("wi",):
            setattr(self, name, Linear(net, arch.hidden, arch.intermediate))
        self.wo = Linear(net, arch.intermediate, arch.hidden)
        self.dropout = Dropout(net, arch.dropout)
        self.act = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate = self.act(self.children["wi_0"](x))
            up = self.children["wi_1"](x)
            x = F.mul(gate, up)
            x = F.to(self.dropout(x), self.net.dtype)
            return self.wo(x)  # gate and up live as long
        x = self.children["wi"](x)
        x = self.act(x)
        return self.wo(F.to(self.dropout(x), self.net.dtype))


class FeedForward(Module):
    kind = "residual"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}LayerFF"
        self.DenseReluDense = Dense(net, prefix)
        self.layer_norm = T5Norm(net, prefix)
        self.dropout = Dropout(net, net.arch.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer_norm(x)
        out = self.DenseReluDense(out)
        return F.add(x, self.dropout(out))


class Block(Module):
    kind = "residual"
    attention: type[Attention] = Attention
    attention_layer: type[AttentionLayer] = AttentionLayer

    def __init__(self, net: Net, prefix: str, decodes: bool, first: bool) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Block"
        self.decodes, self.first = decodes, first
        own = self.attention(net, prefix, biased=first, causal=decodes, crosses=False)
        parts: list[Module] = [self.attention_layer(net, prefix, "SelfAttention", own)]
        if decodes:
            cross = self.attention(net, prefix, biased=False, causal=False, crosses=True)
            parts.append(self.attention_layer(net, prefix, "EncDecAttention", cross))
        self.layer = ModuleList(net, [*parts, FeedForward(net, prefix)])

    def forward(self, x: Tensor, *given: Tensor) -> tuple[Tensor | list[Tensor], ...]:
        """`given`, as far as they are there: mask, bias, what the encoder returned, the bias between the two."""
        rest = list(given)
        layers = list(self.layer.children.values())
        mask = rest.pop(0) if self.decodes and self.net.attention == "eager" else None
        x, bias, _ = layers[0](x, None, mask, None if self.first else rest.pop(0))
        x, bound = finite(x)
        if not self.decodes:
            return finite(layers[-1](x))[0], bias
        x, between, _ = layers[1](x, rest[0], None, None if self.first else rest[1])
        x, bound = finite(x)  # noqa: RUF059  which lives on
        return finite(layers[-1](x))[0], bias, between


class Stack(Module):
    kind = "dropout"

    def __init__(self, net: Net, prefix: str, shared: Embedding, decodes: bool) -> None:
        super().__init__(net)
        self.class_name, self.decodes = f"{prefix}Stack", decodes
        self.embed_tokens = Embedding(net, net.arch.vocab, net.arch.hidden)
        self.embed_tokens.weight = shared.weight
        self.embed_tokens.copied = net.arch.dropout > 0
        self.block = self.blocks(prefix)
        self.final_layer_norm = T5Norm(net, prefix)
        self.final_layer_norm.role = "norm"
        self.dropout = Dropout(net, net.arch.dropout)

    def blocks(self, prefix: str) -> Blocks:
        net = self.net
        return Blocks(net, sharing(net), lambda index: Block(net, prefix, self.decodes, first=index == 0))

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        net = self.net
        embeds = self.embed_tokens(ids)  # the name outlives the blocks
        mask = causal_mask(net, *ids.shape) if self.decodes and net.attention == "eager" else None
        bias = between = None
        x = self.dropout(embeds)
        for number, block in self.block.numbered():
            x, *biases = run_block(net, block, x, mask, bias, memory, between)
            bias, between = biases[0][0], biases[1][0] if self.decodes else None
            if number == 0 and net.checkpointing != "none":  # arguments of all others
                net.tape.share(*(each[0] for each in biases))
        x = self.final_layer_norm(x)
        return self.dropout(x)


class T5ForConditionalGeneration(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        prefix = PREFIXES[net.arch.family]
        self.class_name = f"{prefix}ForConditionalGeneration"
        self.shared = Embedding(net, net.arch.vocab, net.arch.hidden)
        self.encoder = self.stack(net.encoder(), prefix, self.shared, decodes=False)
        self.decoder = self.stack(net.decoder(), prefix, self.shared, decodes=True)
        self.lm_head = Head(net, net.arch.hidden, net.arch.vocab)
        if net.arch.tied:
            self.lm_head.weight = self.shared.weight

    def stack(self, net: Net, prefix: str, shared: Embedding, decodes: bool) -> Stack:
        return Stack(net, prefix, shared, decodes)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        net = self.net
        check_pair(net, ("sdpa", "efficient", "eager"))
        memory = self.encoder(ids)
        decoder_ids = shifted_right(labels)
        hidden = decoded = self.decoder(decoder_ids, memory)  # noqa: F841  the second is a part of the output
        if net.arch.pair.scaled:
            hidden = F.scale(hidden)
        logits = self.lm_head(hidden)
        return masked_loss(F.wide(logits), labels)


def finite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What float16 makes infinite is clamped, to a bound that is lower if there is any; and that bound."""
    if x.dtype != "float16":
        return x, None
    found = F.pointwise(F.pointwise(x), dtype="bool")  # isinf
    x.tape.memory(found.nbytes, 1)
    del found
    most = x.tape.empty((), "float32")
    return F.clamped(x, 2, F.pointwise(most), most), most


def sharing(net: Net) -> tuple[tuple[bool, bool], ...]:
    """Kinds of layers that read something in common: the first makes or keeps it, and to the last no gradient of it has
    come yet."""
    last = net.arch.layers - 1
    return tuple((layer == 0, layer == last) for layer in range(net.arch.layers))


def handed_on(bias: Tensor) -> Tensor:
    """A bias as what a layer returns, whose gradient is that of the layers behind."""
    out = bias.detach()
    if bias.needs_grad:
        bias.tape.link((bias,), lambda g: (g,), out)
    return out


def check_pair(net: Net, attention: tuple[str, ...]) -> None:
    """What encoders with decoders are not simulated with."""
    family = net.arch.family
    if net.attention not in attention:
        raise NotModeled(f"{net.attention} attention in {family}", field="attention", accepted=", ".join(attention))
    if net.loss not in ("hf", "held") or net.kernels != "torch":
        raise NotModeled(f"a fused loss or kernels of {family}", field="loss", accepted="hf")
    if net.sequence_parallel_size > 1:
        raise NotModeled(f"sequence parallelism of {family}", field="sequence_parallel_size", accepted="1")
    if net.checkpointed is not None:
        raise NotModeled(f"checkpointing of some layers of {family}", field="checkpointing", accepted="none, full")


def shifted_right(labels: Tensor) -> Tensor:
    """What the decoder reads: the labels one place later."""
    tape = labels.tape
    shifted = tape.empty(labels.shape, labels.dtype)
    tape.memory(0, shifted.nbytes, "copy")
    clone = tape.empty((labels.shape[0], labels.shape[1] - 1), labels.dtype)
    tape.memory(3 * clone.nbytes, 2 * clone.nbytes, "copy")
    del clone
    padding = F.pointwise(shifted, dtype="bool")
    tape.memory(shifted.nbytes + padding.nbytes, shifted.nbytes)
    return shifted

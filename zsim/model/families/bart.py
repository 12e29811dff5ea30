"""BART, mBART, Pegasus, Marian and M2M-100 with NLLB (transformers 5.24): an encoder and a decoder of one embedding,
which differ in where norms stand and in what positions are."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.errors import InputError, NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import causal_mask, split_heads
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.families import whisper
from zsim.model.families.bert import masked_loss
from zsim.model.families.t5 import check_pair, sharing, shifted_right
from zsim.model.families.towers import PositionTable, given
from zsim.model.graph import Tensor
from zsim.model.kernels import FLASH
from zsim.model.layers import Blocks, Embedding, LayerNorm, Linear, Module, Net, require_grad


@dataclass(frozen=True)
class Style:
    prefix: str
    root: str
    pre_norm: bool  # norms before attention and MLP, and one behind the layers
    embedding_norm: bool
    sines: bool  # positions that are not trained, and an embedding that is scaled outside of its module
    held: tuple[str, ...]  # what a decoder has names for while its layers run
    counted: bool = False  # positions past the padding of each sequence, out of a buffer; and no bias of the logits


STYLES = {
    "bart": Style("Bart", "BartForConditionalGeneration", False, True, False, ("numbers",)),
    "mbart": Style("MBart", "MBartForConditionalGeneration", True, True, False, ("padding",)),
    "pegasus": Style("Pegasus", "PegasusForConditionalGeneration", True, False, True, ("numbers", "padding")),
    "marian": Style("Marian", "MarianMTModel", False, False, True, ("padding",)),
    "m2m_100": Style("M2M100", "M2M100ForConditionalGeneration", True, False, False, (), counted=True),
}
OFFSET = 2  # rows of learned positions before the first


class Tokens(Embedding):
    """Scaled, be it by one."""

    def __init__(self, net: Net, style: Style) -> None:
        super().__init__(net, net.arch.vocab, net.arch.hidden)
        self.sines = style.sines
        self.class_name = "Embedding" if style.sines else f"{style.prefix}ScaledWordEmbedding"

    def forward(self, indices: Tensor) -> Tensor:
        out = P.embedding(indices, self.weight)
        return require_grad(self.net, out if self.sines else F.scale(out), copied=True)


class CountedPositions(Module):
    """Rows of a buffer of sines, counted past the padding of each sequence."""

    kind = "embedding"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}SinusoidalPositionalEmbedding"

    def buffers_bytes(self) -> int:
        return 4 * (self.net.arch.positions + OFFSET) * self.net.arch.hidden

    def forward(self, ids: Tensor) -> Tensor:
        rows = counted(ids)
        out = self.net.tape.empty((*ids.shape, self.net.arch.hidden), self.net.dtype)
        self.net.tape.memory(rows.nbytes + out.nbytes, out.nbytes)
        return out


def counted(ids: Tensor) -> Tensor:
    mask = F.pointwise(F.pointwise(ids, dtype="bool"), dtype="int32")
    counts = F.pointwise(F.pointwise(F.pointwise(mask, dtype="int64"), dtype="int32"))  # cumsum, type_as, + 0
    counts = F.pointwise(counts, mask)
    return F.pointwise(F.pointwise(counts, dtype="int64"))


class Attention(whisper.Attention):
    def __init__(self, net: Net, prefix: str, causal: bool) -> None:
        Module.__init__(self, net)
        width = net.arch.hidden
        self.class_name, self.causal = f"{prefix}Attention", causal
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, Linear(net, width, width, bias=True))

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        d, read = self.net.arch.head_dim, x if memory is None else memory
        q = split_heads(self.q_proj(x), d)
        k, v = self.k_proj(read), self.v_proj(read)
        k, v = split_heads(k, d), split_heads(v, d)
        out, weights = self._attended(q, k, v, mask)
        out = F.contiguous(F.reshape(out, *x.shape[:2], -1))
        out = self.out_proj(out)
        return out, weights


class Layer(whisper.Layer):
    def __init__(self, net: Net, style: Style, decodes: bool) -> None:
        self.style = style
        super().__init__(net, decodes)
        self.class_name = f"{style.prefix}{'Decoder' if decodes else 'Encoder'}Layer"

    def attention(self, causal: bool) -> whisper.Attention:
        return Attention(self.net, self.style.prefix, causal)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        if self.style.pre_norm:
            return super().forward(x, *context)
        arch = self.net.arch
        mask = context[0] if len(context) > 1 else None
        residual = x
        x, _weights = self.self_attn(x, None, mask)
        x = F.dropout(x, arch.dropout)
        x = F.add(residual, x)
        x = self.self_attn_layer_norm(x)
        if self.decodes:
            residual = x
            x, _weights = self.encoder_attn(x, context[-1])
            x = F.dropout(x, arch.dropout)
            x = F.add(residual, x)
            x = self.encoder_attn_layer_norm(x)
        residual = x
        x = self.activation_fn(self.fc1(x))
        x = F.dropout(x, arch.embedding_dropout)
        x = self.fc2(x)
        x = F.dropout(x, arch.dropout)
        x = F.add(residual, x)
        return self.final_layer_norm(x)


class Stack(Module):
    kind = "residual"

    def __init__(self, net: Net, style: Style, shared: Embedding, decodes: bool) -> None:
        super().__init__(net)
        arch, self.style, self.decodes = net.arch, style, decodes
        self.class_name = f"{style.prefix}{'Decoder' if decodes else 'Encoder'}"
        self.embed_tokens = Tokens(net, style)
        self.embed_tokens.weight = shared.weight
        self.embed_positions = CountedPositions(net, style.prefix) if style.counted else table(net, style)
        kinds = sharing(net) if decodes else arch.kinds
        self.layers = Blocks(net, kinds, lambda _index: Layer(net, style, decodes))
        if style.embedding_norm:
            self.layernorm_embedding = LayerNorm(net, arch.hidden)
        if style.pre_norm:
            self.layer_norm = LayerNorm(net, arch.hidden)

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        net, style = self.net, self.style
        embeds = self.embed_tokens(ids)  # this name and the next outlive the blocks
        if style.sines:
            embeds = F.scale(embeds)
        held: dict[str, Tensor] = {}
        mask = None
        if self.decodes:
            held["numbers"] = F.pointwise(net.tape.empty((ids.shape[1],), "int64"))
            held["padding"] = net.tape.empty(ids.shape, "float32")  # that there is none
            mask = causal_mask(net, *ids.shape)
        positions = self.embed_positions(self._places(ids, held.get("numbers")))
        held = {name: tensor for name, tensor in held.items() if name in style.held}
        x = F.add(embeds, positions)
        if style.embedding_norm:
            x = self.layernorm_embedding(x)
        x = F.dropout(x, net.arch.dropout)
        for block in self.layers:
            x = run_block(net, block, x, mask, memory)
        held.clear()
        return self.layer_norm(x) if style.pre_norm else x

    def _places(self, ids: Tensor, numbers: Tensor | None) -> Tensor:
        """Of learned positions one row for each sequence in an encoder, and one in a decoder, which has `numbers`."""
        if self.style.counted:
            return ids
        batch, tokens = ids.shape
        numbers = self.net.tape.empty((tokens,), "int64") if numbers is None else numbers
        return numbers if self.style.sines else F.pointwise(numbers, shape=(1 if self.decodes else batch, tokens))


def table(net: Net, style: Style) -> PositionTable:
    positions = PositionTable(net, net.arch.positions + (0 if style.sines else OFFSET), net.arch.hidden)
    positions.class_name = f"{style.prefix}{'Sinusoidal' if style.sines else 'Learned'}PositionalEmbedding"
    positions.weight.frozen = style.sines
    return positions


class BartModel(Module):
    def __init__(self, net: Net, style: Style) -> None:
        super().__init__(net)
        self.class_name = f"{style.prefix}Model"
        self.shared = Tokens(net, style)
        self.encoder = Stack(net.encoder(), style, self.shared, decodes=False)
        self.decoder = Stack(net.decoder(), style, self.shared, decodes=True)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """What the decoder returned, and the encoder, which is part of the model's output."""
        memory = self.encoder(ids)
        return self.decoder(decoder_ids, memory), (memory,)


class BartForConditionalGeneration(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        style = STYLES[net.arch.family]
        self.class_name, self.biased = style.root, not style.counted
        self.model = BartModel(net, style)
        self.lm_head = head(net, self.model.shared)

    def buffers_bytes(self) -> int:
        """The bias of the logits and tables, in float32."""
        return super().buffers_bytes() + (4 * self.net.arch.vocab if self.biased else 0)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        net, arch = self.net, self.net.arch
        check_pair(net, (*FLASH, "cudnn", "sdpa", "eager"))
        if net.dtype == "float16" and self.biased:
            raise NotModeled(f"float16 in {arch.family}, which clamps infinities", field="precision", accepted="bf16")
        for tokens, field in ((ids.shape[1], "seq_len"), (labels.shape[1], "target_len")):
            if tokens > arch.positions:
                what = f"is {tokens}, more than the {arch.positions} positions of {arch.family}"
                raise InputError(what, field=field, accepted=f"up to {arch.positions}")
        decoder_ids = shifted_right(labels)
        hidden, _memory = self.model(ids, decoder_ids)
        logits = self.lm_head(hidden)
        if self.biased:
            logits = F.add(logits, given(net, (1, arch.vocab), net.dtype))
        return masked_loss(F.wide(logits), labels)

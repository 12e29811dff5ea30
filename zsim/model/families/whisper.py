"""Whisper (transformers 5.24, modeling_whisper.py): an encoder of sound, always of as many positions, and a decoder
that reads it in every layer."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.model import functional as F
from zsim.model import pixels
from zsim.model import products as P
from zsim.model.attention import causal_mask, split_heads
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.families.bert import masked_loss
from zsim.model.families.t5 import check_pair, sharing, shifted_right
from zsim.model.families.towers import PositionTable, given
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.kernels import FLASH
from zsim.model.layers import Activation, Blocks, Embedding, LayerNorm, Linear, Module, Net, Weight


class Convolution(Module):
    """`nn.Conv1d` of kernels of three."""

    kind = "gemm"
    class_name = "Conv1d"

    def __init__(self, net: Net, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(net)
        self.stride = stride
        self.weight = Weight(net, outputs, inputs, 3)
        self.bias = Weight(net, outputs)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], self.weight.shape[0], x.shape[2] // self.stride)
        return pixels.convolution(x, self.weight, self.bias, shape)


class Attention(Module):
    """Queries are scaled, and all three made contiguous. `causal`: of a decoder looking at itself."""

    kind = "copy"
    class_name = "WhisperAttention"

    def __init__(self, net: Net, causal: bool = False) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.causal = causal
        self.k_proj = Linear(net, width, width)
        self.v_proj = Linear(net, width, width, bias=True)
        self.q_proj = Linear(net, width, width, bias=True)
        self.out_proj = Linear(net, width, width, bias=True)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        d, read = self.net.arch.head_dim, x if memory is None else memory
        q = F.contiguous(split_heads(F.scale(self.q_proj(x)), d))
        k = F.contiguous(split_heads(self.k_proj(read), d))
        v = F.contiguous(split_heads(self.v_proj(read), d))
        out, weights = self._attended(q, k, v, mask)
        out = F.contiguous(F.reshape(out, *x.shape[:2], -1))
        out = self.out_proj(out)
        return out, weights

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        net, weights = self.net, None
        if net.attention != "eager":
            out = flash_attention(q, k, v, net.attention, causal=self.causal)
            return F.contiguous(F.transpose(out, 1, 2)), None
        outer, net.tape.label = net.tape.label, "softmax"
        weights = F.scale(P.matmul(q, F.transpose(k, 2, 3)))
        if mask is not None:
            weights = F.add(weights, mask)
        weights = P.softmax(weights)
        weights = F.dropout(weights, net.arch.attention_dropout)
        out = P.matmul(weights, v)
        net.tape.label = outer
        return F.contiguous(F.transpose(out, 1, 2)), weights


class Layer(Module):
    kind = "residual"

    def __init__(self, net: Net, decodes: bool) -> None:
        super().__init__(net)
        arch, self.decodes = net.arch, decodes
        self.class_name = "WhisperDecoderLayer" if decodes else "WhisperEncoderLayer"
        self.self_attn = self.attention(causal=decodes)
        if decodes:
            self.activation_fn = Activation(net, arch.activation)
        self.self_attn_layer_norm = LayerNorm(net, arch.hidden)
        if decodes:
            self.encoder_attn = self.attention(causal=False)
            self.encoder_attn_layer_norm = LayerNorm(net, arch.hidden)
        else:
            self.activation_fn = Activation(net, arch.activation)
        self.fc1 = Linear(net, arch.hidden, arch.intermediate, bias=True)
        self.fc2 = Linear(net, arch.intermediate, arch.hidden, bias=True)
        self.final_layer_norm = LayerNorm(net, arch.hidden)

    def attention(self, causal: bool) -> Attention:
        return Attention(self.net, causal)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        """`context` of a decoder: the mask, if there is one, and what the encoder returned."""
        arch = self.net.arch
        mask = context[0] if len(context) > 1 else None
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _weights = self.self_attn(x, None, mask)
        x = F.dropout(x, arch.dropout)
        x = F.add(residual, x)
        if self.decodes:
            residual = x
            x = self.encoder_attn_layer_norm(x)
            x, _weights = self.encoder_attn(x, context[-1])
            x = F.dropout(x, arch.dropout)
            x = F.add(residual, x)
        residual = x
        x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = F.dropout(x, arch.embedding_dropout)
        x = self.fc2(x)
        x = F.dropout(x, arch.dropout)
        x = F.add(residual, x)
        if x.dtype == "float16" and not self.decodes:
            x = F.clamped(x, bounds=2)
        return x


class Encoder(Module):
    kind = "activation"
    class_name = "WhisperEncoder"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.conv1 = Convolution(net, arch.pair.inputs, arch.hidden, stride=1)
        self.conv2 = Convolution(net, arch.hidden, arch.hidden, stride=2)
        self.embed_positions = PositionTable(net, arch.positions, arch.hidden)
        self.embed_positions.weight.frozen = True  # sines
        self.layers = Blocks(net, arch.kinds, lambda _index: Layer(net, decodes=False))
        self.layer_norm = LayerNorm(net, arch.hidden)

    def forward(self, features: Tensor) -> Tensor:
        arch, net = self.net.arch, self.net
        embeds = F.activation(self.conv1(features))
        embeds = F.activation(self.conv2(embeds))
        embeds = F.permute(embeds, 0, 2, 1)
        places = F.pointwise(net.tape.empty((arch.positions,), "int64"))
        x = F.add(embeds, self.embed_positions(places))
        x = F.dropout(x, arch.dropout)
        for block in self.layers:
            x = run_block(net, block, x)
        return self.layer_norm(x)


class Positions(Module):
    """Rows of a parameter, by index."""

    kind = "embedding"
    class_name = "WhisperPositionalEmbedding"

    def __init__(self, net: Net, rows: int) -> None:
        super().__init__(net)
        self.weight = Weight(net, rows, net.arch.hidden)

    def forward(self, places: Tensor) -> Tensor:
        return P.gather(self.weight, places)


class Decoder(Module):
    kind = "residual"
    class_name = "WhisperDecoder"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.embed_tokens = Embedding(net, arch.vocab, arch.hidden)
        self.embed_positions = Positions(net, arch.positions)
        self.layers = Blocks(net, sharing(net), lambda _index: Layer(net, decodes=True))
        self.layer_norm = LayerNorm(net, arch.hidden)

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        net = self.net
        embeds = self.embed_tokens(ids)  # the name outlives the blocks
        places = F.pointwise(net.tape.empty((ids.shape[1],), "int64"), shape=ids.shape)
        positions = self.embed_positions(places)
        x = F.add(embeds, positions)
        x = F.dropout(x, net.arch.dropout)
        mask = causal_mask(net, *ids.shape)
        for block in self.layers:
            x = run_block(net, block, x, mask, memory)
        return self.layer_norm(x)


class WhisperModel(Module):
    class_name = "WhisperModel"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.encoder = Encoder(net.encoder())
        self.decoder = Decoder(net.decoder())

    def forward(self, features: Tensor, decoder_ids: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """What the decoder returned, and the encoder, which is part of the model's output."""
        memory = self.encoder(features)
        return self.decoder(decoder_ids, memory), (memory,)


class WhisperForConditionalGeneration(CausalLM):
    class_name = "WhisperForConditionalGeneration"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.model = WhisperModel(net)
        self.proj_out = head(net.decoder(), self.model.decoder.embed_tokens)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """`ids`: for their number alone, which is that of the encoder's positions."""
        net, arch = self.net, self.net.arch
        check_pair(net, (*FLASH, "cudnn", "sdpa", "eager"))
        if ids.shape[1] != arch.positions:
            what = f"is {ids.shape[1]}, and the encoder has {arch.positions} positions, of 30 seconds"
            raise InputError(what, field="seq_len", accepted=f"{arch.positions}; target_len is the decoder's")
        if labels.shape[1] > arch.pair.decoder.positions:
            what = f"is more than the decoder's {arch.pair.decoder.positions} positions"
            raise InputError(what, field="target_len", accepted=f"up to {arch.pair.decoder.positions}")
        features = given(net, (ids.shape[0], arch.pair.inputs, 2 * arch.positions), net.dtype)
        decoder_ids = shifted_right(labels)
        hidden, _memory = self.model(features, decoder_ids)
        logits = self.proj_out(hidden)
        return masked_loss(F.wide(logits), labels)

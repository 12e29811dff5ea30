"""GPT-2: learned positions, fused qkv, Conv1D (weights stored [in, out]), dropouts as modules."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import attend, causal_mask, positions
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Dropout, Embedding, LayerNorm, Module, Net, PositionEmbedding, Weight


class Conv1D(Module):
    kind = "gemm"
    class_name = "Conv1D"
    is_linear = True

    def __init__(self, net: Net, inputs: int, outputs: int) -> None:
        super().__init__(net)
        self.weight = Weight(net, inputs, outputs)
        self.bias = Weight(net, outputs)

    @property
    def size(self) -> tuple[int, int]:
        """(outputs, inputs), as of a Linear"""
        inputs, outputs = self.weight.shape
        return outputs, inputs

    def forward(self, x: Tensor) -> Tensor:
        return P.linear(x, self.weight, self.bias, conv1d=True)


class Attention(Module):
    kind = "attention"
    class_name = "GPT2Attention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.c_attn = Conv1D(net, arch.hidden, 3 * arch.hidden)
        self.c_proj = Conv1D(net, arch.hidden, arch.hidden)
        self.attn_dropout = Dropout(net, arch.attention_dropout)
        self.resid_dropout = Dropout(net, arch.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch = self.net.arch
        b, s, h = x.shape
        q, k, v = F.split(self.c_attn(x), [h, h, h])
        k = F.transpose(F.reshape(k, b, s, -1, arch.head_dim), 1, 2)
        v = F.transpose(F.reshape(v, b, s, -1, arch.head_dim), 1, 2)
        q = F.transpose(F.reshape(q, b, s, -1, arch.head_dim), 1, 2)
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout, upcast=False)
        out = self.c_proj(out)
        return self.resid_dropout(out), weights


class MLP(Module):
    kind = "activation"
    class_name = "GPT2MLP"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.c_fc = Conv1D(net, arch.hidden, arch.intermediate)
        self.c_proj = Conv1D(net, arch.intermediate, arch.hidden)
        self.act = Activation(net, arch.activation)
        self.dropout = Dropout(net, arch.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.act(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(Module):
    kind = "residual"
    class_name = "GPT2Block"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.ln_1 = LayerNorm(net, net.arch.hidden)
        self.attn = Attention(net)
        self.ln_2 = LayerNorm(net, net.arch.hidden)
        self.mlp = MLP(net)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        residual = x
        x = self.ln_1(x)
        attended, _weights = self.attn(x, mask)
        x = F.add(attended, residual)
        residual = x
        x = self.ln_2(x)
        fed = self.mlp(x)
        return F.add(residual, fed)


class Model(Module):
    kind = "embedding"
    class_name = "GPT2Model"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.wte = Embedding(net, arch.vocab, arch.hidden)
        self.wpe = PositionEmbedding(net, arch.positions, arch.hidden)
        self.drop = Dropout(net, arch.embedding_dropout)
        self.h = Blocks(net, arch.kinds, lambda index: Block(net))
        self.ln_f = LayerNorm(net, arch.hidden)
        self.ln_f.role = "norm"

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        embeds = self.wte(ids)
        position_ids = positions(net, ids)
        position_embeds = self.wpe(position_ids)
        x = F.add(embeds, position_embeds)
        mask = causal_mask(net, *ids.shape)
        x = self.drop(x)
        for block in self.h:
            x = run_block(net, block, x, mask)
        return self.ln_f(x)


class GPT2LMHeadModel(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.transformer = Model(net)
        self.lm_head = head(net, self.transformer.wte)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.transformer(ids), labels, self.lm_head)

"""GPT-J and CodeGen: rotary embedding over pairs of neighbours, one LayerNorm, attention and MLP in parallel."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import attend, causal_mask, positions
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Dropout, Embedding, LayerNorm, Linear, Module, Net


class GPTJRotaryEmbedding(Module):
    """sin and cos in one table [1, s, rotary], read from a buffer for all positions."""

    kind = "rotary"

    def buffers_bytes(self) -> int:
        return self.net.arch.positions * self.net.arch.rotary_dim * 4

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        tape, rotary = self.net.tape, self.net.arch.rotary_dim
        rows = tape.empty((1, position_ids.shape[-1], rotary), "float32")
        tape.memory(rows.nbytes + position_ids.nbytes, rows.nbytes)
        table = rows if self.net.arch.family == "codegen" else F.to(rows, x.dtype)
        if self.net.checkpointing != "none":  # an argument of every block
            tape.share(table)
        return table


class GPTJAttention(Module):
    kind = "rotary"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        h = net.arch.hidden
        self.project(h)
        self.out_proj = Linear(net, h, h)
        self.resid_dropout = Dropout(net, net.arch.dropout)

    def project(self, h: int) -> None:
        self.k_proj = Linear(self.net, h, h)
        self.v_proj = Linear(self.net, h, h)
        self.q_proj = Linear(self.net, h, h)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = self.net.arch.head_dim
        b, s, _ = x.shape
        q, k = F.reshape(self.q_proj(x), b, s, -1, d), F.reshape(self.k_proj(x), b, s, -1, d)
        return q, k, F.transpose(F.reshape(self.v_proj(x), b, s, -1, d), 1, 2)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d, rotary = self.net.arch, self.net.arch.head_dim, self.net.arch.rotary_dim
        q, k, v = self.heads(x)
        k_turned, k_passed = F.narrow(k, -1, rotary), F.narrow(k, -1, d - rotary)
        q_turned, q_passed = F.narrow(q, -1, rotary), F.narrow(q, -1, d - rotary)
        k_turned = self._rotate(k_turned, table)
        q_turned = self._rotate(q_turned, table)
        k, q = F.cat((k_turned, k_passed)), F.cat((q_turned, q_passed))
        q, k = F.to(F.transpose(q, 1, 2), v.dtype), F.to(F.transpose(k, 1, 2), v.dtype)
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout, wide=True)
        out = self.out_proj(out)
        return self.resid_dropout(out), weights

    def _rotate(self, x: Tensor, table: Tensor) -> Tensor:
        """x [b, s, h, rotary]: `x * cos + rotate_every_two(x) * sin`, the tables repeated for every use."""
        s, rotary = x.shape[1], x.shape[-1]
        sin = F.pointwise(table, shape=(1, s, 1, rotary))
        cos = F.pointwise(table, shape=(1, s, 1, rotary))
        return F.add(F.mul(x, cos), F.mul(self._every_two(x), sin))

    def _every_two(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = F.narrow(x, -1, half), F.narrow(x, -1, half)
        return F.cat((F.neg(second), first))


class CodeGenAttention(GPTJAttention):
    """One projection, which lies by the four GPUs it was trained on; rotates in float32."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.qkv_proj = Linear(net, net.arch.hidden, 3 * net.arch.hidden)  # registered last

    def project(self, h: int) -> None:
        pass

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (b, s, h), d, parts = x.shape, self.net.arch.head_dim, 4
        qkv = F.reshape(self.qkv_proj(x), b, s, parts, 3 * h // parts)
        q, v, k = F.split(qkv, [h // parts] * 3)
        q, k = F.reshape(q, b, s, -1, d), F.reshape(k, b, s, -1, d)
        return q, k, F.transpose(F.reshape(v, b, s, -1, d), 1, 2)


class GPTJMLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.fc_in = Linear(net, arch.hidden, arch.intermediate, bias=True)
        self.fc_out = Linear(net, arch.intermediate, arch.hidden, bias=True)
        self.act = Activation(net, arch.activation)
        self.dropout = Dropout(net, arch.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc_in(x)
        x = self.act(x)
        x = self.fc_out(x)
        return self.dropout(x)


class GPTJBlock(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.ln_1 = LayerNorm(net, net.arch.hidden)
        codegen = net.arch.family == "codegen"
        self.class_name = "CodeGenBlock" if codegen else "GPTJBlock"
        self.attn = (CodeGenAttention if codegen else GPTJAttention)(net)
        self.mlp = GPTJMLP(net)
        self.mlp.class_name = "CodeGenMLP" if codegen else "GPTJMLP"

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.ln_1(x)
        attended, _weights = self.attn(x, *context)
        fed = self.mlp(x)
        return F.add(F.add(attended, fed), residual)


class GPTJModel(Module):
    kind = "copy"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.wte = Embedding(net, arch.vocab, arch.hidden)
        self.drop = Dropout(net, arch.embedding_dropout)
        self.h = Blocks(net, arch.kinds, lambda index: GPTJBlock(net))
        self.ln_f = LayerNorm(net, arch.hidden)
        self.ln_f.role = "norm"
        self.rotary_emb = GPTJRotaryEmbedding(net)
        if arch.family == "codegen":
            self.class_name, self.rotary_emb.class_name = "CodeGenModel", "CodeGenRotaryEmbedding"

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        embeds = self.wte(ids)
        position_ids = positions(net, ids)
        mask = causal_mask(net, *ids.shape)
        x = self.drop(embeds)
        table = self.rotary_emb(x, position_ids)
        for block in self.h:
            x = run_block(net, block, x, table, mask)
        return self.ln_f(x)


class GPTJForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        if net.arch.family == "codegen":
            self.class_name = "CodeGenForCausalLM"
        self.transformer = GPTJModel(net)
        self.lm_head = head(net, self.transformer.wte, bias=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.transformer(ids), labels, self.lm_head)

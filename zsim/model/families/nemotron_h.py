"""Nemotron-H: each layer is one of a state space, attention without positions, an MLP and a mixture of experts.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_nemotron_h.py`).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import attend, causal_mask, positions, split_heads
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.families import deepseek, mamba, moe
from zsim.model.families.internvl import Identity
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Embedding, Linear, Module, Net, RMSNorm, Weight


class Norm(RMSNorm):
    """The weight multiplies in float32."""

    def __init__(self, net: Net) -> None:
        super().__init__(net, net.arch.hidden, "NemotronHRMSNorm")

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = F.to(x, "float32")
        variance = F.mean_last(F.power(x))
        x = F.mul(x, F.rsqrt(F.shift(variance)))
        return F.to(F.mul(F.to(self.weight, "float32"), x), dtype)


class Attention(Module):
    kind = "copy"
    class_name = "NemotronHAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch, d = net.arch, net.arch.head_dim
        self.q_proj = Linear(net, arch.hidden, arch.heads * d)
        self.k_proj = Linear(net, arch.hidden, arch.kv_heads * d)
        self.v_proj = Linear(net, arch.hidden, arch.kv_heads * d)
        self.o_proj = Linear(net, arch.heads * d, arch.hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        q, k, v = split_heads(self.q_proj(x), d), split_heads(self.k_proj(x), d), split_heads(self.v_proj(x), d)
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout)
        return self.o_proj(out), weights


class MLP(Module):
    kind = "activation"
    class_name = "NemotronHMLP"

    def __init__(self, net: Net, width: int) -> None:
        super().__init__(net)
        arch = net.arch
        self.up_proj = Linear(net, arch.hidden, width, arch.mlp_bias)
        self.down_proj = Linear(net, width, arch.hidden, arch.mlp_bias)
        self.act_fn = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class Experts(moe.Experts):
    """Without a gate, and as wide as the latent projection before them."""

    def __init__(self, net: Net) -> None:
        Module.__init__(self, net)
        experts, width = net.arch.experts, net.arch.experts.latent or net.arch.hidden
        self.class_name = "NemotronHExperts"
        self.up_proj = Weight(net, experts.experts, experts.intermediate, width, expert=True)
        self.down_proj = Weight(net, experts.experts, width, experts.intermediate, expert=True)
        self.act_fn = Activation(net, net.arch.activation)

    def first(self) -> Tensor:
        return self.taken("up_proj")

    def gated(self, out: Tensor) -> Tensor:
        return self.act_fn(out)


class MoE(Module):
    kind = "experts"
    class_name = "NemotronHMoE"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch, experts = net.arch, net.arch.experts
        self.experts = Experts(net)
        self.gate = deepseek.Router(net, "NemotronH")
        self.shared_experts = MLP(net, experts.shared)
        latent, bias = experts.latent, arch.mlp_bias
        self.fc1_latent_proj = Linear(net, arch.hidden, latent, bias) if latent else Identity(net)
        self.fc2_latent_proj = Linear(net, latent, arch.hidden, bias) if latent else Identity(net)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        _logits, weights, chosen = self.gate(x)
        x = F.reshape(x, -1, x.shape[-1])
        x = self.fc1_latent_proj(x)
        x = self.experts(x, chosen, weights)
        x = self.fc2_latent_proj(x)
        x = F.reshape(x, *residual.shape)
        return F.add(x, self.shared_experts(residual))


class Block(Module):
    kind = "residual"
    class_name = "NemotronHBlock"

    def __init__(self, net: Net, index: int) -> None:
        super().__init__(net)
        self.norm = Norm(net)
        self.type = net.arch.kinds[index].mixer
        self.mixer = self.mixer_of(net)

    def mixer_of(self, net: Net) -> Module:
        if self.type == "mamba":
            return mamba.Mixer(net, "NemotronHMamba2Mixer", "NemotronHRMSNormGated")
        if self.type == "attention":
            return Attention(net)
        return MoE(net) if self.type == "moe" else MLP(net, net.arch.intermediate)

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        residual = x
        self.net.tape.read(self.norm.weight)
        x = self.norm(F.to(x, self.norm.weight.dtype))
        if self.type == "attention":
            x, _weights = self.mixer(x, *mask)
        else:
            x = self.mixer(x)
        return F.add(residual, x)


class Model(Module):
    kind = "copy"
    class_name = "NemotronHModel"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.embeddings = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: Block(net, index))
        self.norm_f = Norm(net)
        self.norm_f.role = "norm"

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = embeds = self.embeddings(ids)  # noqa: F841  the name outlives the blocks
        position_ids = positions(net, ids)  # noqa: F841  as does this one
        mask = causal_mask(net, *ids.shape)
        for block in self.layers:
            x = run_block(net, block, x, mask if block.type == "attention" else None)  # type: ignore[attr-defined]
        return self.norm_f(x)

    def buffers_bytes(self) -> int:
        """Routers' biases; templates stand for several layers."""
        arch = self.net.arch
        sparse = sum(kind.sparse for kind in arch.kinds)
        return 4 * sparse * arch.experts.experts if sparse else 0


class NemotronHForCausalLM(CausalLM):
    """Its logits are float32 before the loss gets them."""

    class_name = "NemotronHForCausalLM"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.model = Model(net)
        self.lm_head = head(net, self.model.embeddings)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.model(ids), labels, self.lm_head)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return F.to(head(hidden), "float32")

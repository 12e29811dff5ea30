"""Mamba-2, and what all models with its mixer share.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_mamba2.py`), where neither
mamba_ssm nor causal_conv1d is installed.
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import mamba_ssm
from zsim.model.causal_conv import causal_conv1d
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, Convolution, Embedding, Linear, Module, Net, RMSNorm, Weight
from zsim.model.state_space import chunk_scan


class GatedNorm(Module):
    """RMSNorm of each group of what the gate has multiplied, in float32."""

    kind = "norm"

    def __init__(self, net: Net, class_name: str) -> None:
        super().__init__(net)
        self.class_name = class_name
        self.weight = Weight(net, net.arch.space.inner)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype, groups = x.dtype, self.net.arch.space.groups
        x = F.to(x, "float32")
        x = F.mul(x, F.activation(F.to(gate, "float32")))
        grouped = F.reshape(x, *x.shape[:-1], groups, -1)
        variance = F.mean_last(F.power(grouped))
        grouped = F.mul(grouped, F.rsqrt(F.shift(variance)))
        x = F.reshape(grouped, *x.shape)
        return F.mul(self.weight, F.to(x, dtype))


class Mixer(Module):
    """Reads the parameters of its convolution, which is never called, and before that those that a fused kernel would
    take, were there one."""

    kind = "state_space"
    waiting = 0  # nodes of autograd that are ready when its own have run: of the residual

    def __init__(self, net: Net, class_name: str, norm: str) -> None:
        super().__init__(net)
        space, hidden = net.arch.space, net.arch.hidden
        self.class_name = class_name
        self.conv1d = Convolution(net, space.channels, space.kernel, space.conv_bias)
        self.in_proj = Linear(net, hidden, space.inner + space.channels + space.heads, space.bias)
        self.dt_bias = Weight(net, space.heads)
        self.A_log = Weight(net, space.heads)
        self.norm = self.gated_norm(norm)
        self.D = Weight(net, space.heads)
        self.out_proj = Linear(net, space.inner, hidden, space.out_bias)
        if net.kernels == "mamba-ssm":
            self.norm.passive = self.out_proj.passive = True

    def gated_norm(self, class_name: str) -> Module:
        return GatedNorm(self.net, class_name)

    def projected(self, x: Tensor) -> Tensor:
        return self.in_proj(x)

    def fused(self, projected: Tensor, a: Tensor) -> Tensor:
        self.net.tape.part()  # its gradients come before that of A_log
        conv, out, norm = self.conv1d, self.out_proj, self.norm.weights.get("weight")
        return mamba_ssm.split_conv1d_scan(
            projected, (conv.weight, conv.bias), self.dt_bias, a, self.D, norm, (out.weight, out.bias),
            self.net.arch.space, self.waiting,
        )  # fmt: skip

    def normed(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.norm(x, gate)

    def forward(self, x: Tensor) -> Tensor:
        space, dtype, (b, s, _) = self.net.arch.space, x.dtype, x.shape
        projected = self.projected(x)
        a = F.neg(F.activation_by_result(F.wide(F.to(self.A_log, "float32"))))  # of exp
        self.net.tape.read(self.conv1d.weight, self.conv1d.bias, self.norm.weights.get("weight"))
        self.net.tape.read(self.out_proj.weight, self.out_proj.bias)
        if self.net.kernels == "mamba-ssm":
            return self.fused(projected, a)
        gate, mixed, dt = F.split(projected, [space.inner, space.channels, space.heads])
        mixed = F.transpose(mixed, 1, 2)
        mixed = causal_conv1d(mixed, self.conv1d.weight, self.conv1d.bias, activated=True)
        mixed = F.transpose(mixed, 1, 2)
        states = space.groups * space.state
        x, before, after = F.split(mixed, [space.inner, states, states])
        scanned = chunk_scan(
            F.reshape(x, b, s, space.heads, space.head_dim),
            dt,
            a,
            F.reshape(before, b, s, space.groups, space.state),
            F.reshape(after, b, s, space.groups, space.state),
            space.chunk,
            self.D,
            self.dt_bias,
        )
        out = F.reshape(scanned, b, s, -1)
        out = self.normed(out, gate)
        return self.out_proj(F.to(out, dtype))


class Block(Module):
    """The norm's input takes the dtype of its weight, the residual may be float32."""

    kind = "residual"
    class_name = "Mamba2Block"

    def __init__(self, net: Net, later: bool) -> None:
        super().__init__(net)
        self.norm = RMSNorm(net, net.arch.hidden, "Mamba2RMSNorm")
        self.mixer = Mixer(net, "Mamba2Mixer", "MambaRMSNormGated")
        self.mixer.waiting = int(net.arch.wide_residual and not later)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        self.net.tape.read(self.norm.weight)
        x = self.norm(F.to(x, self.norm.weight.dtype))
        if self.net.arch.wide_residual:
            residual = F.to(residual, "float32")
        x = self.mixer(x)
        return F.add(residual, x)


class Model(Module):
    kind = "copy"
    class_name = "Mamba2Model"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.embeddings = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: Block(net, arch.kinds[index].later))
        self.norm_f = RMSNorm(net, arch.hidden, "Mamba2RMSNorm")
        self.norm_f.role = "norm"

    def forward(self, ids: Tensor) -> Tensor:
        x = embeds = self.embeddings(ids)  # noqa: F841  the name outlives the blocks
        for block in self.layers:
            x = run_block(self.net, block, x)
        return self.norm_f(x)


class Mamba2ForCausalLM(CausalLM):
    """Its logits are float32 before the loss gets them."""

    class_name = "Mamba2ForCausalLM"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.backbone = Model(net)
        self.lm_head = head(net, self.backbone.embeddings)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.backbone(ids)
        self.net.tape.read(self.lm_head.weight)
        return self.finish(F.to(hidden, self.lm_head.weight.dtype), labels, self.lm_head)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return F.to(head(hidden), "float32")

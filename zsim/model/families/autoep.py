"""The layer that DeepSpeed's AutoEP puts in place of a mixture-of-experts block: `autoep_size` ranks share the experts.

DeepSpeed 0.19.8 module_inject/auto_ep_layer.py, moe/ep_router.py, moe/ep_experts.py and moe/ep_kernels.py, in their
names: tokens travel to the ranks that hold their experts, one row per choice, and back. Routing is taken as even: each
rank gets as many rows as it sends.
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.families import llama
from zsim.model.graph import Tensor
from zsim.model.kernels import EXPERT_PARALLEL, Exchange
from zsim.model.layers import Linear, Module, Net, Weight

TOKEN_GROUP_ALIGN_SIZE_M = 8  # rows of an expert are padded to a multiple


class TokenChoiceTopKRouter(Module):
    kind = "router"
    class_name = "TokenChoiceTopKRouter"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.gate = Linear(net, net.arch.hidden, net.arch.experts.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moe, tape = self.net.arch.experts, self.net.tape
        scores = P.softmax(F.to(self.gate(x), "float32"))
        _, selected = P.topk(scores, moe.top_k)
        top_scores = P.gather_last(scores, selected)
        if moe.norm_top_k:
            top_scores = F.divide(top_scores, F.shift(F.sum_last(top_scores)))
        top_scores = F.scale(top_scores)
        counts = tape.empty((moe.experts,), "int32")
        ones = tape.empty((selected.numel,), "int32")
        tape.memory(selected.nbytes + ones.nbytes, ones.nbytes + 2 * counts.nbytes)
        return top_scores, selected, counts


class GroupedExperts(Module):
    kind = "experts"
    class_name = "GroupedExperts"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch, moe = net.arch, net.arch.experts
        held = moe.experts // moe.autoep_size
        self.w1 = Weight(net, held, moe.intermediate, arch.hidden, expert=True)
        self.w2 = Weight(net, held, arch.hidden, moe.intermediate, expert=True)
        self.w3 = Weight(net, held, moe.intermediate, arch.hidden, expert=True)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, rows: int) -> Tensor:
        """`rows` of `x` belong to experts, and the rest is padding that no product reads."""
        tape = self.net.tape
        offsets = F.pointwise(num_tokens_per_expert)
        tape.part()
        gate = P.grouped_linear(x, self.w1, offsets, rows=rows)
        tape.part()
        up = P.grouped_linear(x, self.w3, offsets, rows=rows)
        tape.part()
        h = swiglu(gate, up)
        tape.part()
        return P.grouped_linear(h, self.w2, offsets, rows=rows)


class AutoEPMoELayer(Module):
    kind = "experts"
    class_name = "AutoEPMoELayer"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        moe = net.arch.experts
        self.router = TokenChoiceTopKRouter(net)
        self.experts = GroupedExperts(net)
        self.shared_experts = llama.MLP(net, prefix, moe.shared) if moe.shared else None
        self.shared_experts_gate = Linear(net, net.arch.hidden, 1) if moe.shared else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        moe, tape = self.net.arch.experts, self.net.tape
        b, s, h = hidden_states.shape
        x = F.reshape(hidden_states, -1, h)
        top_scores, selected_experts, num_tokens_per_expert = self.router(x)
        rows = selected_experts.numel
        token_indices_sorted, ordered = tape.empty((rows,), "int64"), tape.empty((rows,), "int64")
        tape.memory(selected_experts.nbytes, token_indices_sorted.nbytes + ordered.nbytes)
        del ordered
        _top_scores_sorted = F.pointwise(top_scores, token_indices_sorted, shape=(rows,))
        _expert_indices_sorted = F.pointwise(selected_experts, token_indices_sorted, shape=(rows,))
        routed_input = P.gather(x, F.pointwise(token_indices_sorted))
        shared = moe.autoep_size > 1
        if shared:
            _received = self._exchange_counts(num_tokens_per_expert)
            routed_input = _all_to_all(routed_input)
        _unpermuted = None if shared else routed_input  # where nothing travels it keeps its name to the end
        routed_input, permuted, experts_rows = permute(routed_input, moe.experts // moe.autoep_size)
        expert_output = self.experts(routed_input, experts_rows, rows)
        expert_output = unpermute(expert_output, permuted, rows)
        if shared:
            expert_output = _all_to_all(expert_output)
        output = P.scatter_rows(expert_output, token_indices_sorted)
        output = F.reshape(output, -1, moe.top_k, h)
        output = F.sum_middle(F.mul(output, F.reshape(top_scores, -1, moe.top_k, 1)))
        output = F.reshape(F.to(output, x.dtype), b, s, h)
        if self.shared_experts is None or self.shared_experts_gate is None:
            return output
        shared_output = self.shared_experts(x)
        shared_output = F.mul(F.activation_by_result(self.shared_experts_gate(x)), shared_output)
        return F.add(output, F.reshape(shared_output, b, s, h))

    def _exchange_counts(self, num_tokens_per_expert: Tensor) -> Tensor:
        """compute_split_plan: how many rows of each expert come from where, for which the host waits."""
        tape, numel = self.net.tape, num_tokens_per_expert.numel
        received = tape.empty((numel,), "int32")
        tape.kernel(Exchange("all_to_all", "int32", numel, numel, EXPERT_PARALLEL, awaited=True))
        return received


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """ops/triton_ops/swiglu_triton.py: one kernel, saves both; one backward, into two new tensors."""
    tape = gate.tape
    needs_grad = gate.needs_grad or up.needs_grad
    saved = tape.save(gate, up) if needs_grad else None
    out = F.pointwise(gate, up)
    if needs_grad:

        def backward(g: Tensor) -> tuple[Tensor, Tensor]:
            a, b = saved()  # type: ignore[misc]
            grads = tape.empty(a.shape, a.dtype), tape.empty(b.shape, b.dtype)
            tape.memory(g.nbytes + a.nbytes + b.nbytes, 2 * a.nbytes)
            return grads

        tape.link((gate, up), backward, out)
    return out


def permute(rows: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """permute_by_local_expert: rows by expert and padded, where each of them went, and how many each expert got."""
    tape, (count, width) = rows.tape, rows.shape
    padded = -(-(count + experts * TOKEN_GROUP_ALIGN_SIZE_M) // TOKEN_GROUP_ALIGN_SIZE_M) * TOKEN_GROUP_ALIGN_SIZE_M
    permuted, experts_rows = tape.empty((padded,), "int32"), tape.empty((experts,), "int32")
    tape.memory(0, 2 * permuted.nbytes)
    return _moved(rows, permuted, (padded, width)), permuted, experts_rows


def unpermute(rows: Tensor, permuted: Tensor, count: int) -> Tensor:
    return _moved(rows, permuted, (count, rows.shape[1]))


def _moved(rows: Tensor, permuted: Tensor, shape: tuple[int, int]) -> Tensor:
    """_PermuteRows and _UnpermuteRows: a gather forward, the one of the other backward; both save the inverse."""
    tape, before = rows.tape, rows.shape
    inverse = _inverse(permuted, min(shape[0], before[0]))
    saved = tape.save(permuted, inverse) if rows.needs_grad else None
    out = F.pointwise(rows, shape=shape)
    if rows.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            kept = saved()  # type: ignore[misc]  # noqa: F841
            return (F.pointwise(g, shape=before),)

        tape.link((rows,), backward, out)
    return out


def _inverse(permuted: Tensor, count: int) -> Tensor:
    """inverse_permutation: positions, indices, which are valid, where to; the result has room for the padding."""
    numbers = [F.pointwise(permuted, dtype="int64") for _ in range(2)]
    valid = F.pointwise(numbers[1], dtype="bool")
    targets = F.pointwise(valid, numbers[0], numbers[1], dtype="int64")
    return F.pointwise(targets, shape=(count + permuted.numel,))


def _all_to_all(x: Tensor) -> Tensor:
    """_AllToAllV: as many rows come as go."""
    out = _exchanged(x)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (_exchanged(g),), out)
    return out


def _exchanged(x: Tensor) -> Tensor:
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.kernel(Exchange("all_to_all", x.dtype, x.numel, x.numel, EXPERT_PARALLEL))
    return out

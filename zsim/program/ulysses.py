"""What ranks that share sequences (Ulysses) do outside the model: samples dealt out among them, one loss for all.

DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py, UlyssesSPDataLoaderAdapter, and transformers 5.24
integrations/deepspeed.py, deepspeed_sp_compute_loss. The exchanges around attention are the model's (model/ulysses.py).
"""

from __future__ import annotations

from zsim.model.kernels import DTYPE_BYTES, SEQUENCE_PARALLEL
from zsim.model.spec import Workload
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.ops import COMPUTE, Collective

GROUP = SEQUENCE_PARALLEL
TENSORS = ("input_ids", "position_ids", "labels")  # of a sample; the adapter asks for these


def groups(plan: DeepSpeedPlan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """parallel_state_sp.py initialize_sequence_parallel: neighbours."""
    size = plan.sequence_parallel_size
    if size == 1:
        return {}
    return {GROUP: tuple(tuple(range(start, start + size)) for start in range(0, plan.world_size, size))}


def shared(builder: Builder, plan: DeepSpeedPlan, workload: Workload) -> Shared | None:
    return Shared(builder, plan, workload) if plan.sequence_parallel_size > 1 else None


def differing(plan: DeepSpeedPlan) -> int:
    """Steps of a simulation that are not taken to repeat the one before: samples are dealt out in some only."""
    return 2 if plan.grad_accum % plan.sequence_parallel_size == 0 else 3


class Shared:
    """The sequences of one group of ranks."""

    def __init__(self, builder: Builder, plan: DeepSpeedPlan, workload: Workload) -> None:
        self.builder, self.size = builder, plan.sequence_parallel_size
        self.sample = workload.micro_batch * workload.seq_len  # tokens
        self._micro_steps = 0

    def deal(self, micro: int) -> None:
        """UlyssesSPDataLoaderAdapter.refill: every rank of the group brings a sample, all get their part of each. That
        lasts for as many micro-steps as there are ranks."""
        if self._micro_steps % self.size == 0:
            self._refill(micro)
        self._micro_steps += 1

    def _refill(self, micro: int) -> None:
        builder = self.builder
        length = self._all_gather("int64", 1, "gather lengths", micro)
        builder.host_wait(length)  # .item() of each
        nbytes = self.sample * int(DTYPE_BYTES["int64"])
        for name in TENSORS:
            builder.alloc(f"sample:{name}", "workspace", (1 + self.size) * nbytes)
            gathered = self._all_gather("int64", self.sample, f"gather {name}", micro)
        builder.host_wait(gathered)  # the parts wait in host memory for their turn
        for name in TENSORS:
            builder.free(f"sample:{name}")

    def average_loss(self, micro: int) -> None:
        """The mean over the tokens of all ranks, each loss weighted with the tokens that it is the mean of."""
        self._all_gather("float32", 1, "gather losses", micro)
        self._all_gather("int64", 1, "gather token counts", micro)

    def average_loss_backward(self, micro: int) -> None:
        """torch 2.13 distributed/nn/functional.py, _AllGather.backward on NCCL."""
        work = Collective("reduce_scatter", "float32", self.size, 1, GROUP, "SUM")
        self.builder.launch(COMPUTE, "scatter loss", "backward", work, micro=micro)

    def _all_gather(self, dtype: str, numel: int, label: str, micro: int) -> int:
        work = Collective("all_gather", dtype, numel, numel * self.size, GROUP)
        return self.builder.launch(COMPUTE, label, "forward", work, micro=micro)

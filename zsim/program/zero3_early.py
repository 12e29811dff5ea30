"""Parameters of ZeRO-3 as DeepSpeed gathered them before 0.6.0, where pull request 1453 (4912e0ad7) rewrote that.

Read in 0.3.16 and 0.4.0: runtime/zero/stage3.py (PartitionedParameterCoordinator.fetch_sub_module) and
partition_parameters.py (_allgather_param). One all-gather per parameter, before and after which the host waits for the
whole device, so that none overlaps with compute. Nothing is prefetched or kept for reuse: the root's own hook counts a
step before the hook that resets the count, and a trace whose steps are off by one is not followed
(github.com/deepspeedai/DeepSpeed/issues/1069, comments of May 2021).
"""

from __future__ import annotations

from zsim.program.deepspeed import elementwise
from zsim.program.ops import ALL_GATHER, COMPUTE
from zsim.program.zero3_coordinator import Params
from zsim.program.zero3_parameters import Parameters


class EarlyParameters(Parameters):
    def gather(self, params: Params, module: str, phase: str) -> None:
        """_allgather_param into a list of views: torch gathers into a buffer of its own and copies it apart."""
        if self.world == 1:
            super().gather(params, module, phase)
            return
        for param in params:
            self.builder.host_wait(None)
            full = self.shard[param] * self.world * self.size
            elementwise(self.builder, ALL_GATHER, "fill", phase, 0, full, module=module, micro=self.micro)
            self._gather_alone(param, "world", module, phase)
            event = elementwise(
                self.builder, ALL_GATHER, "copy", phase, full, full, module=module, micro=self.micro, temp_peak=full
            )
            self._inflight[param].event = event

    def wait(self, params: Params, module: str, phase: str) -> None:
        """_synchronize_communication; then a line of debugging output that is never printed, whose text holds each
        parameter's norm: the host waits for the number."""
        if any(param in self._inflight for param in params):
            super().wait(params, module, phase)
            self.events.clear()
            self.builder.host_wait(None)
        for param in params:
            event = elementwise(
                self.builder, COMPUTE, "norm", phase, self.numel[param] * self.size, 0, module=module, micro=self.micro
            )
            self.builder.host_wait(event)

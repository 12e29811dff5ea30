"""How long things take alone: the one door through which the engine asks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from zsim.cluster.spec import Cluster, Device
from zsim.cost import attention, collectives, copies, gemm, host, memory
from zsim.cost.profile import Profile
from zsim.cost.transfer import Transfer
from zsim.errors import NotModeled
from zsim.model.kernels import Attention, Gemm, Kernel
from zsim.program.ops import Collective, Compute, Copy, CpuWork, HostWork, Op

if TYPE_CHECKING:
    from zsim.cost.measured import Measured, MeasuredCopy

Groups = tuple[tuple[int, ...], ...]


class Capacities(Mapping[str, float]):
    """bytes/s of each link of a cluster, looked up when asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self._links = cluster.links

    def __getitem__(self, link: str) -> float:
        return self._links[link].bandwidth

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)


class Price:
    """Seconds of kernels, host work and transfers on `cluster` under the constants of `profile`.

    `omp_num_threads`: as `Plan` has it. `paging`: managed memory does not fit beside the rest, and moves.
    """

    def __init__(
        self, cluster: Cluster, profile: Profile, omp_num_threads: int | None = None, *, paging: bool = False
    ) -> None:
        self.cluster, self.profile, self.omp_num_threads, self.paging = cluster, profile, omp_num_threads, paging
        self.link_capacity: Mapping[str, float] = Capacities(cluster)
        self._devices = cluster.devices
        # processes that have less than a core each take turns
        turns = max(cluster.gpus_per_node / cluster.host.cores, 1.0)
        self._issue = profile.host if profile.own_host else profile.host.scaled(cluster.host.pace * turns)
        self._pace = slowest(cluster.world_size, profile.device_spread)
        self._kernels: dict[tuple[str, Kernel], float] = {}
        self._computes: dict[tuple[str, int], tuple[float, Compute]] = {}
        self._transfers: dict[object, Transfer] = {}

    def compute_seconds(self, rank: int, work: Compute) -> float:
        """Kernels back to back on `rank`'s device, nothing else running.

        Training is in step: the slowest GPU sets the pace of all.
        """
        device = self._devices[rank]
        # Kernel tuples are shared between equal blocks, so their identity finds them faster than their value; the
        # tuple is kept so that its id is not reused.
        key = (device.name, id(work.kernels))
        known = self._computes.get(key)
        if known is None:
            known = self._pace * sum(self._kernel(device, kernel) for kernel in work.kernels), work
            self._computes[key] = known
        return known[0]

    def _kernel(self, device: Device, kernel: Kernel) -> float:
        key = (device.name, kernel)
        seconds = self._kernels.get(key)
        if seconds is None:
            seconds = self._kernels[key] = kernel_seconds(kernel, device, self.profile)
        return seconds

    def issue_seconds(self, op: Op) -> float:
        """Time of the issuing thread to launch `op`."""
        return host.issue_seconds(op, self._issue)

    def host_seconds(self, work: HostWork) -> float:
        """Time of the issuing thread for work that launches nothing."""
        return host.host_seconds(work, self._issue)

    def cpu_seconds(self, rank: int, work: CpuWork) -> float:
        """Optimizer arithmetic on the CPU, all ranks of the node at once."""
        node = self.cluster.template(self.cluster.places[rank][0])
        return host.cpu_seconds(work, self.profile.cpu, node.host, len(node.devices), self.omp_num_threads)

    def transfer(self, work: Collective | Copy, groups: tuple[tuple[int, ...], ...]) -> Transfer:
        """All `groups` running this collective at once; for a copy each group is one rank."""
        key = (work, groups)
        known = self._transfers.get(key)
        if known is None:
            if isinstance(work, Collective):
                known = collectives.lay(self.cluster, work, groups)
                if measured := self.profile.collectives.get(work.kind):
                    known = self._as_measured(measured, work, groups, known)
            else:
                ranks = tuple(rank for group in groups for rank in group)
                stays = work.paged and not self.paging
                known = Transfer(0.0, {}, 0.0, algorithm="none") if stays else copies.lay(self.cluster, work, ranks)
                if (copied := self.profile.copies.get(copies.kind(work))) and known.usage:
                    known = self._copy_as_measured(copied, work, ranks[0], known)
            self._transfers[key] = known
        return known

    def _as_measured(self, measured: Measured, work: Collective, groups: Groups, base: Transfer) -> Transfer:
        """Where the profile has this machine's own times; groups over several machines are priced as ever."""
        ranks = max(map(len, groups))
        if ranks == 1 or any(len({self.cluster.places[rank][0] for rank in group}) > 1 for group in groups):
            return base
        per_byte = max((load / self.link_capacity[link] for link, load in base.usage.items()), default=0.0)
        return measured.transfer(work.kind, base, ranks, len(groups), 1 / per_byte if per_byte else float("inf"))

    def _copy_as_measured(self, measured: MeasuredCopy, work: Copy, rank: int, base: Transfer) -> Transfer:
        from zsim.cost.measured import local_loads

        node = self.cluster.places[rank][0]
        each = [
            local_loads(copies.lay(self.cluster, work, (other,)), self.link_capacity)
            for other, place in enumerate(self.cluster.places)
            if place[0] == node
        ]
        return measured.transfer(base, each)

    def compute_slowdown(self, active: Collection[Collective | Copy]) -> float:
        """Factor >= 1 on kernels while `active` are in flight on the same GPU.

        A collective's kernel takes SMs, memory bandwidth and power. That this grows with the bytes it moves was tried
        on validation/published and did not lower the error.
        """
        return self.profile.collective_slowdown if any(isinstance(work, Collective) for work in active) else 1.0


def kernel_seconds(kernel: Kernel, device: Device, profile: Profile) -> float:
    """One kernel alone on `device`: the launch gap plus the longer of arithmetic and memory traffic."""
    traffic = memory.seconds(
        getattr(kernel, "label", "default"), kernel.bytes, device.memory_bandwidth, profile.memory_efficiency
    )
    arithmetic = 0.0
    if isinstance(kernel, Gemm):
        arithmetic = gemm.seconds(kernel, profile.gemm, peak_flops(device, kernel.dtype))
    elif isinstance(kernel, Attention):
        cost = profile.attention.get(attention.implementation(kernel, device)) or profile.attention["flash"]
        arithmetic = attention.seconds(kernel, cost, peak_flops(device, kernel.dtype))
    return kernel.launches * profile.launch_gap + max(arithmetic, traffic)


_WITHOUT_INT8 = ("", "6.0", "6.1", "7.0", "10.3")


def peak_flops(device: Device, dtype: str) -> float:
    """Dense FLOP/s of `device` for products of `dtype`. Raises NotModeled where it has none.

    NVIDIA's data sheets give int8 twice the speed of 16 bits or more, from Turing on; but for Blackwell Ultra, which
    has next to none of it.
    """
    peak = device.peak_flops.get(dtype)
    if dtype == "int8" and device.compute_capability not in _WITHOUT_INT8:
        peak = 2 * device.peak_flops["float16"]
    if peak is None:
        raise NotModeled(f"{dtype} matrix products on {device.name}")
    return peak


def slowest(gpus: int, spread: float) -> float:
    """How much longer the slowest of `gpus` takes than the average: the expected largest of as many normal deviates, at
    Blom's plotting position, of standard deviation `spread`. The quantile is Tukey's lambda, right to 0.05."""
    share = (gpus - 0.375) / (gpus + 0.25)
    return 1 + spread * 4.91 * (share**0.14 - (1 - share) ** 0.14)

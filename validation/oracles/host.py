"""Host memory of real runs with offload: resident bytes of the process, every tensor alive, and what offload holds.

    python -m validation.oracles.host [NAME-PART ...] --out DIR

Each run is made twice, with a model whose states dominate and with a tiny one: the difference of their resident peaks
is free of what torch, DeepSpeed and the process itself take. On CPUs the GPU's share is resident memory too, so
resident bytes are held against host and GPU together; what offload keeps on the host is summed by category from the
tensors that the framework itself holds for it. What DeepSpeed pins takes the next power of two, as in torch's pinned
allocator (2.13 ATen/core/CachingHostAllocator.h); a CPU by itself would pin nothing.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from validation.oracles import aio
from validation.oracles.engines import Config
from validation.oracles.storage import StorageTracker

LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
BUCKETS = {"reduce_bucket_size": 5_000_000, "stage3_prefetch_bucket_size": 5_000_000}
OFFLOAD = {"device": "cpu", "pin_memory": False}
PINNED = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "pin_memory": False}
NVME_PARAMETERS = {**NVME, "buffer_size": 30_000_000, "max_in_cpu": 50_000_000}
_BLOCKS: list[torch.Tensor] = []  # the allocator keeps what it has pinned for good
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def configurations() -> list[Config]:
    """Optimizer offload of ZeRO-1 to 3, of parameters too, pinned, with accumulation; FSDP2's CPUOffloadPolicy."""
    few = {"sub_group_size": 10_000_000}
    # a float32 reduction of bfloat16 gradients takes a copy on CPUs (_chunk_cat) that it does not take on GPUs
    reduced = {"offload": True, "reduce_dtype": "bfloat16", "upcast": True}
    return [
        _zero("z1", 1),
        _zero("z2", 2),
        _zero("z2_accumulated", 2, accumulation=2),
        _zero("z3", 3),
        _zero("z3_sub_groups", 3, **few),
        _zero("z3_parameters", 3, offload_param=OFFLOAD),
        _zero("z2_pinned", 2, offload_optimizer=PINNED),
        _low("z1_bf16", 1),
        _low("z2_bf16_accumulated", 2, accumulation=2),
        _low("z2_bf16_states_pinned", 2, states=True, offload_optimizer=PINNED),
        _low("z3_bf16", 3, accumulation=2, **few),
        _low("z3_bf16_states_pinned", 3, states=True, offload_optimizer=PINNED, offload_param=PINNED),
        _zero("z3_pinned", 3, offload_optimizer=PINNED, offload_param=PINNED),
        _zero("z3_nvme", 3, offload_optimizer=NVME, **few),
        _zero(
            "z3_nvme_parameters",
            3,
            offload_optimizer=NVME,
            offload_param=NVME_PARAMETERS,
            stage3_max_reuse_distance=0,
            **few,
        ),
        {
            "name": "fsdp1",
            "engine": "fsdp1",
            "world": 2,
            "model": "llama",
            "dtype": "bfloat16",
            "fsdp": {"offload": True},
        },
        {"name": "fsdp1_float32", "engine": "fsdp1", "world": 2, "model": "llama", "fsdp": {"offload": True}},
        {"name": "fsdp2", "engine": "fsdp2", "world": 2, "model": "llama", "dtype": "bfloat16", "fsdp": reduced},
    ]


def _zero(name: str, stage: int, accumulation: int = 1, **zero: Any) -> Config:
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **BUCKETS, "offload_optimizer": OFFLOAD, **zero},
        "steps_per_print": 1 << 30,
    }
    # the dtype in which transformers loads a checkpoint for such a run
    return {"name": name, "engine": "ds", "world": 2, "model": "llama", "dtype": "bfloat16", "ds": ds}


def _low(name: str, stage: int, states: bool = False, accumulation: int = 1, **zero: Any) -> Config:
    """Master weights and their gradients in bfloat16, Adam's moments too where `states`."""
    config = _zero(name, stage, accumulation, **zero)
    config["ds"]["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": states}
    return config


class HostWatcher(StorageTracker):
    """A row also says `rss` and `rss_peak` (since the row before), and `held`, bytes of offload by category."""

    def __init__(self) -> None:
        super().__init__()
        self._optimizer: Any = None
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):  # what is freed goes back to the system at once
            ctypes.CDLL(None).mallopt(option, 1 << 16)
        if "deepspeed" in sys.modules:
            sys.modules["deepspeed"].accelerator.get_accelerator().pin_memory = _pin
        _reset_peak()

    @staticmethod
    def pin(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return _pin(tensor)

    def watch_optimizer(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def at(self, phase: str, *, step: int | None = None, micro: int | None = None) -> None:
        super().at(phase, step=step, micro=micro)
        resident, peak = _resident()
        held = {name: _nbytes(tensors) for name, tensors in _held(self._optimizer).items()} if self._optimizer else {}
        self.rows[-1] |= {"rss": resident, "rss_peak": peak, "held": held}
        _reset_peak()


def _pin(tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
    """In place of the CPU accelerator's `pin_memory`, which does nothing: a copy in a block of a power of two bytes."""
    nbytes = tensor.numel() * tensor.element_size()
    block = torch.full((1 << (nbytes - 1).bit_length(),), 0, dtype=torch.uint8)
    _BLOCKS.append(block)
    return block[:nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _resident() -> tuple[int, int]:
    """Bytes of this process in memory now, and at most since the last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(int(lines[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _nbytes(tensors: Iterable[Any]) -> int:
    """Of all storages below `tensors`, each counted once."""
    storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(nbytes for pointer, nbytes in storages.items() if pointer)


def _held(optimizer: Any) -> dict[str, list[Any]]:
    """What DeepSpeed's or FSDP2's offload keeps on the host, in zsim's categories."""
    if isinstance(optimizer, torch.optim.Optimizer):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        buffers = [block for block in _BLOCKS if block.untyped_storage().data_ptr() not in own]  # FSDP1's _cpu_grad
        return {
            "parameters": parameters, "gradients": [*gradients, *buffers], "optimizer_states": list(_states(optimizer)),
        }  # fmt: skip
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _stage3(optimizer)
    masters = optimizer.single_partition_of_fp32_groups
    return {
        "master_weights": masters,
        "gradients": [
            *(master.grad for master in masters if master.grad is not None),
            *optimizer.accumulated_grads_in_cpu.values(),
        ],
        "optimizer_states": list(_states(optimizer.optimizer)),
        "buffers": [
            *optimizer.param_buffer_of_bit16_for_cpu_offload_groups,
            optimizer.temp_grad_buffer_for_cpu_offload,
        ],
    }


def _stage3(optimizer: Any) -> dict[str, list[Any]]:
    masters = optimizer.fp32_partitioned_groups_flat
    found = {
        "master_weights": masters,
        "gradients": [
            optimizer.grad_partitions_flat_buffer,
            *(master.grad for master in masters if master.grad is not None),
        ],
        "optimizer_states": list(_states(optimizer.optimizer)),
    }
    if optimizer.offload_param:
        shards = [parameter.ds_tensor for group in optimizer.fp16_groups for parameter in group]
        kept = [shard for shard in shards if shard.final_location in (None, "not-nvme")]
        found["parameters"] = [*optimizer.param_groups_fp16_flat_cpu_memory, *kept]
    used = {tensor.untyped_storage().data_ptr() for tensors in found.values() for tensor in tensors}
    pinned = [block for block in _BLOCKS if block.untyped_storage().data_ptr() not in used]
    found["buffers"] = [*pinned, *aio.PINNED.values()]
    return found


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def record(config: Config) -> list[dict[str, Any]]:
    """Header and rows of one configuration as rank 0 saw it, beside the same run of a tiny model.

    Raises RuntimeError with the rank's traceback.
    """
    from validation.oracles.record import run

    (rows, header), (base_rows, base) = (
        run(config | {"attention": "eager", "over": over}, HostWatcher) for over in (config.get("over", LARGE), TINY)
    )
    named = {"kind": "header", "name": config["name"], "engine": config["engine"], "world": config["world"]}
    settings = {key: value for key, value in config.items() if key != "name"} | {"attention": "eager"}
    beside = {"base_model": base["model"], "base_params": base["params"]}
    for row, base_row in zip(rows, base_rows, strict=True):
        row |= {"base_rss": base_row["rss"], "base_rss_peak": base_row["rss_peak"]}
    return [{**named, "config": settings, **beside, **header}, *rows]


def main(arguments: list[str] | None = None) -> int:
    from validation.oracles.record import record_each

    return record_each(
        "host",
        __doc__,
        configurations(),
        record,
        lambda lines: f"{max(line.get('rss_peak', 0) for line in lines):,} bytes resident",
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())

"""Allocations of real DeepSpeed runs, byte for byte, in one process and for any number of ranks.

    python -m validation.oracles.deepspeed_memory [NAME-PART ...] [--out FILE]

The process group is torch's fake one: rank 0 of `world` calls its collectives and nobody answers, so no backend holds
tensors of its own. torch.profiler reports every allocation of the CPU allocator. Those below `SMALLEST` bytes
(scalars, masks) are not counted. Activations are there too, but small: one sequence of two tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
)

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from validation.oracles import mics, models, quantizer

SMALLEST, STEPS, TOKENS = 256, 3, 2
MARK = "moment:"

Config = dict[str, Any]
SMALL = {
    "reduce_bucket_size": 300000, "stage3_prefetch_bucket_size": 200000, "stage3_param_persistence_threshold": 1000,
}  # fmt: skip
REGATHER = SMALL | {"stage3_max_live_parameters": 500000, "stage3_max_reuse_distance": 0}


def _config(
    name: str, stage: int, world: int = 2, ga: int = 1, model: str = "llama", dtype: str = "bf16", **more: Any
) -> Config:
    extra, gpus_per_node = more.pop("extra", {}), more.pop("gpus_per_node", None)
    ds: Config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ga,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **SMALL, **more},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
        **extra,
    }
    if dtype != "fp32":
        ds[dtype] = {"enabled": True}
    return {
        "name": f"z{stage}_{name}_w{world}_ga{ga}_{model}",
        "engine": "ds",
        "world": world,
        "model": model,
        "ds": ds,
        **({"gpus_per_node": gpus_per_node} if gpus_per_node else {}),
    }


def configurations() -> list[Config]:
    fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    comm = {"communication_data_type": "fp32"}
    found = [_config("small", stage, ga=ga) for stage in (1, 2, 3) for ga in (1, 2)]
    found += [_config("small", stage, world=8) for stage in (1, 2, 3)]
    found += [_config("fp32", stage, dtype="fp32") for stage in (1, 2, 3)]
    found += [_config("qwen2", stage, model="qwen2") for stage in (2, 3)]
    found += [_config("commfp32", stage, extra=comm) for stage in (1, 2, 3)]
    found += [_config("overlap", stage, ga=2, overlap_comm=True) for stage in (1, 2)]
    found += [_config("accfp32", stage, ga=2, extra=fp32) for stage in (1, 2, 3)]
    found += [_config("contigfalse", stage, contiguous_gradients=False) for stage in (2, 3)]
    found += [_config("rsfalse", stage, reduce_scatter=False) for stage in (2, 3)]
    return [
        *found,
        _config("default", 0),
        _config("roundrobin", 2, 4, round_robin_gradients=True),
        _config("tinybucket", 2, 4, reduce_bucket_size=40000, use_multi_rank_bucket_allreduce=False),
        _config("default", 3, 64, reduce_bucket_size=500000000, stage3_param_persistence_threshold=100000),
        _config("regather", 3, ga=2, **REGATHER),
        _config("subgroups", 3, sub_group_size=500000),
        _config("sequential", 3, stage3_allgather_sequential=True, **REGATHER),
        _config("allreduce", 3, stage3_use_all_reduce_for_fetch_params=True, **REGATHER),
        _config("hpz", 3, 4, zero_hpz_partition_size=2, **REGATHER),
        _config("qwz", 3, zero_quantized_weights=True),
        _config("qwz_regather", 3, ga=2, zero_quantized_weights=True, **REGATHER),
        _config("qwz_fp32", 3, dtype="fp32", zero_quantized_weights=True, **REGATHER),
        _config("qwz_sequential", 3, zero_quantized_weights=True, stage3_allgather_sequential=True, **REGATHER),
        _config("qwz_hpz", 3, 4, zero_quantized_weights=True, zero_hpz_partition_size=2, **REGATHER),
        _config("qgz", 3, 4, ga=2, zero_quantized_gradients=True, gpus_per_node=2),
        _config("qgz_commfp32", 3, 4, extra=comm, zero_quantized_gradients=True, gpus_per_node=2),
        _config("coarse", 3, stage3_module_granularity_threshold=61000, **REGATHER),
        _config("mics", 3, 4, mics_shard_size=2, **REGATHER),  # of DeepSpeed 0.18.9, see mics.py
    ]


def _run(config: Config, results: Any) -> None:
    import deepspeed

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config["world"]), "LOCAL_WORLD_SIZE": "1"})
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=config["world"], store=FakeStore())
    dist.all_gather_into_tensor = _zeroed(dist.all_gather_into_tensor, "output_tensor")
    dist.reduce_scatter_tensor = _zeroed(dist.reduce_scatter_tensor, "output")
    dist.all_to_all_single = _zeroed(dist.all_to_all_single, "output")
    os.environ["LOCAL_SIZE"] = str(config.get("gpus_per_node", config["world"]))
    if any(key.startswith("zero_quantized") for key in config["ds"]["zero_optimization"]):
        quantizer.install(quantizer.Empty())
    if "mics_shard_size" in config["ds"]["zero_optimization"]:
        mics.install()
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign] # has no CPU kernel
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _mark("start")
        model, settings = models.build(config["model"])
        parameters = [
            {"name": name, "shape": list(p.shape), "numel": p.numel()} for name, p in model.named_parameters()
        ]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config["ds"])
        _mark("init")
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        for _ in range(STEPS):
            for _ in range(config["ds"]["gradient_accumulation_steps"]):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                _mark("backward")
                engine.step()
            _mark("step")
    header = {"model": {"kind": config["model"], **settings}, "params": parameters, "micro_batch": 1, "seq": TOKENS}
    results.put(header | {"moments": _moments(profiler)})
    results.close()
    results.join_thread()
    os._exit(0)


def _zeroed(call: Callable[..., Any], output: str) -> Callable[..., Any]:
    """Nobody fills the output: zeros keep the numbers finite."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        (kwargs[output] if output in kwargs else args[0]).zero_()
        return work and Pending(work, (args, kwargs))

    return wrapper


class Pending:
    """What NCCL's work does and the fake one does not: it holds the call's tensors until it is waited for (torch 2.13
    ProcessGroupNCCL.cpp, TensorShelf)."""

    def __init__(self, work: Any, tensors: Any) -> None:
        self.work, self.tensors = work, tensors

    def wait(self) -> Any:
        self.tensors = None
        return self.work.wait()


def _mark(moment: str) -> None:
    with record_function(MARK + moment):
        pass


def _moments(profiler: profile) -> list[dict[str, Any]]:
    """Bytes alive at each mark and the most since the one before, in order; nothing is alive at the start."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        trace = json.loads(Path(file.name).read_text())["traceEvents"]
    events: list[tuple[float, int, Any]] = []
    for event in trace:
        name = str(event.get("name", ""))
        if name == "[memory]" and event["args"].get("Device Type") == 0:
            events.append((float(event["ts"]), 0, (event["args"]["Addr"], int(event["args"]["Bytes"]))))
        elif name.startswith(MARK):
            events.append((float(event["ts"]), 1, name.removeprefix(MARK)))
    alive: dict[int, int] = {}
    found: list[dict[str, Any]] = []
    total = peak = 0
    for _, kind, value in sorted(events, key=lambda event: event[:2]):
        if kind == 0:
            address, nbytes = value
            if nbytes >= SMALLEST:
                alive[address] = nbytes
                total += nbytes
            elif nbytes < 0:
                total -= alive.pop(address, 0)
            peak = max(peak, total)
            continue
        if value == "start":
            alive, total = {}, 0
        else:
            found.append({"moment": value, "bytes": total, "peak": peak})
        peak = total
    return found


def record(config: Config) -> dict[str, Any]:
    """The configuration with what was allocated. Raises RuntimeError if the run fails."""
    import deepspeed
    import deepspeed.runtime.zero.stage3
    import transformers

    transformers.logging.set_verbosity_error()
    for name in list(deepspeed.ops.__compatible_ops__):
        if "shm" in name:
            deepspeed.ops.__compatible_ops__[name] = False
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_run, args=(config, results))
    process.start()
    try:
        found: dict[str, Any] = results.get(timeout=120)
    except Exception as error:
        raise RuntimeError(f"{config['name']} gave no result") from error
    finally:
        process.kill()
        process.join()
    versions = {"versions": {"deepspeed": deepspeed.__version__}}
    return {key: config[key] for key in ("name", "engine", "world")} | versions | {"config": config} | found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.oracles.deepspeed_memory", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all configurations if none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "allocations" / "deepspeed.jsonl.gz")
    options = parser.parse_args(arguments)
    import gzip

    lines = []
    for config in configurations():
        if not options.names or any(name in config["name"] for name in options.names):
            lines.append(json.dumps(record(config)))
            print(config["name"], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""CPU time of the thread that issues eager training: forward, backward and step of tiny models in which arithmetic
costs next to nothing.

    python -m validation.oracles.host_time [NAME-PART ...] --out FILE.jsonl

One line per configuration: its settings as `record` writes them, and CPU seconds of the thread in each phase. What
else runs on the machine slows a thread down by up to a half, even in its own CPU time. So between the phases runs a
yardstick, some torch calls that are always the same: `seconds` are the median of what a phase took in yardsticks, times
the seconds of a yardstick on the machine when nothing disturbs it (the lowest twentieth of the quietest run).

The process group is torch's fake one: rank 0 calls its collectives and nobody answers; DDP, whose C++ expects answers,
has a gloo group of itself alone. World size 1 under "ddp" is the bare model. On a CPU the autograd engine runs in the
calling thread; on GPUs in another one, for which the calling thread waits.

Another release of DeepSpeed is measured where it comes first on PYTHONPATH: its number is in its lines, and
which of them constants are fitted to (`use`) is set by hand. Their buckets were of 1e5 or 1e6 elements, as DeepSpeed
before 0.14.1 averages all of a bucket. 0.9 to 0.13 need stand-ins there for intel_extension_for_pytorch,
oneccl_bindings_for_pytorch and split_half_float_double, which looks for types of CUDA.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from validation.oracles import (
    deepspeed_memory,
    engines,
    record,  # sets the environment before torch is loaded
)
from validation.oracles.configurations_experts import NO_LEAVES
from zsim.plan.version import VERSION

Config = engines.Config
STEPS, WARM = 50, 10
# 32 tokens of a model of width 32: its largest product is 2 million FLOP.
NARROW = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
# 32 experts, each a module: under transformers 4.57 (configurations_experts.py).
NARROW_EXPERTS = NARROW | {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 32, "num_experts_per_tok": 2}
NARROW_GPT2 = {"n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 64}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Clock:
    """A watcher for `engines.run` that only looks at the clock."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.enabled = True
        self._phase, self._step, self._micro, self._since = "init", 0, 0, time.thread_time()
        self._weight = torch.ones(8, 8, requires_grad=True)
        self._yard = 0.0

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None: ...

    def at(self, phase: str, *, step: int | None = None, micro: int | None = None) -> None:
        seconds, before = time.thread_time() - self._since, self._yard
        self._yard = self._yardstick()
        yard = (before + self._yard) / 2
        self.rows.append(
            {"step": self._step, "micro": self._micro, "phase": self._phase, "seconds": seconds, "yard": yard}
        )
        if step == WARM:
            gc.collect()
            gc.freeze()
        self._phase, self._step = phase, self._step if step is None else step
        self._micro = self._micro if micro is None else micro
        self._since = time.thread_time()

    def _yardstick(self) -> float:
        """CPU seconds of 200 operators with autograd and their backward."""
        began = time.thread_time()
        x = self._weight
        for _ in range(40):
            x = torch.mm(x, self._weight.t()).view(4, 16).transpose(0, 1).reshape(8, 8) * 0.125
        torch.autograd.grad(x.sum(), self._weight)
        return time.thread_time() - began

    def watch(self, *_: object) -> None: ...

    def watch_backward(self, *_: object) -> None: ...

    def watch_optimizer(self, *_: object) -> None: ...


def configurations() -> list[Config]:
    """Of each kind of host work models of several depths, and others that no constant is fitted to (`use`)."""
    found = []
    for layers in (2, 8):
        found += [
            _make(f"plain_{layers}", layers),
            _make(f"ckpt_{layers}", layers, ckpt=True),
            _make(f"eager_{layers}", layers, attention="eager"),
            _make(f"lora_{layers}", layers, lora={"r": 4, "targets": PROJECTIONS}),
            _make(f"lora_dropout_{layers}", layers, lora={"r": 4, "targets": PROJECTIONS, "dropout": 0.05}),
            _make(f"gpt2_{layers}", layers, "gpt2"),
            _make(f"compile_{layers}", layers, compile=True),
            _make(f"ddp_{layers}", layers, world=2),
            _make(f"fsdp1_{layers}", layers, engine="fsdp1", world=2),
            _make(f"fsdp2_{layers}", layers, engine="fsdp2", world=2),
            *(_zero(f"zero{stage}_{layers}", layers, stage) for stage in (1, 2, 3)),
            *(_zero(f"zero{stage}_accumulating_{layers}", layers, stage, ga=3) for stage in (1, 2) if layers == 8),
            _zero(f"zero3_lora_{layers}", layers, 3, lora={"r": 4, "targets": PROJECTIONS}),
        ]
    found += [
        *(_make(f"{impl}_{n}", n, impl=impl, clip=False) for n in (2, 8) for impl in ("loop", "fused")),
        _make("test_lora_ckpt_6", 6, use="test", ckpt=True, lora={"r": 4, "targets": PROJECTIONS, "dropout": 0.05}),
        _make("test_compile_5", 5, "qwen2", use="test", compile=True),
        _make("test_qwen2_5", 5, "qwen2", use="test", impl="fused"),
        _make("test_qwen3_5", 5, "qwen3", use="test", ckpt=True),
        _make("test_gpt2_ckpt_5", 5, "gpt2", use="test", ckpt=True),
        _make("test_gpt2_ddp_12", 12, "gpt2", use="test", world=2),
        _make("test_fsdp2_ckpt_5", 5, use="test", engine="fsdp2", world=2, ckpt=True),
        _make("test_fsdp1_ckpt_5", 5, use="test", engine="fsdp1", world=2, ckpt=True),
        _zero("test_zero2_ckpt_5", 5, 2, use="test", ckpt=True),
        _zero("test_zero3_ckpt_5", 5, 3, use="test", ckpt=True),
        _zero("test_zero3_lora_ckpt_5", 5, 3, use="test", ckpt=True, lora={"r": 4, "targets": PROJECTIONS}),
        _zero("test_zero3_gpt2_5", 5, 3, "gpt2", use="test"),
        _make("test_experts_ckpt_2", 2, "qwen3_moe", use="test", experts="modules", ckpt=True),
        _zero("test_zero3_experts_2", 2, 3, "qwen3_moe", use="test", experts="modules"),
        _zero("test_zero3_experts_ckpt_2", 2, 3, "qwen3_moe", use="test", experts="modules", ckpt=True),
    ]  # fmt: skip
    return found


def _make(
    name: str, layers: int, model: str = "llama", *, engine: str = "ddp", world: int = 1, use: str = "fit", **more: Any
) -> Config:
    size = NARROW_GPT2 | {"n_layer": layers} if model == "gpt2" else NARROW | {"num_hidden_layers": layers}
    if model == "qwen3":
        size = size | {"head_dim": 16}
    if model == "qwen3_moe":
        size = NARROW_EXPERTS | {"num_hidden_layers": layers}
    fsdp = {"fsdp2": {"mp": False}, "fsdp1": {"param_dtype": "float32", "reduce_dtype": "float32"}}
    settings = {"fsdp": fsdp[engine]} if engine in fsdp else {}
    return {
        "name": name, "engine": engine, "world": world, "model": model, "over": size, "use": use, "steps": STEPS,
        **settings, **more,
    }  # fmt: skip


def _zero(name: str, layers: int, stage: int, model: str = "llama", ga: int = 1, **more: Any) -> Config:
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ga,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, "overlap_comm": True},
    }
    if stage == 3:
        ds["zero_optimization"] |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    if model == "qwen3_moe":
        ds["zero_optimization"] |= NO_LEAVES
    return _make(name, layers, model, engine="ds", world=2, ds=ds, **more)


def measure(config: Config) -> dict[str, Any]:
    """One line of the file. Runs in a process of its own."""
    record._warm_up(config)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_run, args=(config, results))
    process.start()
    line = results.get(timeout=record.SECONDS)
    process.join()
    if isinstance(line, str):
        raise RuntimeError(line)
    return line


def _run(config: Config, results: Any) -> None:
    import traceback

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config["world"]), "LOCAL_WORLD_SIZE": "1"})
    os.environ["LOCAL_SIZE"] = str(config["world"])
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        if config["engine"] == "ddp":
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        else:
            dist.init_process_group("fake", rank=0, world_size=config["world"], store=FakeStore())
        dist.all_gather_into_tensor = deepspeed_memory._zeroed(dist.all_gather_into_tensor, "output_tensor")
        dist.reduce_scatter_tensor = deepspeed_memory._zeroed(dist.reduce_scatter_tensor, "output")
        if config["world"] == 1:
            torch.nn.parallel.DistributedDataParallel = lambda model, **_: model
        torch._dynamo.config.disable = not config.get("compile")  # record's environment switches it off
        rows, header = engines.run(config, 0, config["world"], Clock())
        results.put(record._header(config, header) | {"backend": "fake", **_summary(rows)})
    except BaseException:
        results.put(traceback.format_exc())
    results.close()
    results.join_thread()
    os._exit(0)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians in yardsticks by phase, of all micro-steps together, and what a yardstick took when it took least."""
    samples = defaultdict(list)
    for row in rows:
        if row["step"] >= WARM:
            samples[row["phase"], row["micro"]].append(row["seconds"] / row["yard"])
    yards = sorted(row["yard"] for row in rows)
    phases: Counter[str] = Counter()
    for (phase, _), values in samples.items():
        phases[phase] += statistics.median(values)
    return {
        "yardsticks": {phase: round(value, 4) for phase, value in phases.items()},
        "yardstick_s": yards[len(yards) // 20],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.oracles.host_time", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all configurations if none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "measured" / "host_time.jsonl")
    parser.add_argument("--repeat", type=int, default=3, help="processes per configuration, of which the median counts")
    options = parser.parse_args(arguments)
    chosen = configurations()
    if options.names:
        chosen = [config for config in chosen if any(name in config["name"] for name in options.names)]
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(options.repeat):
        for config in chosen:
            line = measure(config)
            lines[config["name"]].append(line)
            print(config["name"], line["yardsticks"], round(1e6 * line["yardstick_s"]), flush=True)
    yard = min(line["yardstick_s"] for found in lines.values() for line in found)
    with options.out.open("w") as file:
        for found in lines.values():
            file.write(json.dumps(_merged(found, yard)) + "\n")
    return 0


def _merged(lines: list[dict[str, Any]], yard: float) -> dict[str, Any]:
    """One line of the runs of a configuration: seconds on the undisturbed machine."""
    phases = lines[0].pop("yardsticks")
    others = [line["yardsticks"] for line in lines[1:]]
    seconds = {
        phase: round(yard * statistics.median([first, *(other[phase] for other in others)]), 7)
        for phase, first in phases.items()
    }
    release, name = lines[0]["versions"]["deepspeed"], lines[0]["name"]
    if lines[0]["engine"] == "ds" and release != VERSION:
        name = f"{name}_deepspeed_{release}"
    return lines[0] | {"name": name, "yardstick_s": yard, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())

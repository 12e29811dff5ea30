"""Short training runs of a capture: real engines on small models, timed in rounds, and traced once."""

from __future__ import annotations

import gc
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from zsim.model.huggingface import read_config
from zsim.model.spec import ModelSpec
from zsim.validation.capture import STEP_COLUMNS, Machine

SEQ_LEN, MICRO_BATCH = 128, 1
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
}  # fmt: skip
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "small": {"hidden_size": 384, "intermediate_size": 1032, "num_hidden_layers": 6, "num_attention_heads": 6,
              "num_key_value_heads": 2},
    "large": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip
# Buckets small enough that models of a few million parameters fill several.
BUCKET = 1_000_000
_ZERO = {"reduce_bucket_size": BUCKET, "overlap_comm": True}
_ZERO3 = {"stage3_prefetch_bucket_size": BUCKET // 2, "stage3_param_persistence_threshold": 1000}


@dataclass(frozen=True)
class CapturedModel:
    name: str
    config: dict[str, Any]
    spec: ModelSpec

    @property
    def workload_dtype(self) -> str:
        return "bfloat16" if torch.cuda.is_available() else "float32"


def model_of(name: str) -> CapturedModel:
    """One of SIZES, or a config.json. Raises InputError."""
    if name in SIZES:
        config = _LLAMA | SIZES[name]
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            return CapturedModel(name, config, read_config(path))
    path = Path(name)
    spec = read_config(path / "config.json" if path.is_dir() else path)
    file = path / "config.json" if path.is_dir() else path
    label = path.parent.name if path.name == "config.json" else path.stem
    return CapturedModel(label, json.loads(file.read_text(encoding="utf-8")), spec)


def run(machine: Machine, models: list[CapturedModel], strategies: list[str]) -> None:
    """Rounds over all runs, so that what disturbs the machine for a minute falls on all of them alike."""
    rounds = 3
    for number in range(rounds):
        for model in models:
            for strategy in strategies:
                if f"{strategy} {model.name} {number}" in machine.done:
                    continue
                machine.say(f"[round {number + 1}/{rounds}] {strategy} {model.name}")
                line = _train(machine, model, strategy, traced=number == 0)
                machine.append("steps.csv", STEP_COLUMNS, [[number, strategy, model.name, *line]])
        if machine.rank == 0 and number == 0:
            for model in models:
                for strategy in strategies:
                    _write_scenario(machine, model, strategy)


def _train(machine: Machine, model: CapturedModel, strategy: str, traced: bool) -> list[Any]:
    """One line of steps.csv after round, strategy and model: medians over the slowest rank's steps."""
    step, parameters = _engine(machine, model, strategy)
    if machine.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    times: list[list[float]] = []  # forward, backward, optimizer, and their core seconds
    until = time.perf_counter() + (1.0 if machine.quick else 5.0)
    while True:
        times.append(step())
        enough = torch.tensor([float(len(times) >= 5 and (time.perf_counter() > until or len(times) >= 40))])
        if machine.world > 1:
            enough = enough.to(machine.device)
            dist.broadcast(enough, 0)
        if enough.item():
            break
    peak = torch.cuda.max_memory_allocated() if machine.kind == "cuda" else ""
    if traced:
        _trace(machine, model, strategy, step)
    totals, core = (sorted(sum(parts[half : half + 3]) for parts in times) for half in (0, 3))
    last = len(totals) - 1
    parts: list[float | str] = [median(column) for column in zip(*times, strict=True)]
    parts.insert(3, median(core))
    if machine.kind != "cpu":
        parts[3:] = [""] * 4
    name = str(machine.dtype).removeprefix("torch.")
    spread = [totals[int(0.1 * last)], totals[round(0.9 * last)]]
    shape = [MICRO_BATCH, SEQ_LEN, name, machine.world, parameters, len(times)]
    del step
    gc.collect()  # hooks and modules refer to each other; what stayed would count in the next run's peak
    if machine.kind == "cuda":
        torch.cuda.empty_cache()
    return [*shape, median(totals), *spread, *parts, peak]


def _trace(machine: Machine, model: CapturedModel, strategy: str, step: Callable[[], object]) -> None:
    """Three steps under the profiler; the host's name is taken out of the file."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if machine.kind == "cuda" else [])
    with profile(
        activities=activities, record_shapes=True, schedule=schedule(wait=0, warmup=1, active=2, repeat=1)
    ) as profiler:
        for _ in range(3):
            step()
            profiler.step()
    raw = machine.out / f"raw_{machine.rank}.json"
    profiler.export_chrome_trace(str(raw))
    document = json.loads(raw.read_text(encoding="utf-8", errors="replace"), strict=False)
    raw.unlink()
    document.pop("host_name", None)
    document.pop("trace_id", None)
    name = f"trace_{strategy}_{model.name}_rank{machine.rank}"
    document["traceName"] = name
    slim = ("Input Dims", "Input type", "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype",
            "Process Group Name", "stream", "correlation", "device", "External id")  # fmt: skip
    document["traceEvents"] = [
        event | ({"args": {key: event["args"][key] for key in slim if key in event["args"]}} if "args" in event else {})
        for event in document["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") not in ("python_function", "Trace")
    ]
    with gzip.open(machine.out / f"{name}.json.gz", "wt", encoding="utf-8", compresslevel=9) as file:
        json.dump(document, file, separators=(",", ":"))


def _engine(machine: Machine, model: CapturedModel, strategy: str) -> tuple[Callable[[], list[float]], int]:
    """A function that trains one step and returns what `_timed` does; and the number of parameters."""
    torch.manual_seed(0)
    network = _network(machine, model, strategy)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    tokens = torch.randint(0, model.config["vocab_size"], (MICRO_BATCH, SEQ_LEN), device=machine.device)
    if strategy.startswith("zero"):
        engine = _deepspeed(machine, network, int(strategy[4:]))
        return lambda: _timed(machine, engine, tokens, engine.backward, engine.step), parameters
    if strategy == "ddp":
        # A lone rank trains as trainers do, without a Reducer.
        wrapped = network if machine.world == 1 else torch.nn.parallel.DistributedDataParallel(network)
    else:
        wrapped = _fully_shard(machine, network)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, foreach=machine.kind != "cpu")

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: _timed(machine, wrapped, tokens, torch.Tensor.backward, update), parameters


def _timed(machine: Machine, network: Any, tokens: Any, backward: Any, update: Any) -> list[float]:
    """Seconds of forward, backward and optimizer, then the CPU seconds of this process in each of them."""
    moments: list[tuple[float, float]] = []

    def passed() -> None:
        machine.synchronize()
        moments.append((time.perf_counter(), time.process_time()))

    passed()
    loss = network(input_ids=tokens, labels=tokens).loss
    passed()
    backward(loss)
    passed()
    update()
    passed()
    return [end[clock] - start[clock] for clock in (0, 1) for start, end in pairwise(moments)]


def _network(machine: Machine, model: CapturedModel, strategy: str) -> torch.nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    settings = {
        key: value for key, value in model.config.items() if key not in ("architectures", "torch_dtype", "dtype")
    }
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.use_cache = False
    config._attn_implementation = "sdpa"
    network = transformers.AutoModelForCausalLM.from_config(config)
    # FSDP2 keeps its shards in float32 and casts what it gathers
    return network.to(torch.float32 if strategy == "fsdp2" else machine.dtype).to(machine.device).train()


def _fully_shard(machine: Machine, network: Any) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(machine.kind, (machine.world,))
    policy = MixedPrecisionPolicy(param_dtype=machine.dtype, reduce_dtype=torch.float32)
    for block in [module for module in network.modules() if type(module).__name__ in (network._no_split_modules or ())]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    return network


def deepspeed_config(stage: int, low: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": low},
        "gradient_clipping": 1.0,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": stage, **_ZERO, **(_ZERO3 if stage == 3 else {})},
        "zero_allow_untested_optimizer": True,
    }


def _deepspeed(machine: Machine, network: Any, stage: int) -> Any:
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if machine.kind == "cpu":  # it has no kernel there; on GPUs it only defers the reuse of memory
        torch.Tensor.record_stream = lambda *arguments: None  # type: ignore[method-assign]
        # Its shared-memory collectives would be compiled first, and then replace gloo's.
        for name in deepspeed.ops.__compatible_ops__:
            if "shm" in name:
                deepspeed.ops.__compatible_ops__[name] = False
    deepspeed.init_distributed(verbose=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, foreach=machine.kind != "cpu")
    settings = deepspeed_config(stage, machine.kind != "cpu")
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=settings)
    return engine


def _write_scenario(machine: Machine, model: CapturedModel, strategy: str) -> None:
    """The run as a scenario: what `zsim validate trace` simulates."""
    folder = machine.out / "models"
    folder.mkdir(exist_ok=True)
    (folder / f"{model.name}.json").write_text(json.dumps(model.config, indent=1) + "\n", encoding="utf-8")
    low = machine.kind != "cpu"
    topology = "topology.txt" if (machine.out / "topology.txt").exists() else "topology.yaml"
    lines = [
        f"name: {strategy}, {model.name}, {machine.world} ranks",
        f"model: models/{model.name}.json",
        f"cluster: {topology}",
        f"micro_batch: {MICRO_BATCH}",
        f"seq_len: {SEQ_LEN}",
        f"precision: {'bf16' if low else 'fp32'}",
        "attention: sdpa",
        f"optimizer: {{name: adamw, impl: {'foreach' if low else 'loop'}}}",
    ]
    if strategy == "ddp":
        lines += ["framework: ddp", f"ddp: {{dtype: {'bfloat16' if low else 'float32'}}}"]
    elif strategy == "fsdp2":
        lines += ["framework: fsdp2", "fsdp: {grouping: hf, reduce_dtype: float32}"]
    else:
        stage = int(strategy[4:])
        settings = {"stage": stage, **_ZERO, **(_ZERO3 if stage == 3 else {})}
        body = ", ".join(f"{key}: {str(value).lower()}" for key, value in settings.items())
        lines += ["framework: deepspeed", f"zero: {{{body}}}"]
    (machine.out / f"run_{strategy}_{model.name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")

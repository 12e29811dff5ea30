"""Runs real engines on gloo ranks of this machine and writes one file of collectives per configuration.

    python -m validation.oracles.record [NAME-PART ...] --out DIR      configurations of configurations.py
    python -m validation.oracles.record --config FILE.json --out DIR   one of your own, in the same words

A warm parent imports the frameworks once and forks the ranks of one configuration at a time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.update(
    {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo",
        "TORCHDYNAMO_DISABLE": "1", "DEEPSPEED_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)  # fmt: skip

import torch
import torch.distributed as dist

from validation.oracles import engines
from validation.oracles.engines import Config
from validation.oracles.recorder import Recorder

SECONDS = 300  # for one configuration
Lines = list[dict[str, Any]]


# What every rank would import. zero.Init replaces tensor constructors, which torch._dynamo compares with the originals
# when it is loaded: it has to be loaded before.
MODULES = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers.masking_utils",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


def _warm_up(config: dict[str, Any]) -> None:
    """Import once, before the fork."""
    for name in MODULES:
        import_module(name)
    import_module("transformers").logging.set_verbosity_error()
    if config["engine"] == "ds":
        deepspeed = import_module("deepspeed")
        for name in list(deepspeed.ops.__compatible_ops__):
            if "shm" in name:
                deepspeed.ops.__compatible_ops__[name] = False  # no just-in-time build of what training does not use


def _rank(config: dict[str, Any], rank: int, store: str, results: Any, watcher: type[engines.Watcher]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = config["world"]
    os.environ.update(
        {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
        }
    )  # fmt: skip
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        config = config | {"folder": os.path.dirname(store)}
        results.put((rank, engines.run(config, rank, world, watcher()), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # no clean-up of process groups whose peers may be gone


def record(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Header and rows of one configuration, as rank 0 saw it. Raises RuntimeError with the rank's traceback."""
    rows, header = run(config, Recorder)
    return [_header(config, header), *({"i": index, **row} for index, row in enumerate(rows))]


def run(config: dict[str, Any], watcher: type[engines.Watcher]) -> engines.Recorded:
    """Runs all ranks of one configuration; what rank 0's `watcher` saw. Raises RuntimeError as `record`."""
    return run_all(config, watcher)[0]


def run_all(config: dict[str, Any], watcher: type[engines.Watcher]) -> dict[int, engines.Recorded]:
    """The same of every rank."""
    _warm_up(config)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(config, rank, os.path.join(folder, "store"), results, watcher))
            for rank in range(config["world"])
        ]
        for process in processes:
            process.start()
        done: dict[int, engines.Recorded] = {}
        deadline = time.monotonic() + config.get("timeout", SECONDS)
        try:
            while len(done) < len(processes):
                rank, recorded, error = results.get(timeout=max(0.1, deadline - time.monotonic()))
                if error:
                    raise RuntimeError(f"rank {rank} failed:\n{error}")
                done[rank] = recorded
        except queue.Empty:
            raise RuntimeError(f"{config['name']} did not end in {config.get('timeout', SECONDS)} s") from None
        finally:
            for process in processes:
                if len(done) < len(processes):
                    process.kill()
                process.join()
    return done


def _header(config: dict[str, Any], header: dict[str, Any]) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "kind": "header",
        "name": config["name"],
        "engine": config["engine"],
        "world": config["world"],
        "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed")},
        "backend": "gloo",
        "config": {key: value for key, value in config.items() if key != "name"},
        **header,
    }


def write(lines: list[dict[str, Any]], path: Path) -> None:
    """gzip without a time stamp: recording the same again gives the same bytes."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def record_each(
    module: str,
    description: str | None,
    configurations: Iterable[Config],
    record: Callable[[Config], Lines],
    said: Callable[[Lines], str],
    arguments: list[str] | None,
) -> int:
    """The command of a recorder: those of its `configurations` that are asked for, each a file of what `record` finds,
    in the folder named like `module`. `said`: what is printed of a recording."""
    parser = argparse.ArgumentParser(prog=f"python -m validation.oracles.{module}", description=description)
    parser.add_argument("names", nargs="*", help="parts of names (default: all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / module)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for config in configurations:
        if any(name in config["name"] for name in options.names or [""]):
            lines = record(config)
            write(lines, options.out / f"{config['name']}.jsonl.gz")
            print(f"{config['name']}: {said(lines)}", flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    from validation.oracles.configurations import configurations

    parser = argparse.ArgumentParser(prog="python -m validation.oracles.record", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all configurations if none")
    parser.add_argument("--config", type=Path, help="JSON file with one configuration")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "sequences")
    options = parser.parse_args(arguments)
    chosen = configurations()
    if options.config:
        chosen = [json.loads(options.config.read_text())]
    elif options.names:
        chosen = [config for config in chosen if any(name in config["name"] for name in options.names)]
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for config in chosen:
        began = time.monotonic()
        try:
            lines = record(config)
        except RuntimeError as error:
            failed += 1
            print(f"{config['name']}: {error}", file=sys.stderr)
            continue
        write(lines, options.out / f"{config['name']}.jsonl.gz")
        count = sum(line["kind"] == "coll" for line in lines)
        print(f"{config['name']}: {count} collectives, {time.monotonic() - began:.1f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

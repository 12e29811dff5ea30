"""Memory of saving and resuming in real runs: what each rank of gloo ranks holds beyond its training states.

    PYTHONPATH=FOLDER-WITH-ACCELERATE python -m validation.oracles.saving [NAME-PART ...] --out DIR

After three steps each rank saves as the Hugging Face Trainer does (transformers 5.24 trainer.py, accelerate 1.15
accelerator.py `get_state_dict`, utils/fsdp_utils.py) and reads the checkpoint again, through the frameworks' own
functions. A row: the moment; bytes of tensors alive when it began, and at their peaks since, on the device and on the
host; of each `torch.save` the largest storage on the device, as it copies storages to the host one by one, and the
bytes that are there already. Ranks are CPU processes, where a copy to the host is none: `.cpu()`,
`.to(torch.device("cpu"))` and the clones of `clone_tensors_for_torch_save` are made real copies, and count as the
host's with all that is made from them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from validation.oracles.engines import Config
from validation.oracles.storage import StorageTracker

SHAPE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4000}
HOST = torch.device("cpu")


def configurations() -> list[Config]:
    """ZeRO-0 to 3, gathered or not, offloaded, with adapters; FSDP1 and FSDP2 with full and sharded state dicts."""
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    found = [_zero(f"z{stage}", stage) for stage in (0, 1, 2, 3)]
    found += [
        _zero("z2_offload", 2, **offload),
        _zero("z3_offload", 3, **offload),
        _zero("z3_offload_parameters", 3, **offload, offload_param={"device": "cpu", "pin_memory": False}),
        _zero("z3_sub_groups", 3, sub_group_size=1_000_000),
        _zero("z2_frozen", 2) | {"freeze": ["model.layers.0", "model.layers.1", "model.layers.2"]},
        _zero("z3_frozen", 3) | {"freeze": ["model.layers.0", "model.layers.1", "model.layers.2"]},
        _zero("z3_w4", 3) | {"world": 4},
        _zero("z2_w4", 2) | {"world": 4},
    ]
    for engine in ("fsdp1", "fsdp2"):
        for kind in ("FULL", "SHARDED"):
            for world in (2, 4):
                found.append(_fsdp(f"{engine}_{kind.lower()}_w{world}", engine, kind, world))
    found += [
        _fsdp("fsdp1_full_bf16", "fsdp1", "FULL", 2) | {"dtype": "bfloat16"},
        _fsdp("fsdp1_full_gpu", "fsdp1", "FULL", 2) | {"on_gpu": True},
        _fsdp("fsdp1_full_flat_parameters", "fsdp1", "FULL", 2, use_orig_params=False),
    ]
    return found


def _zero(name: str, stage: int, **zero: Any) -> Config:
    buckets = {"reduce_bucket_size": 500_000, "stage3_prefetch_bucket_size": 100_000}
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage, **buckets, "stage3_gather_16bit_weights_on_model_save": True, **zero,
        },
        "steps_per_print": 1 << 30,
    }  # fmt: skip
    return {"name": name, "engine": "ds", "world": 2, "model": "llama", "dtype": "bfloat16", "over": SHAPE, "ds": ds}


def _fsdp(name: str, engine: str, kind: str, world: int, **fsdp: Any) -> Config:
    return {
        "name": name, "engine": engine, "world": world, "model": "llama", "over": SHAPE, "kind": kind, "fsdp": fsdp,
        "impl": "foreach",
    }  # fmt: skip


class SavingWatcher(StorageTracker):
    """Counts device and host apart; at the end of training it saves and resumes. `config` is set before the fork."""

    config: Config = {}

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[dict[str, Any]] = []
        self._host: set[int] = set()
        self._to_host = False
        self._totals, self._tops = [0, 0], [0, 0]  # device, host
        self._saved: list[list[int]] = []
        self._model: Any = None
        self._optimizer: Any = None
        self._engine: Any = None
        self.own: list[torch.device] = []  # FSDP1's compute devices: the objects, as to the CPU they are equal
        self._patch()
        if "deepspeed" in sys.modules:
            self._keep_engine(sys.modules["deepspeed"])

    def _keep_engine(self, deepspeed: Any) -> None:
        initialize = deepspeed.initialize

        def kept(*args: Any, **kwargs: Any) -> Any:
            found = initialize(*args, **kwargs)
            self._engine = found[0]
            return found

        deepspeed.initialize = kept

    def watch_backward(self, model: torch.nn.Module) -> None:
        self._model = model

    def watch_optimizer(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def at(self, phase: str, *, step: int | None = None, micro: int | None = None) -> None:
        if phase == "end":
            if self.config["engine"] == "ds":
                _deepspeed(self, self.config["saved_in"])
            else:
                _fsdp_save(self, self.config["saved_in"])
        self.rows = self.moments  # type: ignore[assignment]

    @contextlib.contextmanager
    def moment(self, name: str) -> Iterator[None]:
        """A row for what is done inside."""
        gc.collect()
        before, self._saved = list(self._totals), []
        self._tops = list(self._totals)
        yield
        self.moments.append(
            {"moment": name, "bytes": sum(before), "before": before, "peak": self._tops, "saved": self._saved}
        )

    def saved(self, obj: Any) -> None:
        """What `torch.save` gets."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(obj)}
        device = [nbytes for key, nbytes in storages.items() if key not in self._host]
        host = sum(nbytes for key, nbytes in storages.items() if key in self._host)
        self._saved.append([max(device, default=0), host])

    def to_host(self, copy: Callable[[], Any]) -> Any:
        was, self._to_host = self._to_host, True
        try:
            return copy()
        finally:
            self._to_host = was

    def is_host(self, tensor: torch.Tensor) -> bool:
        local = getattr(tensor, "_local_tensor", tensor)
        return local.untyped_storage()._cdata in self._host

    def _set(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if not _has_memory(storage):
            return
        if key not in self._alive and self._to_host:
            self._host.add(key)
        side = key in self._host
        self._totals[side] += nbytes - self._alive.get(key, 0)
        super()._set(storage)
        self._tops = [max(pair) for pair in zip(self._tops, self._totals, strict=True)]

    def _drop(self, key: int) -> None:
        self._totals[key in self._host] -= self._alive.get(key, 0)
        self._host.discard(key)
        super()._drop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if tensors and all(self.is_host(tensor) for tensor in tensors):  # made from what is on the host
            return self.to_host(lambda: super(SavingWatcher, self).__torch_dispatch__(func, types, args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _patch(self) -> None:
        to, save = torch.Tensor.to, torch.save

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if self.is_host(tensor) else self.to_host(lambda: tensor.detach().clone())

        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            target = args[0] if args else None
            if isinstance(target, torch.device) and target == HOST and not any(target is own for own in self.own):
                return copied(tensor)
            return to(tensor, *args, **kwargs)

        def counted(obj: Any, *args: Any, **kwargs: Any) -> None:
            self.saved(obj)
            save(obj, *args, **kwargs)

        self._patches: list[tuple[Any, str, Any]] = [
            (torch.Tensor, "cpu", copied), (torch.Tensor, "to", moved), (torch, "save", counted),
        ]  # fmt: skip
        if "deepspeed" in sys.modules:
            from deepspeed.checkpoint import utils

            clones = utils.clone_tensors_for_torch_save
            self._patches.append(
                (utils, "clone_tensors_for_torch_save", lambda *args: self.to_host(lambda: clones(*args)))
            )
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor
        from torch.distributed.fsdp._flat_param import FlatParamHandle

        def moved_flat(handle: Any, *args: Any, **kwargs: Any) -> None:
            handle.flat_param.data = copied(handle.flat_param.data)
            if handle._use_orig_params and not handle.is_sharded(handle.flat_param):
                handle._use_unsharded_views(as_params=True)

        def moved_shards(sharded: Any, *args: Any, **kwargs: Any) -> Any:
            for shard in sharded._local_shards:
                shard.tensor = copied(shard.tensor)
            return sharded

        self._patches += [(FlatParamHandle, "flat_param_to", moved_flat), (ShardedTensor, "cpu", moved_shards)]

    @contextlib.contextmanager
    def real_copies(self) -> Iterator[None]:
        """What would go from the device to the host is copied."""
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in self._patches]
        for owner, name, patched in self._patches:
            setattr(owner, name, patched)
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """That of a wrapper such as AsyncCollectiveTensor has none."""
    try:
        return storage.data_ptr() != 0 or not storage.nbytes()
    except RuntimeError:
        return False


def _tensors(obj: Any) -> Iterator[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        yield getattr(obj, "_local_tensor", obj)
    elif isinstance(obj, dict):
        for value in obj.values():
            yield from _tensors(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            yield from _tensors(value)


def _deepspeed(watcher: SavingWatcher, folder: str) -> None:
    engine = watcher._engine
    stage = watcher.config["ds"]["zero_optimization"]["stage"]
    with watcher.real_copies():
        from deepspeed.checkpoint import utils

        with watcher.moment("gather"):  # accelerate's get_state_dict
            if stage == 3:
                state = engine._zero3_consolidated_16bit_state_dict()
            else:
                state = utils.clone_tensors_for_torch_save(engine.module.state_dict())
        del state
        with watcher.moment("save_checkpoint"):
            engine.save_checkpoint(folder)
        with watcher.moment("load_checkpoint"), _read(watcher):
            engine.load_checkpoint(folder)


@contextlib.contextmanager
def _read(watcher: SavingWatcher) -> Iterator[None]:
    """Tensors of `torch.load` lie on the host."""
    load = torch.load

    def read(*args: Any, **kwargs: Any) -> Any:
        found = watcher.to_host(lambda: load(*args, **kwargs))
        for tensor in _tensors(found):
            watcher.to_host(lambda tensor=tensor: watcher._set(tensor.untyped_storage()))  # type: ignore[misc]
        return found

    torch.load = read
    try:
        yield
    finally:
        torch.load = load


def _fsdp_save(watcher: SavingWatcher, folder: str) -> None:
    from accelerate import PartialState
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    config, model, optimizer = watcher.config, watcher._model, watcher._optimizer
    version, full = (1 if config["engine"] == "fsdp1" else 2), config["kind"] == "FULL"
    on_gpu = config.get("on_gpu", False)
    kind = StateDictType[f"{config['kind']}_STATE_DICT"]
    plugin = SimpleNamespace(
        fsdp_version=version, state_dict_type=kind, sync_module_states=True,
        state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True) if full
        else ShardedStateDictConfig(offload_to_cpu=True),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True) if full
        else ShardedOptimStateDictConfig(offload_to_cpu=True),
    )  # fmt: skip
    PartialState(cpu=True, backend="gloo")
    rank = torch.distributed.get_rank()
    accelerator = SimpleNamespace(
        num_processes=config["world"], process_index=rank, is_main_process=rank == 0, is_fsdp2=version == 2,
        wait_for_everyone=torch.distributed.barrier,
    )  # fmt: skip
    watcher.own = [module.compute_device for module in FullyShardedDataParallel.fsdp_modules(model)]
    if on_gpu:  # torch's own default, and the Trainer's until transformers 4.30
        with watcher.real_copies(), watcher.moment("model"):
            state = model.state_dict()
            del state
        return
    with watcher.real_copies():
        with watcher.moment("model"):
            fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
        with watcher.moment("optimizer"):
            fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        with watcher.moment("load model"), _read(watcher):
            fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder)
        with watcher.moment("load optimizer"), _read(watcher):
            fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


def record(config: Config) -> list[dict[str, Any]]:
    """A header, and one line per rank and moment. Raises RuntimeError with the rank's traceback."""
    from validation.oracles.record import run_all

    with tempfile.TemporaryDirectory() as folder:
        watcher = type("Watcher", (SavingWatcher,), {"config": config | {"saved_in": folder}})
        found = run_all(config, watcher)
    _, header = found[0]
    settings = {key: value for key, value in config.items() if key != "name"}
    lines = [{"kind": "header", "name": config["name"], "engine": config["engine"], "world": config["world"],
              "config": settings, **header}]  # fmt: skip
    for rank, (rows, _) in sorted(found.items()):
        lines += [{"kind": "moment", "rank": rank, **row} for row in rows]
    return lines


def main(arguments: list[str] | None = None) -> int:
    from validation.oracles.record import record_each

    return record_each(
        "saving", __doc__, configurations(), record, lambda lines: f"{len(lines) - 1} moments", arguments
    )


if __name__ == "__main__":
    sys.exit(main())

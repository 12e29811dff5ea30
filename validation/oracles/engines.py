"""One training loop per engine: `run` returns the rows that a rank recorded and additions to the header."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from validation.oracles import aio, autocast, experts, float8, mics, models, preference, quantizer, ulysses
from validation.oracles.recorder import Recorder
from validation.oracles.storage import StorageTracker

SEQUENCE, MICRO_BATCH, STEPS = 32, 1, 3

Config = dict[str, Any]
Watcher = Recorder | StorageTracker
Recorded = tuple[list[dict[str, Any]], dict[str, Any]]


def run(config: Config, rank: int, world: int, recorder: Watcher) -> Recorded:
    """`recorder` watches the run; what it has seen is in its `rows`."""
    engines: dict[str, Callable[[Config, int, int, Watcher], Recorded]] = {
        "ddp": run_ddp, "fsdp1": run_fsdp1, "fsdp2": run_fsdp2, "ds": run_deepspeed,
    }  # fmt: skip
    return engines[config["engine"]](config, rank, world, recorder)


def _build(
    recorder: Watcher, config: Config, lazily: AbstractContextManager[Any] | None = None
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """`lazily`: zero.Init, which from_pretrained enters; peft comes to the model later."""
    dtype = getattr(torch, config.get("dtype", "float32"))
    attention = config.get("attention", "sdpa")
    if "sequence_parallel" in config:
        attention = ulysses.attention_name(attention)
    if config.get("experts") == "modules" or config["model"] == "dbrx":
        from validation.oracles import expert_rows

        torch.topk = expert_rows.dealt
    with lazily or contextlib.nullcontext():
        model, settings = models.build(config["model"], dtype, attention, **config.get("over", {}))
    if "lora" in config:
        models.adapt(model, config["lora"])
    models.freeze(model, config.get("freeze", []))
    if "float8" in config:
        float8.convert(model, emulate=True, **float8.of_conversion(config))
    recorder.watch(model, models.marked(model))
    if config.get("ckpt"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.get("compile"):
        for block in models.blocks(model):
            block.compile()
    header = {
        "model": {"kind": config["model"], **settings},
        "micro_batch": _sequences(config),
        "seq": SEQUENCE,
        "params": [_describe(name, parameter) for name, parameter in model.named_parameters()],
    }
    if config["model"] in models.TINY_VISION:
        header["images"] = models.IMAGE
    if config["model"] in models.TINY_PAIRS:
        header["target"] = models.target(SEQUENCE)
    return model, header


def _describe(name: str, parameter: Any) -> dict[str, Any]:
    # under deepspeed.zero.Init the tensor itself is a shard
    shape = list(getattr(parameter, "ds_shape", parameter.shape))
    found = {"name": name, "numel": getattr(parameter, "ds_numel", parameter.numel()), "shape": shape}
    return found if parameter.requires_grad else found | {"trainable": False}


def _tokens(header: dict[str, Any], rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * index + rank)
    vocabulary = header["model"].get("text_config", header["model"])["vocab_size"]
    return torch.randint(0, vocabulary, (header["micro_batch"], SEQUENCE), generator=generator)


def _sequences(config: Config) -> int:
    """Of a micro-batch; those of pairs."""
    return 2 * MICRO_BATCH if "preference" in config else MICRO_BATCH


def _reference(config: Config, lazily: AbstractContextManager[Any] | None = None) -> torch.nn.Module | None:
    """A second model, where the trainer has one."""
    if config.get("preference", {}).get("reference") != "model":
        return None
    with lazily or contextlib.nullcontext():
        dtype = getattr(torch, config.get("dtype", "float32"))
        attention = config.get("attention", "sdpa")
        model, _ = models.build(config["model"], dtype, attention, **config.get("over", {}))
    return model.eval()


def _compared(config: Config, model: Any, reference: Any) -> preference.Step | None:
    """What runs a micro-step on pairs."""
    if "preference" not in config:
        return None
    return preference.Step(config["preference"], model, reference, config.get("autocast"))


Sync = Callable[[bool], AbstractContextManager[None]]


def _train(
    recorder: Watcher,
    config: Config,
    header: dict[str, Any],
    model: torch.nn.Module,
    rank: int,
    sync: Sync = lambda last: contextlib.nullcontext(),
    clip: Callable[[], Any] | None = None,
    reference: Any = None,
) -> None:
    """`sync(last)` is entered around each micro-step of an accumulation."""
    optimizers = _optimizers(config, model)
    for optimizer in optimizers:
        recorder.watch_optimizer(optimizer)
    accumulation, compared = config.get("ga", 1), _compared(config, model, reference)
    for step in range(1, config.get("steps", STEPS) + 1):
        for micro in range(accumulation):
            tokens = _tokens(header, rank, (step - 1) * accumulation + micro)
            with sync(micro == accumulation - 1):
                recorder.at("forward", step=step, micro=micro)
                if compared:
                    loss = compared.loss(tokens) / accumulation
                else:
                    with autocast.as_on_cuda(config.get("autocast")):
                        loss = model(**models.inputs_of(config, tokens)).loss / accumulation
                recorder.at("backward")
                loss.backward()
        recorder.at("step")
        if config.get("clip", True):
            (clip or (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))()
        for optimizer in optimizers:
            optimizer.step()
        if config.get("float8", {}).get("precompute"):
            float8.precompute(model)
        model.zero_grad()
        _evaluate(recorder, config, header, model, rank, step)
    recorder.at("end")
    recorder.enabled = False


def _evaluate(recorder: Watcher, config: Config, header: dict[str, Any], model: Any, rank: int, step: int) -> None:
    """As transformers' Trainer does between two steps (prediction_step), on batches of a size of their own."""
    if "evaluate" not in config:
        return
    recorder.at("evaluation")
    model.eval()
    size = header | {"micro_batch": config["evaluate"]}
    for index in range(2):
        tokens = _tokens(size, rank, 1000 + 2 * step + index)
        with torch.no_grad(), autocast.as_on_cuda(config.get("autocast")):
            outputs = model(**models.inputs_of(config, tokens), use_cache=False)
        del outputs
    model.train()


def _optimizers(config: Config, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    found: list[torch.optim.Optimizer] = []
    if config.get("optimizer") == "muon":
        matrices = models.hidden_matrices(model)
        found.append(torch.optim.Muon([p for p in trained if id(p) in matrices]))
        trained = [p for p in trained if id(p) not in matrices]
    impl = config.get("impl", "loop")
    return [*found, torch.optim.AdamW(trained, lr=1e-3, foreach=impl == "foreach", fused=impl == "fused")]


def run_ddp(config: Config, rank: int, world: int, recorder: Watcher) -> Recorded:
    from torch.nn.parallel import DistributedDataParallel

    with recorder:
        model, header = _build(recorder, config)
        reference = _reference(config)
        wrapped = DistributedDataParallel(model, **config.get("ddp", {}))
        recorder.watch_backward(wrapped)
        no_sync: Sync = lambda last: contextlib.nullcontext() if last else wrapped.no_sync()  # noqa: E731
        _train(
            recorder, config, header, wrapped, rank, reference=reference,
            **({"sync": no_sync} if config.get("no_sync") else {}),
        )  # fmt: skip
    return recorder.rows, header


def run_fsdp2(config: Config, rank: int, world: int, recorder: Watcher) -> Recorded:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    settings = config.get("fsdp", {})
    with recorder:
        model, header = _build(recorder, config)
        mesh = (
            init_device_mesh("cpu", tuple(settings["mesh"]), mesh_dim_names=("replicate", "shard"))
            if "mesh" in settings
            else init_device_mesh("cpu", (world,))
        )
        arguments: dict[str, Any] = {"mesh": mesh}
        if settings.get("mp", True):
            arguments["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=getattr(torch, settings.get("param_dtype", "bfloat16")),
                reduce_dtype=getattr(torch, settings.get("reduce_dtype", "float32")),
            )
        if settings.get("offload"):
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        reshard = settings.get("reshard_after_forward", True)
        reference = _reference(config)
        if reference is not None and config["preference"].get("sharded"):  # trl's prepare_fsdp
            fully_shard(reference, reshard_after_forward=reshard, **arguments)
        blocks = models.blocks(model)
        if settings.get("titan") or settings.get("accelerate"):
            text = models.text_model(model)
            embedding, head = text.get_input_embeddings(), model.get_output_embeddings()
            norm = models.final_norm(text if models.sees(model) else model.base_model)
            if settings.get("accelerate") and (text is not getattr(model, "model", text) or "lora" in config):
                norm = None  # accelerate looks for it among children of the base model, which a PeftModel is not
            tail = [norm, head]
            tied = embedding.weight is head.weight
        if settings.get("upcast_trained"):  # as accelerate does since 1.14 with what was loaded in bfloat16
            models.widen(model)
        for module in models.adapter_leaves(model) if settings.get("adapter_units") else ():
            fully_shard(module, reshard_after_forward=reshard, **arguments)
        if settings.get("titan"):
            fully_shard(embedding, reshard_after_forward=reshard, **arguments)
        for unit in models.of_classes(model, settings["wrap"]) if "wrap" in settings else models.units(model):
            fully_shard(unit, reshard_after_forward=reshard, **arguments)
        if settings.get("accelerate") and not tied:
            fully_shard(embedding, reshard_after_forward=reshard, **arguments)
        if settings.get("titan") or settings.get("accelerate"):
            ends = [module for module in ([norm, embedding, head] if tied else tail) if module is not None]
            fully_shard(ends, reshard_after_forward=False, **arguments)
        root = {} if settings.get("root_reshard") == "default" else {"reshard_after_forward": reshard}
        fully_shard(model, **root, **arguments)
        if settings.get("upcast"):  # as accelerate does with what was loaded in bfloat16
            model.to(torch.float32)
        if depth := settings.get("prefetch"):
            for index, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
                block.set_modules_to_backward_prefetch(blocks[max(0, index - depth) : index][::-1])
        recorder.watch_backward(model)

        @contextlib.contextmanager
        def sync(last: bool) -> Iterator[None]:
            if settings.get("sync_only_last"):
                model.set_requires_gradient_sync(last)
            if settings.get("all_reduce_only_last"):
                model.set_requires_all_reduce(last)
            if settings.get("no_reshard_bwd_until_last"):
                model.set_reshard_after_backward(last)
            if settings.get("is_last_backward"):
                model.set_is_last_backward(last)
            yield

        _train(recorder, config, header, model, rank, sync, reference=reference)
    return recorder.rows, header


def _give_up_gradients() -> None:
    """On GPUs FSDP1 drops the gradient on the host that it wrote back before a backward, as it lies on another device
    than the unit; on CPUs it would keep it until the unit's own gradient is there."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    prepare = FlatParamHandle.prepare_gradient_for_backward

    def dropped(handle: FlatParamHandle) -> None:
        handle.flat_param.grad = None
        prepare(handle)

    FlatParamHandle.prepare_gradient_for_backward = dropped  # type: ignore[method-assign]


def run_fsdp1(config: Config, rank: int, world: int, recorder: Watcher) -> Recorded:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

    settings = config.get("fsdp", {})
    with recorder:
        model, header = _build(recorder, config)
        arguments: dict[str, Any] = {}
        if "mesh" in settings:
            arguments["device_mesh"] = init_device_mesh(
                "cpu", tuple(settings["mesh"]), mesh_dim_names=("replicate", "shard")
            )
        if settings.get("offload"):
            arguments["cpu_offload"] = CPUOffload(offload_params=True)
            pin = getattr(recorder, "pin", lambda tensor, *arguments: tensor)
            torch.Tensor.pin_memory = pin  # type: ignore[method-assign]
            _give_up_gradients()
            torch.cpu.Stream.synchronize = lambda stream: None  # type: ignore[attr-defined]
        prefetch = settings.get("backward_prefetch", "BACKWARD_PRE")
        policy: Any = ModuleWrapPolicy({type(unit) for unit in models.units(model)})
        if settings.get("adapter_units"):
            units = {id(module) for module in [*models.adapter_leaves(model), *models.blocks(model)]}
            policy = CustomPolicy(lambda module: id(module) in units)
        if "wrap" in settings:
            policy = CustomPolicy(lambda module: type(module).__name__ in settings["wrap"])
        if "min_num_params" in settings:
            policy = functools.partial(size_based_auto_wrap_policy, min_num_params=settings["min_num_params"])
        if settings.get("mp", True):
            arguments["mixed_precision"] = MixedPrecision(
                param_dtype=getattr(torch, settings.get("param_dtype", "bfloat16")),
                reduce_dtype=getattr(torch, settings.get("reduce_dtype", "bfloat16")),
            )
        wrap = functools.partial(
            FullyShardedDataParallel,
            sharding_strategy=ShardingStrategy[settings.get("strategy", "FULL_SHARD")],
            auto_wrap_policy=policy,
            backward_prefetch=BackwardPrefetch[prefetch] if prefetch else None,
            forward_prefetch=settings.get("forward_prefetch", False),
            use_orig_params=settings.get("use_orig_params", True),
            device_id=torch.device("cpu"),
            **arguments,
        )
        reference: Any = _reference(config)
        if reference is not None and config["preference"].get("sharded"):  # trl's prepare_fsdp
            reference = wrap(reference)
        wrapped = wrap(model)
        recorder.watch_backward(wrapped)
        no_sync: Sync = lambda last: contextlib.nullcontext() if last else wrapped.no_sync()  # noqa: E731
        _train(
            recorder, config, header, wrapped, rank, clip=lambda: wrapped.clip_grad_norm_(1.0), reference=reference,
            **({"sync": no_sync} if settings.get("no_sync") else {}),
        )  # fmt: skip
    return recorder.rows, header


def run_deepspeed(config: Config, rank: int, world: int, recorder: Watcher) -> Recorded:
    import deepspeed

    settings = json.loads(json.dumps(config["ds"]))  # deepspeed changes it
    accumulation = settings["gradient_accumulation_steps"]
    for section in ("offload_optimizer", "offload_param"):
        if settings["zero_optimization"].get(section, {}).get("device") == "nvme":
            settings["zero_optimization"][section]["nvme_path"] = config["folder"]
            aio.install()
    if "gpus_per_node" in config:
        os.environ["LOCAL_SIZE"] = str(config["gpus_per_node"])  # accelerator/cpu_accelerator.py device_count
    if any(key.startswith("zero_quantized") for key in settings["zero_optimization"]):
        quantizer.install()
    if "mics_shard_size" in settings["zero_optimization"]:
        mics.install()
    if "expert_parallel" in settings:
        experts.install()
    # It has no CPU kernel; on GPUs it only defers the reuse of memory.
    torch.Tensor.record_stream = lambda *arguments: None  # type: ignore[method-assign]
    with recorder:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        lazily: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        if config.get("zero_init"):
            models.leave_weights()
            whole = settings | {"train_batch_size": accumulation * world}
            lazily = functools.partial(deepspeed.zero.Init, config_dict_or_path=whole)
        model, header = _build(recorder, config, lazily())
        if config.get("leaf"):
            deepspeed.utils.set_z3_leaf_modules(model, [type(models.blocks(model)[0])])
        reference: Any = _reference(config, lazily())
        if reference is not None:
            reference = preference.zero_reference(reference, settings)
        trained = models.decay_groups(model) if config.get("decay_groups") else list(model.parameters())
        parallel, steps = config.get("sequence_parallel"), config.get("steps", STEPS)
        mpu = parallel and ulysses.register(model, config.get("attention", "sdpa"), parallel, MICRO_BATCH)
        given: dict[str, Any] = {"model_parameters": trained}
        if "expert_parallel" in settings and config.get("decay_groups"):  # DeepSpeed makes no groups of these
            del settings["optimizer"]
            given = {"optimizer": torch.optim.AdamW(trained, lr=1e-3, foreach=False)}
        engine, *_ = deepspeed.initialize(model=model, config=settings, mpu=mpu, **given)
        if "expert_parallel" in settings:
            header["converted"] = [_describe(name, parameter) for name, parameter in model.named_parameters()]
        recorder.watch_backward(model)
        recorder.watch_optimizer(engine.optimizer)
        compared = _compared(config, engine, reference)
        dealt = mpu and ulysses.batches(mpu, lambda index: _tokens(header, rank, index), steps * accumulation)
        for step in range(1, steps + 1):
            for micro in range(accumulation):
                recorder.at("forward", step=step, micro=micro)
                if compared:
                    loss = compared.loss(_tokens(header, rank, (step - 1) * accumulation + micro))
                elif parallel:
                    loss = ulysses.loss(engine, next(dealt), parallel)
                else:
                    tokens = _tokens(header, rank, (step - 1) * accumulation + micro)
                    dtype = next(engine.module.parameters()).dtype
                    loss = engine(**models.inputs_of(config, tokens, dtype)).loss
                recorder.at("backward")
                engine.backward(loss)
                recorder.at("step")
                engine.step()
            _evaluate(recorder, config, header, engine, rank, step)
        recorder.at("end")
        recorder.enabled = False
    extra = {"ds_optimizer": type(engine.optimizer).__name__, "skipped_steps": engine.skipped_steps}
    return recorder.rows, header | extra

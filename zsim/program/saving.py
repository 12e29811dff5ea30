"""Memory of checkpoints: what ranks hold to write one between two steps, or to read one, beside what training holds.

Alloc and Free alone, in the order of DeepSpeed 0.19.8 (runtime/engine.py), torch 2.13 (distributed/fsdp,
distributed/checkpoint), and of the functions through which transformers 5.24 (trainer.py, `save_model` and
`_save_optimizer_and_scheduler`) and accelerate 1.15 (accelerator.py `get_state_dict`, utils/fsdp_utils.py) call them.
Held against real runs: validation/oracles/saving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from zsim.model.kernels import DTYPE_BYTES
from zsim.model.spec import ModelSpec, Module
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Saving
from zsim.program.deepspeed import (
    dtype_bytes,
    frozen_bytes,
    master_dtype,
    parameter_groups,
    state_dtype,
    sub_groups,
    trainable,
)
from zsim.program.fsdp1_flat import HYBRID, Handle
from zsim.program.ops import RANK_0, Alloc, Free, Instruction
from zsim.program.optimizer import rule_of
from zsim.program.partitions import partition
from zsim.program.startup import CHECKPOINT, model_bytes
from zsim.program.units import groups_of, mesh_of
from zsim.program.versions import before
from zsim.program.walk import modules_in_order

WEIGHTS, STATES, RESUMING = "saving the weights", "saving the optimizer's states", "resuming"
GATHERED = "all_gather_buffers"
# Causes.
AT_RANK_0, CLONED = "rank 0 gathers all weights on its host", "every rank copies all weights to its host"
STATES_AT_RANK_0 = "rank 0 gathers all of the optimizer's states on its host"
STAGED = "every rank copies all of its shards to its host, from which they are written"
OWN_SHARDS, READ_SHARDS = "every rank copies its shards to its host", "every rank reads its shards"
READ_BY_ALL, READ_AT_RANK_0 = "every rank reads all weights", "rank 0 reads all of the optimizer's states"
ALL_READ_BY_ALL = "every rank reads all weights, and all of the optimizer's states"
BROUGHT, BROUGHT_FILE = "rank 0 brings all weights to its host", "rank 0 brings a file of weights at a time to its host"
BROUGHT_STATE = "rank 0 brings a tensor of the optimizer's states at a time to its host"
ON_EVERY_GPU = "every GPU gathers all weights, with offload_to_cpu of the full state dict off"
SHARD_OF_FILE = 50 * 10**9  # bytes, save_pretrained's max_shard_size


class Moment(NamedTuple):
    """`drops`: categories that are given up before, of what training holds between its steps. `RESUMING` comes before
    the first of them."""

    name: str
    cause: str  # what it is that takes the memory
    instructions: tuple[Instruction, ...]
    drops: tuple[str, ...] = ()


def moments(model: ModelSpec, tree: Module, plan: AnyPlan) -> Iterator[Moment]:
    """In the order in which a run comes to them. None where nothing says how it saves."""
    saving = plan.saving
    if saving is None or (isinstance(plan, DeepSpeedPlan) and (plan.autoep_size or plan.mics_shard_size > 0)):
        return
    if saving.by == "none":
        found = moments(model, tree, replace(plan, saving=replace(saving, by="trainer")))
        yield from (moment for moment in found if moment.name == RESUMING)
        return
    if isinstance(plan, DeepSpeedPlan):
        yield from _deepspeed(model, tree, plan, saving)
    elif isinstance(plan, Fsdp1Plan):
        yield from _Fsdp1(model, tree, plan).moments(saving)
    elif isinstance(plan, Fsdp2Plan):
        yield from _fsdp2(model, plan, saving)
    else:
        yield from _ddp(model, plan, saving)


class _Memory:
    """Instructions in the making. `host`: on every rank's host; `rank_0`: on that of the first rank alone."""

    def __init__(self) -> None:
        self.made: list[Instruction] = []

    def gpu(self, nbytes: int, tensors: Sequence[int] = ()) -> Free:
        return self._alloc(GATHERED, nbytes, "gpu", tuple(tensors))

    def host(self, nbytes: int) -> Free:
        return self._alloc(CHECKPOINT, nbytes, "host")

    def rank_0(self, nbytes: int) -> Free:
        return self._alloc(RANK_0, nbytes, "host")

    def free(self, *held: Free) -> None:
        self.made += held

    def moment(self, name: str, cause: str, drops: tuple[str, ...] = ()) -> Moment:
        made, self.made = tuple(self.made), []
        return Moment(name, cause, made, drops)

    def _alloc(self, category: str, nbytes: int, device: str, tensors: tuple[int, ...] = ()) -> Free:
        key = f"checkpoint {len(self.made)}"
        self.made.append(Alloc(key, category, nbytes, device, tensors=tensors))
        return Free(key)


# DeepSpeed.


def _deepspeed(model: ModelSpec, tree: Module, plan: DeepSpeedPlan, saving: Saving) -> Iterator[Moment]:
    memory, weights = _Memory(), model_bytes(model, plan)
    drops = (GATHERED,) if plan.stage == 3 else ()  # checkpoint_event_prologue: persistent parameters
    by_trainer = saving.by == "trainer" and not before(plan, 0, 10)
    adapters = by_trainer and model.tuning is not None
    if plan.stage == 3:
        if plan.stage3_gather_16bit_weights_on_model_save:  # without the base since transformers 5 of January 2026
            _consolidate(memory, model, tree, plan, adapters=adapters and not before(plan, 0, 18, 5))
    elif by_trainer:
        memory.host(weights)  # accelerate's clone_tensors_for_torch_save, on every rank
    yield memory.moment(WEIGHTS, AT_RANK_0 if plan.stage == 3 else CLONED, drops)
    # exclude_frozen_parameters, since transformers pull request 27825 of December 2023
    frozen = 0 if adapters and not before(plan, 0, 13) else _frozen(model, plan)
    if not saving.only_model or not by_trainer:
        _save_checkpoint(memory, model, plan, frozen)
        on_host = plan.stage < 3 and plan.offload_optimizer is not None  # the shards are
        yield memory.moment(STATES, BROUGHT if on_host else OWN_SHARDS, drops)
    if saving.resume:
        _load_checkpoint(memory, model, plan, weights, frozen)
        read = READ_SHARDS if plan.stage == 3 else READ_BY_ALL if plan.stage else ALL_READ_BY_ALL
        yield memory.moment(RESUMING, read, drops)


def _consolidate(memory: _Memory, model: ModelSpec, tree: Module, plan: DeepSpeedPlan, *, adapters: bool) -> None:
    """_zero3_consolidated_16bit_state_dict: a module's own parameters at a time, whole on every GPU, then on rank 0's
    host. `adapters`: without those that are not trained (exclude_frozen_parameters), which are gathered all the same.
    """
    size, seen = dtype_bytes(plan.dtype), set[int]()
    for module in modules_in_order(tree):
        params = [param for param in (*module.params, *module.idle) if param not in seen]
        if not params:
            continue
        seen.update(params)
        each = {param: _bytes(model, param, size) for param in params}
        gathered = memory.gpu(sum(each.values()), list(each.values()))
        memory.rank_0(sum(nbytes for p, nbytes in each.items() if model.parameters[p].trainable or not adapters))
        memory.free(gathered)


def _save_checkpoint(memory: _Memory, model: ModelSpec, plan: DeepSpeedPlan, frozen: int) -> None:
    """The weights by rank 0 below stage 3, then each rank its partitions. torch.save brings storages to the host one by
    one, and whole: the weights are views of one flat storage, an optimizer's states one of each kind."""
    size = dtype_bytes(plan.dtype)
    fragments = memory.host(frozen)  # _get_zero_frozen_param_attributes: on every rank, though rank 0 alone saves them
    flats = _flat_numels(model, plan)
    if plan.stage < 3:
        memory.free(memory.rank_0(max(flats) * size))
    memory.free(fragments)
    if plan.offload_optimizer is None:
        largest = max(_partitions(model, plan)) * _master_size(plan)
        if plan.stage:
            memory.free(memory.host(largest))
        else:
            memory.free(memory.rank_0(largest))


def _load_checkpoint(memory: _Memory, model: ModelSpec, plan: DeepSpeedPlan, weights: int, frozen: int) -> None:
    """Every rank reads the weights, below stage 3 whole; frozen ones stay in the client state while it reads its own
    partitions, which moments on the GPU are made from before old ones go, where there are any before the first step.
    """
    on_nvme = plan.offload_optimizer == "nvme"  # whose files are copied
    partitions = 0 if on_nvme else sum(_partitions(model, plan))
    moments = rule_of(plan.optimizer).states * dtype_bytes(state_dtype(plan)) * partitions
    own = _master_size(plan) * partitions + moments
    if plan.stage == 0:
        memory.host(weights + own)
    else:
        memory.host(frozen)
        memory.free(memory.host(weights if plan.stage < 3 else 0))
        memory.host(own)
    if plan.offload_optimizer is None:
        memory.gpu(moments)


def _frozen(model: ModelSpec, plan: DeepSpeedPlan) -> int:
    """Of frozen parameters, what a rank of stage 2 (all) or 3 (its shards) copies to its host."""
    nbytes = frozen_bytes(model, plan.dtype)
    return nbytes if plan.stage == 2 else ceil(nbytes / plan.world_size) if plan.stage == 3 else 0


def _flat_numels(model: ModelSpec, plan: DeepSpeedPlan) -> list[int]:
    return [sum(model.parameters[param].numel for param in group) for group in parameter_groups(model, plan)]


def _partitions(model: ModelSpec, plan: DeepSpeedPlan) -> list[int]:
    """Elements of each of a rank's flat float32 tensors."""
    if plan.stage == 0:
        return _flat_numels(model, plan)
    if plan.stage < 3:
        return [group.size for group in partition(model, parameter_groups(model, plan), plan).groups]
    shard = [ceil(parameter.numel / plan.sharing(parameter.home)) for parameter in model.parameters]
    return [sum(shard[param] for param in group) for group in sub_groups(model, plan, shard)]


def _master_size(plan: DeepSpeedPlan) -> int:
    return dtype_bytes(master_dtype(plan))


# FSDP1.


class _Fsdp1:
    def __init__(self, model: ModelSpec, tree: Module, plan: Fsdp1Plan) -> None:
        self.plan = plan
        sharded = plan.sharding_strategy != "NO_SHARD"
        replicas_shards = mesh_of(plan.mesh if plan.sharding_strategy in HYBRID else None, plan.world_size)
        self.shards = replicas_shards[1] if sharded else 1
        groups = groups_of(model, tree, "flat" if plan.flat else "hf", adapter_units=plan.adapter_units)
        handles = [Handle(group, model, plan, self.shards) for group in groups]
        self.root = [handle for handle in handles if handle.is_root]
        self.others = [handle for handle in handles if not handle.is_root]
        self.states = rule_of(plan.optimizer).states
        self.master = dtype_bytes(plan.storage_dtype)
        self.memory = _Memory()

    def moments(self, saving: Saving) -> Iterator[Moment]:
        plan, memory = self.plan, self.memory
        # _reset_flat_param_grad_info_if_needed: gradients that flat parameters have kept; on the host they are pinned
        drops = ("gradients",) if plan.use_orig_params and not plan.cpu_offload else ()
        if plan.state_dict_type == "LOCAL_STATE_DICT":
            return
        full = plan.state_dict_type == "FULL_STATE_DICT"
        copies = self._full() if full else self._sharded()
        gathered = AT_RANK_0 if plan.state_dict_offload_to_cpu else ON_EVERY_GPU
        yield memory.moment(WEIGHTS, gathered if full else OWN_SHARDS, drops)
        if not saving.only_model:
            # without use_orig_params the state dict's flat copies live on
            for nbytes in copies:
                memory.rank_0(nbytes)
            self._optimizer()
            yield memory.moment(STATES, STATES_AT_RANK_0 if full else OWN_SHARDS, drops)
        if saving.resume:
            self._load()
            yield memory.moment(RESUMING, READ_BY_ALL if full else READ_SHARDS, drops)

    def _full(self) -> list[int]:
        """A unit at a time in the type of its shards, the root around all others. To the host it goes as one flat
        tensor, and is cut there; otherwise clones stay on the GPU. Returns the flat tensors that live on."""
        memory, to_host, copies = self.memory, self.plan.state_dict_offload_to_cpu, list[int]()

        def unshard(handle: Handle) -> Free:
            nbytes = handle.full * handle.stored_size
            on_gpu = memory.gpu(nbytes)
            if not to_host:
                return on_gpu
            flat = memory.rank_0(nbytes)
            memory.free(on_gpu)
            return flat

        def clone(handle: Handle, flat: Free) -> None:
            each = [numel * handle.stored_size for numel in handle.numels]
            if to_host:
                memory.rank_0(sum(each))
            else:
                memory.gpu(sum(each), each)
            if to_host and not self.plan.use_orig_params:
                copies.append(handle.full * handle.stored_size)
            else:
                memory.free(flat)

        around = [(handle, unshard(handle)) for handle in self.root]
        for handle in self.others:
            clone(handle, unshard(handle))
        for handle, flat in around:
            clone(handle, flat)
        return copies

    def _sharded(self) -> list[int]:
        """Units are unsharded on the GPU too, and cut again."""
        memory, around = self.memory, [self.memory.gpu(handle.full * handle.stored_size) for handle in self.root]
        for handle in (*self.others, *self.root):
            whole = [memory.gpu(handle.full * handle.stored_size)] if handle in self.others else around
            piece = memory.gpu(ceil(max(handle.numels) / self.shards) * handle.stored_size)
            memory.host(handle.shard * handle.stored_size)
            memory.free(piece, *whole)
        return []

    def _optimizer(self) -> None:
        """_allgather_orig_param_states: a unit's state at a time, the next one's shard made beside the last one's."""
        memory, plan = self.memory, self.plan
        for handle in (*self.root, *self.others):
            if not handle.trainable or not self.states:
                continue
            full, shard = handle.full * self.master, handle.shard * self.master
            passing = [memory.gpu(full)]
            for _ in range(self.states):
                passing.append(memory.gpu(shard))
                if plan.state_dict_type == "FULL_STATE_DICT":
                    memory.rank_0(sum(handle.numels) * self.master)
                else:
                    memory.host(shard)
            memory.free(*passing)

    def _load(self) -> None:
        """load_fsdp_model, load_fsdp_optimizer: every rank reads the full weights, of the states the first one all."""
        memory, full = self.memory, self.plan.state_dict_type == "FULL_STATE_DICT"
        handles = (*self.root, *self.others)
        of_rank = sum(handle.shard * handle.stored_size for handle in handles)
        weights = sum(sum(handle.numels) * handle.stored_size for handle in handles)
        memory.free(memory.host(weights if full else of_rank))
        trained = [handle for handle in handles if handle.trainable]
        states = self.states * self.master
        if full:
            memory.rank_0(states * sum(sum(handle.numels) for handle in trained))
            if self.plan.use_orig_params:
                memory.rank_0(states * sum(handle.shard for handle in trained))
        elif trained:
            tensors = [numel * self.master for handle in trained for numel in handle.numels for _ in range(self.states)]
            memory.host(states * sum(handle.shard for handle in trained))
            memory.host(_in_reading(tensors, self.shards))


# FSDP2 and DDP.


def _fsdp2(model: ModelSpec, plan: Fsdp2Plan, saving: Saving) -> Iterator[Moment]:
    """get_model_state_dict, get_optimizer_state_dict: a parameter at a time, whole on every GPU and then on rank 0's
    host, or each rank's shards on its own."""
    memory, full = _Memory(), plan.state_dict_type == "FULL_STATE_DICT"
    shards = mesh_of(plan.mesh, plan.world_size)[1]
    states, master = rule_of(plan.optimizer).states, dtype_bytes(plan.storage_dtype)
    frozen = plan.frozen_dtype or plan.storage_dtype
    # of adapters' models the base as well where the Trainer's save_model gathers it, and otherwise adapters alone
    kept = [p for p, parameter in enumerate(model.parameters) if full or parameter.trainable or not model.tuning]
    sizes = [_bytes(model, p, master if model.parameters[p].trainable else dtype_bytes(frozen)) for p in kept]
    trained = [_bytes(model, p, master) for p in trainable(model)]

    def save(tensors: Sequence[int], *, on_gpu: bool = False) -> None:
        for nbytes in tensors:
            if full:
                whole = memory.gpu(nbytes)
                if not on_gpu:
                    memory.rank_0(nbytes)
                    memory.free(whole)
            elif not plan.cpu_offload:  # there the shards are on the host
                memory.host(ceil(nbytes / shards))

    if saving.by == "async":  # DefaultStager.stage; torch.distributed.checkpoint.save has a tensor in hand at a time
        memory.host(ceil(sum(sizes) / shards) + ceil(sum(trained) * states / shards))
        yield memory.moment(STATES, STAGED)
        return
    save(sizes, on_gpu=not plan.state_dict_offload_to_cpu)
    gathered = AT_RANK_0 if plan.state_dict_offload_to_cpu else ON_EVERY_GPU
    yield memory.moment(WEIGHTS, gathered if full else OWN_SHARDS)
    if not saving.only_model:
        save([nbytes for nbytes in trained for _ in range(states)])
        yield memory.moment(STATES, STATES_AT_RANK_0 if full else OWN_SHARDS)
    if saving.resume:
        for tensors in (sizes, [nbytes for nbytes in trained for _ in range(states)]):
            of_rank = memory.host(ceil(sum(tensors) / shards))
            read = memory.rank_0(sum(tensors)) if full else memory.host(_in_reading(tensors, shards))
            memory.free(of_rank, read)
        yield memory.moment(RESUMING, READ_AT_RANK_0 if full else READ_SHARDS)


def _ddp(model: ModelSpec, plan: DdpPlan, saving: Saving) -> Iterator[Moment]:
    """save_pretrained brings a file's tensors to the host at once, torch.save the states one by one; every rank reads
    both again (trainer.py, _load_from_checkpoint and _load_optimizer_and_scheduler)."""
    memory, weights = _Memory(), model_bytes(model, plan)
    trained = [_bytes(model, param, dtype_bytes(plan.dtype)) for param in trainable(model)]
    memory.rank_0(min(weights if model.tuning is None else sum(trained), SHARD_OF_FILE))
    yield memory.moment(WEIGHTS, BROUGHT_FILE)
    if not saving.only_model:
        memory.rank_0(max(trained))
        yield memory.moment(STATES, BROUGHT_STATE)
    if saving.resume:
        memory.free(memory.host(weights))
        memory.host(rule_of(plan.optimizer).states * sum(trained))
        yield memory.moment(RESUMING, ALL_READ_BY_ALL)


def _in_reading(tensors: Sequence[int], shards: int) -> int:
    """torch.distributed.checkpoint's FileSystemReader has two tensors in hand: the next and, still, the last."""
    return ceil(max(map(sum, pairwise(tensors)), default=0) / shards)


def _bytes(model: ModelSpec, param: int, size: int) -> int:
    parameter = model.parameters[param]
    return round(parameter.numel * (DTYPE_BYTES[parameter.dtype] if parameter.dtype else size))

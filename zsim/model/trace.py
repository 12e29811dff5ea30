"""Runs a model once on a tape and writes down the module tree that strategies walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

from zsim.errors import InputError, NotModeled
from zsim.model import families
from zsim.model.architecture import Architecture
from zsim.model.families.torchtitan import transformers_name
from zsim.model.fusion import fused, kept, ungated_bytes
from zsim.model.graph import Call, Segment, Storage, Tensor, row_major
from zsim.model.kernels import SEQUENCE_PARALLEL, Exchange, Memory, Wait, Work
from zsim.model.layer_keys import layer_keys, trains_tower, with_flat_units
from zsim.model.layers import Blocks, Net, Weight
from zsim.model.layers import Module as Layer
from zsim.model.preference import check_compares
from zsim.model.spec import Compute, ModelSpec, Module, Parameter, Workload
from zsim.model.tape import Tape
from zsim.model.undisturbed import Outcome, Watch, undisturbed

KEPT = 32  # a megabyte each; a search has four micro-batches under three ways of checkpointing


def trace(spec: ModelSpec, workload: Workload) -> Module:
    """The module tree of one micro-batch: calls in PyTorch's order, with the work and memory of each.

    Each distinct block runs once; equal blocks share their `Compute` objects wherever those name no parameter.
    The last `KEPT` are cached on the spec. Raises NotModeled for what the family cannot run (see `families.build`).
    """
    key = ("trace", workload)
    if key not in spec._cache:
        if len(spec._cache) == KEPT:
            del spec._cache[next(iter(spec._cache))]
        if spec.conversion and (executed := spec.conversion.executed):
            from zsim.model.expert_parallel import renumber

            spec._cache[key] = renumber(trace(executed, workload), executed, spec)
        else:
            spec._cache[key] = undisturbed(_attempt, replace(spec), workload)
    return spec._cache[key]


def trace_reference(spec: ModelSpec, workload: Workload) -> Module:
    """The module tree of a forward without gradients on the same pairs: of a second model, or of the same one without
    its adapters (`Preference.reference`)."""
    assert workload.preference is not None
    frozen = tuple(replace(parameter, trainable=False) for parameter in spec.parameters)
    workload = replace(workload, checkpointing="none", checkpointed=None)
    key = ("reference", workload)
    if key not in spec._cache:
        spec._cache[key] = undisturbed(_attempt, replace(spec, parameters=frozen), workload)
    return spec._cache[key]


def trace_evaluation(spec: ModelSpec, workload: Workload) -> Module:
    """The module tree of a batch of `workload.evaluation`: a forward without gradients."""
    evaluation = workload.evaluation
    assert evaluation is not None
    frozen = tuple(replace(parameter, trainable=False) for parameter in spec.parameters)
    workload = replace(
        workload,
        micro_batch=evaluation.micro_batch,
        loss=evaluation.loss or workload.loss,
        checkpointing="none",
        checkpointed=None,
        flat_units="",
        evaluation=None,
        forward_only=True,
    )
    return trace(replace(spec, parameters=frozen), workload)


def _attempt(spec: ModelSpec, workload: Workload) -> Outcome:
    tracer = _Tracer(spec, workload)
    with Watch(tracer.tape) as watch:
        canary = watch.canary()
        tree = tracer.run()
        del canary
        return Outcome(tree, watch.disturbed)


def parameters(model: Layer) -> tuple[Parameter, ...]:
    """`named_parameters()` of a model built by `families.build`: tied weights once, under the first name."""
    found: list[Parameter] = []
    seen: set[tuple[int, int]] = set()
    for name, layer, owner, weight in model.named_weights():
        if (id(weight), layer) not in seen:
            seen.add((id(weight), layer))
            owned_by = owner.class_name or type(owner).__name__
            found.append(Parameter(name, weight.shape, owned_by, not weight.frozen, expert=weight.expert))
    return tuple(found)


class _Tracer:
    def __init__(self, spec: ModelSpec, workload: Workload) -> None:
        reference = workload.preference is not None and not spec.trainable_numel
        self.forward_only = reference or workload.forward_only
        if workload.flat_units and spec.trainable_numel < spec.numel:
            spec = with_flat_units(spec, workload.flat_units)
        self.spec, self.workload = spec, workload
        pair = getattr(spec.arch, "seq2seq", None)
        hooks = pair is None or not pair.inputs  # transformers hooks the embeddings of models that read tokens
        reached = workload.checkpointing != "none" and workload.implementation == "hf" and hooks
        tower = workload.checkpoint_frozen_tower or trains_tower(spec)  # which a text model has not
        vision = getattr(spec.arch, "vision", None)
        hooked = reached and tower and (vision is None or vision.input_embedding)
        text_keys, tower_keys = layer_keys(spec, reached, hooked)
        self.tape = Tape(workload.device == "cuda", workload.dtype if workload.weights else None)
        self.tape.forward_only = self.forward_only
        net = Net(
            cast(Architecture, spec.arch),
            self.tape,
            workload.weights or workload.dtype,
            workload.attention,
            workload.checkpointing,
            workload.checkpointed,
            workload.loss,
            workload.implementation,
            workload.kernels,
            workload.wide_cache,
            workload.sequence_parallel_size,
            workload.adapters,
            text_keys,
            tower_keys,
            any(reached for _, reached in text_keys),
            any(reached for _, reached in tower_keys),
            tower,
            workload.images,
            transformers=workload.transformers,
            torchtitan=workload.torchtitan,
            compile=workload.compile,
            breaks_graphs=families.breaks_graphs(spec.family, workload),
            cudnn_masks=workload.cudnn_masks,
            early_stop=workload.early_stop,
            preference=workload.preference,
            without_adapters=reference,
        )
        if workload.compile and any(kind.mixer != "attention" for kind in getattr(spec.arch, "kinds", ())):
            raise NotModeled(
                f"torch.compile of {spec.family}'s layers that are not attention", field="compile", accepted="false"
            )
        if workload.compile and net.arch.moe is not None and net.arch.moe.modules:
            raise NotModeled("torch.compile of experts that are modules", field="compile", accepted="false")
        if workload.kernels == "mamba-ssm" and (workload.weights or workload.float8 or spec.tuning is not None):
            raise NotModeled(
                "mamba-ssm, which reads a projection's weight itself, under torch.autocast, in float8 or with adapters",
                field="kernels", accepted="torch",
            )  # fmt: skip
        if workload.kernels == "flash-attn packed" and spec.tuning is not None:
            why = "xformers' SwiGLU, which reads the projections' weights itself, with adapters"
            raise NotModeled(why, field="kernels", accepted="torch, liger")
        if workload.float8 is not None:
            from zsim.model import float8

            net.layer_keys = float8.layer_keys(net, workload.float8)
        self.model = families.build(net)
        if spec.tuning is not None:
            from zsim.model.lora import attach

            attach(self.model, net, spec.tuning)
        self.model.set_paths("")
        if workload.float8 is not None:
            float8.convert(self.model, workload.float8, workload.compile)
        self.index = {parameter.name: i for i, parameter in enumerate(spec.parameters)}
        for layer in self.model.all_modules():
            for name, weight in layer.weights.items():
                position = self._position(f"{layer.path}.{name}" if layer.path else name)
                if position is not None and weight.param.index < 0:  # a tied weight keeps its first name's place
                    weight.param.index = position
                    weight.param.trainable = spec.parameters[position].trainable
                    kept_in = spec.parameters[position].dtype
                    if workload.weights and kept_in:
                        weight.keep_in(kept_in)
                if weight.param.index < 0:
                    raise InputError(
                        f"{workload.implementation} has a parameter {layer.path}.{name} that {spec.name} has not",
                        field="implementation",
                    )

    def _position(self, name: str) -> int | None:
        return self.index.get(transformers_name(name) if self.workload.implementation == "torchtitan" else name)

    def run(self) -> Module:
        tape, workload = self.tape, self.workload
        target = workload.target_len or workload.local_seq_len
        shapes = [(workload.sequences, tokens) for tokens in (workload.local_seq_len, target)]
        ids, labels = (
            Tensor(Storage(tape, shape, "int64", False), shape, row_major(shape), "int64") for shape in shapes
        )
        root = tape.begin()
        loss = self.model(ids, labels)
        if not self.forward_only and not (loss.needs_grad and self.spec.trainable_numel):
            raise InputError("no parameter is trainable")
        check_compares(self.model.net)
        if workload.float8 is not None:
            from zsim.model.float8 import check_called

            check_called(self.model)
        tape.finish_forward()
        if not self.forward_only:
            tape.backward(loss)
        if workload.sequence_parallel_size > 1 and not _exchanges(tape):
            raise NotModeled(
                f"sequence parallelism of {self.spec.family}", field="sequence_parallel_size", accepted="1"
            )
        _number_labels(root, Counter())
        computes = {
            id(segment): _compute(segment, workload, self.spec.family in families.UNGATED) for segment in tape.segments
        }
        return self._plan(cast(Call, root.body[0]), 0, computes).module("", 0)

    def _plan(self, call: Call, cut: int, computes: dict[int, Compute]) -> _Plan:
        """The plan of a call; `cut` is the length of the path of the block that it belongs to."""
        layer: Layer = call.module
        body: list[_Plan | _Repeat | Compute] = []
        templates: dict[int, _Plan] = {}
        leading: dict[int, tuple[Compute, ...]] = {}
        before: list[Compute] = []
        layers = 0  # of a list, that are in the body
        for item in call.body:
            if isinstance(item, Segment):
                (before if item.leads else body).append(computes[id(item)])
            elif item.module.listed_in is None:
                body.append(self._plan(item, cut, computes))
            else:
                templates[id(item.module)] = self._plan(item, len(item.module.path), computes)
                leading[id(item.module)], before = tuple(before), []
                for block, repeat in self._repeated(item.module.listed_in, templates, layers):
                    body += [replace(one, label=f"{one.label}.{layers}") for one in leading[block]]
                    body.append(repeat)
                    layers += 1
        own = (layer, *(child for child in layer.children.values() if child.passive))
        return _Plan(
            layer.path[cut:],
            layer.class_name or type(layer).__name__,
            layer.role,
            tuple(weight.param.index for part in own for weight in _params(part)),
            body,
            layer.checkpointed,
            any(weight.expert for weight in layer.weights.values()),
            call.differentiable,
            len(call.in_backward),
            call.reached,
            layer.called_again,
            tuple(weight.param.index for weight in layer.idle),
        )

    def _repeated(self, blocks: Blocks, templates: dict[int, _Plan], first: int) -> Iterator[tuple[int, _Repeat]]:
        """Layers of a list from `first` on, as far as their templates have run: which block is the template, its plan,
        the layer's path, and how far behind its parameters are."""
        anchors: dict[int, tuple[_Plan, str, int]] = {}
        for number in range(first, len(blocks.kinds)):
            block = blocks.templates[blocks.kinds[number]][1]
            if id(block) not in templates:
                return
            if id(block) not in anchors:
                layer = next(module for module in block.all_modules() if module.weights)
                name, weight = next(iter(layer.weights.items()))
                suffix = f"{layer.path[len(block.path) :]}.{name}"
                anchors[id(block)] = (templates[id(block)], suffix, weight.param.index)
            plan, suffix, anchor = anchors[id(block)]
            path = f"{blocks.path}.{number}"
            position = self._position(path + suffix)
            assert position is not None
            yield id(block), _Repeat(plan, path, position - anchor)


class _Repeat(NamedTuple):
    """A block that runs as another one did."""

    plan: _Plan
    path: str
    shift: int


class _Plan(NamedTuple):
    """A module call to be written down once per layer: names without the block's path, indices of the template."""

    suffix: str
    module_class: str
    role: str
    params: tuple[int, ...]
    body: list[_Plan | _Repeat | Compute]
    checkpointed: bool
    expert: bool
    differentiable: int
    in_backward: int
    reached: bool
    called_again: bool
    idle: tuple[int, ...]

    def module(self, path: str, shift: int) -> Module:
        body: list[Module | Compute] = []
        for item in self.body:
            if isinstance(item, Compute):
                body.append(_shifted(item, shift) if shift and (item.grads or item.reads) else item)
            elif isinstance(item, _Plan):
                body.append(item.module(path, shift))
            else:
                body.append(item.plan.module(item.path, item.shift))
        params, idle = (tuple([index + shift for index in own]) if shift else own for own in (self.params, self.idle))
        return Module(
            path + self.suffix, self.module_class, self.role, params, tuple(body), self.checkpointed, self.expert,
            self.differentiable, self.in_backward, self.reached, self.called_again, idle,
        )  # fmt: skip


def _params(layer: Layer) -> Iterator[Weight]:
    yield from (weight for weight in layer.weights.values() if not any(weight is other for other in layer.lent))
    yield from layer.holds


def _exchanges(tape: Tape) -> bool:
    return any(
        isinstance(kernel, Exchange) and kernel.group == SEQUENCE_PARALLEL
        for segment in tape.segments
        for kernel in segment.forward.kernels
    )


def _number_labels(call: Call, seen: Counter[tuple[int, str]]) -> None:
    """Make labels unique within a module, over all its calls."""
    for item in call.body:
        if isinstance(item, Call):
            _number_labels(item, seen)
            continue
        key = (id(call.module), item.label)
        seen[key] += 1
        if seen[key] > 1:
            item.label = f"{item.label}.{seen[key]}"


def _compute(segment: Segment, workload: Workload, plain: bool) -> Compute:
    """`plain`: the activations of its model have no gate."""
    ways = segment.forward, segment.backward, segment.recompute
    forward, backward, recompute = (_merged(way.kernels) for way in ways)
    saved, resaved = tuple(segment.saved), tuple(segment.resaved)
    calls = [way.eager for way in ways]
    if workload.compile and not segment.logits and not (segment.frame is not None and segment.frame.eager):
        ungated = ungated_bytes(segment.label, saved or resaved, workload.dtype) if plain else 0
        forward, recompute = fused(forward, ungated), fused(recompute, ungated)
        backward = fused(backward, ungated, backward=True)
        saved = tuple(tensor for tensor in saved if not any(tensor is idle for idle in segment.idle))  # dead code
        entered = segment.forward.blocks  # and left again in backward, with its recomputation
        calls = [way.compiled(blocks) for way, blocks in zip(ways, (entered, entered, 0), strict=True)]
        saved, resaved = (
            kept(segment.label, tensors, workload.weights or workload.dtype) for tensors in (saved, resaved)
        )
    return Compute(
        segment.label,
        forward,
        backward,
        recompute,
        saved,
        resaved,
        tuple(segment.grads),
        tuple(segment.reads),
        segment.forward_peak,
        segment.forward_live,
        segment.backward_peak,
        segment.backward_live,
        segment.recompute_peak,
        segment.recompute_live,
        "logits" if segment.logits else "activations",
        segment.forward_alive,
        segment.backward_alive,
        segment.recompute_alive,
        *calls,
    )


def _shifted(c: Compute, shift: int) -> Compute:
    """The same work in a later block."""
    grads, reads = (tuple([index + shift for index in each]) for each in (c.grads, c.reads))
    return Compute(
        c.label, c.forward, c.backward, c.recompute, c.saved, c.resaved, grads, reads, c.forward_peak, c.forward_live,
        c.backward_peak, c.backward_live, c.recompute_peak, c.recompute_live, c.category, c.forward_alive,
        c.backward_alive, c.recompute_alive,
        c.forward_calls, c.backward_calls, c.recompute_calls,
    )  # fmt: skip


def _merged(kernels: list[Work]) -> tuple[Work, ...]:
    """Memory-bound kernels of one kind as one descriptor, at the place of the first since a collective or a wait."""
    merged: list[Work] = []
    places: dict[str, int] = {}
    for kernel in kernels:
        if not isinstance(kernel, Memory):
            merged.append(kernel)
            if isinstance(kernel, Exchange | Wait):
                places.clear()
        elif kernel.label in places:
            old = merged[places[kernel.label]]
            assert isinstance(old, Memory)
            merged[places[kernel.label]] = Memory(
                kernel.label,
                old.read_bytes + kernel.read_bytes,
                old.write_bytes + kernel.write_bytes,
                old.launches + kernel.launches,
            )
        else:
            places[kernel.label] = len(merged)
            merged.append(kernel)
    return tuple(merged)

"""Adapters on a frozen model, as peft 0.18 adds them, and base weights in few bits, as bitsandbytes keeps them.

An adapter is two ordinary Linear modules beside a frozen one. A 4-bit weight (bitsandbytes 0.48) is a parameter of
packed storage and a kernel that unpacks it into a temporary, once in every forward and once in every backward. An 8-bit
weight (0.50, LLM.int8()) is multiplied as it is with its input made int8, and unpacked in backward alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import cast

from zsim.errors import InputError, NotModeled
from zsim.model import families
from zsim.model import functional as F
from zsim.model.architecture import Architecture
from zsim.model.graph import Tensor
from zsim.model.layers import Dropout, Linear, Module, Net, Weight
from zsim.model.modules_to_save import ModuleDict, save_modules
from zsim.model.parts import part_of
from zsim.model.spec import COPY, ModelSpec, Parameter

ALL_LINEAR = "all-linear"  # peft: every Linear and Conv1D but the output projection
# peft 0.21 tuners_utils.py, _check_lora_target_modules_mamba: families in which it raises for this one, all-linear too.
NO_OUT_PROJ, OUT_PROJ = ("falcon_h1", "mamba2", "nemotron_h"), "out_proj"
# transformers 5.24 integrations/bitsandbytes.py replace_with_bnb_linear: of these classes, of no subclass; before 5 of
# subclasses as well. Conv1D's weights are turned as they are loaded.
QUANTIZED = ("Linear", "Conv1D")
OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "input_linear", "output_linear"}
# Stored elements are of the run's 16-bit dtype (bnb_4bit_quant_storage, which sharding needs): four weights each.
WEIGHTS_PER_ELEMENT = 4
# bitsandbytes functional.py quantize_4bit: a float32 maximum per 64 weights; with double quantization (quant_state
# nested) a byte instead, and a float32 for every 256 of them.
BLOCK, NESTED_BLOCK = 64, 256


@dataclass(frozen=True, slots=True)
class Lora:
    """`targets`: names of Linear modules ("q_proj", "self_attn.q_proj"), or "all-linear"; `pattern`, in their place, a
    regular expression of whole names ("model.layers.0.mlp.up_proj"), as peft takes text. alpha costs nothing.
    `exclude`: modules that are left out, by name or by the part of a vision-language model that they belong to."""

    r: int
    targets: tuple[str, ...] = (ALL_LINEAR,)
    alpha: float = 16.0
    dropout: float = 0.0
    exclude: tuple[str, ...] = ()
    pattern: str | None = None
    save: tuple[str, ...] = ()  # modules_to_save; none of them gets an adapter
    tie: bool = False  # ensure_weight_tying
    parameters: tuple[str, ...] = ()  # target_parameters

    def excludes(self, module: str) -> bool:
        names = (*self.exclude, *self.save)
        return part_of(module) in self.exclude or any(f".{name}." in f".{module}." for name in names)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a checkpoint is fine-tuned: `quantize` None, nf4 or int8; `double_quant` of the maxima of nf4's blocks;
    `experts`: tensors that stack them, too; `before_5`: as transformers before 5 has it."""

    lora: Lora | None = None
    quantize: str | None = None
    double_quant: bool = True
    before_5: bool = False
    experts: bool = False


def tune(spec: ModelSpec, tuning: Tuning) -> ModelSpec:
    """The model with adapters, everything else frozen. Raises InputError for targets that it has not.

    Names are peft's without its prefix `base_model.model.`.
    """
    if not isinstance(spec.arch, Architecture):
        raise InputError("adapters need a model with layers", field="lora", accepted="model: a config.json")
    if tuning.lora is None:
        raise InputError("quantized weights cannot be trained without adapters", field="quantize", accepted="lora: ...")
    if spec.arch.labels:
        why = f"adapters on {spec.family} with labels, whose head peft trains whole"
        raise NotModeled(why, field="lora", accepted="none")
    net = Net(spec.arch)
    model = families.build(net)
    absent, unsaved = attach(model, net, tuning)
    found = tuple(_parameters(model))
    state = quantization_bytes(found, tuning)
    lacking = (("targets", absent), ("modules_to_save", unsaved))
    notes = tuple(f"lora.{field}: the model has no {', '.join(n)}, which peft passes over" for field, n in lacking if n)
    return replace(
        spec, parameters=found, tuning=tuning, buffers_bytes=spec.buffers_bytes + state, notes=spec.notes + notes,
    )  # fmt: skip


def quantization_bytes(parameters: tuple[Parameter, ...], tuning: Tuning) -> int:
    """Bytes of the maxima of blocks (4 bits) or rows (8), which every rank holds in full: they are no parameters."""
    if tuning.quantize == "int8":
        return sum(4 * p.shape[0] for p in parameters if p.dtype == "int8")
    blocks = sum(ceil(p.numel * p.packed / BLOCK) for p in parameters if p.packed > 1)
    return blocks + 4 * ceil(blocks / NESTED_BLOCK) if tuning.double_quant else 4 * blocks


def attach(model: Module, net: Net, tuning: Tuning) -> tuple[list[str], list[str]]:
    """Replace modules of a freshly built model. Returns the targets that it has not, of which peft (0.21
    tuners_utils.py, inject_adapter) passes over all as long as it finds one, and the modules to save that it has not.
    """
    lora, ranks = tuning.lora, dict[str, int]()
    if lora and (lora.parameters or net.arch.moe):
        from zsim.model.param_lora import adapt_parameters, of_experts

        lora, ranks = of_experts(model, net.arch, lora)
        tuning = replace(tuning, lora=lora)
    if tuning.experts:
        from zsim.model.packed_experts import pack_experts

        pack_experts(model, net, tuning.quantize, tuning.double_quant)
        if ranks:
            what = "adapters on experts in 4 bits"
            raise NotModeled(what, field="lora.target_parameters", accepted="none; or quantize.experts: false")
    absent = _adapt(model, net, tuning, alone=not ranks)
    if ranks:
        absent += adapt_parameters(model, net, ranks)  # without dropout, which peft refuses and axolotl leaves out
    return absent, save_modules(model, net, lora.save, lora.tie) if lora and lora.save else []


def _adapt(model: Module, net: Net, tuning: Tuning, alone: bool) -> list[str]:
    """`alone`: no parameters get adapters besides."""
    pattern = tuning.lora.pattern if tuning.lora else None
    targets = () if tuning.lora is None or pattern else tuning.lora.targets
    matching = _matching(model, pattern) if pattern else set()
    if numbered := [target for target in targets if any(part.isdecimal() for part in target.split("."))]:
        raise NotModeled(f"adapters on some layers only: {numbered[0]}", field="lora.targets", accepted="q_proj, ...")
    model.set_paths("")
    hit: set[str] = set()
    excluded: set[str] = set()
    names: set[str] = set()
    quantized = False
    for parent in list(model.all_modules()):
        for name, module in list(parent.children.items()):
            if not module.is_linear:
                continue
            child = cast(Linear, module)  # or Conv1D, which has what is asked of it
            meant = {target for target in targets if f".{parent.path}.{name}".endswith(f".{target}")}  # as peft matches
            chosen = bool(meant) or child in matching
            if output := module.role == "head":  # peft adapts it if it is named, and transformers leaves it in 16 bits
                if not chosen:
                    continue
                if net.loss == "fused":
                    what = f"adapters on {name} under a fused loss, which takes its weight alone"
                    raise NotModeled(what, field="lora.targets", accepted="loss: hf")
            else:
                names.add(name)
                chosen = chosen or targets == (ALL_LINEAR,)
            if tuning.quantize and not output and (child.class_name in QUANTIZED or tuning.before_5):
                eight = tuning.quantize == "int8"
                child = (
                    Linear8bitLt(net, child, tuning.before_5) if eight else Linear4bit(net, child, tuning.double_quant)
                )
                setattr(parent, name, child)
                quantized = True
            if tuning.lora and chosen and tuning.lora.excludes(f"{parent.path}.{name}"):
                excluded |= meant or {name}
            elif tuning.lora and chosen:
                if says := _raises(name, child, net.arch.family):
                    accepted = f"other targets, or lora.exclude: [{name}]"
                    raise InputError(f"peft {says}", field="lora.targets", accepted=accepted)
                hit |= meant or {name}
                setattr(parent, name, LoraLinear(net, child, tuning.lora))
    if tuning.quantize and not quantized and not tuning.experts:
        what = f"quantized weights of {net.arch.family}: bitsandbytes gets none of its modules from transformers 5"
        raise NotModeled(what, field="quantize", accepted="none")
    if excluded and not hit and alone:
        what = f"leaves out all that lora.targets chooses: {', '.join(sorted(excluded))}"
        raise InputError(what, field="lora.exclude", accepted="some of these modules")
    if pattern and not hit:
        some = "model.layers.0.self_attn.q_proj; or a list of last parts: [q_proj, v_proj]"
        raise InputError(f"{pattern} is the whole name of no Linear module", field="lora.targets", accepted=some)
    missing = sorted(set(targets) - hit - excluded - {ALL_LINEAR})
    stacked = net.arch.moe is not None and not net.arch.moe.modules
    if (not hit and alone) or (stacked and not OF_EXPERTS.isdisjoint(missing)):  # which were modules once
        what = ", ".join(missing) or "Linear module"
        raise InputError(f"the model has no {what}", field="lora.targets", accepted=", ".join(sorted(names)))
    others = [module.path for module in model.all_modules() if type(module) is not LoraLinear]
    for target in missing:
        if any(f".{path}".endswith(f".{target}") for path in others):
            what = f"adapters on {target}, which is no Linear module"
            raise NotModeled(what, field="lora.targets", accepted=", ".join(sorted(names)))
    return missing


def _raises(name: str, module: Module, family: str) -> str:
    """What peft refuses: as it adapts a module, or as this one is called."""
    if name == OUT_PROJ and family in NO_OUT_PROJ:
        return f"puts no adapter on the {name} of {family}, and raises"
    if family == "qwen3_omni_moe_thinker" and name.isdecimal():  # of a list, and layers have such names, too
        return f"takes {name} for layers of {family}, which are no Linear, and raises"
    if module.several_results:  # lora/layer.py Linear.forward takes the dtype of the result
        return f"puts an adapter on the {name} of {family}, which raises as it is called: it has several results"
    return ""


def _matching(model: Module, pattern: str) -> set[Module]:
    """The modules whose whole name matches, in every layer that they stand for. Raises InputError, NotModeled."""
    matched: dict[Module, set[bool]] = {}
    try:
        for name, _, owner, _ in model.named_weights():
            matched.setdefault(owner, set()).add(bool(re.fullmatch(pattern, name.rpartition(".")[0])))
    except re.error as error:
        raise InputError(f"{pattern} is no regular expression: {error}", field="lora.targets") from None
    if any(len(answers) > 1 for answers in matched.values()):
        raise NotModeled(f"adapters on some layers only: {pattern}", field="lora.targets", accepted="q_proj, ...")
    return {owner for owner, answers in matched.items() if True in answers}


def _parameters(model: Module) -> Iterator[Parameter]:
    seen: set[tuple[int, int]] = set()
    for name, layer, owner, weight in model.named_weights():
        if (id(weight), layer) in seen:
            continue
        seen.add((id(weight), layer))
        shape, packed, dtype = weight.shape, 1, None
        if isinstance(owner, Linear8bitLt) and weight is owner.weight:
            dtype = "int8"
        if getattr(owner, "packing", None) or (isinstance(owner, Linear4bit) and weight is owner.weight):
            packed = WEIGHTS_PER_ELEMENT
            shape = (ceil(prod(weight.shape) / packed), 1)
        yield Parameter(
            name, shape, owner.class_name or type(owner).__name__, dtype=dtype, expert=weight.expert, packed=packed,
            trainable=".lora_" in name or COPY in name,
        )  # fmt: skip


class LoraLinear(Module):
    """peft/tuners/lora/layer.py Linear.forward: base(x) + B(A(dropout(x))) * scaling.

    `_cast_input_dtype` casts x to the dtype of A's weight. An adapter that is sharded by itself is still a shard then,
    and what it is given goes back to the dtype of the run: FSDP2 casts it in the unit's pre-forward, autocast FSDP1's.
    On a quantized base (bnb.py) x is left to autocast, wherever there is one.
    """

    kind = "residual"
    class_name = "Linear"

    def __init__(self, net: Net, base: Linear, lora: Lora) -> None:
        super().__init__(net)
        outputs, inputs = base.size
        self.base_layer = base
        self.logits, self.role = base.logits, base.role
        self.lora_dropout = ModuleDict(net)
        self.drop = self.lora_dropout.add(Dropout(net, lora.dropout))
        if not lora.dropout:
            self.drop.class_name = "Identity"
        self.children.pop("drop", None)
        self.lora_A = ModuleDict(net)
        self.lora_B = ModuleDict(net)
        self.lora_A.add(Linear(net, inputs, lora.r))
        self.lora_B.add(Linear(net, lora.r, outputs))

    @property
    def weight(self) -> Weight:
        """The base's, which some modules read before they call this one (peft 0.21 tuners_utils.py, BaseTunerLayer)."""
        return self.base_layer.weight

    @property
    def bias(self) -> Weight | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.net.without_adapters:
            return result
        dtype, a, b = x.dtype, self.lora_A.default, self.lora_B.default
        if not isinstance(self.base_layer, Linear4bit | Linear8bitLt):
            x = F.to(x, self.net.adapters or dtype)
        return F.add(result, F.scale(b(a(F.to(self.drop(x), dtype)))))


class Linear4bit(Linear):
    """bitsandbytes/nn/modules.py; autograd/_functions.py MatMul4Bit: saves nothing but the packed weight.

    Until 0.43.2 of July 2024 (pull request 1270) it kept its input too, as an attribute. The checkpoints that
    transformers made by default in those days, reentrant ones, ran forward without gradients, so that these inputs are
    there while a block is run again.
    """

    class_name = "Linear4bit"

    def __init__(self, net: Net, base: Linear, double_quant: bool) -> None:
        Module.__init__(self, net)
        if net.checkpointing == "selective":
            raise NotModeled("selective checkpointing of 4-bit products", accepted="none, full")
        self.weight = Weight(net, *base.size)
        self.bias = base.bias
        self.double_quant = double_quant

    def forward(self, x: Tensor) -> Tensor:
        came, x = x.dtype, F.low(x)
        tape, dtype = x.tape, x.dtype
        n, k = self.weight.shape
        flat = x if len(x.shape) == 2 else F.reshape(x, -1, k)
        m = flat.shape[0]

        def unpack() -> Tensor:
            return unpacked(self.net, (n, k), dtype, self.double_quant)

        def product() -> Tensor:
            weight = unpack()  # noqa: F841  alive during the product
            out = tape.empty((m, n), dtype)
            tape.gemm(m, n, k, dtype)
            return out

        def backward(g: Tensor) -> tuple[Tensor]:
            inputs = kept and kept()  # noqa: F841  alive until its end
            weight = unpack()  # noqa: F841
            grad = tape.empty((m, k), dtype)
            tape.gemm(m, k, n, dtype)
            return (grad,)

        needs_grad = flat.needs_grad
        kept = tape.save(flat) if needs_grad and self.net.older(4, 43) else None
        out = product()
        if needs_grad:
            tape.link((flat,), backward, out)
        if self.bias is not None:
            out = F.add(out, cast(Tensor, self.bias))
        out = F.to(out, came)
        return out if len(x.shape) == 2 else F.reshape(out, *x.shape[:-1], n)


def unpacked(net: Net, shape: tuple[int, ...], dtype: str, double_quant: bool) -> Tensor:
    """bitsandbytes functional.py dequantize_4bit."""
    tape, blocks = net.tape, ceil(prod(shape) / BLOCK)
    scales = tape.empty((blocks,), "float32") if double_quant else None
    if scales is not None:
        tape.memory(blocks, scales.nbytes, "dequantize")
    full = tape.empty(shape, dtype)
    tape.memory(prod(shape) // 2 + 4 * blocks, full.nbytes, "dequantize")
    return full


class Linear8bitLt(Linear):
    """bitsandbytes 0.50 nn/modules.py; autograd/_functions.py MatMul8bitLt with weights in int8 and a threshold for
    outliers, as transformers loads them; backends/cuda/ops.py and backends/default/ops.py for what its steps allocate.

    Backward needs no input, but the autograd function holds it as an attribute, which checkpointing does not reach:
    inputs of a checkpointed block's products stay. Until transformers 5 (modeling_utils.py) checkpoints were reentrant
    unless told otherwise. Those run forward without gradients, where the function sees none that it would need: the
    inputs are there only while a block is run again. Columns with outliers are few (7 of 4,096 in arXiv 2208.07339):
    the pass over the result that adds their product is counted, and no bytes of theirs.
    """

    class_name = "Linear8bitLt"

    def __init__(self, net: Net, base: Linear, reentrant: bool) -> None:
        Module.__init__(self, net)
        if net.checkpointing == "selective":
            raise NotModeled("selective checkpointing of 8-bit products", accepted="none, full")
        self.weight = Weight(net, *base.size)
        self.bias = base.bias
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        tape, dtype = x.tape, x.dtype
        n, k = self.weight.shape
        flat = x if len(x.shape) == 2 else F.reshape(x, -1, k)
        m, needs_grad = flat.shape[0], flat.needs_grad
        kept = tape.save(flat) if needs_grad and self.reentrant else None
        held = tape.hold(flat) if needs_grad and not self.reentrant else None
        rows = _int8_rows(flat)
        sums = tape.empty((m, n), "int32")
        tape.gemm(m, n, k, "int8")
        half = tape.empty((m, n), "float16")
        tape.memory(sums.nbytes + 4 * (m + n), half.nbytes, "dequantize")
        out = half if dtype == "float16" else F.pointwise(half, dtype=dtype)
        del sums, half
        out = F.pointwise(out)  # output.addmm(subA, subB)
        del rows

        def backward(g: Tensor) -> tuple[Tensor]:
            inputs = held if kept is None else kept()  # noqa: F841  alive until its end
            full = tape.empty((n, k), dtype)
            tape.memory(n * k, full.nbytes, "dequantize")
            tape.memory(full.nbytes + 4 * n, full.nbytes, "dequantize")  # times the rows' maxima, in place
            grad = tape.empty((m, k), dtype)
            tape.gemm(m, k, n, dtype)
            return (grad,)

        if needs_grad:
            tape.link((flat,), backward, out)
        return out if len(x.shape) == 2 else F.reshape(out, *x.shape[:-1], n)


def _int8_rows(x: Tensor) -> tuple[Tensor, ...]:
    """`int8_vectorwise_quant(x.to(float16), threshold)`: int8, and the maxima of rows."""
    tape, x = x.tape, x.detach()
    half = x if x.dtype == "float16" else F.pointwise(x, dtype="float16")
    outliers = F.pointwise(F.pointwise(half), dtype="bool")
    tape.memory(2 * outliers.nbytes, x.shape[-1])  # any(); argwhere(any(dim=0))
    stats = tape.empty((x.shape[0],), "float32")
    rows = tape.empty(x.shape, "int8")
    tape.memory(half.nbytes, rows.nbytes + stats.nbytes, "quantize")
    return rows, stats

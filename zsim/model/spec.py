"""What is trained: parameters, and the tree of modules in execution order with the work each does.

Two levels. `ModelSpec` is what a checkpoint defines: its parameters in `named_parameters()` order. Together
with a `Workload` it yields a `Module` tree (`ModelSpec.trace`), the model as PyTorch executes it for one
micro-batch: modules call children in order and compute in between. Strategies walk this tree; nothing in it
knows of ranks, shards or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from zsim.model.kernels import DTYPE_BYTES, NO_CALLS, Calls, Work

if TYPE_CHECKING:
    from zsim.model.lora import Tuning

COPY = ".modules_to_save."  # in names of what peft's wrapper holds, which trains in the place of what it wraps


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of `named_parameters()`. Tied parameters appear once, under the first name."""

    name: str
    shape: tuple[int, ...]
    module_class: str = "Linear"
    trainable: bool = True
    dtype: str | None = None  # storage dtype if it is not the run's (bitsandbytes nf4, fp32 routers)
    expert: bool = False  # belongs to one of several routed experts (MoE)
    parts: int = 1  # ranks that have others of this name (expert parallelism), itself among them
    home: str = "world"  # the group of ranks that have the same, as `zsim.program.ops.Program` names it
    packed: int = 1  # weights that one stored element holds (4-bit weights in 16-bit storage: 4)

    @property
    def numel(self) -> int:
        """Elements as stored, which is what frameworks move."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps from forward to backward."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return round(prod(self.shape) * DTYPE_BYTES[self.dtype])


# Unsaved tensors, each a number that is its own within the model's run, and its bytes. At a peak the number is negative
# where the tensor is older than the work; a layer that runs as another did has its numbers.
Unsaved = tuple[tuple[int, int], ...]
Alive = tuple[Unsaved, Unsaved]
UNKNOWN = 1 << 40  # from here on nobody knows them again


def numbered(sizes: Sequence[int]) -> Unsaved:
    """Tensors that are gone after the work that makes them."""
    return tuple([(UNKNOWN + place, nbytes) for place, nbytes in enumerate(sizes, 1)])


@dataclass(frozen=True, slots=True)
class Compute:
    """Work that a module does itself, between the calls of its children.

    Memory, all in bytes on one rank:
    - `saved` is held from this forward to the end of this backward. Under checkpointing it is what the policy
      keeps; `resaved` is what recomputation rebuilds just before the backward.
    - `forward_peak` / `forward_live`: tensors that nothing saves (inputs, outputs, temporaries, the residual
      stream) alive at the worst moment inside this forward, and right after it. `backward_*` the same for
      gradients of activations and temporaries, without parameter gradients.
    - `recompute_peak` / `recompute_live`: as `forward_*`, while recomputation runs (the gradient of the block's
      output is alive then).
    - Any of them may be negative: where selective recomputation has dropped what still counts as saved, and where a
      saved tensor becomes a parameter's gradient as it is (fused loss), which counts twice for a moment.
    - `forward_alive` and the like: the tensors behind the peak, and behind what is alive, oldest first.
    `*_calls`: what the issuing thread does besides launching the kernels.
    `grads` are the indices of parameters whose gradient this backward produces, in autograd's order. `reads`: of
    parameters that the module's own code takes from other modules than itself just before this work.
    """

    label: str
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    recompute: tuple[Work, ...] = ()
    saved: tuple[Saved, ...] = ()
    resaved: tuple[Saved, ...] = ()
    grads: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    forward_peak: int = 0
    forward_live: int = 0
    backward_peak: int = 0
    backward_live: int = 0
    recompute_peak: int = 0
    recompute_live: int = 0
    category: str = "activations"  # or "logits": where reports count `saved` and temporaries
    forward_alive: Alive = ((), ())
    backward_alive: Alive = ((), ())
    recompute_alive: Alive = ((), ())
    forward_calls: Calls = NO_CALLS
    backward_calls: Calls = NO_CALLS
    recompute_calls: Calls = NO_CALLS

    @property
    def saved_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.saved)

    @property
    def resaved_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.resaved)


@dataclass(frozen=True, slots=True)
class Module:
    """A module call. `body` holds child calls and own work in execution order.

    `params` are indices into `ModelSpec.parameters` of the parameters that it, or a module in it that is never called,
    owns directly (a tied lm_head lists the embedding's). Every torch module that is called appears, with or without
    parameters, because DeepSpeed's hooks fire on each. `role` marks what strategies need: "root", "embedding", "block"
    (the FSDP / checkpoint unit), "unit" (of FSDP alone), "norm" (the final one), "head", "".
    """

    name: str
    module_class: str = ""
    role: str = ""
    params: tuple[int, ...] = ()
    body: tuple[Module | Compute, ...] = ()
    checkpointed: bool = False
    expert: bool = False
    differentiable: int = 1  # of what it returns, how many require a gradient
    in_backward: int = 1  # and one comes: to how many results, of which those outside a list count as one
    reached: bool = True  # what it is called with requires a gradient
    called_again: bool = False  # recomputation calls it, with its hooks, and not its forward alone
    idle: tuple[int, ...] = ()  # parameters of modules in it that are never called, and that nobody reads


@dataclass(frozen=True, slots=True)
class Images:
    """What a vision tower is given: `per_sequence` images of `height` x `width` pixels in every sequence."""

    per_sequence: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Float8:
    """Linear modules in float8 (torchao). `recipe`: tensorwise | rowwise | rowwise_with_gw_hp. `exclude`: parts of
    names of modules that stay as they are; also first_linear, last_linear, auto_filter_small_kn (model.float8).
    `all_gather`: FSDP2 gathers them in float8."""

    recipe: str = "tensorwise"
    exclude: tuple[str, ...] = ()
    all_gather: bool = False
    precompute: bool = False  # of the scales of what is gathered, for all at once after the optimizer's step


@dataclass(frozen=True, slots=True)
class Preference:
    """Training by preference: a micro-batch is pairs, of a chosen and a rejected sequence each, all chosen ones first.

    `reference`: what the log-probabilities of the trained model are compared with, before its backward: those of a
    second `model`, of the same one without its `adapters`, or `none` that this step computes (computed before training,
    or a loss without any).
    `log_probs`: how a trainer makes them. log_softmax: of all logits but the last of a sequence | selective: sequence
    by sequence, all logits | sliced: sequence by sequence, all but the last | shifted: the same of a copy.
    """

    kind: str = "dpo"  # of the loss; what it costs the others say
    reference: str = "model"
    log_probs: str = "log_softmax"
    sharded: bool = True  # a second model under FSDP; False: every rank has all of it, as it has below ZeRO-3
    stored: str | None = None  # the dtype of a second model, but DeepSpeed's; None: as the trained one is stored
    widened: bool = False  # logits are cast to float32 first
    # tensors like all logits that the trainer still holds while the reference runs, and while it writes its metrics
    held: float = 0.0
    averaged: bool = False  # logits, of chosen and of rejected sequences, for which a trainer copies them
    likelihood: bool = False  # the cross-entropy of the chosen sequences is a part of the loss
    surveyed: bool = False  # entropies, means and the likeliest tokens of all logits are metrics
    metrics: int = 0  # numbers that the host asks the GPU for in every micro-step
    gathered: bool = False  # and gathers from all ranks before


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Forwards without gradients between two steps: batches of sequences as long as training's.

    `loss`: as Workload.loss, where it is another than training's.
    """

    micro_batch: int
    loss: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What one rank runs per micro-batch, apart from sharding.

    Under sequence parallelism (Ulysses) `sequence_parallel_size` ranks share its sequences: outside attention each
    has `local_seq_len` tokens of all of them.
    """

    micro_batch: int
    seq_len: int
    dtype: str = "bfloat16"  # of compute, and of activations and weights but under torch.autocast
    weights: str | None = None  # under torch.autocast in `dtype`: that of the weights
    adapters: str | None = None  # of adapters that are sharded by themselves, as they lie between uses; None: `dtype`
    # flash | flash3 | flash4 | cudnn | sdpa (which torch takes) | efficient (SDPA that is given a mask) | eager
    attention: str = "flash"
    cudnn_masks: bool = False  # efficient: cuDNN's kernel where SDPA takes that one first, as with torch 2.11 and later
    checkpointing: str = "none"  # none | full | selective (torchtitan's per-op policy)
    checkpointed: tuple[int, ...] | None = None  # the blocks it applies to; None: all
    early_stop: bool = True  # the second run stops at the last tensor that backward needs; else at the block's end
    # hf | torchtitan | llm-foundry | litgpt | torch.nn (families/encoder.py): whose modules (decides what is saved ...)
    implementation: str = "hf"
    # hf: fp32 logits | uncast: logits in their own dtype | held, uncast_held: which the training loop holds through the
    # backward | copied, copied_held: fp32 logits of all tokens but the last, copied (transformers before 4.49) |
    # copied_uncast, copied_cast: in their own dtype, the copy cast by torch.autocast or not (Llama before 4.31) |
    # compiled: by torch.compile, copied_compiled: of a copy | fused: in chunks, so that all logits never exist
    loss: str = "hf"
    # liger: its RMSNorm and SwiGLU | unsloth: its RMSNorm and cross-entropy, as fms-acceleration's fast kernels |
    # flash-attn, flash-attn packed: see model.flash_attn
    kernels: str = "torch"
    # Keys and values that the model hands back with the loss, cast to float32: of transformers up to 4.47, whose caches
    # are tuples, in training without checkpointing, by accelerate's autocast (utils/operations.py convert_to_fp32)
    wide_cache: bool = False
    compile: bool = False
    float8: Float8 | None = None
    device: str = "cuda"  # whose kernels; "cpu" is what torch records with fake tensors (the oracles)
    sequence_parallel_size: int = 1
    images: Images | None = None
    target_len: int | None = None  # tokens of the decoder of a model with an encoder, which has seq_len; None: as many
    # FSDP1: a frozen parameter beside a trained one in its unit has a gradient as well. "block"; "leaf": besides, every
    # module with a trained parameter of its own is a unit; "whole": the model is one
    flat_units: str = ""
    checkpoint_frozen_tower: bool = True  # its patches are made to require a gradient, as in transformers 5.24
    transformers: tuple[int, ...] | None = None  # the release whose models run, where it is an old one; None: 5.24
    torchtitan: tuple[int, int] | None = None  # year and month of its models, where they are old ones; None: 2026's
    preference: Preference | None = None  # None: the next token is learned
    evaluation: Evaluation | None = None  # after each step
    forward_only: bool = False  # what is traced is an evaluation
    workspace_bytes: int = 0  # of each thread that issues matrix products, on the GPU (Device.workspace_bytes)

    @property
    def local_seq_len(self) -> int:
        return self.seq_len // self.sequence_parallel_size

    @property
    def tokens(self) -> int:
        """Of one rank."""
        return self.sequences * self.local_seq_len

    @property
    def sequences(self) -> int:
        """Of a micro-batch; a pair is two."""
        return self.micro_batch if self.preference is None else 2 * self.micro_batch


def every_nth(blocks: int, n: int) -> tuple[int, ...]:
    """`Workload.checkpointed` of torchtitan's `selective_ac_option = n`: the n-th block, the 2n-th and so on.

    Source: torchtitan distributed/activation_checkpoint.py `_apply_layer_sac`.
    """
    return tuple(range(n - 1, blocks, n))


@dataclass(frozen=True)
class ModelSpec:
    """A model as its checkpoint defines it. Build the executed tree with `trace(workload)` in `model.trace`."""

    name: str
    family: str
    parameters: tuple[Parameter, ...]
    arch: object  # the family's normalized configuration (model.architecture.Architecture)
    buffers_bytes: int = 0  # non-parameter state on the GPU: rotary tables
    index_buffers_bytes: int = 0  # of these, what is int64: positions
    complex_buffers_bytes: int = 0  # and what is complex64: rotations
    notes: tuple[str, ...] = ()  # what was assumed while reading
    tuning: Tuning | None = None  # adapters and quantized weights
    conversion: Conversion | None = None  # of its experts into those of one rank among several
    _cache: dict = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Weights, however they are stored, of all experts."""
        return sum(parameter.numel * parameter.packed * parameter.parts for parameter in self.parameters)

    @property
    def trainable_numel(self) -> int:
        return sum(parameter.numel * parameter.parts for parameter in self.parameters if parameter.trainable)


@dataclass(frozen=True)
class Conversion:
    """What DeepSpeed's AutoEP made of `source`. `executed`: the same with parameters in the order of its modules, where
    their numbers follow another."""

    size: int  # ranks that share the experts
    source: ModelSpec  # before
    executed: ModelSpec | None = None

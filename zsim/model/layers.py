"""The torch modules that decoders are made of, on a tape: parameters in registration order, forward as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zsim.model import functional as F
from zsim.model import liger
from zsim.model import products as P
from zsim.model.activations import ACTIVATIONS
from zsim.model.architecture import Architecture
from zsim.model.graph import Param, Storage, Tensor, row_major
from zsim.model.spec import Images, Preference
from zsim.model.tape import Tape

if TYPE_CHECKING:
    from zsim.model.float8 import Casts


@dataclass
class Net:
    """What every module is built with: the tape it runs on, the architecture and how it is run."""

    arch: Architecture
    tape: Tape = field(default_factory=Tape)
    dtype: str = "bfloat16"  # of weights, and of what is made of nothing else
    attention: str = "flash"
    checkpointing: str = "none"
    checkpointed: tuple[int, ...] | None = None  # the blocks it applies to; None: all
    loss: str = "hf"
    implementation: str = "hf"
    kernels: str = "torch"
    wide_cache: bool = False
    sequence_parallel_size: int = 1  # ranks that share the sequences (Ulysses)
    adapters: str | None = None  # dtype of adapters' shards, where it is another one
    layer_keys: tuple[Hashable, ...] = ()  # per layer: blocks are traced once per key (which parameters are frozen)
    tower_keys: tuple[Hashable, ...] = ()  # of the layers of a vision tower
    reached: bool = False  # some layer's input requires a gradient
    reached_tower: bool = False
    tower_checkpointing: bool = True  # where checkpointing is on
    images: Images | None = None
    hooks_inputs: bool = True  # the input embedding is one that transformers finds
    transformers: tuple[int, ...] | None = None  # see Workload
    torchtitan: tuple[int, int] | None = None
    compile: bool = False
    breaks_graphs: bool = False  # attention does, under torch.compile
    cudnn_masks: bool = False  # see Workload
    early_stop: bool = True  # see Workload
    preference: Preference | None = None
    compares: bool = False  # the model has come to the loss of its pairs
    without_adapters: bool = False  # peft's disable_adapter

    @property
    def copies_logits(self) -> bool:
        return self.loss.startswith("copied")

    def older(self, *release: int) -> bool:
        """Whether the models are those of a transformers before `release`."""
        return self.transformers is not None and self.transformers < release

    def titan_before(self, year: int, month: int) -> bool:
        return self.torchtitan is not None and self.torchtitan < (year, month)

    @property
    def loss_is_a_function(self) -> bool:
        """transformers 4.46 loss/loss_utils.py ForCausalLMLoss widens the logits, which the model still holds."""
        return self.transformers is not None and self.transformers >= (4, 46)

    def layers_save(self, x: Tensor) -> bool:
        """Whether layers keep what they multiply the tensors with that they make of `x`, the first one's input."""
        return x.needs_grad or self.reached

    def checkpoints(self, block: int) -> bool:
        return self.checkpointing != "none" and (self.checkpointed is None or block in self.checkpointed)

    @property
    def inputs_require_grad(self) -> bool:
        """transformers 5.24 activation_checkpointing_enable: enable_input_require_grads, on the input embeddings of the
        text model and of a vision tower, frozen or not."""
        return self.checkpointing != "none" and self.implementation == "hf" and self.hooks_inputs

    def tower(self) -> Net:
        """What the modules of the vision tower are built with."""
        assert self.arch.vision is not None
        policy = self.checkpointing if self.tower_checkpointing else "none"
        return replace(
            self,
            arch=self.arch.vision.blocks,
            layer_keys=self.tower_keys,
            reached=self.reached_tower,
            checkpointing=policy,
            checkpointed=None if self.arch.vision.checkpointed else (),
            hooks_inputs=self.arch.vision.input_embedding,
            attention="sdpa" if self.attention == "efficient" else self.attention,  # it has no mask
            breaks_graphs=False,  # nor positions
        )

    def encoder(self) -> Net:
        """What the modules of an encoder are built with, where a decoder reads it."""
        return replace(
            self, layer_keys=self.tower_keys, reached=self.reached_tower, hooks_inputs=not self.arch.pair.inputs
        )

    def decoder(self) -> Net:
        return replace(self, arch=self.arch.pair.decoder, hooks_inputs=not self.arch.pair.inputs)


class Weight(Tensor):
    """A parameter: a leaf that is always there. `expert`: one of several routed experts. `frozen`: by its own model."""

    __slots__ = ("expert", "frozen")

    def __init__(self, net: Net, *shape: int, expert: bool = False) -> None:
        super().__init__(Storage(net.tape, shape, net.dtype, False), shape, row_major(shape), net.dtype)
        self.param: Param = Param(-1, True)
        self.expert = expert
        self.frozen = False

    def keep_in(self, dtype: str) -> None:
        """Another dtype than the rest has: under torch.autocast, which leaves it to operators to promote."""
        self.storage, self.dtype = Storage(self.tape, self.shape, dtype, False), dtype


class Module:
    """A torch module: attributes that are modules or weights are registered in order of assignment.

    `kind` labels its own memory-bound kernels; `logits` books its memory with the logits.
    """

    kind = "pointwise"
    class_name = ""
    role = ""
    logits = False
    listed_in: Blocks | None = None  # the list that this module is a template of
    checkpointed = False
    called_again = False  # of a block that is checkpointed: recomputation calls it, with its hooks
    unread = False  # of a block: nothing reads its result
    passive = False  # never called: whoever holds it reads its parameters
    is_linear = False  # peft takes it for a Linear
    several_results = False  # it returns more than one tensor
    holds: tuple[Weight, ...] = ()  # of modules in it that are never called, and that it reads
    lent: tuple[Weight, ...] = ()  # of its own, that another module holds
    idle: tuple[Weight, ...] = ()  # of modules in it that are never called, and that nobody reads

    def __init__(self, net: Net) -> None:
        self.net = net
        self.path = ""  # from the root; of a template, that of the first layer it stands for
        self.children: dict[str, Module] = {}
        self.weights: dict[str, Weight] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module) and name != "listed_in":
            self.children[name] = value
        elif isinstance(value, Weight):
            self.weights[name] = value
        object.__setattr__(self, name, value)

    def __call__(self, *args: Any) -> Any:
        tape = self.net.tape
        outer, tape.label = tape.label, self.kind
        tape.enter(self, args)
        result = self.forward(*args)
        tape.leave(result)
        tape.label = outer
        return result

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError

    def all_modules(self) -> Iterator[Module]:
        """This module and all below, of repeated blocks one each."""
        yield self
        for child in self.children.values():
            yield from child.all_modules()

    def set_paths(self, path: str) -> None:
        """Give this module and all below their names."""
        self.path = path
        for name, child in self.children.items():
            child.set_paths(f"{path}.{name}" if path else name)

    def buffers_bytes(self) -> int:
        """Bytes of buffers on the device: rotary frequencies, twice (transformers keeps the original ones, too)."""
        return sum(child.buffers_bytes() for child in self.children.values())

    def index_buffers_bytes(self) -> int:
        """Of these, those of int64."""
        return sum(child.index_buffers_bytes() for child in self.children.values())

    def complex_buffers_bytes(self) -> int:
        """And those of complex64."""
        return sum(child.complex_buffers_bytes() for child in self.children.values())

    def named_weights(self, prefix: str = "", layer: int = -1) -> Iterator[tuple[str, int, Module, Weight]]:
        """(name, layer or -1, owner, weight) in the order of `named_parameters`; tied weights under every name."""
        for name, weight in self.weights.items():
            yield prefix + name, layer, self, weight
        for name, child in self.children.items():
            yield from child.named_weights(f"{prefix}{name}.", layer)


class Blocks(Module):
    """A ModuleList of blocks that holds one template per distinct layer instead of every layer.

    `kinds[i]` tells layers apart; `make(i)` builds layer i. `role`: "" where FSDP wraps a part of each instead.
    """

    def __init__(
        self, net: Net, kinds: tuple[Hashable, ...], make: Callable[[int], Module], role: str = "block"
    ) -> None:
        super().__init__(net)
        keys = net.layer_keys or (None,) * len(kinds)
        checkpointed = map(net.checkpoints, range(len(kinds)))
        self.kinds = tuple(zip(kinds, keys, checkpointed, strict=True))
        self.templates: dict[Hashable, tuple[int, Module]] = {}
        for index, kind in enumerate(self.kinds):
            if kind not in self.templates:
                block = make(index)
                block.role, block.listed_in, block.checkpointed = role, self, net.checkpoints(index)
                self.templates[kind] = (index, block)

    def __iter__(self) -> Iterator[Module]:
        """The distinct blocks, in order of first use."""
        for _, block in self.templates.values():
            yield block

    def numbered(self) -> Iterator[tuple[int, Module]]:
        """The distinct blocks with the number of the first layer that each stands for."""
        yield from self.templates.values()

    def set_paths(self, path: str) -> None:
        self.path = path
        for index, block in self.templates.values():
            block.set_paths(f"{path}.{index}")

    def named_weights(self, prefix: str = "", layer: int = -1) -> Iterator[tuple[str, int, Module, Weight]]:
        for index, kind in enumerate(self.kinds):
            yield from self.templates[kind][1].named_weights(f"{prefix}{index}.", index)

    def all_modules(self) -> Iterator[Module]:
        yield self
        for block in self:
            yield from block.all_modules()

    def buffers_bytes(self) -> int:
        return sum(self.templates[kind][1].buffers_bytes() for kind in self.kinds)


class Linear(Module):
    kind = "gemm"
    class_name = "Linear"
    is_linear = True
    float8: Casts | None = None  # it is a Float8Linear
    called = False

    def __init__(self, net: Net, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(net)
        self.weight = Weight(net, outputs, inputs)
        self.bias = Weight(net, outputs) if bias else None

    @property
    def size(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        outputs, inputs = self.weight.shape
        return outputs, inputs

    def forward(self, x: Tensor) -> Tensor:
        self.called = True
        if self.float8 is not None:
            return self.float8.linear(x, self.weight, self.bias)
        return P.linear(x, self.weight, self.bias)


class Convolution(Module):
    """`nn.Conv1d` of a kernel of `width` for each channel, [c, 1, width]. The models that have one read its parameters
    and never call it."""

    class_name = "Conv1d"
    passive = True

    def __init__(self, net: Net, channels: int, width: int, bias: bool) -> None:
        super().__init__(net)
        self.weight = Weight(net, channels, 1, width)
        self.bias = Weight(net, channels) if bias else None


class Embedding(Module):
    kind = "embedding"
    class_name = "Embedding"
    role = "embedding"
    copied = False  # its result, before the first block has it
    takes_tokens = True  # and is the one that transformers finds

    def __init__(self, net: Net, rows: int, width: int) -> None:
        super().__init__(net)
        self.weight = Weight(net, rows, width)

    def forward(self, indices: Tensor) -> Tensor:
        out = P.embedding(indices, self.weight)
        return require_grad(self.net, out, self.net.images is not None or self.copied) if self.takes_tokens else out


class PositionEmbedding(Embedding):
    """Of what comes to those of tokens: positions, or types of tokens."""

    takes_tokens = False


def require_grad(net: Net, out: Tensor, copied: bool) -> Tensor:
    """What a frozen embedding returns, where checkpointing makes it require a gradient: a leaf, which its
    AccumulateGrad keeps. `copied`: before it comes to the first block, which keeps it anyway."""
    if net.inputs_require_grad and not out.needs_grad:
        tape = out.tape
        saved, leaf = tape.save(*([out] if copied else [])), out.detach()

        def backward(g: Tensor) -> tuple[()]:
            saved()
            tape.unread += [g, leaf]
            return ()

        tape.link((), backward, out)
    return out


class RMSNorm(Module):
    """In float32 and back, then the weight (LlamaRMSNorm)."""

    kind = "norm"
    fused = True  # by Liger and Unsloth, where they are asked for

    def __init__(self, net: Net, width: int, class_name: str) -> None:
        super().__init__(net)
        self.class_name = class_name
        self.weight = Weight(net, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.net.kernels.startswith("flash-attn"):
            from zsim.model import flash_attn

            return flash_attn.rms_norm(x, self.weight)
        if self.fused and self.net.kernels in ("liger", "unsloth"):
            in_place = self.net.kernels != "liger" or self.net.arch.family not in liger.NORMS_RESULTS
            return liger.rms_norm(x, self.weight, in_place)
        if self.net.older(4, 31):
            return self._first(x)
        dtype = x.dtype
        x = F.to(x, "float32")
        variance = F.mean_last(F.power(x))
        x = F.mul(x, F.rsqrt(F.shift(variance)))
        return F.mul(self.weight, F.to(x, dtype))

    def _first(self, x: Tensor) -> Tensor:
        """LlamaRMSNorm of transformers 4.28 to 4.30: keeps its input in both dtypes; in 4.30 the weight multiplies in
        float32."""
        dtype = x.dtype
        variance = F.mean_last(F.power(F.to(x, "float32")))
        x = F.mul(x, F.rsqrt(F.shift(variance)))
        if self.net.older(4, 30):
            return F.mul(self.weight, F.to(x, dtype))
        return F.to(F.mul(self.weight, x), dtype)


class LayerNorm(Module):
    kind = "norm"
    class_name = "LayerNorm"

    def __init__(self, net: Net, width: int, bias: bool = True, affine: bool = True) -> None:
        super().__init__(net)
        self.weight = Weight(net, width) if affine else None
        self.bias = Weight(net, width) if bias and affine else None

    def forward(self, x: Tensor) -> Tensor:
        return P.layer_norm(x, self.weight, self.bias)


class Identity(Module):
    class_name = "Identity"

    def forward(self, x: Tensor) -> Tensor:
        return x


class ModuleList(Module):
    """Holds modules that are called one by one."""

    class_name = "ModuleList"

    def __init__(self, net: Net, modules: list[Module]) -> None:
        super().__init__(net)
        for number, module in enumerate(modules):
            setattr(self, str(number), module)


class Dropout(Module):
    kind = "dropout"
    class_name = "Dropout"

    def __init__(self, net: Net, p: float) -> None:
        super().__init__(net)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p)


class Activation(Module):
    """An entry of transformers' ACT2FN (or `nn.GELU`): `name` as in config.json."""

    kind = "activation"

    def __init__(self, net: Net, name: str) -> None:
        super().__init__(net)
        self.class_name, self.function = ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

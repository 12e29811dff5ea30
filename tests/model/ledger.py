"""Walks a module tree as PyTorch executes it and adds up what it says, for comparison with recordings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zsim.model.kernels import Attention, Gemm, Kernel, Memory
from zsim.model.spec import Compute, ModelSpec, Module, Workload
from zsim.model.trace import trace


def modules(module: Module) -> Iterator[Module]:
    yield module
    for item in module.body:
        if isinstance(item, Module):
            yield from modules(item)


def computes(module: Module) -> Iterator[Compute]:
    for item in module.body:
        if isinstance(item, Module):
            yield from computes(item)
        else:
            yield item


def block(tree: Module) -> Module:
    return next(module for module in modules(tree) if module.role == "block")


def flops(kernels: list[Kernel]) -> float:
    return sum(kernel.flops for kernel in kernels if isinstance(kernel, Gemm | Attention))


def memory_bound(kernels: list[Kernel]) -> tuple[int, float]:
    """Launches and bytes."""
    found = [kernel for kernel in kernels if isinstance(kernel, Memory)]
    return sum(kernel.launches for kernel in found), sum(kernel.bytes for kernel in found)


@dataclass
class Ledger:
    """Bytes alive through one step: what computes hold as saved, their temporaries, gradients of parameters."""

    spec: ModelSpec
    tree: Module
    itemsize: int = 2
    saved: int = 0
    grads: int = 0
    after_forward: int = 0
    peak_forward: int = 0
    peak_backward: int = 0
    calls: list[tuple[str, str]] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    forward_kernels: list[Kernel] = field(default_factory=list)
    backward_kernels: list[Kernel] = field(default_factory=list)  # with those of recomputation

    @classmethod
    def of_run(cls, spec: ModelSpec, run: Mapping[str, Any]) -> Ledger:
        """Of the step that a `run` of validation/oracles/families is; its "padded" is FlashAttention, too."""
        attention = "flash" if run["attention"] == "padded" else run["attention"]
        workload = Workload(
            run["batch"], run["seq"], attention=attention, checkpointing=run["checkpointing"], device="cpu"
        )
        return cls(spec, trace(spec, workload))

    def __post_init__(self) -> None:
        self._forward(self.tree)
        self._backward(self.tree)

    def _forward(self, module: Module) -> None:
        self.calls.append((module.name, module.module_class))
        for item in module.body:
            if isinstance(item, Module):
                self._forward(item)
                continue
            self.saved += item.saved_bytes
            self.peak_forward = max(self.peak_forward, self.saved + item.forward_peak)
            self.after_forward = self.saved + item.forward_live
            self.forward_kernels += item.forward

    def _recompute(self, module: Module) -> None:
        for item in module.body:
            if isinstance(item, Module):
                self._recompute(item)
                continue
            self.saved += item.resaved_bytes
            self.peak_backward = max(self.peak_backward, self.saved + self.grads + item.recompute_peak)
            self.backward_kernels += item.recompute

    def _backward(self, module: Module) -> None:
        if module.checkpointed:
            self._recompute(module)
        for item in reversed(module.body):
            if isinstance(item, Module):
                self._backward(item)
                continue
            names = [self.spec.parameters[index] for index in item.grads]
            self.ready += [parameter.name for parameter in names]
            self.grads += sum(parameter.numel * self.itemsize for parameter in names)
            self.peak_backward = max(self.peak_backward, self.saved + self.grads + item.backward_peak)
            self.saved -= item.saved_bytes + item.resaved_bytes
            self.backward_kernels += item.backward

"""Sees every c10d collective of a training run on its way to the process group, and writes it down as a row.

A TorchDispatchMode sees Python callers and C++ callers (the DDP reducer) alike; on CPU the autograd engine runs in the
calling thread, so backward is seen too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

NAMES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce_coalesced",
    "_allgather_base_": "all_gather_into_tensor", "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base_": "reduce_scatter_tensor", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "broadcast_": "broadcast", "reduce_": "reduce", "barrier": "barrier", "send": "send", "recv_": "recv",
    "alltoall_base_": "all_to_all_single", "alltoall_": "all_to_all", "gather_": "gather", "scatter_": "scatter",
}  # fmt: skip
# Ops that take (outputs, inputs, ...); the others work in place on their first argument.
OUTPUT_FIRST = {
    "_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "_reduce_scatter_base_", "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_", "alltoall_base_", "alltoall_", "gather_", "scatter_",
}  # fmt: skip
FUNCTIONAL = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single"}


class Recorder(TorchDispatchMode):
    """Collects rows; the training loop says where it stands through `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.step, self.micro, self.phase = 0, 0, "init"
        self.enabled = True
        self._names: dict[int, str] = {}
        self._marked: set[str] = set()
        self._stack: list[str] = []
        self._backward_module: str | None = None

    def at(self, phase: str, *, step: int | None = None, micro: int | None = None) -> None:
        self.phase = phase
        self.step = self.step if step is None else step
        self.micro = self.micro if micro is None else micro
        self._stack.clear()
        if phase == "step":
            self._backward_module = None

    def watch(self, model: torch.nn.Module, marked: Iterable[str]) -> None:
        """Call before the engine wraps the model: rows then name the module whose forward is running."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._marked = set(marked)

        def before(module: torch.nn.Module, args: Any) -> None:
            if (name := self._names.get(id(module))) is not None:
                self._stack.append(name)
                self._mark("fwd_begin", name)

        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            if (name := self._names.get(id(module))) is not None:
                self._mark("fwd_end", name)
                if self._stack and self._stack[-1] == name:
                    self._stack.pop()

        torch.nn.modules.module.register_module_forward_pre_hook(before)
        torch.nn.modules.module.register_module_forward_hook(after)

    def watch_backward(self, model: torch.nn.Module) -> None:
        """Call after the engine has installed its own hooks, so that the marker sits on a module's final output."""
        for module in model.modules():
            if (name := self._names.get(id(module))) is not None:
                module.register_forward_hook(lambda _module, _args, output, name=name: self._hook(output, name))

    def watch_optimizer(self, optimizer: Any) -> None: ...

    def _hook(self, output: Any, name: str) -> None:
        leaves = list(output.values()) if isinstance(output, Mapping) else tree_flatten(output)[0]
        tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]

        def begin(_gradient: torch.Tensor) -> None:
            self._backward_module = name
            self._mark("bwd_begin", name)

        if tensors:
            tensors[0].register_hook(begin)

    def _mark(self, what: str, module: str) -> None:
        if self.enabled and module in self._marked:
            self.rows.append(self._row("mark") | {"what": what, "module": module})

    def _row(self, kind: str) -> dict[str, Any]:
        return {"step": self.step, "micro": self.micro, "phase": self.phase, "kind": kind}

    def _where(self) -> str | None:
        return self._stack[-1] if self._stack else self._backward_module if self.phase == "backward" else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls.__name__ == "DTensor" for cls in types):
            return NotImplemented  # let DTensor desugar into collectives first
        if self.enabled and func.namespace == "c10d":
            self._log(func, args, kwargs or {})
        elif self.enabled and func.namespace == "_c10d_functional" and func._opname in FUNCTIONAL:
            self._log_functional(func._opname, args)
        elif self.enabled and func.namespace == "deepspeed" and func._opname == "dim_zero_all_to_all":
            self._log_exchange(*args)
        return func(*args, **(kwargs or {}))

    def _log(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = func._schema.name.split("::")[1]
        outputs, inputs = (args[0], args[1]) if name in OUTPUT_FIRST else (args[0], args[0])
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given.update(kwargs)
        group = None
        if "process_group" in given:
            group = dist.get_process_group_ranks(dist.ProcessGroup.unbox(given["process_group"]))
        row = self._collective(NAMES.get(name, name), _tensors(inputs), _tensors(outputs), group)
        if "reduce_op" in given:
            row["reduce_op"] = _reduce_op()
        if "root_rank" in given:
            row["root"] = given["root_rank"]
        self.rows.append({key: value for key, value in row.items() if value is not None})

    def _log_functional(self, name: str, args: Sequence[Any]) -> None:
        """`args`: the tensor, what kind of reduction, ..., the group's name last."""
        group = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(args[-1]))
        row = self._collective(name, [args[0]], [args[0]], group) | {"functional": True}
        if name == "all_gather_into_tensor":
            row["out_numel"] *= len(group)
        elif name == "reduce_scatter_tensor":
            row["out_numel"] //= len(group)
        if "reduce" in name:
            row["reduce_op"] = args[1]
        self.rows.append({key: value for key, value in row.items() if value is not None})

    def _log_exchange(self, tensor: torch.Tensor, group_name: str) -> None:
        """Ulysses: inside its operator, which the mode does not enter, stands one all_to_all_single."""
        from deepspeed.sequence.layer import _all_to_all_groups

        group = dist.get_process_group_ranks(_all_to_all_groups[group_name])
        self.rows.append(self._collective("all_to_all_single", [tensor], [tensor], group))

    def _collective(
        self, op: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], group: list[int] | None
    ) -> dict[str, Any]:
        row = self._row("coll") | {
            "op": op,
            "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else None,
            "in_numel": sum(t.numel() for t in inputs),
            "out_numel": sum(t.numel() for t in outputs),
            "group": group,
            "module": self._where(),
        }
        if self._stack and self.phase == "backward":
            row["recompute"] = True
        return row


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _reduce_op() -> str | None:
    """The `op` argument of the torch.distributed call under way: the dispatcher shows it only as an opaque object."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and "op" in frame.f_locals:
            op = frame.f_locals["op"]
            return str(getattr(op, "op", op)).split(".")[-1]
        frame = frame.f_back  # type: ignore[assignment]
    return None

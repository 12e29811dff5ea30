"""Who holds the memory at the peak: tensors of equal blocks summed up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zsim.engine.timeline import TEMPORARY
from zsim.model.spec import Parameter
from zsim.program.ops import DELAYED_FREES
from zsim.result.critical_path import RankView
from zsim.result.memory import peak_index
from zsim.result.spec import Result


@dataclass(frozen=True, slots=True)
class Holder:
    """`count` tensors called `tensor` ("saved model.layers.*.mlp.act_fn.activation") hold `nbytes` in all."""

    category: str
    tensor: str
    count: int
    nbytes: int


def holders(result: Result) -> list[Holder]:
    """What is allocated on the fullest GPU at its peak, the largest first."""
    events = RankView(result.program, result.timeline, result.gpu.peak_rank).ledgers["gpu"]
    live: dict[tuple[str, str], int] = {}
    for event in events[: peak_index(events) + 1]:
        if event.category != DELAYED_FREES:
            tensor = event.category, event.key
            live[tensor] = live.get(tensor, 0) + event.nbytes
    sums: dict[tuple[str, str], list[int]] = {}
    for (category, key), nbytes in live.items():
        if nbytes:
            total = sums.setdefault((category, _name(key, result.setup.model.parameters)), [0, 0])
            total[0] += 1
            total[1] += nbytes
    found = [Holder(category, name, count, nbytes) for (category, name), (count, nbytes) in sums.items()]
    return sorted(found, key=lambda holder: -holder.nbytes)


def _name(key: str, parameters: Sequence[Parameter]) -> str:
    """A tensor's name without layers and sub-groups: "full:17" -> "full model.layers.*.mlp.up_proj.weight"."""
    if key == TEMPORARY:
        return "inside the kernel at the peak"
    numbered = re.fullmatch(r"(full|regathered|grad):(\d+)", key)
    if numbered and int(numbered[2]) < len(parameters):
        key = f"{numbered[1]}:{parameters[int(numbered[2])].name}"
    key = re.sub(r"^(re)?saved:\d+:\.?", lambda match: f"{match[1] or ''}saved:", key)
    key = re.sub(r"^optimizer:\d+_(\w+)$", r"\1", key)
    key = key + "(root)" if key.endswith(":") else key
    return re.sub(r"(?<=[.:])\d+(?=[.:]|$)", "*", key).replace(":", " ", 1)

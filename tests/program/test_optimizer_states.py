"""States of real optimizers after one step, against those of the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zsim.plan.spec import Optimizer
from zsim.program.optimizer import state_bytes

torch = pytest.importorskip("torch")
SHAPES = [(24, 40), (40,), (7, 3), (3, 5, 8)]


def adafactor(params: Any) -> Any:
    return pytest.importorskip("transformers.optimization").Adafactor(params)


@pytest.mark.parametrize(
    ("ours", "make"),
    [
        (Optimizer("adamw"), torch.optim.AdamW),
        (Optimizer("adam"), torch.optim.Adam),
        (Optimizer("sgd"), lambda params: torch.optim.SGD(params, lr=0.1)),
        (Optimizer("sgd", momentum=True), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        (Optimizer("adafactor"), adafactor),
        (Optimizer("adafactor"), torch.optim.Adafactor),
    ],
    ids=["adamw", "adam", "sgd", "sgd with momentum", "transformers' adafactor", "torch's adafactor"],
)
def test_bytes_of_states(ours: Optimizer, make: Callable[[Any], Any]) -> None:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = make(params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and value.dim()  # counters have none
    }
    assert state_bytes(ours, [parameter.numel() for parameter in params], 4, SHAPES) == sum(kept.values())

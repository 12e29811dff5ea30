"""The figures that predictions of published runs are to reach, each beside what it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zsim.validation.parts import Part
from zsim.validation.published import Prediction, Score

# Which runs of torchtitan state what is reserved eager and compiled, on 8 and on 128 GPUs.
TITAN_8B = "benchmarks/llama3_h100_202412_torchtitan.md"


class Aim(NamedTuple):
    """A figure that is to be at most, or at least, `bound`."""

    what: str
    value: float
    bound: float
    least: bool = False
    digits: int = 2
    unit: str = " %"

    @property
    def held(self) -> bool:
        return self.value >= self.bound if self.least else self.value <= self.bound


def table(aims: Iterable[Aim]) -> Iterator[str]:
    """Markdown lines."""
    yield "| figure | aim | is | |\n|---|--:|--:|---|"
    for aim in aims:
        bound = f"{'≥' if aim.least else '≤'} {aim.bound:g}{aim.unit}"
        yield f"| {aim.what} | {bound} | {aim.value:.{aim.digits}f}{aim.unit} | {'' if aim.held else '**missed**'} |"


def step_times(known: Sequence[Prediction], closed_form: Mapping[str, Mapping[str, float]]) -> Iterator[Aim]:
    """Of rows whose step time is predicted. `closed_form`: MAPE and median of seven constants per GPU, by GPU."""
    test = [p for p in known if p.split == "test"]
    foundry = [p for p in test if is_foundry(p)]
    if score := _score(foundry):
        yield Aim("llm-foundry, MAPE", score.mape, 3.5)
        yield Aim("llm-foundry, median", score.median, 2)
        yield Aim("llm-foundry, rows beyond 10 %", 100 * score.beyond_10 / score.rows, 5)
    for gpu, theirs in closed_form.items():
        if score := _score(p for p in foundry if p.gpu == gpu):
            yield Aim(f"llm-foundry on {gpu}, MAPE, against seven constants", score.mape, theirs["mape"])
            yield Aim(f"llm-foundry on {gpu}, median, against seven constants", score.median, theirs["median"])
    if score := _score(p for p in test if p.row.source.startswith(("fms-fsdp", "torchtitan"))):
        yield Aim("fms-fsdp and torchtitan, MAPE", score.mape, 6)
    if score := _score(test):
        yield Aim("all sources, MAPE", score.mape, 7)
        yield Aim("all sources, bias either way", abs(score.bias), 2)


def left_out(errors: Mapping[str, float]) -> Iterator[Aim]:
    """Of rows by profiles that no run on their GPU shaped."""
    if score := Score.of(errors.values()):
        yield Aim("GPUs left out of the fit, MAPE", score.mape, 15)


def memory(predictions: Sequence[Prediction]) -> Iterator[Aim]:
    for kind in ("allocated", "reserved"):
        if score := Score.of(p.memory_error(kind) for p in predictions):
            yield Aim(f"{kind} memory, MAPE", score.mape, 8)
            yield Aim(f"{kind} memory, median", score.median, 4)
    if score := Score.of(p.memory_error("reserved") for p in predictions if TITAN_8B in p.row.source):
        yield Aim(f"memory of torchtitan's {score.rows} rows of Llama-3.1-8B, MAPE", score.mape, 5)
    wrong = sum(p.step is not None and not p.step.fits for p in predictions)
    yield Aim("called out of memory though they ran", wrong, 0, digits=0, unit="")


def parts_of_steps(parts: Iterable[Part]) -> Iterator[Aim]:
    if errors := [abs(part.error) for part in parts]:
        yield Aim("parts of a step, the furthest off", max(errors), 15, digits=0)


def orders(taus: Mapping[str, float]) -> Iterator[Aim]:
    for group, tau in taus.items():
        yield Aim(f"Kendall's tau: {group}", tau, 0.9, least=True, unit="")


def is_foundry(prediction: Prediction) -> bool:
    return prediction.row.get("framework").startswith("llm-foundry")


def _score(predictions: Iterable[Prediction]) -> Score | None:
    return Score.of(p.error for p in predictions)

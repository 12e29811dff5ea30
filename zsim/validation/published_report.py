"""The section of validation/REPORT.md on published runs: errors, others', terms left out, rows far off."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zsim.validation import aims
from zsim.validation.evidence import setup_of
from zsim.validation.parts import Part, parts
from zsim.validation.published import Prediction, Score, baseline_seconds, predict
from zsim.validation.rows import read_folder

FAR = 20.0  # percent: rows beyond it are explained one by one
TIE = 1.0  # percent: measurements nearer to each other than this have no order


def section(folder: Path) -> Iterator[str]:
    """Markdown lines. `folder` holds the CSV files, peers.yaml, explained.yaml and perhaps calibration.yaml."""
    predictions = [predict(row) for row in read_folder(folder)]
    known = [p for p in predictions if p.error is not None]
    test = [p for p in known if p.split == "test"]
    peers, record = read_yaml(folder / "peers.yaml"), read_yaml(folder / "calibration.yaml")
    timed = list(parts(folder)) if (folder / "parts.yaml").exists() else []
    yield (
        f"{len(known)} training runs that others measured. Rows marked `fit` shaped the profiles, `test` did "
        "not: split by a checksum of source, model, GPU and sequence length. Errors of the step time in percent. `zsim "
        "validate published validation/published/*.csv` prints every row.\n"
    )
    yield from aims.table(
        [
            *aims.step_times(known, peers.get("seven constants per GPU", {})),
            *aims.left_out(record.get("left_out", {})),
            *aims.memory(predictions),
            *aims.parts_of_steps(timed),
            *aims.orders(orders(known)),
        ]
    )
    yield ""
    yield from _table("test rows of", {"all": test, **by(test, lambda p: p.row.source), **by(test, lambda p: p.gpu)})
    yield from _table("GPUs whose memory is", by(test, lambda p: p.fullness), head=False)
    yield (
        "\nMemory is full where by prediction the allocator has to give cached blocks back in every step, once it has "
        "settled. zsim has no time for that, and a report of such a run says how far off these rows are."
    )
    yield ""
    yield from _table("fit rows of", {"all": [p for p in known if p.split == "fit"]}, head=False)
    yield from _against_peers(known, peers)
    yield from _record(record)
    yield from _order(known)
    yield from _parts(timed)
    explained = read_yaml(folder / "explained.yaml")
    yield from _memory(predictions, explained)
    yield from far(known, explained)
    refused = [p for p in predictions if p.refused]
    yield f"\n{len(predictions) - len(refused)} of {len(predictions)} rows are predicted; refused:\n"
    yield from (f"- {p.row.get('id')}: {p.refused}" for p in refused)


def by(predictions: Sequence[Prediction], key: Any) -> dict[str, list[Prediction]]:
    return {name: [p for p in predictions if key(p) == name] for name in sorted({key(p) for p in predictions})}


def _table(title: str, groups: Mapping[str, Sequence[Prediction]], head: bool = True) -> Iterator[str]:
    if head:
        yield f"| {title} | rows | MAPE | median | worst | bias | beyond 10 % |\n|---|--:|--:|--:|--:|--:|--:|"
    for name, members in groups.items():
        score = Score.of(p.error for p in members)
        if score:
            label = name if head else f"{title} {name}"
            yield (
                f"| {label} | {score.rows} | {score.mape:.2f} | {score.median:.2f} | {score.worst:+.1f} | "
                f"{score.bias:+.2f} | {score.beyond_10} |"
            )


def _against_peers(known: Sequence[Prediction], peers: Mapping[str, Any]) -> Iterator[str]:
    """zsim and one line of arithmetic, computed here, beside what others' simulators do on the same tables."""
    rows = [p for p in known if aims.is_foundry(p)]
    if not rows:
        return
    own = by([p for p in rows if p.split == "test"], lambda p: p.gpu)
    line = {gpu: _baseline(members) for gpu, members in by(rows, lambda p: p.gpu).items()}
    others = {
        "(6N + attention + recomputation) / peak": {gpu: Score.of(errors) for gpu, errors in line.items()},
        "zsim": {gpu: Score.of(p.error for p in members) for gpu, members in own.items()},
    }
    yield "\n### llm-foundry, beside others\n"
    yield (
        "MAPE / median. The seven constants, not all of them physical, are fitted to each GPU, and one factor on the "
        "step time per GPU for each of the others, on other rows than they are scored on; nothing per GPU for zsim, of "
        "which these are test rows.\n"
    )
    yield f"| | {' | '.join(own)} |\n|---|{'--:|' * len(own)}"
    for name, scores in others.items():
        cells = (f"{s.mape:.1f} / {s.median:.1f}" if (s := scores.get(gpu)) else "-" for gpu in own)
        yield f"| {name} | {' | '.join(cells)} |"
    for name, figures in {
        "a closed form of seven constants": peers["seven constants per GPU"],
        **peers["llm-foundry"],
    }.items():
        cells = (f"{f['mape']} / {f['median']}" if (f := figures.get(gpu)) else "-" for gpu in own)
        yield f"| {name} | {' | '.join(cells)} |"


def _baseline(rows: Sequence[Prediction]) -> list[float]:
    """Errors of the test rows, in percent, under FLOPs over peak times the median factor of the fit rows."""
    ratios = {p.row.id: (p.measured_s or 0.0) / baseline_seconds(setup_of(p.row)) for p in rows}
    fitted = sorted(ratios[p.row.id] for p in rows if p.split == "fit")
    factor = fitted[len(fitted) // 2]
    return [100 * (factor / ratios[p.row.id] - 1) for p in rows if p.split == "test"]


def _record(record: Mapping[str, Any]) -> Iterator[str]:
    """What `zsim calibrate published --ablations` wrote down."""
    left_out = record.get("left_out", {})
    score = Score.of(left_out.values())
    if score:
        yield "\n### A device that no run was fitted on\n"
        yield (
            "Each family of GPUs left out of the fit in turn and predicted by the generic profile: MAPE "
            f"{score.mape:.1f} %, median {score.median:.1f} %, bias {score.bias:+.1f} % over {score.rows} rows."
        )
    if record.get("ablations"):
        yield "\n### What each term buys\n"
        yield "MAPE without it, the other constants fitted anew (rows on the GPUs that are fitted).\n"
        yield "| without | fit rows | test rows |\n|---|--:|--:|"
        for line in record["ablations"]:
            yield f"| {line['without']} | {line['fit_mape']:.2f} | {line['test_mape']:.2f} |"
        yield (
            "\nContention buys nothing on these rows, and host time little, which are large models on NVLink and NICs "
            "of their own. They stay for what these rows do not hold: small models, whose step is the host's time (the "
            "captures of docs/calibration.md), and transfers that share a PCIe link (the points of RTX 4090 above).\n"
        )


GROUPS = {
    "ZeRO-2, ZeRO-3, checkpointing and offload, 8 A800": lambda p: p.gpu.startswith("A800"),
    "checkpointing and compilation, 8 H100": lambda p: "PR 165" in p.row.source,
    "1.3B, 8 to 512 H100": lambda p: p.row["model"] == "mpt-1b" and p.row["seq_len"] == "2048" and p.gpu == "H100-SXM",
    "3B, 8 to 128 A100-40": lambda p: (
        p.row["model"] == "mpt-3b" and p.row["seq_len"] == "2048" and p.gpu == "A100-SXM-40GB"
    ),
    "sequence length, 3B on 8 A100-80": lambda p: (
        p.row["model"] == "mpt-3b" and p.row["n_gpus"] == "8" and p.gpu == "A100-SXM-80GB"
    ),
}  # fmt: skip


def orders(known: Sequence[Prediction]) -> dict[str, float]:
    """Kendall's tau of each group that has an order."""
    found = {}
    for name, member in GROUPS.items():
        chosen = [p for p in known if member(p)]
        tau = kendall([(_rate(p, p.measured_s), _rate(p, p.step.step_s if p.step else None)) for p in chosen])
        if tau is not None:
            found[name] = tau
    return found


def _order(known: Sequence[Prediction]) -> Iterator[str]:
    yield "\n### Which of two setups is faster\n"
    yield f"Kendall's tau of tokens per second and GPU; measurements within {TIE:g} % of each other have no order.\n"
    yield "| group | rows | tau |\n|---|--:|--:|"
    for name, tau in orders(known).items():
        yield f"| {name} | {sum(GROUPS[name](p) for p in known)} | {tau:.2f} |"


def _rate(prediction: Prediction, seconds: float | None) -> float:
    row = prediction.row
    return row.count("micro_batch") * row.count("grad_accum", 1) * row.count("seq_len") / (seconds or float("inf"))


def kendall(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Tau over all pairs whose first values differ by more than TIE percent; None without such a pair."""
    agree = total = 0
    for (a, x), (b, y) in itertools.combinations(pairs, 2):
        if abs(a / b - 1) > TIE / 100:
            total += 1
            agree += 1 if (a - b) * (x - y) > 0 else -1
    return agree / total if total else None


def _parts(found: Sequence[Part]) -> Iterator[str]:
    if not found:
        return
    yield "\n### Where a step's time goes\n"
    yield (
        "Runs whose sources time the parts of a step and state all settings that matter. None states exposed "
        "communication; DeepSpeed issues 650, 1635 and 6695 and gpt-neox issue 965 print timers, but not the shape of "
        "the model, the batch or the hardware.\n"
    )
    yield "| run | part | measured | predicted | error |\n|---|---|--:|--:|--:|"
    for part in found:
        yield f"| {part.run} | {part.name} | {part.measured_s:g} s | {part.predicted_s:.1f} s | {part.error:+.0f} % |"
    yield from (f"\n{source}" for source in dict.fromkeys(part.source for part in found))


def _memory(predictions: Sequence[Prediction], explained: Mapping[str, str]) -> Iterator[str]:
    """Scores, rows beyond FAR with their explanations (`explained`: under "memory ID"), readings not compared."""
    yield "\n### Peak memory\n"
    yield "| kind | rows | MAPE | median | worst | bias |\n|---|--:|--:|--:|--:|--:|"
    for kind in ("allocated", "reserved"):
        score = Score.of(p.memory_error(kind) for p in predictions)
        if score:
            errors = f"{score.mape:.1f} | {score.median:.1f} | {score.worst:+.1f} | {score.bias:+.1f}"
            yield f"| {kind} | {score.rows} | {errors} |"
    errors_of = [(p, kind, p.memory_error(kind) or 0.0) for p in predictions for kind in ("allocated", "reserved")]
    yield f"\nRows beyond {FAR:g} %:\n"
    for p, kind, error in sorted(errors_of, key=lambda found: -abs(found[2])):
        if abs(error) > FAR:
            why = explained.get(f"memory {p.row.id}", "not explained").strip()
            yield f"- {p.row.id}, {kind}: {error:+.1f} %. {why}"
    yield (
        "\nReadings that contradict each other or their row, by the rules of `zsim/validation/readings.py`; not "
        "compared:\n"
    )
    yield from (f"- {p.row.id}: {p.contradiction}" for p in predictions if p.contradiction)
    wrong = [p.row.id for p in predictions if p.step and not p.step.fits]
    yield f"\nCalled out of memory though they ran: {len(wrong)} of {sum(p.step is not None for p in predictions)}"
    yield from (f"- {row}. {explained.get(f'memory {row}', 'not explained').strip()}" for row in wrong)


def far(known: Sequence[Prediction], explained: Mapping[str, str]) -> Iterator[str]:
    yield f"\n### Rows beyond {FAR:g} %\n"
    for p in sorted(known, key=lambda p: -abs(p.error or 0.0)):
        if abs(p.error or 0.0) > FAR:
            why = explained.get(p.row.id, "not explained").strip()
            yield f"- {p.row.id} ({p.split}): {p.error:+.1f} %. {why}"


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}

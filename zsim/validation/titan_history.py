"""What torchtitan did when: a row names its month, or the number of the pull request or issue that it stands in.

Rules are torchtitan's commits, each by its pull request: its number and the month in which it was merged.
"""

from __future__ import annotations

import re

from zsim.validation.rows import Row

LOSS_COMPILED = (642, "2024-11")  # e10cb9494, 22 October 2024: torch.compile of the loss, too
LOSS_EAGER = (755, "2024-12")  # e8977b007, 18 December 2024: off again, it crashed (pytorch/pytorch#143774)
LOSS_COMPILED_AGAIN = (1033, "2025-04")  # bbb1b616e, 2 April 2025
LOGITS_FREED = (391, "2024-06")  # e29b6b4d4, 12 June 2024: not held through the backward any more
OWN_GROUPS = (1094, "2025-08")  # 83e694105, 28 July 2025: embedding, and norm with output, beside the blocks
FUSED_NORMS = (
    1540,
    "2025-08",
)  # torch's nightlies have pull request 153666; norms are torch's since 985, 19 March 2025
GROUPED_HEADS = (2259, "2026-02")  # ff0829c10, 27 January 2026: keys and values are not repeated
FUSED_ADAMW = (881, "2025-03")  # 6e4988550, 24 February 2025: the default, which was foreach

Change = tuple[int, str]


def after(row: Row, change: Change) -> bool:
    """Whether what a row measured had `change`. A row without a date is of the time before the first release."""
    number, month = change
    text = " ".join((row.id, row["source"], row.get("notes")))
    stated = re.search(r"(?<!\d)(20[2-9]\d)-?(0[1-9]|1[0-2])(?!\d{3})", text)
    if stated:
        return f"{stated[1]}-{stated[2]}" >= month
    thread = re.search(r"\b(?:PR|issue) (\d+)", row["source"])
    return thread is not None and int(thread[1]) >= number


def loss(row: Row) -> str:
    """As `Workload.loss` has it."""
    if not after(row, LOGITS_FREED):
        return "held"
    if row.get("compile") != "yes":
        return "hf"
    first = after(row, LOSS_COMPILED) and not after(row, LOSS_EAGER)
    return "compiled" if first or after(row, LOSS_COMPILED_AGAIN) else "hf"


def models(row: Row) -> tuple[int, int] | None:
    """For `Workload.torchtitan`: before the one or the other, or as they are now. v0.2.2, of January 2026, has both."""
    if after(row, GROUPED_HEADS) or "torchtitan v0.2.2" in row.get("notes"):
        return None
    return (2025, 12) if after(row, FUSED_NORMS) else (2024, 12)


def grouping(row: Row) -> str:
    return "titan" if after(row, OWN_GROUPS) else "titan2024"


def optimizer(row: Row) -> str:
    return "fused" if after(row, FUSED_ADAMW) else "foreach"

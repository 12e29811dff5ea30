"""How a Result shows itself in a notebook: the verdict and two small tables, plain HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zsim.result.render import terminal
from zsim.result.spec import Result

GIB = 2**30


def summary(result: Result) -> str:
    gpu, time = result.gpu, result.time
    memory = [(name.replace("_", " "), f"{nbytes / GIB:.2f} GiB") for name, nbytes in gpu.by_category.items()]
    memory.append(
        (f"reserved + framework, of {gpu.capacity_bytes / GIB:.1f} GiB", f"{gpu.nvidia_smi_bytes / GIB:.2f} GiB")
    )
    step = [
        (name, f"{seconds:.4g} s", f"{seconds / time.step_s:.1%}")
        for name, seconds in (
            ("compute", time.compute_s),
            ("exposed communication", time.exposed_comm_s),
            ("waiting for the host", time.host_s),
            ("other idle", time.idle_s),
        )
    ]
    return (
        f"<p><strong>{escape(terminal.verdict(result))}</strong></p>"
        f"<p>Bottleneck: {escape(result.bottleneck.name)}, {result.bottleneck.share:.0%} of the critical path.</p>"
        f"<div style='display:flex;gap:3em;flex-wrap:wrap'>{_table('Memory at the peak', memory)}"
        f"{_table('Step', step)}</div>"
    )


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{body}</tbody></table>"

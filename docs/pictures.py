"""Makes the pictures of outputs.md and README.md again: `python docs/pictures.py`. Needs the test extra and Chromium.

Two are made by hand, as their viewers are pages on the web: perfetto.png and memory_viz.png.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
FLAGSHIP, RUN = "scenarios/qwen32b_8xh100.yaml", "scenarios/qwen7b_8x4090.yaml"
STAGES = ("compare", "scenarios/llama31_8b_4xa100_zero2.yaml", "--stages", "0,1,2,3")
NODES = ("compare", "scenarios/llama31_8b_512xh100_fsdp2.yaml", "--vary", "cluster.nodes=1,4,16,64")
SWEEP = (
    "sweep", "scenarios/llama31_8b_512xh100_fsdp2.yaml", "--vary", "cluster.nodes=1..64*2",
    "--vary", "micro_batch=1,2,4", "--vary", "checkpointing=none,selective,full",
)  # fmt: skip
WIDEST = 1000
PAGE = "<meta charset=utf-8><body style='margin:0'>{}"
TERMINAL = (
    "<pre style='font:13px/1.25 \"DejaVu Sans Mono\",monospace;margin:0;padding:14px;display:inline-block'>{code}</pre>"
)


def zsim(*arguments: str) -> str:
    """What the command prints to a terminal of 80 columns, with its colours."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "zsim", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return done.stdout  # without the progress bars


def save(name: str, png: bytes, width: int = WIDEST) -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        PICTURES / f"{name}.png", optimize=True
    )


def as_html(*arguments: str) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text.from_ansi(f"$ zsim {' '.join(arguments)}\n{zsim(*arguments)}"))
    return PAGE.format(console.export_html(inline_styles=True, code_format=TERMINAL))


def pictures(folder: Path, opened: Callable[..., Any]) -> None:
    """`opened(file, width, dark)` is Playwright's page of an HTML file."""
    for name, arguments in (("terminal", (RUN, "--changes", "3")), ("explain", ("explain", RUN)), ("compare", STAGES)):
        (folder / "text.html").write_text(as_html(*arguments), encoding="utf-8")
        save(name, opened(folder / "text.html", 900).locator("pre").screenshot())

    zsim(FLAGSHIP, "--changes", "0", "--out", str(folder / "flagship"))
    zsim(RUN, "--out", str(folder / "run"))
    zsim(*STAGES, "--out", str(folder / "stages"))
    zsim(*NODES, "--out", str(folder / "nodes"))
    zsim(*SWEEP, "--store", str(folder / "sweep.db"), "--out", str(folder / "sweep.html"))
    save("../flagship", (folder / "flagship" / "memory_timeline.png").read_bytes())
    save("memory_timeline", (folder / "run" / "memory_timeline.png").read_bytes())
    save("breakdown", (folder / "run" / "breakdown.png").read_bytes(), 560)
    save("stages", (folder / "stages" / "comparison.png").read_bytes(), 900)
    save("scaling", (folder / "nodes" / "scaling.png").read_bytes(), 700)

    report = opened(folder / "run" / "report.html", 1100)
    hover(report, "#memory-time", 0.37, 150)
    save("report", report.screenshot())
    report.locator("#topology").scroll_into_view_if_needed()
    save("report_links", report.locator("#topology").screenshot())
    save("report_phone", opened(folder / "run" / "report.html", 390, dark=True).screenshot())
    dark = opened(folder / "run" / "report.html", 1100, dark=True)
    dark.locator("#lanes").scroll_into_view_if_needed()
    dark.evaluate("Plotly.relayout(document.getElementById('lanes'), {'xaxis.range': [0.84, 1.3]})")
    hover(dark, "#lanes", 0.5, 180)
    save("report_lanes", dark.locator("#step").screenshot())

    sweep = opened(folder / "sweep.html", 1100)
    save("sweep_heat", sweep.locator("#heat").screenshot())
    save("sweep_front", sweep.locator("#front").screenshot())

    import zsim as api

    shown = api.simulate(ROOT / RUN)._repr_html_()
    (folder / "notebook.html").write_text(PAGE.format(f"<div style='font:14px sans-serif;padding:8px'>{shown}</div>"))
    save("notebook", opened(folder / "notebook.html", 1000).locator("div").first.screenshot(), 800)


def hover(page: Any, chart: str, across: float, down: float) -> None:
    page.wait_for_timeout(500)
    box = page.locator(chart).bounding_box()
    page.mouse.move(box["x"] + across * box["width"], box["y"] + down)
    page.wait_for_timeout(600)


def main() -> None:
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def opened(path: Path, width: int, dark: bool = False) -> Any:
            size = {"width": width, "height": 840}
            page = browser.new_page(viewport=size, color_scheme="dark" if dark else "light")  # type: ignore[arg-type]
            page.goto(path.as_uri())
            page.wait_for_timeout(1000)
            return page

        pictures(Path(folder), opened)
        browser.close()


if __name__ == "__main__":
    main()

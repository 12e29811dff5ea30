"""A sweep's page in a browser: it draws what the store has."""

import json
import re

import pytest

from tests.result import browser
from tests.result.test_commands import MODEL, ROOT
from zsim.cli.app import main
from zsim.result.render import sweep_html


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A small model on 1 to 4 nodes, one of its batches too large, one stage that cannot be."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "small.yaml").write_text(
        f"model: config.json\ncluster: {ROOT}/topologies/h100_8x64_ib400.yaml\nframework: deepspeed\n"
        "zero: {stage: 1}\nmicro_batch: 1\nseq_len: 512\n"
    )
    axes = ["cluster.nodes=1,2,4", "zero.stage=1,3", "micro_batch=1,4096"]
    options = [part for axis in axes for part in ("--vary", axis)]
    with pytest.raises(SystemExit):
        main(["sweep", str(folder / "small.yaml"), *options, "--workers", "1", "--store", str(folder / "s.db"),
              "--out", str(folder / "s.html"), "--out", str(folder / "s.csv")])  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def page(swept):
    with browser.opened(swept / "s.html") as page:
        yield page


def rows(swept):
    text = (swept / "s.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])["rows"]


def test_carries_the_store(swept):
    import csv

    with (swept / "s.csv").open() as file:
        table = list(csv.DictReader(file))
    found = rows(swept)
    assert len(found) == len(table) == 12
    for row, line in zip(found, table, strict=True):
        assert row["inputs"]["cluster.nodes"] == int(line["cluster.nodes"])
        assert str(row["step_s"] or "") == line["step_s"]
    assert {row["fits"] for row in found} == {0, 1}


def test_draws_all_of_it_without_errors(page):
    assert page.complaints == []
    for section in ("scaling", "heat", "stages", "front"):
        assert page.locator(f"#{section} .main-svg").count() >= 1, section
        assert page.locator(f"#{section}").is_visible()
    assert page.locator("#table tbody tr").count() == 12


def test_says_which_is_fastest(page, swept):
    best = max((row for row in rows(swept) if row["fits"]), key=lambda row: row["tokens_per_s"])
    assert f"{best['tokens_per_s']:,.0f} tokens/s" in page.locator("#verdict .banner").inner_text()


def test_heat_map_follows_the_choice(page, swept):
    text = "[...document.getElementById('heat-chart').data[0].text]"
    assert len(page.evaluate(text)) == 6  # three nodes by two stages, each with a batch that fits
    page.select_option("#heat-y", "micro_batch")
    page.wait_for_function(f"{text}.length === 3")  # nothing fits in the other row
    page.select_option("#heat-z", "step_s")
    fitting = [row for row in rows(swept) if row["fits"]]
    steps = {min(r["step_s"] for r in fitting if r["inputs"]["cluster.nodes"] == nodes) for nodes in (1, 2, 4)}
    page.wait_for_function(f"{text}.every((cell) => cell.endsWith('s'))")
    colors = page.evaluate("[...document.getElementById('heat-chart').data[0].marker.color]")
    assert colors == pytest.approx(sorted(steps))
    assert page.complaints == []


def test_hover_explains_a_point(page):
    point = page.locator("#front-chart .points path").first
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    page.wait_for_selector("#front-chart .hoverlayer .hovertext")
    assert "tokens/s per GPU" in page.locator("#front-chart .hoverlayer").text_content()


def test_dark_and_phone(page):
    page.click("#theme")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.complaints == []


def test_of_very_many_scenarios_the_fastest_are_shown(tmp_path):
    row = {"status": "ok", "fits": 1, "zero.stage": 3}
    many = [row | {"tokens_per_s": float(speed)} for speed in range(sweep_html.MOST_ROWS + 10)]
    sweep_html.write(many, ["zero.stage"], "many", tmp_path / "s.html")
    shown = rows(tmp_path)
    assert len(shown) == sweep_html.MOST_ROWS
    assert min(row["tokens_per_s"] for row in shown) == 10
    assert (tmp_path / "s.html").stat().st_size < 5_000_000


def test_a_sweep_without_outcome_still_has_its_table(page, tmp_path):
    sweep_html.write([{"status": "refused", "error": "no such GPU", "fits": None}], [], "none", tmp_path / "s.html")
    page.goto((tmp_path / "s.html").as_uri())
    page.wait_for_selector("html[data-ready=true]")
    assert page.complaints == []
    assert "no such GPU" in page.locator("#table").inner_text()

"""report.html: self-contained, and alive in a browser."""

import dataclasses
import json
import re

import pytest

from tests.result import browser, made
from zsim.result.compare import Impossible
from zsim.result.render import html


@pytest.fixture(scope="module")
def result():
    return made.result()


@pytest.fixture(scope="module")
def report(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    html.write(result, path, [result], impossible=[Impossible("stage 0", "not possible: needs stage 1, 2 or 3")])
    return path


def test_opens_offline_and_stays_small(report):
    text = report.read_text(encoding="utf-8")
    assert report.stat().st_size < 5_000_000
    outside_the_library = text.replace(
        html.ASSETS.joinpath("plotly-basic-4.1.1.min.js").read_text(encoding="utf-8"), ""
    )
    assert not re.search(r"""(src|href)=["']?https?:""", outside_the_library)


def test_carries_the_figures_of_result_json(result, report):
    data = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', report.read_text(encoding="utf-8"), re.S
    )
    said = json.loads(data[1])
    assert said["result"] == json.loads(json.dumps(result.to_dict()))
    lanes = said["lanes"]
    compute = sum(item[2] for item in lanes["items"] if lanes["names"][item[0]] == "compute")
    assert compute == pytest.approx(result.time.compute_s)
    assert sum(item[2] for item in lanes["items"] if lanes["names"][item[0]] == html.WAITS) == pytest.approx(
        result.time.step_s - result.time.compute_s
    )


def test_text_of_users_cannot_end_the_script(result):
    odd = dataclasses.replace(result, name="</script><b>&")
    text = html.document(odd)
    assert text.count("</script>") == html.document(result).count("</script>")
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;</title>" in text


@pytest.fixture(scope="module")
def page(report):
    with browser.opened(report) as page:
        yield page


def test_renders_without_errors(page):
    assert page.complaints == []
    assert page.locator(".chart .main-svg").count() >= 6
    assert page.locator("#verdict .banner").inner_text().startswith("FITS")
    assert page.locator("#verdict .banner").get_attribute("class") == "banner fits"


def test_a_tight_verdict_has_a_colour_of_its_own(result):
    tight = dataclasses.replace(result, gpu=dataclasses.replace(result.gpu, allocator_retries=1))
    assert '"state": "tight"' in html.document(tight).replace('"state":"tight"', '"state": "tight"')
    assert "#9a6700" in tight._repr_html_()
    assert "#9a6700" not in result._repr_html_()


def test_shows_the_figures(page, result):
    cards = page.locator("#verdict").inner_text()
    assert f"{result.time.step_s:.3f} s" in cards
    assert f"{100 * result.throughput.mfu:.1f} %" in cards
    table = page.locator("#memory-table").inner_text()
    assert f"{result.gpu.nvidia_smi_bytes / 2**30:.2f} GiB" in table
    assert "stage 0: not possible: needs stage 1, 2 or 3" in page.locator("#notes-body").text_content()


def test_hover_explains_an_op(page):
    bar = page.locator("#lanes .bars .point path").first
    bar.scroll_into_view_if_needed()
    bar.hover(force=True)
    page.wait_for_selector("#lanes .hoverlayer .hovertext")
    assert "ms" in page.locator("#lanes .hoverlayer").text_content()


def test_keyboard_zooms_and_resets(page):
    axis = "document.getElementById('lanes').layout.xaxis.range"
    width = f"{axis}[1] - {axis}[0]"
    whole = page.evaluate(width)
    page.focus("#lanes")
    page.keyboard.press("+")
    page.wait_for_function(f"{width} < {0.6 * whole}")
    page.keyboard.press("0")
    page.wait_for_function(f"{width} > {0.9 * whole}")


def test_filter_keeps_what_matches(page):
    page.fill("#filter", "reduce scatter")
    rows = page.locator("#ops-table tbody tr")
    assert rows.count() == 2
    page.fill("#filter", "")
    assert rows.count() > 2


def test_dark_and_phone(page):
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.complaints == []

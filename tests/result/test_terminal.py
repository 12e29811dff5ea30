"""The report as a user sees it: 80 columns, no colour, any encoding."""

import dataclasses
import io

import pytest

from tests.result import made
from zsim.api import load_scenario, simulate
from zsim.result.compare import compare, label
from zsim.result.render import explanation, side_by_side, terminal
from zsim.result.render.page import Page
from zsim.result.reported import BARELY, CLOSE
from zsim.result.sensitivity import Change


def printed(render, *arguments, width=80, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    render(*arguments, Page(file, width))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.fixture(scope="module")
def result():
    return made.result()


def test_verdict_comes_first_and_lines_end_at_80_columns(result):
    lines = printed(terminal.render, result).splitlines()
    assert lines[0].startswith("FITS: miniature")
    assert str(result).startswith(lines[0])
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)


def test_a_log_file_without_unicode_gets_plain_bars(result):
    text = printed(terminal.render, result, encoding="ascii")
    assert "####" in text


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_terminal_gets_a_narrow_report(result, width):
    assert "step" in printed(terminal.render, result, width=width)
    text = printed(explanation.render, result, [], width=width)
    assert "when each begins" in text
    comparison = compare([result] * 3)
    lines = printed(side_by_side.render, comparison, width=width).splitlines()
    assert max(map(len, lines)) <= 40
    assert sum(line.startswith("Outcome") for line in lines) == 3


def test_the_figures_are_those_of_the_result(result):
    text = printed(terminal.render, result)
    assert "1.300 s" in text  # compute
    assert "500.00 ms" in text  # exposed communication
    assert f"MFU {result.throughput.mfu:.1%}" in text
    assert "NVLink at 100 GB/s" in text


def test_a_run_that_does_not_fit_says_what_is_missing():
    small = dataclasses.replace(made.DEVICE, usable_bytes=2**30)
    result = made.result(small)
    assert not result.fits
    assert result.gpu.headroom_bytes < 0
    text = printed(terminal.render, result)
    assert text.startswith("DOES NOT FIT: miniature: at least")
    assert "as if it fitted" in text
    assert result.time.step_s == pytest.approx(made.STEP_S)


@pytest.mark.parametrize(
    ("fraction", "said"),
    [
        (0.2, "at least 4.7 GiB missing per GPU of the 15.8 GiB that torch may reserve"),
        (0.3, "takes all the 23.7 GiB that torch may reserve"),
        (0.5, "11.9 of the 39.6 GiB that torch may reserve"),
    ],
)
def test_what_runs_short_under_a_memory_fraction_is_torchs_own_limit(fraction, said):
    scenario = load_scenario(
        "scenarios/qwen7b_8xh100.yaml", [f"allocator=per_process_memory_fraction:{fraction}"]
    ).resolve()
    result = simulate(scenario)
    assert f"{said} (per_process_memory_fraction {fraction} of 79.1 GiB)" in terminal.verdict(result)
    text = printed(terminal.render, result)
    assert f"torch may reserve {fraction * 79.11:>11.2f} GiB" in text
    assert "the latter decides" in text.replace("\n    ", " ")


def test_without_a_memory_fraction_there_is_no_such_limit(result):
    assert "torch may reserve" not in printed(terminal.render, result)


def test_bars_are_as_long_as_their_share():
    assert terminal.bar(0.5, 10, blocks=True) == "█████"
    assert terminal.bar(0.55, 10, blocks=True) == "█████▌"
    assert terminal.bar(0.5, 10, blocks=False, mark=0.8) == "#####   |"
    assert terminal.bar(1.0, 10, blocks=False, mark=0.8) == "########|##"


def test_explanation_accounts_for_the_step(result):
    said = explanation.to_dict(result, [])
    for part in ("attribution", "critical_path"):
        assert sum(line["seconds"] for line in said[part]) == pytest.approx(result.time.step_s)
        assert sum(line["share"] for line in said[part]) == pytest.approx(1)
    text = printed(explanation.render, result, [])
    assert "all-gather, forward (AG0 to AG1)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_long_setting_keeps_its_distance_from_the_memory(result):
    name = "zero.stage3_param_persistence_threshold=409600"
    changes = [Change(name, "setting", -1e-9, 1.0, 1.0, 1, 2**30, True, 1)]
    assert f"    +0.0%  {name}  1.0 GiB free\n" in printed(explanation.render, result, changes)


def test_a_setting_that_lacks_no_gpu_memory_says_what_it_lacks(result):
    changes = [
        Change("zero.stage=2", "setting", 0.1, 1.0, 1.0, 1, 2**30, False, 1, "memory beside the steps"),
        Change("zero.stage=1", "setting", 0.1, 1.0, 1.0, 1, -(2**30), False, 1, "GPU memory"),
    ]
    text = printed(explanation.render, result, changes)
    assert "zero.stage=2  lacks memory beside the steps\n" in text
    assert "zero.stage=1  lacks 1.0 GiB\n" in text


def test_a_comparison_says_what_else_than_gpu_memory_is_short(result):
    from zsim.result.compare import compare

    small = dataclasses.replace(result, host=dataclasses.replace(result.host, capacity_bytes=1, peak_bytes=2))
    said = {line.name: line.values for line in compare([result, small]).outcome}
    assert said["fits"] == ("yes", "no")
    assert said["short of"] == ("", "host memory or NVMe space")
    assert [(each["tight"], each["short_of"]) for each in (result.to_dict(), small.to_dict())] == [
        (False, None),
        (False, "host memory or NVMe space"),
    ]


def test_what_tight_runs_differ_in_is_what_they_need_without_their_cache(result):
    """Both take all that there is: the larger one has less of it in its cache."""
    from zsim.result.compare import compare

    room = 78 << 30
    tight = dataclasses.replace(result.gpu, by_category={"activations": 50 << 30, "framework": 1 << 30},
                                framework_bytes=1 << 30, peak_allocated_bytes=50 << 30, peak_reserved_bytes=room,
                                allocator_retries=9)  # fmt: skip
    fuller = dataclasses.replace(tight, by_category={"activations": 62 << 30, "framework": 1 << 30},
                                 peak_allocated_bytes=62 << 30, peak_reserved_bytes=room - (1 << 20))  # fmt: skip
    comparison = compare([dataclasses.replace(result, gpu=gpu) for gpu in (tight, fuller)])
    said = {line.name: line.values for line in comparison.outcome}
    assert said["fits"] == ("tight", "tight")
    assert said["memory without cache"] == (51 << 30, 63 << 30)
    assert said["memory with cache"] == (79 << 30, (79 << 30) - (1 << 20))
    why = "B needs 12.00 GiB more per GPU than A, cache aside: at the peak, activations +12.00 GiB"
    assert why in comparison.reasons


def test_causes_in_words():
    assert label("waiting for h2d/backward") == "waiting for copies to the GPU of backward"
    assert label("waiting for cpu_optimizer/optimizer") == "waiting for optimizer step on the CPU"
    assert label("exposed all_gather/forward", ", ") == "exposed all-gather, forward"


def test_side_by_side_names_what_differs(result):
    headline = dataclasses.replace(result.headline, stage=2, plan=result.headline.plan | {"stage": 2})
    other = dataclasses.replace(result, headline=headline)
    comparison = compare([result, other])
    assert [(line.name, line.values) for line in comparison.inputs] == [("zero.stage", (3, 2))]
    assert comparison.names == ("1: miniature", "2: miniature")
    text = printed(side_by_side.render, comparison)
    assert max(map(len, text.splitlines())) <= 80
    text = printed(side_by_side.render, compare([result] * 5))
    assert [line.split()[1:] for line in text.splitlines() if line.startswith("Outcome")] == [["A", "B"], [*"CDE"]]


def test_a_nearly_full_gpu_says_what_became_of_such_runs(result):
    odds = f"but {CLOSE.ran_out} of {CLOSE.runs} such reported runs ran out of memory"
    close = dataclasses.replace(result.gpu, headroom_bytes=result.gpu.capacity_bytes // 25)
    nearly = dataclasses.replace(result, gpu=close)
    assert terminal.verdict(nearly).startswith(f"FITS, {odds}: miniature: ")
    assert terminal.verdict(result).startswith("FITS: miniature: ")
    assert (terminal.state(nearly), terminal.state(result)) == ("tight", "fits")


def test_a_full_gpu_is_not_said_to_have_room(result):
    """A run that fits only because the allocator gave memory back: what it takes, and that it may fail as well."""
    full = dataclasses.replace(result.gpu, allocator_retries=19, headroom_bytes=0, peak_allocated_bytes=70 << 30,
                               peak_reserved_bytes=74 << 30)  # fmt: skip
    text = " ".join(printed(terminal.render, dataclasses.replace(result, gpu=full)).split())
    odds = f"but {BARELY.ran_out} of {BARELY.runs} such reported runs ran out of memory"
    assert text.startswith(f"FITS, tight, {odds}: miniature: takes all")
    assert "4.0 of them to cache and fragments" in text
    assert "back 19 times, which is slow." in text
    assert f'of {BARELY.runs} runs that users reported and zsim calls "{BARELY.says}", {BARELY.ran_out} ran out' in text
    often = dataclasses.replace(full, allocator_retries_per_step=4)
    text = " ".join(printed(terminal.render, dataclasses.replace(result, gpu=often)).split())
    assert "4 are in every step, whose time leaves them out" in text
    priced = dataclasses.replace(often, remapping_s=0.5)
    text = " ".join(printed(terminal.render, dataclasses.replace(result, gpu=priced)).split())
    assert "4 are in every step, 0.5 s of it." in text
    assert "free per GPU" not in text[:200]


def test_a_host_that_is_nearly_full_is_not_said_to_have_room(result):
    """What the system and other processes take is not simulated."""
    host = dataclasses.replace(result.host, capacity_bytes=200 << 30, peak_bytes=170 << 30)
    assert not dataclasses.replace(result, host=host).tight
    full = dataclasses.replace(result, host=dataclasses.replace(host, peak_bytes=190 << 30))
    assert full.tight
    assert full.fits
    assert terminal.verdict(full).startswith("FITS, tight: miniature: 190 of 200 GiB of host RAM per node, without the")


def test_settings_of_the_allocator_are_in_the_headline(result):
    assert "allocator" not in terminal.headline(result.headline)
    settings = result.headline.plan["allocator"] | {"expandable_segments": True, "max_split_size_mb": 128}
    changed = dataclasses.replace(result.headline, plan=result.headline.plan | {"allocator": settings})
    assert terminal.headline(changed).endswith("; allocator expandable_segments=True, max_split_size_mb=128")


def said_of_the_bottleneck(result):
    lines = printed(terminal.render, result).splitlines()
    start = lines.index("Bottleneck")
    return " ".join(line.strip() for line in lines[start + 1 : lines.index("", start)])


def test_a_bottleneck_other_than_the_largest_part_of_the_step_says_why():
    """Kernels beside Python that issues the next ones too late: most of the step, and little of what it waits for."""
    host = simulate("scenarios/qwen7b_8xh100.yaml", ["seq_len=1536"])
    assert host.bottleneck.group == "host"
    assert host.time.compute_s > host.time.host_s
    assert sum(host.bottleneck.path.values()) == pytest.approx(1)
    whole, on_path = host.time.compute_s / host.time.step_s, host.bottleneck.path["compute"]
    assert on_path < 0.5 * whole
    why = f"Compute, {whole:.0%} of the step, is {on_path:.0%} of it: the rest runs beside Python that issues too late"
    assert why in said_of_the_bottleneck(host)


def test_a_bottleneck_that_also_runs_beside_kernels_says_so():
    pcie = simulate("scenarios/qwen7b_8x4090.yaml")
    exposed = pcie.time.exposed_comm_s / pcie.time.step_s
    assert pcie.bottleneck.group_share > exposed + 0.05
    why = f"also beside kernels; exposed communication, {exposed:.0%} of the step, is when none runs."
    assert said_of_the_bottleneck(pcie).endswith(why)
    assert "That path" not in said_of_the_bottleneck(simulate("scenarios/qwen32b_8xh100.yaml"))

"""What the allocations alone decide is what the clock would have said."""

from pathlib import Path

import pytest

from zsim.api import load_scenario, simulate
from zsim.program.lower import lower
from zsim.result.need import need

CASES = [
    [],
    ["zero.stage=1"],
    ["zero.stage=2", "grad_accum=2"],
    ["zero.stage=3", "checkpointing=full", "micro_batch=4"],
    ["zero.stage=3", "zero.offload_optimizer=cpu", "zero.offload_param=cpu"],
    ["framework=fsdp2", "zero=null"],
    ["framework=fsdp2", "zero=null", "grad_accum=2"],
    ["framework=fsdp1", "zero=null"],
    ["framework=ddp", "zero=null"],
    ["model.params=4e9", "framework=ddp", "zero=null"],  # 64 GB of states and more
    ["model.params=8e9", "zero.stage=1", "seq_len=65536"],
]


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_the_peak_is_the_clocks(scenario: Path, overrides: list[str]) -> None:
    setup = load_scenario(scenario, overrides).resolve()
    least = need(lower(setup.model, setup.tree, setup.plan, setup.workload), setup.cluster)
    result = simulate(setup)
    assert least.peak_allocated == result.gpu.peak_allocated_bytes
    assert least.framework == result.gpu.framework_bytes
    assert least.host == result.host.peak_bytes
    if least.excluded:
        assert not result.fits


def test_both_verdicts_occur(scenario: Path) -> None:
    def excluded(overrides: list[str]) -> str | None:
        setup = load_scenario(scenario, overrides).resolve()
        return need(lower(setup.model, setup.tree, setup.plan, setup.workload), setup.cluster).excluded

    assert excluded([]) is None
    assert excluded(CASES[-1]) == "GPU memory"

"""State spaces with kernels of mamba-ssm and causal-conv1d, whose own Python was recorded
(validation/oracles/mamba_ssm.py)."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger, flops, modules
from tests.model.test_families import FEW_MASKED
from tests.model.test_hybrids import MODELS, NANO
from zsim.errors import NotModeled
from zsim.model.huggingface import from_config
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.spec import Workload
from zsim.model.trace import trace

FILE = Path(__file__).parents[2] / "validation" / "oracles" / "families" / "mamba_ssm.json.gz"


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))["models"]


CASES = [(name, index) for name, model in recorded().items() for index in range(len(model["runs"]))]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_step_with_the_kernels_is_the_recorded_one(name: str, index: int):
    model = recorded()[name]
    run = model["runs"][index]
    spec = from_config(model["config"], name)
    how = {"attention": run["attention"], "checkpointing": run["checkpointing"], "kernels": "mamba-ssm"}
    ledger = Ledger(spec, trace(spec, Workload(run["batch"], run["seq"], device="cpu", **how)))
    assert ledger.calls == [tuple(call) for call in model["calls"]]
    assert ledger.ready == model["ready"]
    assert flops(ledger.forward_kernels) == run["flops"]["forward"]
    assert flops(ledger.backward_kernels) == run["flops"]["backward"]
    assert ledger.after_forward == run["after_forward"]
    assert ledger.peak_forward == run["peak"]["forward"]
    late = name in FEW_MASKED and run["attention"] == "eager" and run["checkpointing"] == "full"
    mask = 2 * run["batch"] * run["seq"] ** 2 if late else 0
    assert ledger.peak_backward == run["peak"]["backward"] + mask


def test_the_kernels_save_a_fraction():
    spec = from_config(NANO, "nano")
    saved = {}
    for kernels in ("torch", "mamba-ssm"):
        tree = trace(spec, Workload(1, 4096, kernels=kernels))
        mixer = next(module for module in modules(tree) if module.module_class == "NemotronHMamba2Mixer")
        saved[kernels] = sum(
            item.saved_bytes for inner in modules(mixer) for item in inner.body if hasattr(item, "saved")
        )
    assert 14.9 < saved["torch"] / saved["mamba-ssm"] < 15.1


def test_what_is_refused():
    spec = from_config(NANO, "nano")
    adapted = tune(spec, Tuning(Lora(8, ("in_proj",))))
    odd = from_config(NANO | {"ssm_state_size": 1, "n_groups": 2}, "odd")
    llama = from_config(MODELS["LFM2-1.2B"][1], "lfm2")
    cases = ((spec, {"weights": "float32"}), (adapted, {}), (odd, {}), (llama, {}))
    for model, how in cases:
        with pytest.raises(NotModeled) as caught:
            trace(model, Workload(1, 64, kernels="mamba-ssm", **how))
        assert caught.value.field == "kernels"

"""Every family against the real model of transformers 5.24, run under fake tensors (validation/oracles/families.py,
hybrids.py)."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger, flops
from zsim.model.huggingface import from_config
from zsim.model.readers import READERS
from zsim.model.spec import Workload
from zsim.model.trace import trace

FOLDER = Path(__file__).parents[2] / "validation" / "oracles" / "families"


@cache
def recorded() -> dict[str, Any]:
    files = (FOLDER / name for name in ("families.json.gz", "hybrids.json.gz"))
    return {
        name: found
        for file in files
        for name, found in json.loads(gzip.decompress(file.read_bytes()))["models"].items()
    }


CASES = [(name, index) for name, model in recorded().items() for index in range(len(model["runs"]))]

# What zsim knows to differ, and by how much. Each distinct block runs once on the tape:
# - tables and masks that only some layers use live until the first block's backward;
# - BLOOM, MPT and GPT-Neo hand attention weights out of the block, and the next one runs while they live.
# And the gradient of a bias counts from the start of its segment: before a dropout's backward, it is that early.
LATE_TABLES = {
    "gemma2": 4 * 64 * 64,
    "vaultgemma": 4 * 64 * 64,
    **dict.fromkeys(("gemma3", "gemma3-windows"), 4 * 64 * 32 * 2),
    "opt-post-norm": 8 * 64,
    "olmo3": 4 * 64 * 16,
    "mellum-windows": 2 * 64 * 32,
    **dict.fromkeys(("gemma4-dense", "gemma4-moe"), 2 * 64 * 64),
    **dict.fromkeys(("modernbert", "modernbert-classifier"), 2 * 64 * (2 * 16 + 64)),
    "modernbert-decoder": 2 * 64 * (2 * 16 + 64),
}
BERTS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
EARLY_BIAS = dict.fromkeys(("gpt_bigcode", "gpt_bigcode-heads", "starcoder2", "electra-wide", *BERTS), 2 * 64)
EARLY_BIAS |= dict.fromkeys([f"{name}-classifier" for name in BERTS], 2 * 64)
FEW_MASKED = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "nemotron_h",
    "granitemoehybrid",
    "bamba",
    "qwen2-windows",
    "cohere2_moe",
)  # some layers have no mask
FEW_WINDOWS = (  # SDPA's mask of bools
    "dots1-windows", "cwm", "ministral-types", "qwen2-windows", "gemma3-windows", "mellum-windows",
)  # fmt: skip
HANDED_WEIGHTS = {"mpt", "bloom", "gpt_neo"}
# A block is recomputed where its first saved tensor is asked for. Experts copy their rows' gradient before that, and
# the tape after it: that copy is missing from the peak, where recomputation is the peak.
MISSED_ROWS = {  # rows per token (of its experts, or of all), of 64 entries in bf16
    "gpt_oss": 2 * 64 * 64 * 2,
    "llama4": 4 * 64 * 64 * 2,
    **dict.fromkeys(
        ("gemma3n", "gemma3n-repeated"), 64 * 64 * 2
    ),  # the sum of the gradients of streams, which one tensor is added to
}


def test_every_reader_has_a_recording():
    assert {model["config"]["model_type"] for model in recorded().values()} == set(READERS)


@pytest.mark.parametrize("name", recorded())
def test_parameters_are_those_of_named_parameters(name: str):
    model = recorded()[name]
    ours = [[p.name, list(p.shape), p.module_class] for p in from_config(model["config"], name).parameters]
    assert ours == model["parameters"]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_step_is_the_recorded_one(name: str, index: int):
    model = recorded()[name]
    run = model["runs"][index]
    spec = from_config(model["config"], name)
    ledger = Ledger.of_run(spec, run)
    assert ledger.calls == [tuple(call) for call in model["calls"]]
    assert ledger.ready == model["ready"]
    assert flops(ledger.forward_kernels) == run["flops"]["forward"]
    assert flops(ledger.backward_kernels) == run["flops"]["backward"]
    assert ledger.after_forward == run["after_forward"]
    full = run["checkpointing"] == "full"
    if full and name in HANDED_WEIGHTS:
        weights = 2 * run["batch"] * 4 * run["seq"] ** 2  # bf16, of the block before
        assert 0 <= run["peak"]["forward"] - ledger.peak_forward <= weights
    else:
        assert ledger.peak_forward == run["peak"]["forward"]
    late = LATE_TABLES.get(name, 0) * run["batch"] + EARLY_BIAS.get(name, 0) if full else 0
    if full and name in FEW_MASKED and run["attention"] == "eager":
        late += 2 * run["batch"] * run["seq"] ** 2
    if full and name in FEW_WINDOWS and run["attention"] == "sdpa":
        late += run["seq"] ** 2
    missed = MISSED_ROWS.get(name, 0) * run["batch"] if full else 0
    assert -missed <= ledger.peak_backward - run["peak"]["backward"] <= late


def test_ledger_ends_empty():
    spec = from_config(recorded()["llama"]["config"], "llama")
    for checkpointing in ("none", "full", "selective"):
        ledger = Ledger(spec, trace(spec, Workload(2, 64, checkpointing=checkpointing)))
        assert ledger.saved == 0
        assert ledger.grads == 2 * spec.numel

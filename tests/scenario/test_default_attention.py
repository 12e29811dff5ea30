"""What attention runs where no `attention` is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model import test_families, test_seq2seq, test_vision
from zsim.model.huggingface import from_config
from zsim.model.spec import Images, Workload
from zsim.model.trace import trace
from zsim.scenario.load import load
from zsim.scenario.releases import attention_of

# Every other recorded family runs FlashAttention: those below say `_supports_flash_attn = False` in transformers 5.24,
# or have heads of 512.
OTHERS = {
    "vision mllama": "sdpa",
    "vision gemma3": "efficient",
    "vision paligemma": "efficient",
    "vision paligemma2": "eager",
    "vision gemma4-layers": "sdpa",
    "vision gemma4-dense": "sdpa",
    "gemma4-wide": "sdpa",
    **dict.fromkeys(("deepseek_v32", "deepseek_v32-heads", "glm_moe_dsa"), "sdpa"),
    "pair t5": "sdpa",
    "pair flan-t5": "sdpa",
    "pair mt5": "sdpa",
    **dict.fromkeys(("pair umt5", "pair umt5-xxl"), "sdpa"),
}
RECORDED: dict[str, dict[str, Any]] = {
    **test_families.recorded(),
    **{f"vision {name}": model for name, model in test_vision.recorded().items()},
    **{f"pair {name}": model for name, model in test_seq2seq.recorded().items()},
}


@pytest.mark.parametrize("name", RECORDED)
def test_every_model_has_a_default_that_it_runs(write: Callable[..., Path], name: str) -> None:
    run = RECORDED[name]["runs"][0]
    model = from_config(RECORDED[name]["config"], name)
    attention, notes = attention_of(load(write()).fields, None, model)
    assert attention == OTHERS.get(name, "flash")
    (note,) = notes
    chosen = f"attention: {attention}," if name in OTHERS else "attention: flash (FlashAttention 2), zsim's own choice"
    assert note.startswith(chosen)
    assert attention_of(load(write("attention: sdpa\n")).fields, None, model) == ("sdpa", ())
    images = Images(run["images"], *run["size"]) if name.startswith("vision ") else None
    trace(model, Workload(1, run.get("seq", 64), attention=attention, images=images))


def test_llama_3_2_vision_says_what_it_runs(write: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(test_vision.recorded()["mllama"]["config"]))
    setup = load(write(model=str(path), images="{size: [56, 56]}")).resolve()
    assert setup.workload.attention == "sdpa"
    assert "attention: sdpa, for FlashAttention does not take mllama's masks" in setup.assumptions

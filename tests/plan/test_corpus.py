"""Files that people have published: each is read, or refused for the right reason. Skips where they are not at hand."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.hjson import parse_hjson
from zsim.plan.reading import Reading

CORPUS = Path(__file__).parents[2] / ".." / "shared" / "reference" / "corpus"
FILES = sorted([*CORPUS.glob("ds_config/*"), *CORPUS.glob("accel_yaml/*")]) if CORPUS.is_dir() else []

# Files refused as they stand: by number, with a part of the reason. Every other one is read.
REFUSED = {
    # never filled in
    "D015": "`...` stands for something that was left out",
    "D093": "`...` stands for something that was left out",
    "D048": "$MICRO_BATCH is a shell variable",
    "D058": "$GLOBAL_BATCH_SIZE is a shell variable",
    "D070": "$GLOBAL_BATCH is a shell variable",
    "D106": "$ZERO_STAGE is a shell variable",
    "D113": "$BATCH_SIZE is a shell variable",
    "D125": "$ZERO_STAGE is a shell variable",
    "D158": "$GLOBAL_BATCH is a shell variable",
    "D103": "CONFIG_BATCH_SIZE is a placeholder",
    "D123": "CONFIG_BATCH_SIZE is a placeholder",
    "D016": "list of values to tune",
    "D116": "list of values to tune",
    # DeepSpeed 0.19.8 refuses them
    "D010": "1e-10 is not a whole number",
    "D160": "0.5 is not a whole number",
    "D040": "DeepSpeed does not know this key",  # bf16.loss_scale, ignored before 0.17
    "D140": "DeepSpeed does not know this key",
    "D141": "DeepSpeed does not know this key",
    "D148": "DeepSpeed does not know this key",
    "D156": "DeepSpeed does not know this key",  # fp16.opt_level
    "D066": "did you mean stage3_param_persistence_threshold?",
    "D098": "did you mean stage3_param_persistence_threshold?",
    "D096": "DeepSpeed does not know this key",  # zero_optimization.grad_hooks
    "D050": "DeepSpeed refuses it here",  # optimizer.params.max_grad_norm
    "D053": "has removed the old curriculum learning",
    "D090": "has removed elastic training",
    "D101": "false is not a section",
    "Y013": "accelerate does not know this key",
    # not modeled
    "D011": "DeepCompile",
    "D018": "tensor parallelism",
    "D031": "tensor parallelism",
    "D143": "OneBitAdam",
    "Y011": "tensor parallelism",
    "Y018": "model.freeze",
    "Y033": "expert parallelism",
}

pytestmark = pytest.mark.skipif(not FILES, reason="the published files are not at hand")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name[:4])
def test_read_or_refused_for_the_right_reason(path: Path) -> None:
    reason = REFUSED.get(path.name[:4])
    if reason is None:
        reading = read(path)
        assert ("framework", "name") in reading.fields
        assert reading.still_missing()
        return
    with pytest.raises(InputError) as refused:
        read(path)
    assert reason in refused.value.message
    assert refused.value.file == path
    assert refused.value.line is not None or "is an oumi recipe" in refused.value.message


def read(path: Path) -> Reading:
    document = detect.parse(path)
    return detect.read(document, detect.identify(document))


def test_deepspeed_refuses_the_same_files() -> None:
    """DeepSpeed's own configuration class on every file, with `auto` filled as the Trainer would."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed")
    if deepspeed.__version__ != "0.19.8":
        pytest.skip("compared with DeepSpeed 0.19.8")
    from deepspeed.runtime.config import DeepSpeedConfig

    compared = 0
    for path in FILES:
        if not path.name.startswith("D"):
            continue
        try:
            data = copy.deepcopy(parse_hjson(path.read_text(), path).data)
        except InputError:
            continue
        if detect.is_neox_text(path.read_text()):
            continue
        theirs = accepts(DeepSpeedConfig, data)
        try:
            read(path)
            ours = True
        except NotModeled:
            continue
        except InputError as refused:
            if "max_grad_norm" in (refused.field or ""):
                continue  # DeepSpeed refuses it later, when it makes the optimizer
            ours = False
        compared += 1
        assert ours == theirs, path.name
    assert compared > 60


def accepts(config_class: Any, data: dict[str, Any]) -> bool:
    for name, value in {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }.items():
        if data.get(name) == "auto":
            data[name] = value
    for name in ("fp16", "bf16"):
        if isinstance(data.get(name), dict) and data[name].get("enabled") == "auto":
            data[name]["enabled"] = name == "bf16"
    whole = data.pop("train_batch_size", None)
    if isinstance(whole, str) and whole != "auto":
        return False
    data.setdefault("train_micro_batch_size_per_gpu", 1)  # one rank: the batch sizes of a cluster do not multiply
    try:
        config_class(data)
    except Exception:
        return False
    return True

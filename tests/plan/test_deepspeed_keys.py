"""The table of DeepSpeed's keys: complete, right, and every key does what the table says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zsim.document import Document
from zsim.errors import InputError, NotModeled
from zsim.plan.deepspeed import read_document
from zsim.plan.deepspeed_keys import ALIASES, LISTED, NONE, NULLABLE, REFUSED, REMOVED, SECTIONS, USED, Key
from zsim.plan.key_table import markdown
from zsim.plan.reading import Reading

KEYS = [(section, name, key) for section, keys in SECTIONS.items() for name, key in keys.items()]
_OTHER: dict[type, Any] = {bool: True, int: 7, float: 0.25, str: "x", list: ["x"], dict: {"x": 1}, object: "x"}
# Values that are right for their key where the one of the kind is not.
_VALUES: dict[str, Any] = {
    "zero_optimization.stage": 2,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "cpu",
    "seq_parallel_communication_data_type": "bf16",
    "communication_data_type": "fp32",
    "data_types.grad_accum_dtype": "bf16",
    "optimizer.type": "Lion",
    "bf16.enabled": False,
    "bfloat16.enabled": False,
    "bf16.check_grad_overflow": False,
    "bfloat16.check_grad_overflow": False,
    "zero_force_ds_cpu_optimizer": False,
    "timers.throughput.enabled": False,
    "timers.throughput.synchronized": False,
    "torch_autocast.dtype": "torch.bfloat16",
}


def full_name(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def read_with(section: str, name: str, value: Any) -> Reading:
    """A small configuration in which the key stands, with what it needs around it."""
    data: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    data["zero_optimization"] = {"stage": 3}
    if section == "bfloat16":
        data["bfloat16"] = data.pop("bf16")
    if section == "fp16" and name == "enabled":
        data.pop("bf16")
    if section.startswith("zero_optimization.offload"):
        data["zero_optimization"][section.split(".")[1]] = {"device": "cpu"}
    if section == "aio":
        data["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    if name == "zero_force_ds_cpu_optimizer":
        data["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if section == "torch_autocast":
        data["torch_autocast"] = {"enabled": True, "dtype": "bf16"}
    if section == "expert_parallel" or name == "use_data_before_expert_parallelism":
        data["expert_parallel"] = {"enabled": True}
    if section.startswith("optimizer"):
        data["optimizer"] = {"type": "AdamW"}
    inner = data
    for part in section.split(".") if section else []:
        inner = inner.setdefault(part, {})
    inner[name] = value
    return read_document(Document("ds.json", data))


def other_value(section: str, name: str, key: Key) -> Any:
    full = full_name(section, name)
    if full in _VALUES:
        return _VALUES[full]
    if key.kind is bool:
        return not key.default if isinstance(key.default, bool) else True
    return _OTHER[key.kind]


@pytest.mark.parametrize(("section", "name", "key"), KEYS, ids=[full_name(*case[:2]) for case in KEYS])
def test_every_key_does_what_the_table_says(section: str, name: str, key: Key) -> None:
    full = full_name(section, name)
    if full in SECTIONS and key.effect == USED:
        return  # a section; its keys stand in the table themselves
    value = other_value(section, name, key)
    if key.effect == REFUSED:
        with pytest.raises(NotModeled) as refused:
            read_with(section, name, value)
        assert refused.value.field == full
        assert key.why in refused.value.message
        if key.default is not None:
            read_with(section, name, key.default)  # its harmless value passes
        return
    reading = read_with(section, name, value)
    texts = " ".join([*reading.notes, *reading.without_effect, *reading.not_modeled])
    if key.effect == NONE:
        assert any(full in text.split(" (")[0] for text in reading.without_effect)
    elif key.effect == LISTED:
        assert any(text.startswith(f"{full}:") for text in reading.not_modeled)
    else:
        said = {path[-1] for path in reading.fields}
        changed = reading.fields != read_with("", "steps_per_print", 1).fields
        assert name in said or changed or name in texts


def test_aliases_name_the_same_key() -> None:
    for own, alias in ALIASES.items():
        key = SECTIONS["zero_optimization"][alias]
        if key.effect == USED:
            value = other_value("zero_optimization", alias, key)
            assert (
                read_with("zero_optimization", own, value).fields == read_with("zero_optimization", alias, value).fields
            )


@pytest.mark.parametrize("full", REMOVED)
def test_removed_keys_are_refused(full: str) -> None:
    section, _, name = full.rpartition(".")
    with pytest.raises(InputError, match="DeepSpeed has removed"):
        read_with(section, name, False)


# ---------------------------------------------------------------- against DeepSpeed itself, where it is installed


@pytest.fixture(scope="module")
def config() -> Any:
    import os

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    import deepspeed

    if deepspeed.__version__ != "0.19.8":
        pytest.skip("the table is that of DeepSpeed 0.19.8")
    from deepspeed.runtime import config

    return config


def test_the_table_holds_every_pydantic_field(config: Any) -> None:
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    for section, model in {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "hybrid_engine": config.HybridEngineConfig,
        "compile": CompileConfig,
        "tensor_parallel": TPTrainingConfig,
    }.items():
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        extra = {"replace_with_kernel_inject", "tensor_parallel"} if section == "tensor_parallel" else set()
        assert SECTIONS[section].keys() - extra == fields.keys(), section
        for name, field in fields.items():
            key = SECTIONS[section][name]
            if key.effect == USED and key.default is not None:
                default = field.default.value if hasattr(field.default, "value") else field.default
                assert key.default == default, f"{section}.{name}"
            assert (f"{section}.{name}" in NULLABLE) == _takes_null(model, name), f"{section}.{name}"


def _takes_null(model: Any, name: str) -> bool:
    from pydantic import ValidationError

    try:
        model(**{name: None})
    except ValidationError:
        return False
    return True


def test_null_is_refused_where_pydantic_refuses_it() -> None:
    zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_quantized_gradients": None}}
    with pytest.raises(InputError, match="null is not true or false") as refused:
        read_document(Document("ds.json", zero))
    assert refused.value.accepted == "true or false, or leave it out"
    read_with("zero_optimization", "overlap_comm", None)
    bf16 = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True, "immediate_grad_update": None}}
    with pytest.raises(InputError, match="null is not true or false"):
        read_document(Document("ds.json", bf16))
    read_document(Document("ds.json", bf16), "0.16.9")  # a plain look-up then


def test_values_are_refused_as_deepspeed_refuses_them(config: Any) -> None:
    """Numbers and texts, for every used key. A group of no ranks passes DeepSpeed's check, and fails later."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    def accepted(act: Callable[..., Any], error: type[Exception], *arguments: Any, **keys: Any) -> bool:
        try:
            act(*arguments, **keys)
        except error:
            return False
        return True

    differ = []
    for section, model in {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    }.items():
        names = [
            name for name, key in SECTIONS[section].items() if key.effect == USED and key.kind in (int, float, bool)
        ]
        for name in names:
            for value in (0, 1, -1, 0.5, 1.5, "x", "1000", "1e9"):
                around = {} if section == "zero_optimization" else {"device": "cpu"}
                theirs = accepted(model, Exception, **around, **{name: value})
                ours = accepted(read_with, InputError, section, name, value)
                if theirs != ours and not name.startswith("cpu_offload"):
                    differ.append((section, name, value, theirs))
    assert differ == [("zero_optimization", "zero_hpz_partition_size", 0, True)]


def test_the_table_holds_every_key_of_the_top_level(config: Any) -> None:
    """Every name that runtime/config.py and the sections it reads look up in the file."""
    import inspect
    import re

    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import constants

    source = inspect.getsource(config)
    looked_up = set(re.findall(r"param_dict(?:\.get\(|\[|, )\s*([A-Z_]{3,})", source))
    names = {getattr(constants, constant, getattr(config, constant, None)) for constant in looked_up}
    names |= set(re.findall(r"param_dict\.get\(['\"](\w+)['\"]", source)) | set(
        monitor.DeepSpeedMonitorConfig.model_fields
    )
    known = SECTIONS[""].keys() | REMOVED.keys()
    missing = {name for name in names if isinstance(name, str) and name not in known}
    missing -= {"max_grad_norm", "dtype", "tag_validation", "params", "type", "enabled"}  # inside sections
    assert not missing


def test_the_table_holds_every_key_of_aio_and_activation_checkpointing(config: Any) -> None:
    from deepspeed.runtime.activation_checkpointing import config as checkpointing
    from deepspeed.runtime.swap_tensor import constants as aio

    names = {value for name, value in vars(aio).items() if name.startswith("AIO_") and not name.endswith("_DEFAULT")}
    assert names - {aio.AIO_FORMAT} == SECTIONS["aio"].keys() - {"thread_count"}
    assert checkpointing.ACT_CHKPT_DEFAULT.keys() | {"profile"} == SECTIONS["activation_checkpointing"].keys()


def test_the_table_holds_every_key_of_expert_parallelism(config: Any) -> None:
    import inspect
    import re

    from deepspeed.module_inject import auto_ep_config

    names = re.findall(r'param_dict(?:\.get\(|\[)"(\w+)"', inspect.getsource(auto_ep_config))
    assert set(names) == SECTIONS["expert_parallel"].keys()


def test_removed_keys_are_deepspeeds(config: Any) -> None:
    theirs = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    theirs |= {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(REMOVED) == theirs


def test_default_of_clipping(config: Any) -> None:
    assert SECTIONS[""]["gradient_clipping"].default == config.GRADIENT_CLIPPING_DEFAULT


def test_the_documented_table_is_this_one() -> None:
    """Written by `python -m zsim.plan.key_table`; a row per key, each of which is a case above."""
    text = (Path(__file__).parents[2] / "docs" / "deepspeed-keys.md").read_text(encoding="utf-8")
    assert text == "\n".join(markdown()) + "\n"
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    sections = {full for full in SECTIONS if full}
    assert rows >= {full_name(section, name) for section, name, _ in KEYS} - sections | REMOVED.keys()

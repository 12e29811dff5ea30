"""FSDP options as accelerate 1.15, the Hugging Face Trainer (transformers 5.24) and axolotl write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.document import Document, Path_, nearest
from zsim.errors import NotModeled
from zsim.plan.reading import Reading
from zsim.plan.recipe import as_flag

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # numbered from 1
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")  # torch's StateDictType, from 1
_WITHOUT_EFFECT = {
    "final_state_dict_type": "the last save, of weights alone",
    "sync_module_states": "loading",
    "xla": "TPUs",
    "xla_fsdp_v2": "TPUs",
    "xla_fsdp_grad_ckpt": "TPUs",
}
_CLASSES = ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap")  # the plugin's environment, its argument
OPTIONS = {
    "version", "sharding_strategy", "reshard_after_forward", "offload_params", "cpu_offload", "backward_prefetch",
    "forward_prefetch", "limit_all_gathers", "use_orig_params", "auto_wrap_policy", "activation_checkpointing",
    "activation_checkpointing_offload", "mixed_precision_policy", "cpu_ram_efficient_loading", "state_dict_type",
    "min_num_params", *_CLASSES, *_WITHOUT_EFFECT,
}  # fmt: skip


def read_fsdp(
    reading: Reading,
    config: Mapping[str, Any],
    path: Path_,
    *,
    default_version: int,
    default_wrap: str = "TRANSFORMER_BASED_WRAP",
    default_least: int = 0,
    nodes: int | None = None,
) -> None:
    """Set the framework and its `fsdp` fields from a section of options, with or without the prefix "fsdp_".

    `path` is where the section stands; `default_least` is for min_num_params; `nodes` and `reading.ranks` size the
    groups of hybrid sharding. Raises InputError for values that the tools refuse, NotModeled for what cannot be
    simulated.
    """
    options, places = {}, {}
    for key, value in config.items():
        name = str(key).removeprefix("fsdp_")
        if value is not None:
            options[name], places[name] = value, (*path, key)
    document = reading.document

    def flag(name: str, default: bool) -> bool:
        if name not in options:
            return default
        return as_flag(options[name], lambda text: document.error(places[name], text, "true or false"))

    def choice(name: str, default: str, accepted: tuple[str, ...]) -> str:
        value = str(options.get(name, default)).upper()
        if value.isdecimal() and 1 <= int(value) <= len(accepted):
            value = accepted[int(value) - 1]
        if value not in accepted:
            raise document.error(places[name], f"{options[name]!r} is not known", ", ".join(accepted))
        return value

    def put(field: str, value: Any, name: str) -> None:
        reading.set(("fsdp", field), value, places.get(name, path))

    version = str(options.get("version", default_version))
    if version not in ("1", "2"):
        raise document.error(places["version"], f"{version} is not a version of FSDP", "1 or 2")
    framework = f"fsdp{version}"
    reading.set(("framework", "name"), framework, places.get("version", path))
    if "version" not in options:
        reading.notes.append(f"FSDP{version}, the tool's default")

    wrap = choice("auto_wrap_policy", default_wrap, ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))
    if wrap == "SIZE_BASED_WRAP":
        _by_size(reading, version, places, put, options.get("min_num_params", default_least))
    else:
        if wrap == "NO_WRAP" and version == "2":
            where = places.get("auto_wrap_policy", path)
            raise document.error(where, f"wrapping {wrap} in FSDP2", "TRANSFORMER_BASED_WRAP", kind=NotModeled)
        if wrap == "NO_WRAP":
            put("flat", True, "auto_wrap_policy")
        if "min_num_params" in options:
            reading.without_effect.append(f"{places['min_num_params'][-1]} (size-based wrapping only)")
    for name in [name for name in _CLASSES if name in options]:
        if wrap == "TRANSFORMER_BASED_WRAP":
            put("wrap", _classes(document, places[name], options[name]), name)
        else:
            reading.without_effect.append(f"{places[name][-1]} (TRANSFORMER_BASED_WRAP only)")
    if flag("offload_params", False) or flag("cpu_offload", False):
        put("cpu_offload", True, "offload_params" if "offload_params" in options else "cpu_offload")
    if flag("cpu_ram_efficient_loading", False):
        reading.set(("load",), "rank0", places["cpu_ram_efficient_loading"])
    if flag("activation_checkpointing", False):
        if wrap != "TRANSFORMER_BASED_WRAP":  # accelerate 1.15 accelerator.py: what the policy wraps is checkpointed
            why = f"checkpoints of what {wrap} chooses"
            raise document.error(places["activation_checkpointing"], why, "false", kind=NotModeled)
        reading.set(("checkpointing",), "full", places["activation_checkpointing"])
    if flag("activation_checkpointing_offload", False):
        raise document.error(
            places["activation_checkpointing_offload"], "offloaded activations", "false", kind=NotModeled
        )

    if "state_dict_type" in options:
        kind = choice("state_dict_type", "FULL_STATE_DICT", _STATE_DICTS)
        if version == "2" and kind == "LOCAL_STATE_DICT":
            raise document.error(places["state_dict_type"], f"{kind} is only available with FSDP1")
        put("state_dict_type", kind, "state_dict_type")
    if version == "2":
        put("reshard_after_forward", _fsdp2_reshard(reading, options, places, flag, choice), "reshard_after_forward")
    else:
        _fsdp1(reading, options, put, flag, choice, nodes)
    for name in options:
        if name in _WITHOUT_EFFECT:
            reading.without_effect.append(f"{places[name][-1]} ({_WITHOUT_EFFECT[name]})")
        elif name == "backward_prefetch_policy":  # accelerate 0.12 to 0.34, utils/launch.py
            reading.notes.append(
                f"{places[name][-1]} is ignored from accelerate 1.0 on; before, it was backward_prefetch"
            )
        elif name not in OPTIONS:
            close = nearest(name, OPTIONS)
            hint = f"; did you mean {close}?" if close else ""
            reading.notes.append(f"{places[name][-1]} is no option of FSDP and is ignored{hint}")


def _classes(document: Document, place: Path_, value: Any) -> list[str]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip().isidentifier() for name in names):
        raise document.error(place, f"{value!r} names no classes", "LlamaDecoderLayer, or several with commas")
    return [name.strip() for name in names]


def _by_size(reading: Reading, version: str, places: Mapping[str, Path_], put: Any, value: Any) -> None:
    document = reading.document
    try:
        least = int(float(value))
        if isinstance(value, bool) or least < 0:
            raise ValueError(value)
    except (TypeError, ValueError, OverflowError):
        raise document.error(places["min_num_params"], f"{value!r} is not a number of parameters", "1e8") from None
    if version == "2":  # accelerate 1.15 fsdp2_apply; torch 2.13 _fsdp_init.py _validate_module
        why = "SIZE_BASED_WRAP shards every module of that size, the list of blocks too, which FSDP2 refuses"
        raise document.error(places["auto_wrap_policy"], why, "TRANSFORMER_BASED_WRAP, or version 1")
    if least:
        put("min_num_params", least, "min_num_params")
    else:  # accelerate 1.15 dataclasses.py set_auto_wrap_policy: then there is no policy
        put("flat", True, "min_num_params" if "min_num_params" in places else "auto_wrap_policy")


def _fsdp2_reshard(
    reading: Reading, options: Mapping[str, Any], places: Mapping[str, Path_], flag: Any, choice: Any
) -> bool:
    """A bool in FSDP2; the older sharding_strategy says the same where it can."""
    if "reshard_after_forward" in options:
        return bool(flag("reshard_after_forward", True))
    strategy = choice("sharding_strategy", "FULL_SHARD", _STRATEGIES)
    if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise reading.document.error(places["sharding_strategy"], f"{strategy} is only available with FSDP1")
    return bool(strategy == "FULL_SHARD")


def _fsdp1(reading: Reading, options: Mapping[str, Any], put: Any, flag: Any, choice: Any, nodes: int | None) -> None:
    name = "sharding_strategy" if "sharding_strategy" in options else "reshard_after_forward"
    strategy = choice(name, "FULL_SHARD", _STRATEGIES)
    put("sharding_strategy", "_HYBRID_SHARD_ZERO2" if strategy == "HYBRID_SHARD_ZERO2" else strategy, name)
    if "HYBRID" in strategy and nodes and reading.ranks:
        put("mesh", [nodes, reading.ranks // nodes], name)  # FSDP1 shards within a node and replicates across
    prefetch = choice("backward_prefetch", "NO_PREFETCH", ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"))
    put("backward_prefetch", "NONE" if prefetch == "NO_PREFETCH" else prefetch, "backward_prefetch")
    put("forward_prefetch", flag("forward_prefetch", False), "forward_prefetch")
    for option in ("limit_all_gathers", "use_orig_params"):  # what is left out follows from accelerate's release
        if option in options:
            put(option, flag(option, True), option)

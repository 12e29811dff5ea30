"""Float8 training as a scenario asks for it: which modules, with what, and what it does not go with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.cluster.spec import Cluster
from zsim.errors import NotModeled
from zsim.model.spec import Float8

if TYPE_CHECKING:
    from zsim.scenario.fields import Float8Field
    from zsim.scenario.load import Scenario

# What stays as it is where nobody says: torchtitan's configurations (filter_fqns), accelerate 1.15 utils/ao.py
_EXCLUDED = {"torchtitan": ("output",), "hf": ("first_linear", "last_linear")}
MFU = "MFU is that of 16-bit products, as torchtitan printed it for float8 until February 2026"


def float8_of(scenario: Scenario, given: Float8Field, cluster: Cluster) -> tuple[Float8, list[str]]:
    """The setting and notes on it. Raises InputError, NotModeled."""
    fields = scenario.fields
    framework, device, path = fields.framework.name, cluster.devices[0], ("float8",)
    if "float8" not in device.peak_flops:
        with_it = "a GPU that has them: Hopper, Blackwell, Ada, MI300"
        raise scenario.error(path, f"{device.name} has no float8 products", with_it)
    for name, what in (("lora", "adapters"), ("quantize", "quantized weights")):
        if getattr(fields, name):
            raise scenario.error(path, f"float8 with {what}", f"null, or {name}: null", kind=NotModeled)
    if fields.precision != "bf16":
        raise scenario.error(path, f"float8 beside {fields.precision}", "precision: bf16", kind=NotModeled)
    if fields.kernels not in ("torch", "liger"):
        raise scenario.error(path, f"float8 with kernels of {fields.kernels}", "kernels: torch, liger", kind=NotModeled)
    notes, exclude = [MFU], given.exclude
    if exclude is None:
        exclude = list(_EXCLUDED[fields.implementation])
        by_whom = "torchtitan" if fields.implementation == "torchtitan" else "accelerate"
        notes.append(f"float8.exclude: {', '.join(exclude)}, as {by_whom} has it")
    if not fields.compile:
        notes.append("float8 without compile: its casts are kernels of their own, as torchao says not to run it")
    if framework == "ddp" and fields.compile:
        notes.append(
            "float8 with ddp and compile: axolotl (docs/mixed_precision.qmd) lists an error of torch's with it"
        )
    gathers = bool(given.all_gather)
    if gathers and framework != "fsdp2":
        raise scenario.error(("float8", "all_gather"), f"is an option of fsdp2, not {framework}", "false")
    if gathers and given.recipe != "tensorwise":  # config.py, Float8LinearConfig.__post_init__
        raise scenario.error(("float8", "all_gather"), f"torchao refuses it with {given.recipe}", "recipe: tensorwise")
    if given.precompute and not gathers:
        raise scenario.error(("float8", "precompute"), "goes with all_gather: true", "false, or all_gather: true")
    return Float8(given.recipe, tuple(exclude), gathers, bool(given.precompute)), notes

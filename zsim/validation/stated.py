"""What the words of a published row say beyond its columns: data types, the optimizer, DeepSpeed's file, adapters."""

from __future__ import annotations

import re
from typing import Any

from zsim.errors import NotModeled
from zsim.model.lora import Lora, Tuning
from zsim.model.spec import Float8
from zsim.plan.version import parse_version
from zsim.validation.loops import loop
from zsim.validation.rows import Row

_DTYPES = {"fp16": "float16", "fp32": "float32"}


def half(row: Row) -> str:
    return next((name for word, name in _DTYPES.items() if row["precision"].startswith(word)), "bfloat16")


def all_bf16(row: Row) -> bool:
    """Whether weights, gradients and optimizer states are in 16 bits, `half(row)`, without anything wider."""
    words = r"pure[ _]bf16|bf16-true|(?:bf|fp)16 (?:params|weights)(?:, grads)? and (?:bf16 optimizer )?states"
    return re.search(words, row["precision"]) is not None


def reduce_dtype(row: Row) -> str | None:
    """Of gradients between GPUs, where the precision says it."""
    if "fp32 reduce" in row["precision"]:
        return "float32"
    return "bfloat16" if re.search(r"\breduce\b[^;]*bf16", row["precision"]) or all_bf16(row) else None


def optimizer(row: Row, default: str) -> str:
    """Whose AdamW the notes name, as `Optimizer.impl`; `default` is the framework's own choice."""
    notes = row.get("notes")
    if "AdamW of transformers" in notes:
        return "loop"
    return "foreach" if "AdamW of torch" in notes else "fused" if "fused AdamW" in notes else default


def kernels(row: Row, default: str) -> str:
    """Whose norms and activations the row names, as `Workload.kernels`."""
    named = row.get("attention_impl")
    return "flash-attn" if "xformers' SwiGLU" in named else "liger" if "liger" in named else default


def adapters(row: Row) -> Tuning | None:
    """LoRA whose rank and targets the precision names, "LoRA r=64 on q_proj, v_proj", or else the loop's own."""
    found = re.search(r"LoRA r=(\d+) on (\w+(?:, \w+)*)", row["precision"])
    if found is None:
        own = loop(row).lora if "LoRA" in row["precision"] else None
        return Tuning(own, "nf4" if "4-bit" in row["precision"] else None) if own else None
    dropout = re.search(r"LoRA dropout (0?\.\d+)", row.get("notes"))
    lora = Lora(int(found[1]), tuple(found[2].split(", ")), dropout=float(dropout[1]) if dropout else 0.0)
    return Tuning(lora, "nf4" if "4-bit" in row["precision"] else None)


def float8(row: Row) -> Float8 | None:
    """torchao's recipe, where torchtitan, OLMo-core, lightning-thunder's benchmark of litgpt or accelerate's example
    (fsdp2_fp8) runs it: "fp8 rowwise", or "fp8 linear", which is tensorwise. Its configurations leave out the output
    projection; where they gather in float8 they compute the scales after the optimizer's step, as all commands of these
    sources have it. Raises NotModeled for other float8."""
    precision = row["precision"]
    if not re.search(r"fp8|float8", precision, re.IGNORECASE):
        return None
    found = re.match(r"fp8 (linear|tensorwise|rowwise_with_gw_hp|rowwise)\b", precision)
    if found is None or not re.search("torchtitan|OLMo-core|litgpt|fsdp2_fp8", row["framework"]):
        raise NotModeled("float8 that is not torchao's", row.file, row.line, "precision")
    recipe, gathers = found[1].replace("linear", "tensorwise"), "fp8 all-gather" in precision
    head = "output" if loop(row).implementation == "torchtitan" else "lm_head"
    return Float8(recipe, (head,), gathers, gathers)


def master_weights(row: Row, version: str, offloads: bool) -> dict[str, Any]:
    """Fields of a DeepSpeedPlan: what the precision says of master weights in bf16, as DeepSpeed spells it or in words.

    Adam's states beside them are in bf16 too on GPUs, where DeepSpeed has no other, and in float32 on the CPU unless
    the row says more. Releases before 0.17.1 pass over the keys (plan/deepspeed.py, in_release).
    """
    precision = row["precision"]
    if not re.search(r"bf16[ _]master", precision) or parse_version(version) < (0, 17, 1):
        return {}
    low = re.search(r"bf16[ _](master[\w ,]* and )?(optimizer|Adam)[ _]states", precision)
    return {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": not offloads or bool(low)}


def zero_settings(row: Row) -> dict[str, Any]:
    """Fields of a DeepSpeedPlan: what the notes say of DeepSpeed's file. All else is DeepSpeed's default."""
    notes = row.get("notes")
    given: dict[str, Any] = {}
    if "overlap_comm" in notes:
        given["overlap_comm"] = "overlap_comm off" not in notes
    if "pinned" in notes:
        given |= {"offload_optimizer_pin_memory": True, "offload_param_pin_memory": True}
    if buckets := re.search(r"reduce buckets of ([\d.e]+)", notes):
        given["reduce_bucket_size"] = round(float(buckets[1]))
    if buckets := re.search(r"prefetch buckets of ([\d.e]+)", notes):
        given["stage3_prefetch_bucket_size"] = round(float(buckets[1]))
    if groups := re.search(r"sub-groups of ([\d.e]+)", notes):
        given["sub_group_size"] = round(float(groups[1]))
    if "no clip" in notes:
        given["grad_clip"] = None
    if "sizes auto" in notes:  # plan/deepspeed.py AUTO_FROM_HIDDEN_SIZE
        hidden = row.count("d_model")
        given["reduce_bucket_size"] = hidden**2
        if row["strategy"] == "zero3":
            given["stage3_prefetch_bucket_size"] = round(0.9 * hidden**2)
            given["stage3_param_persistence_threshold"] = 10 * hidden
    return given

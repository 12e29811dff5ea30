"""The setup that a row of a published training run describes.

A row that states too little, or something that is not simulated, is refused with the reason (InputError, NotModeled);
nothing about the run is guessed except what the assumptions of its setup name.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from zsim.cluster.spec import Cluster
from zsim.errors import InputError, NotModeled
from zsim.model import families
from zsim.model.architecture import Architecture, LayerKind
from zsim.model.kernels import Work
from zsim.model.layers import Net
from zsim.model.lora import tune
from zsim.model.spec import Compute, ModelSpec, Module, Workload
from zsim.model.trace import parameters
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan
from zsim.program.lower import under
from zsim.scenario import Setup
from zsim.validation import stated, titan_history
from zsim.validation.loops import loop, prefers_cudnn
from zsim.validation.machines import cluster_of
from zsim.validation.row_plans import LLAMA_FACTORY, is_example, plan_of_row
from zsim.validation.rows import Row
from zsim.validation.shapes import with_shape

_EXAMPLE_VOCAB = 50257  # of DeepSpeedExamples training/bf16_master_weight: the tokens of GPT-2
_NAMED = ("qwen3", "qwen2", "mistral", "olmo2", "phi3", "gemma2", "gemma")
_KERNELS = {"SDPA with a mask": "efficient", "SDPA, cuDNN first": "sdpa"}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_UNTIED = {"qwen2": 3000, "qwen3": 4096}  # models of this width and more have an output projection of their own
_HEADS = {"qwen3": 128, "gemma2": 256, "gemma": 256}
PARALLELISM = re.compile(r"\b(uses (TP|CP|PP)|TP \d|CP \d|PP \d|sequence parallel [2-9]|tensor parallel|pipeline)")


def setup_of(row: Row) -> Setup:
    """What the row says was run. Raises InputError or NotModeled with the reason if it cannot be simulated."""
    try:
        return _setup(with_shape(row))
    except InputError as error:
        if error.file is None:  # of a part that the row describes: a GPU, a plan
            error.file, error.line = row.file, row.line
        raise


def _setup(row: Row) -> Setup:
    _refuse_unmodeled(row)
    assumed: list[str] = []
    cluster = cluster_of(row, assumed)
    workload = _workload(row, cluster, assumed)
    model = _model(row)
    plan = plan_of_row(row, cluster)
    workload = replace(under(plan, workload), cudnn_masks=prefers_cudnn(row))
    if isinstance(plan, DeepSpeedPlan) and plan.zero_init:
        assumed.append("built under zero.Init, or peaks of memory read after the start")
    if LLAMA_FACTORY in row["framework"] and isinstance(plan, DeepSpeedPlan):
        assumed.append(f"DeepSpeed {plan.version} by LLaMA-Factory, and its launcher's expandable segments")
    if workload.loss == "held":
        assumed.append("the training loop holds the logits through the backward")
    device = cluster.devices[0]
    wanted = 4 * model.numel + 12 * model.trainable_numel
    if isinstance(plan, DdpPlan) and plan.dtype == "float32" and wanted > device.memory_bytes:
        raise InputError(
            f"16 bytes per trained parameter are more than a {device.name} has", row.file, row.line, "precision"
        )
    tree = _tree(model, workload, plan)
    return Setup(row.id, model, tree, workload, plan, cluster, _stack(row), tuple(assumed))


def _stack(row: Row) -> str:
    return "composer-2023" if row["framework"].startswith("llm-foundry") else "default"


def _refuse_unmodeled(row: Row) -> None:
    text = " ".join((row.get("framework"), row["precision"], row.get("strategy"), row.get("notes")))
    stated.float8(row)
    if PARALLELISM.search(text):
        raise NotModeled("tensor, pipeline, context or sequence parallelism", row.file, row.line, "notes")
    if re.search(r"LoRA|PEFT", text) and stated.adapters(row) is None:
        raise NotModeled("adapters (the adapted modules are not stated)", row.file, row.line, "precision")
    if re.search(r"own C\+\+|Megatron|MLX|llm\.c", row["framework"]):
        raise NotModeled(f"programs of {row['framework']}", row.file, row.line, "framework")


def _workload(row: Row, cluster: Cluster, assumed: list[str]) -> Workload:
    checkpointing = row["activation_checkpoint"]
    rules = loop(row)
    titan = "torchtitan" in row["framework"]
    chosen = None
    if checkpointing == "selective" and not (titan and not _every_second(row)):
        checkpointing, chosen = "full", _checkpointed(row)
    foundry = rules.implementation == "llm-foundry"
    fused = "foak" in row["framework"]
    if fused:
        assumed.append("rotary embeddings as torch does them, not in place")
    tokens = row.count("micro_batch") * row.count("seq_len")
    # The loss in float32 holds 10 bytes per logit (logits, log-softmax, half a gradient); this run did fit. Trainers of
    # transformers' models switch Liger on by one flag; llm-foundry and torchtitan do not have it.
    huge = rules.implementation == "hf" and 10 * tokens * _vocab(row) > cluster.devices[0].usable_bytes
    # All of Liger, its loss included; where single kernels are as its own, the row says which.
    liger = "liger" in row["framework"] or "liger kernels" in row.get("attention_impl")
    if huge:
        assumed.append("Liger's loss, norms and activations: the logits alone would fill the GPU")
    return Workload(
        micro_batch=row.count("micro_batch"),
        seq_len=row.count("seq_len"),
        dtype=stated.half(row),
        attention="triton" if foundry and "PURE" in row["precision"] else _fused_attention(row, assumed),
        checkpointing=checkpointing,
        checkpointed=chosen,
        # adapters are peft's, on the modules of transformers
        implementation="hf" if rules.implementation == "torchtitan" and stated.adapters(row) else rules.implementation,
        loss="fused" if huge or liger else _loss(row),
        kernels="unsloth" if fused else stated.kernels(row, "liger" if huge else "torch"),
        wide_cache="--bf16" in row["precision"] and checkpointing == "none" and "transformers 4.35" in row.get("notes"),
        compile=row.get("compile") == "yes",
        float8=stated.float8(row),
        torchtitan=titan_history.models(row) if titan else (2024, 12),
        workspace_bytes=cluster.devices[0].workspace_bytes,
    )


def _vocab(row: Row) -> int:
    return row.count("vocab", _EXAMPLE_VOCAB if is_example(row) else None)


def _loss(row: Row) -> str:
    """As notes or the loop's code have it. A loop of one's own around DeepSpeed's engine holds the model's outputs
    through the backward; trainers let go of them. (gist-a800: what is allocated between steps grows by 4 bytes per
    logit of a micro-batch.)"""
    if "torchtitan" in row["framework"]:
        return titan_history.loss(row)
    known = loop(row).loss
    if known in ("hf", "copied") and re.search(r"cross-entropy of (?:the )?(?:bf16|fp16) logits", row.get("notes")):
        return "uncast" if known == "hf" else "copied_uncast"
    if known == "copied" and "outputs held" in row.get("notes"):
        return "copied_held"
    if (
        loop(row).compiles_loss
        and row.get("compile") == "yes"
        and "logits in float32 by the model" not in row.get("notes")
    ):
        return "compiled" if known == "hf" else "copied_compiled"
    if known == "copied_compiled" and "and the loss" not in row.get("notes"):
        return "copied"
    return "held" if row["framework"].startswith("DeepSpeed") else known


def _fused_attention(row: Row, assumed: list[str]) -> str:
    """FlashAttention, where the source does not say, too: by itself or as SDPA took it before torch 2.11. But in the
    months of DeepSpeed 0.14.0 to 0.14.2 (March to May 2024), of torch 2.2, transformers was 4.38 to 4.40, whose SDPA is
    given a mask."""
    if row.get("attention_impl").startswith("eager"):
        return "eager"
    if row.get("attention_impl").startswith("flash-attn 3"):
        return "flash3"
    if row.get("attention_impl").startswith("flash-attn 4"):
        return "flash4"
    if loop(row).compiles_whole and row.get("compile") == "yes" and row.get("attention_impl") == "SDPA":
        return "efficient"
    if row.get("attention_impl") in _KERNELS:
        return _KERNELS[row["attention_impl"]]
    if prefers_cudnn(row) and re.match(r"SDPA(?! ?\(?flash)|$", row.get("attention_impl")):
        return "sdpa"
    if row.get("attention_impl") or not re.search(r"DeepSpeed 0\.14\.[012]\b", row["framework"]):
        return "flash"
    assumed.append("attention not stated: SDPA with a mask, as transformers 4.38 to 4.40 of the same months have it")
    return "efficient"


def _every_second(row: Row) -> bool:
    return "every second layer" in row.get("notes")


def _checkpointed(row: Row) -> tuple[int, ...]:
    """The blocks that are checkpointed, spread evenly."""
    blocks = row.count("n_layers")
    wanted = round(_recomputed_share(row) * blocks)
    return tuple((2 * i + 1) * blocks // (2 * wanted) for i in range(wanted))


def _recomputed_share(row: Row) -> float:
    """Share of blocks that are checkpointed whole, for policies that choose blocks; from HFU / MFU where printed."""
    if _every_second(row):
        return 0.5
    if counted := re.search(r"(\d+) of (?:the )?(\d+) (?:layers|blocks) checkpointed", row.get("notes")):
        return int(counted[1]) / int(counted[2])
    hfu, mfu = re.search(r"HFU (0?\.\d+)", row.get("notes")), row.number("mfu_pct")
    if not hfu or not mfu:
        raise InputError("the share of checkpointed blocks is not stated", row.file, row.line, "activation_checkpoint")
    return min(1.0, 3 * (100 * float(hfu[1]) / mfu - 1))


def _tree(model: ModelSpec, workload: Workload, plan: AnyPlan) -> Module:
    from zsim.model.trace import trace

    tree = trace(model, workload)
    return _recompute_to_the_end(tree) if isinstance(plan, Fsdp1Plan) and plan.version < "2.1" else tree


def _recompute_to_the_end(module: Module) -> Module:
    """Until torch 2.1 (torch/utils/checkpoint.py, `_StopRecomputationError`) a block ran again to its last kernel.

    Kernels after the last saved tensor are added to the recomputation of the last work that saves one.
    """
    body = tuple(_recompute_to_the_end(item) if isinstance(item, Module) else item for item in module.body)
    if not module.checkpointed:
        return replace(module, body=body)
    works = [work for _, work in _works(module)]
    last = max((index for index, work in enumerate(works) if work.resaved), default=None)
    if last is None:
        return module
    stopped = works[last]
    rest = stopped.forward[len(stopped.recompute) :] + tuple(k for work in works[last + 1 :] for k in work.forward)
    return _with_recompute(module, stopped, stopped.recompute + rest)


def _works(module: Module) -> list[tuple[Module, Compute]]:
    found: list[tuple[Module, Compute]] = []
    for item in module.body:
        found += _works(item) if isinstance(item, Module) else [(module, item)]
    return found


def _with_recompute(module: Module, work: Compute, kernels: tuple[Work, ...]) -> Module:
    body = tuple(
        _with_recompute(item, work, kernels)
        if isinstance(item, Module)
        else replace(item, recompute=kernels)
        if item is work
        else item
        for item in module.body
    )
    return replace(module, body=body)


def _model(row: Row) -> ModelSpec:
    layers, width, heads = row.count("n_layers"), row.count("d_model"), row.count("n_heads")
    example = is_example(row)
    kv_heads, ffn = row.count("n_kv_heads", heads), row.count("d_ff", 4 * width if example else None)
    vocab, name = _vocab(row), row["model"].lower()
    if name.startswith(("mixtral", "gpt_bigcode", "roberta")):
        raise NotModeled(f"model {row['model']}", row.file, row.line, "model")
    if example or row["framework"].startswith("llm-foundry"):
        return _own(
            row["model"],
            Architecture(
                family="torch.nn" if example else "mpt",
                hidden=width,
                kinds=(LayerKind(),) * layers,
                heads=heads,
                kv_heads=heads,
                head_dim=width // heads,
                intermediate=ffn,
                vocab=vocab,
                positions=row.count("seq_len"),
                tied=not example,
                activation="gelu",
            ),
            loop(row).implementation,
        )
    if name.startswith("gpt2"):
        config: dict[str, Any] = {
            "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocab,
            "n_positions": row.count("seq_len"), "n_inner": ffn,
            "tie_word_embeddings": "output projection not tied" not in row.get("notes"),
            **(dict.fromkeys(_DROPOUTS, 0) if "no dropout" in row.get("notes") else {}),
            **({"activation_function": loop(row).activation} if loop(row).activation else {}),
        }  # fmt: skip
    elif name.startswith("opt-"):
        config = {
            "model_type": "opt", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "ffn_dim": ffn, "word_embed_proj_dim": width, "vocab_size": vocab, "max_position_embeddings": 2048,
        }  # fmt: skip
    else:
        family = next((known for known in _NAMED if name.startswith(known)), "llama")
        tied = family.startswith(("gemma", "qwen")) and width < _UNTIED.get(family, width + 1)
        config = {
            "model_type": family, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
            "max_position_embeddings": row.count("seq_len"),
            "tie_word_embeddings": tied or "embeddings tied" in row.get("notes"),
            **({"head_dim": _HEADS[family]} if family in _HEADS else {}),
        }  # fmt: skip
    model, tuning = _read_model(json.dumps(config, sort_keys=True), row["model"]), stated.adapters(row)
    if loop(row).implementation == "litgpt" and tuning is None:
        return _own(row["model"], cast(Architecture, model.arch), "litgpt")
    return tune(model, tuning) if tuning else model


@cache
def _own(name: str, arch: Architecture, implementation: str) -> ModelSpec:
    """A model with the parameters that `implementation` has, which are not those of transformers' checkpoint."""
    return ModelSpec(name, arch.family, parameters(families.build(Net(arch, implementation=implementation))), arch)


@cache
def _read_model(config: str, name: str) -> ModelSpec:
    from zsim.model.huggingface import read_config

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name.replace("/", "_") / "config.json"
        path.parent.mkdir()
        path.write_text(config)
        return read_config(path)

"""Training loops that rows name, by what their code does: whose modules, which element types, when gradients meet.

A row rarely says what its loop does by itself; each rule was read in the loop's source, which its entry names. A loop
that is not here runs as the nearest stack: transformers' modules, mixed precision over float32 shards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zsim.model.lora import Lora
from zsim.plan.version import parse_version
from zsim.validation.rows import Row


@dataclass(frozen=True)
class Loop:
    """Fields named as in `Workload` and in the plans; None: as the row says, or the framework's own."""

    implementation: str = "hf"
    loss: str = "hf"
    storage_dtype: str | None = None  # of weights and optimizer states, whatever the row calls "bf16"
    reduce_dtype: str | None = None
    sync_only_last: bool = False  # no reduction before the last micro-step of an accumulation
    forward_prefetch: bool = False
    optimizer: str | None = None
    root_reshard: bool | None = None  # FSDP2's root: True where reshard_after_forward is passed for it, too
    unit_per_module: bool = False  # FSDP1 wraps every module that has parameters
    unit_per_adapter: bool = False
    torch: str | None = None  # the oldest release that its tables can be of
    lora: Lora | None = None  # of its rows with adapters
    flat: bool = False  # FSDP1 with use_orig_params=False, which it is told for DDP too (NO_SHARD)
    grad_clip: float | None = None
    grouping: str = "hf"  # FSDP2's
    activation: str | None = None  # GPT-2's
    compiles_loss: bool = False  # torch.compile takes the loss with the model
    sharded_alone: bool = False  # FSDP2 on one GPU, too
    compiles_whole: bool = False  # torch.compile takes a model of transformers since 4.45, which gives SDPA a mask then


LOOPS = {
    # kempnerforge/distributed/parallel.py at 01b461a (2026-04-05): `model.to(dtype=param_dtype)` before fully_shard
    # with `reduce_dtype=float32`; training/grad.py `maybe_no_sync`; scripts/train.py: F.cross_entropy of the logits as
    # they are, which stay; heads repeated as torchtitan does. Its profile of that week has cuDNN: torch 2.11.
    "kempnerforge": Loop(
        "torchtitan", "uncast_held", "bfloat16", "float32", sync_only_last=True, root_reshard=True, torch="2.11"
    ),
    # vectorlm/trainer.py, utils/model_utils.py at 9045f08 (2024-05-28): `model.no_sync()`, AdamW as torch has it
    "vectorlm": Loop(
        storage_dtype="bfloat16",
        reduce_dtype="bfloat16",
        sync_only_last=True,
        forward_prefetch=True,
        optimizer="foreach",
        unit_per_adapter=True,  # lora_requires_grad_policy_fn
    ),
    # thunder/benchmarks/benchmark_litgpt.py at 56e267a97 (2024-06): `zero_bucket_wrap_policy`, and the logits stay
    "thunder": Loop("litgpt", "uncast_held", unit_per_module=True),
    # fsdp_qlora train.py of March 2024: pure bf16, peft's wrap policy, 4-bit weights stored in bf16, maxima of their
    # blocks quantized again; its tables are of reentrant checkpoints
    "fsdp_qlora": Loop(
        loss="copied_held",
        storage_dtype="bfloat16",
        reduce_dtype="bfloat16",
        unit_per_module=True,
        optimizer="foreach",
        lora=Lora(64, ("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"), dropout=0.1),
        flat=True,
        grad_clip=0.3,
    ),
    # pretrain/tinyllama.py of September 2023: `no_backward_sync`, `AdamW(..., foreach=False)`
    "tinyllama": Loop("litgpt", "uncast", sync_only_last=True, optimizer="loop", grad_clip=1.0),
    # litgpt/model.py and pretrain.py; its tables state the element types
    "litgpt": Loop("litgpt", "uncast"),
    "lit-gpt": Loop("litgpt", "uncast"),
    "lit-llama": Loop("litgpt", "uncast"),
    # DeepSpeedExamples training/bf16_master_weight/train.py at a43031e: a model of torch.nn's, and the logits stay
    "bf16_master_weight": Loop("torch.nn", "uncast_held"),
    # src/olmo_core/nn/transformer/model.py `apply_fsdp` and scripts/train at e27ba7455 (2024-11-05): adapted from
    # torchtitan's of October 2024; rotary embedding and repeated heads as there, too
    "olmo-core": Loop("torchtitan", "compiled", grad_clip=1.0, grouping="titan2024"),
    # the same for OLMo 2, whose norms torchtitan does not have; the logits are copied, the loss compiled
    "olmo-core olmo2": Loop("hf", "copied_compiled", grad_clip=1.0, grouping="titan2024"),
    # transformers 4.28 modeling_open_llama.py; solver/trainer.py at 0157b69 (2023-05-17) keeps the outputs
    "open-llama": Loop(loss="copied_uncast", grad_clip=1.0),
    # training/benchmarks/llama2_7b/deepspeed/run_pretraining.py of December 2023: `loss = model_engine(...).loss`
    "flagperf": Loop(loss="copied"),
    # ch05/10_llm-training-speed: `cross_entropy(logits.flatten(0, 1), ...)` in a function of its own
    "llms-from-scratch": Loop(loss="uncast", activation="gelu_pytorch_tanh"),
    # train.py of 2023: autocast makes the cross-entropy's logits float32
    "nanogpt": Loop(grad_clip=1.0, compiles_loss=True),
    # src/trainer/build.py, models/llama3.py: bf16 as loaded, `FSDP(...)` with a policy by size, outputs deleted
    "universal-llm-trainer": Loop(
        loss="copied_uncast",
        storage_dtype="bfloat16",
        unit_per_module=True,
        optimizer="foreach",
        flat=True,
        grad_clip=10.0,
    ),
    # llama_finetuning.py of July 2023: pure_bf16, peft's wrap policy, torch's own defaults else
    "llama-recipes": Loop(
        loss="copied",
        storage_dtype="bfloat16",
        reduce_dtype="bfloat16",
        unit_per_adapter=True,
        optimizer="foreach",
        flat=True,
    ),
    # src/prime_rl/trainer/model.py and sft/train.py at b798a90d6 (2026-01-31): `fully_shard` of blocks and root,
    # whatever the number of GPUs; `out = model(...)` holds `logits.float()` through the backward
    "prime-rl": Loop(
        loss="held",
        storage_dtype="float32",
        reduce_dtype="float32",
        optimizer="foreach",
        root_reshard=True,
        grad_clip=1.0,
        sharded_alone=True,
    ),
    # configs/lema/llama2b.pt.yaml and configs/accelerate/sample_fsdp_llama3.yaml of July 2024: the Trainer of
    # transformers 4.43, which reduces in the last micro-step alone
    "oumi": Loop(loss="copied", sync_only_last=True, forward_prefetch=True, grad_clip=1.0, compiles_loss=True),
    # internlm/core/scheduler and model/losses: flash-attn's cross-entropy of the logits as they are
    "internevo": Loop(loss="uncast"),
    # train.py: flash-attn's cross-entropy, `inplace_backward`
    "easycontext": Loop(loss="uncast"),
    # benchmarks/quantized_training/pretrain_llama2.py at 9acc9a4de (2024-09): `logits[:, :-1].float()` of its own Llama
    "pretrain_llama2": Loop(loss="copied", compiles_loss=True),
    # docs/examples/te_llama/utils.py at 8b210490b (2024-05), transformers of that month
    "hf accelerate": Loop(loss="copied"),
    "trl sfttrainer": Loop(loss="copied", grad_clip=0.3),
    # src/model.py, src/train.py: torchtitan's Llama of 2024, `cross_entropy(logits.float(), ...)` and `del logits`
    "lsaie_project": Loop("torchtitan"),
    # recipes/lora_finetune_*.py at 0217d44c2 (2024-05-09): `FSDP(..., mixed_precision=None)` of torch.nn's default flat
    # parameters, `lora_fsdp_wrap_policy`; `logits.float()` by the model
    "torchtune 0.1": Loop(
        "torchtitan",
        storage_dtype="bfloat16",
        reduce_dtype="bfloat16",
        unit_per_adapter=True,
        optimizer="foreach",
        flat=True,
    ),
    # recipes/ and modules/ at bd2a0fc7c: pure bf16 under `fully_shard` with `reshard_after_forward` for the root, too;
    # keys and values of all heads, rotary embedding in float32; AdamW and no clipping as the recipes have them
    "torchtune": Loop(
        "torchtitan",
        storage_dtype="bfloat16",
        reduce_dtype="bfloat16",
        root_reshard=True,
        grouping="titan",
        compiles_loss=True,
    ),
    # method_comparison/MetaMathQA/run.py at 5d602fdbf: a loop of its own, whose `outputs` live through the backward
    "peft method_comparison": Loop(loss="held", optimizer="foreach", grad_clip=1.0),
    # trainer/sft.py at 2428453: TRL's SFTTrainer of transformers 4.57; peft's wrap policy
    "soup": Loop(unit_per_adapter=True, optimizer="fused", sync_only_last=True, grad_clip=1.0),
    # training/performance/benchmarks/torch-compile-bench.py at 744d01e: `run(...).loss.backward()`
    "torch-compile-bench": Loop(compiles_whole=True),
    # swift/llm/sft.py of January 2024, on transformers 4.36: its Seq2SeqTrainer, max_grad_norm 0.5
    "swift sft": Loop(loss="copied", grad_clip=0.5),
    # applications/DeepSpeed-Chat/training/step1_supervised_finetuning/main.py: `outputs = model(**batch)`
    "deepspeed-chat": Loop(loss="copied"),
    # examples/train_lora/llama3_lora_sft.yaml: the Trainer's max_grad_norm
    "llama-factory 0.9": Loop(grad_clip=1.0),
    # transformers' Trainer of April 2024, max_grad_norm 1.0
    "llama_factory 0.6": Loop(loss="copied", grad_clip=1.0),
    # recipes/llm/train_ft.py at b3c51c328 (2025-11): `out = model(**batch)` lives through the backward; one GPU is not
    # wrapped
    "automodel": Loop(loss="held", optimizer="foreach"),
    # atorch/examples/llama2/fsdp_llama2.py at 94a8bed96, model_context.py: FSDP's mixed precision all in bf16;
    # `outputs` live through the backward
    "atorch": Loop(
        loss="copied_held", reduce_dtype="bfloat16", forward_prefetch=True, optimizer="foreach", unit_per_adapter=True
    ),
    # examples/fsdp2/fsdp2_fp8.py at d2e6b031: `outputs = model(**batch)`; accelerate reshards the root, too
    "fsdp2_fp8": Loop(loss="held", reduce_dtype="bfloat16", optimizer="foreach", root_reshard=True),
    # touchnet/models/llama of March 2025: torchtitan's
    "touchnet": Loop("torchtitan", grad_clip=1.0, grouping="titan2024"),
    "torchtitan": Loop("torchtitan"),
    "llm-foundry": Loop("llm-foundry"),
}
OWN = Loop()
CUDNN_FIRST = "2.11"  # on Hopper: torch's wheels have cuDNN after 9.15.1 (sdp_utils.cpp, check_prefer_cudnn_attention)
CUDNN_FIRST_MONTH = "2026-04"  # of tables that do not name a release


def loop(row: Row) -> Loop:
    """The loop that the row's framework names; lightning-thunder's benchmark of litgpt and DeepSpeed's example are ones
    of their own, and so are OLMo's models in OLMo-core."""
    framework = row["framework"].lower()
    if "lit" in framework and "benchmark_litgpt" in row.get("notes"):
        framework = "thunder"
    if "/bf16_master_weight/" in row.get("source"):
        framework = "bf16_master_weight"
    if "olmo-core" in framework and row["model"].startswith("olmo"):
        return LOOPS["olmo-core olmo2"]
    return next((rules for name, rules in LOOPS.items() if name in framework), OWN)


def prefers_cudnn(row: Row) -> bool:
    """Whether SDPA takes cuDNN's attention where the GPU has it: by the release of torch, else by the table's date."""
    text = " ".join((row.id, row["source"], row["framework"], row.get("notes")))
    release = re.search(r"\b(?:torch|PyTorch) (\d+\.\d+)", text)
    stated = release[1] if release else loop(row).torch
    if stated:
        return parse_version(stated) >= parse_version(CUDNN_FIRST)
    month = re.search(r"\b(20[2-9]\d-[01]\d)", text)
    return month is not None and month[1] >= CUDNN_FIRST_MONTH

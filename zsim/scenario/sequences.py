"""Whether ranks can share sequences (Ulysses): what DeepSpeed and the tools around it demand."""

from __future__ import annotations

from typing import cast

from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture
from zsim.model.spec import ModelSpec, Workload
from zsim.plan.batch import divisors
from zsim.plan.spec import AnyPlan, DeepSpeedPlan

FIELD = "sequence_parallel_size"

# transformers 5.24: their configurations have no num_key_value_heads, which register_with_transformers asks for. Four
# have attention of their own besides, which it would not reach. DeepSeek's head_dim, the width it reckons with, is that
# of the rotated part alone. Gemma 4's heads are of two widths.
_UNREACHED = (
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "falcon", "mpt", "bloom", "bert", "roberta", "xlm-roberta",
    "camembert", "electra", "esm", "distilbert", "modernbert", "modernbert-decoder", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "glm4_moe_lite", "youtu", "glm_moe_dsa", "axk1", "minicpm3", "codegen",
    "t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "gemma4_text", "gemma4", "mamba2",
)  # fmt: skip
# register_with_transformers leaves masks away, and refuses what cannot do without.
_MASKED = ("eager", "efficient")


def check_shared(model: ModelSpec, workload: Workload, ranks: int, framework: str) -> None:
    """Raises InputError where `workload.sequence_parallel_size` cannot be, NotModeled where zsim does not simulate it.

    DeepSpeed 0.19.8 runtime/sequence_parallel: UlyssesSPAttentionHF.__init__ and register_with_transformers,
    UlyssesSPDataLoaderAdapter.refill, and initialize_sequence_parallel.
    """
    size, arch = workload.sequence_parallel_size, cast(Architecture, model.arch)
    if size == 1:
        return
    if framework != "deepspeed":
        raise NotModeled(f"sequence parallelism with {framework}", field=FIELD, accepted="1, or framework: deepspeed")
    data_parallel_ranks(ranks, size)
    if workload.seq_len % size:
        accepted = f"a multiple of {size}"
        raise InputError(f"{workload.seq_len} is not divisible by {FIELD} {size}", field="seq_len", accepted=accepted)
    if arch.latent is not None and arch.latent.value != arch.head_dim:
        what = f"sequence parallelism of {arch.family} with values of another width than keys"
        raise NotModeled(what, field=FIELD, accepted="1")
    if arch.family in _UNREACHED:
        raise InputError(f"DeepSpeed's Ulysses cannot take {arch.family}'s attention over", field=FIELD, accepted="1")
    if arch.heads % size:
        raise InputError(
            f"{size} does not divide the {arch.heads} attention heads of {model.name}",
            field=FIELD,
            accepted=divisors(arch.heads),
        )
    if arch.kv_heads % size and size % arch.kv_heads:
        message = (
            f"{size} neither divides the {arch.kv_heads} key and value heads of {model.name} nor is divided by them"
        )
        raise InputError(message, field=FIELD, accepted=divisors(arch.kv_heads))
    if workload.attention in _MASKED:
        raise InputError(
            f"{workload.attention} needs a mask, which Ulysses leaves away",
            field="attention",
            accepted="flash, flash3, flash4, cudnn, sdpa",
        )
    if workload.implementation != "hf":
        raise NotModeled(
            f"sequence parallelism in {workload.implementation}'s modules", field="implementation", accepted="hf"
        )
    if workload.kernels not in ("torch", "liger"):
        owner = {"unsloth": "Unsloth"}.get(workload.kernels, workload.kernels)
        raise NotModeled(f"sequence parallelism with {owner}'s kernels", field="kernels", accepted="torch, liger")


def data_parallel_ranks(ranks: int, size: int) -> int:
    """Of how many ranks each group of `size` counts as one. Raises InputError."""
    if ranks % size:
        raise InputError(f"{size} does not divide the {ranks} ranks", field=FIELD, accepted=divisors(ranks))
    return ranks // size


FIRST = (0, 17)  # DeepSpeed pull request 7268


def check_version(version: tuple[int, ...], size: int) -> None:
    """Raises InputError for a DeepSpeed that cannot take over the attention of Hugging Face's models."""
    if size > 1 and version < FIRST:
        found = ".".join(map(str, version))
        raise InputError(
            f"DeepSpeed {found} has no UlyssesSPAttentionHF", field=FIELD, accepted="version 0.17 or later"
        )


def shared_notes(model: ModelSpec, plan: AnyPlan, workload: Workload) -> list[str]:
    """What holds of a run whose ranks share sequences."""
    size = workload.sequence_parallel_size
    if size == 1 or not isinstance(plan, DeepSpeedPlan):
        return []
    found = [
        f"{size} neighbouring GPUs share each sequence, {workload.local_seq_len:,} tokens each, by DeepSpeed's "
        "UlyssesSPAttentionHF and UlyssesSPDataLoaderAdapter (ALST), with the mean loss of the Trainer"
    ]
    if plan.communication_data_type:
        found.append("zero.communication_data_type has no effect, but zero.seq_parallel_communication_data_type has")
    if plan.stage in (1, 2) and plan.seq_parallel_communication_data_type != "float32":
        found.append("zero.seq_parallel_communication_data_type has no effect: stages 1 and 2 reduce in float32")
    arch = cast(Architecture, model.arch)
    if workload.attention == "sdpa" and any(kind.sliding for kind in arch.kinds):
        found.append("sliding layers attend to the whole sequence: with sdpa their window is in the mask, which goes")
    if arch.family == "mixtral":
        found.append("DeepSpeed 0.19.8 fails on a Mixtral whose config.json has no head_dim")
    return found

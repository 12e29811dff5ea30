"""Ulysses sequence parallelism as ALST and the Hugging Face Trainer run it, for `engines.run_deepspeed`.

DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py exchanges heads for sequence around every attention and deals
out batches; transformers 5.24 integrations/deepspeed.py, deepspeed_sp_compute_loss, averages the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

PLAIN = "plain"  # eager attention under another name, as DeepSpeed takes it by name only to refuse it


def attention_name(name: str) -> str:
    """The name under which transformers finds the attention of a configuration."""
    if name != "eager":
        return name
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    ALL_ATTENTION_FUNCTIONS[PLAIN] = eager_attention_forward
    return PLAIN


def register(model: torch.nn.Module, attention: str, size: int, micro_batch: int) -> Any:
    """What `deepspeed.initialize` takes as `mpu`."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    # On gloo torch emulates the gradient of all_gather by scatters; on NCCL it is a reduce-scatter.
    torch.distributed.nn.functional._AllGather.backward = staticmethod(_reduce_scattered)  # type: ignore[method-assign]
    return UlyssesSPAttentionHF.register_with_transformers(
        model, attention_name(attention), size, micro_batch, disable_in_eval=True
    )


def _reduce_scattered(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
    """torch 2.13 distributed/nn/functional.py, _AllGather.backward, the branch for NCCL."""
    result = torch.empty_like(gradients[dist.get_rank(ctx.group)])
    dist.reduce_scatter(result, [gradient.contiguous() for gradient in gradients], group=ctx.group)
    return None, result


def batches(mpu: Any, tokens: Callable[[int], torch.Tensor], count: int) -> Iterator[dict[str, torch.Tensor]]:
    """`tokens(i)` is this rank's i-th sample; every rank gets its piece of all samples of its group in turn."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    size = mpu.get_sequence_parallel_world_size()
    samples = [_sample(tokens(index)) for index in range(-(-count // size))]
    return UlyssesSPDataLoaderAdapter(
        samples, mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), size, torch.device("cpu")
    )


def _sample(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1).contiguous()
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.clone()}


def loss(engine: Any, batch: dict[str, torch.Tensor], size: int) -> torch.Tensor:
    """The Trainer's: the mean over all tokens of the group."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    parallelism = SimpleNamespace(sp_backend="deepspeed", sp_size=size)
    return deepspeed_sp_compute_loss(None, engine, batch, False, parallelism)

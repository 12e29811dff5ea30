"""A micro-step of trainers that train by preference, as trl's DPOTrainer and CPOTrainer run it, around a tiny model.

The configuration's `preference`: `reference` (model: a second one, as each engine has it; adapters: this one without
them; none), `log_probs` (how they come from logits: log_softmax, selective, selective_shifted, float32), and `metrics`
(gathered: reduced among ranks in each micro-step, as since trl 0.14).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from validation.oracles import autocast

Config = dict[str, Any]


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, how: str) -> torch.Tensor:
    """Of each sequence, all of whose tokens but the first count: trl until 0.28."""
    if how == "selective":  # trl 0.15 to 0.28: all logits, targets rolled
        labels = torch.roll(tokens, shifts=-1, dims=1)
        each = _selective(logits, labels)
        return torch.roll(each, shifts=1, dims=1).sum(-1)
    labels = tokens[:, 1:].clone()
    logits = logits[:, :-1, :]
    return torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2).sum(-1)


def _selective(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """trl's selective_log_softmax."""
    if logits.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = []
    for row, targets in zip(logits, labels, strict=True):
        rows.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=targets.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


class Step:
    """Runs micro-steps: `policy` is what the engine made of the model, `reference` what is called without gradients."""

    def __init__(self, settings: Config, policy: Any, reference: Any, low: str | None = None) -> None:
        """`low`: the dtype of autocast, which accelerate has around each forward, whose results it widens."""
        self.settings, self.policy, self.reference, self.low = settings, policy, reference, low

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: chosen sequences and as many rejected ones."""
        ours = self._forward(self.policy, tokens)
        logps = ours["logps"]
        theirs = torch.zeros_like(logps)
        if self.settings["reference"] != "none":
            with torch.no_grad(), without_adapters(self.policy):
                # the Trainer's `model`, not its `model_wrapped`, which are one under FSDP
                whole = type(self.policy).__name__ in ("DistributedDataParallel", "DeepSpeedEngine")
                own = self.policy.module if whole else self.policy
                reference = own if self.settings["reference"] == "adapters" else self.reference
                theirs = self._forward(reference, tokens)["logps"]
        ratios = logps - theirs
        chosen, rejected = ratios.chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        self._report(chosen.detach(), rejected.detach(), logps.detach())
        return loss

    def _forward(self, model: Any, tokens: torch.Tensor) -> dict[str, Any]:
        """concatenated_forward, whose logits go as it returns but where the trainer holds them."""
        how = self.settings["log_probs"]
        with autocast.as_on_cuda(self.low):
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        if how == "float32" or self.low:
            logits = logits.to(torch.float32)
        if how == "selective_shifted":
            copy = logits[:, :-1, :].contiguous()
            return {"logps": _selective(copy, tokens[:, 1:].clone()).sum(-1), "logits": logits, "copy": copy}
        found = {"logps": log_probs(logits, tokens, how)}
        if how == "float32":
            return found | {"logits": logits}
        short = logits if how == "selective" else logits[:, :-1, :]
        mask = torch.ones(short.shape[:2], dtype=torch.bool)
        half = len(tokens) // 2
        return found | {"means": [short[part][mask[part]].mean() for part in (slice(half), slice(half, None))]}

    def _report(self, chosen: torch.Tensor, rejected: torch.Tensor, logps: torch.Tensor) -> None:
        if self.settings.get("metrics") != "gathered":
            return
        rewards = [chosen, rejected, (chosen > rejected).float(), chosen - rejected, *logps.chunk(2)]
        for metric in [*rewards, logps.mean(), logps.mean()]:
            ours = metric.contiguous().reshape(-1)
            everyone = torch.empty(dist.get_world_size() * ours.numel(), dtype=ours.dtype)
            dist.all_gather_into_tensor(everyone, ours)


def zero_reference(model: torch.nn.Module, settings: Config) -> Any:
    """trl's prepare_deepspeed: an engine of its own without an optimizer, stage 3 or 0."""
    import deepspeed

    settings = json.loads(json.dumps(settings))
    settings.pop("optimizer", None)
    settings["zero_optimization"].pop("offload_optimizer", None)
    if settings["zero_optimization"]["stage"] != 3:
        settings["zero_optimization"]["stage"] = 0
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.eval()
    return engine


@contextlib.contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """peft's disable_adapter, which sets requires_grad of adapters off, and on again."""
    adapted = [module for module in model.modules() if hasattr(module, "base_layer") or hasattr(module, "lora_A")]
    for module in adapted:
        module.enable_adapters(False)
    yield
    for module in adapted:
        module.enable_adapters(True)

"""Colours and names that every picture shares. Okabe and Ito's palette: told apart without full colour vision."""

from __future__ import annotations

CATEGORY_COLORS = {
    "framework": "#4D4D4D",
    "parameters": "#0072B2",
    "master_weights": "#56B4E9",
    "optimizer_states": "#009E73",
    "gradients": "#E69F00",
    "reduce_buffers": "#B39B00",
    "all_gather_buffers": "#F0E442",
    "activations": "#CC79A7",
    "logits": "#D55E00",
    "workspace": "#8C8C8C",
    "delayed_frees": "#C9C9C9",
}
PHASE_COLORS = {
    "forward": "#0072B2",
    "recompute": "#56B4E9",
    "backward": "#E69F00",
    "optimizer": "#009E73",
    "init": "#8C8C8C",
    "reference": "#7FB3D5",
}
CAUSE_COLORS = {"communication": "#D55E00", "host": "#7A5195", "other": "#8C8C8C"}

CATEGORY_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "master_weights": "master weights",
    "activations": "activations",
    "all_gather_buffers": "all-gather buffers",
    "reduce_buffers": "reduce buffers",
    "logits": "logits and loss",
    "workspace": "workspace",
    "delayed_frees": "freed, not reusable yet",
    "framework": "CUDA context, NCCL",
    "buffers": "buffers",
}


def cause_label(name: str, between: str = ", ") -> str:
    """ "reduce_scatter/backward" -> "reduce-scatter, backward"; "h2d/forward" -> "copies to the GPU, forward"."""
    kind, _, phase = name.partition("/")
    if kind == "cpu_optimizer":
        return "optimizer step on the CPU"
    kind = {"h2d": "copies to the GPU", "d2h": "copies to the host"}.get(kind, kind.replace("_", "-"))
    return f"{kind}{between}{phase}" if phase else kind

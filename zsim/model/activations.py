"""Activation functions by their names in config.json: the class that stands for each, and what it launches."""

from __future__ import annotations

from collections.abc import Callable

from zsim.model import functional as F
from zsim.model.graph import Tensor


def _gelu_new(x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3))), one kernel per operation."""
    return F.mul(F.scale(x), F.shift(F.activation_by_result(F.scale(F.add(x, F.scale(F.power(x)))))))


def _quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 * x)"""
    return F.mul(x, F.activation_by_result(F.scale(x)))


def _relu_squared(x: Tensor) -> Tensor:
    return F.power(F.activation_by_result(x))


ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "silu": ("SiLUActivation", F.activation),
    "swish": ("SiLU", F.activation),
    "gelu": ("GELUActivation", F.activation),
    "nn.gelu": ("GELU", F.activation),
    "quick_gelu": ("QuickGELUActivation", _quick_gelu),
    "gelu_pytorch_tanh": ("GELUTanh", F.activation),
    "gelu_new": ("NewGELUActivation", _gelu_new),
    "relu": ("ReLU", F.activation_by_result),
    "relu2": ("ReLUSquaredActivation", _relu_squared),
    "tanh": ("Tanh", F.activation_by_result),
}

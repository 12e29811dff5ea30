"""What vision towers are made of, whatever their family: inputs, attention both ways, patches as a convolution."""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import pixels
from zsim.model import products as P
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Storage, Tensor, row_major
from zsim.model.layers import Embedding, Module, Net, Weight
from zsim.model.spec import Images


def given(net: Net, shape: tuple[int, ...], dtype: str) -> Tensor:
    """An input of the model."""
    return Tensor(Storage(net.tape, shape, dtype, False), shape, row_major(shape), dtype)


def images_of(net: Net) -> Images:
    if net.images is None:
        raise NotModeled(
            "a vision-language model without images", field="images", accepted="images per sequence and their size"
        )
    return net.images


def attend(
    net: Net, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, upcast: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Attention both ways of [b, h, s, d]: the result as [b, s, h, d], contiguous, and the weights if there are any.
    Under a `mask`, which the memory-efficient kernel takes; eager with a softmax in float32 if `upcast`."""
    weights = None
    if net.attention != "eager":
        impl = net.attention if mask is None else "efficient"
        out = flash_attention(q, k, v, impl, mask=mask, causal=False)
    else:
        outer, net.tape.label = net.tape.label, "softmax"
        weights = F.scale(P.matmul(q, F.transpose(k, 2, 3)))
        if mask is not None:
            weights = F.add(weights, mask)
        weights = F.to(P.softmax(F.to(weights, "float32")), q.dtype) if upcast else P.softmax(weights)
        out = P.matmul(weights, v)
        net.tape.label = outer
    return F.contiguous(F.transpose(out, 1, 2)), weights


class Convolution(Module):
    """`nn.Conv2d` or `nn.Conv3d` whose stride is its kernel's size. `shape` of the result is its caller's."""

    kind = "gemm"

    def __init__(self, net: Net, class_name: str, inputs: tuple[int, ...], outputs: int, bias: bool) -> None:
        super().__init__(net)
        self.class_name = class_name
        self.weight = Weight(net, outputs, *inputs)
        self.bias = Weight(net, outputs) if bias else None

    def forward(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return pixels.convolution(x, self.weight, self.bias, shape)


class PositionTable(Embedding):
    """No input embedding, which alone frameworks and checkpointing treat apart."""

    role = ""

    def forward(self, indices: Tensor) -> Tensor:
        return P.embedding(indices, self.weight)

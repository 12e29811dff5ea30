"""The short convolution along a sequence that state-space and hybrid models put before or in place of attention, as
transformers 5.24 runs it where the package causal_conv1d is not installed (`causal_conv1d_fn` of its models)."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.graph import Tensor


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activated: bool = False) -> Tensor:
    """Each channel of x [b, c, s] with its own kernel, weight [c, 1, k]; padded on both sides and cut to s.
    `activated`: silu on the result, which is contiguous then and else a view.

    The weight is seen through `squeeze` and `unsqueeze`, whose nodes run when its gradient is there: after the bias's.
    """
    tape, size, dtype = x.tape, x.shape[-1], x.dtype
    tape.viewed()
    tape.viewed()
    out = F.narrow(depthwise(F.to(x, weight.dtype), weight, bias), -1, size)
    return F.to(F.activation(out) if activated else out, dtype)


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv1d(x, weight, bias, padding=k - 1, groups=c)`: [b, c, s + k - 1].

    Saves its input and its weight (derivatives.yaml, convolution). On CUDA an input that is not contiguous is copied,
    forward and backward (ATen/native/Convolution.cpp: it goes through two dimensions). Bound by memory, as it has k
    multiplications for each element.
    """
    tape, x = x.tape, F.low(x)
    (b, c, s), k, dtype = x.shape, weight.shape[-1], x.dtype
    params = (weight,) if bias is None else (bias, weight)
    x_grad, wanted = x.needs_grad, [param.needs_grad for param in params]
    kept = weight
    if weight.dtype != dtype:  # torch.autocast keeps no copies of views
        kept = F.pointwise(weight.detach(), dtype=dtype)
    saved = tape.save(x, kept) if x_grad or any(wanted) else None
    out = tape.empty((b, c, s + k - 1), dtype)
    source = _laid_out(x)
    tape.memory(source.nbytes, out.nbytes, "convolution")
    if saved:

        def backward(g: Tensor) -> tuple[Tensor | None, ...]:
            x, _kept = saved()
            source = _laid_out(x)
            grad = tape.empty((b, c, s), dtype) if x_grad else None
            grads = [tape.gradient(p, p.shape, dtype) if want else None for p, want in zip(params, wanted, strict=True)]
            if grad is not None:
                tape.memory(g.nbytes, grad.nbytes, "convolution")
            if any(wanted):
                tape.memory(source.nbytes + g.nbytes, 0, "convolution")
            return grad, *grads

        tape.link((x, *params), backward, out)
    return out


def _laid_out(x: Tensor) -> Tensor:
    return F.contiguous(x.detach()) if x.tape.cuda else x

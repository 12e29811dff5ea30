"""Losses on symbolic tensors (rules as in `functional`)."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.graph import ITEM, Tensor


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension; the kernel makes a contiguous tensor to read, which recordings on a CPU do not see
    (ATen/native/cuda/SoftMax.cu, host_softmax), and its result is saved."""
    tape = logits.tape
    whole = logits.is_contiguous() or not tape.cuda
    source = logits if whole else F.pointwise(logits, shape=logits.shape)
    scores = tape.empty(logits.shape, logits.dtype)
    tape.memory(source.nbytes, scores.nbytes)
    if logits.needs_grad:
        saved_scores = tape.save(scores)

        def softmax_backward(g: Tensor) -> tuple[Tensor]:
            (scores,) = saved_scores()
            grad = tape.empty(scores.shape, scores.dtype)
            tape.memory(g.nbytes + scores.nbytes, grad.nbytes)
            return (grad,)

        tape.link((logits,), softmax_backward, scores)
    return scores


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """`log_softmax` and `nll_loss` over [tokens, vocabulary]: a tensor of that size each, forward and backward."""
    tape = logits.tape
    scores = log_softmax(logits)
    inputs = tape.save(scores, target) if logits.needs_grad else None
    loss, total_weight = tape.empty((), logits.dtype), tape.empty((), logits.dtype)
    tape.memory(target.nbytes + target.numel * ITEM[scores.dtype], loss.nbytes)
    if logits.needs_grad:
        saved_weight = tape.save(total_weight)

        def nll_backward(g: Tensor) -> tuple[Tensor]:
            scores, _ = inputs()  # type: ignore[misc]
            kept = saved_weight()  # noqa: F841
            grad = tape.empty(scores.shape, scores.dtype)
            tape.memory(target_bytes, grad.nbytes)
            return (grad,)

        target_bytes = target.nbytes
        tape.link((scores,), nll_backward, loss)
    return loss


def cross_entropy_compiled(logits: Tensor, target: Tensor) -> Tensor:
    """`F.cross_entropy(logits.float(), target)` under torch.compile: a kernel each way over the 16-bit logits.

    Inductor fuses the casts into them: what is saved are the logits as they came, and maximum and log-sum per token.
    """
    tape = logits.tape
    maxima, sums, loss = (tape.empty(shape, "float32") for shape in (logits.shape[:-1], logits.shape[:-1], ()))
    tape.memory(2 * logits.nbytes + target.nbytes, maxima.nbytes + sums.nbytes + loss.nbytes)
    if logits.needs_grad:
        saved = tape.save(logits, maxima, sums, target)

        def backward(g: Tensor) -> tuple[Tensor]:
            logits, maxima, sums, target = saved()
            grad = tape.empty(logits.shape, logits.dtype)
            tape.memory(logits.nbytes + maxima.nbytes + sums.nbytes + target.nbytes, grad.nbytes)
            return (grad,)

        tape.link((logits,), backward, loss)
    return loss


def cross_entropy_of_logits(logits: Tensor, target: Tensor, in_place: bool) -> Tensor:
    """A kernel each way: saves the logits and their log-sum-exp.

    Unsloth's `Fast_CrossEntropyLoss` writes the gradient over the logits, that of flash-attn 2.3 (ops/triton/
    cross_entropy.py, `inplace_backward` as its default is) beside them.
    """
    tape, needs_grad = logits.tape, logits.needs_grad
    losses, sums = (tape.empty(logits.shape[:-1], "float32") for _ in range(2))
    tape.memory(logits.nbytes + target.nbytes, losses.nbytes + sums.nbytes)
    loss = tape.empty((), "float32")
    tape.memory(losses.nbytes, loss.nbytes)
    if needs_grad:
        saved = tape.save(logits, sums, target)

        def backward(g: Tensor) -> tuple[Tensor]:
            logits, sums, target = saved()
            grad = logits if in_place else tape.empty(logits.shape, logits.dtype)
            tape.memory(logits.nbytes + sums.nbytes + target.nbytes, grad.nbytes)
            return (grad,)

        tape.link((logits,), backward, loss)
    return loss


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Head and loss in one, in chunks of tokens, so that logits exist for one chunk only.

    Liger-Kernel's `fused_linear_cross_entropy_forward` (0.5 to 0.6, `accum_dtype` None): the forward computes logits,
    loss and both gradients per chunk of the power of two above tokens / ceil(vocabulary / hidden); backward hands the
    kept gradients out (a gradient of 1 multiplies nothing).
    """
    tape, dtype = hidden.tape, hidden.dtype
    product = tape.autocast or dtype
    tokens, width = hidden.shape
    vocab = weight.shape[0]
    share = -(-tokens // -(-vocab // width))
    chunk = min(1 << (share - 1).bit_length(), tokens)
    x_grad, w_grad = hidden.needs_grad, weight.needs_grad
    grad_hidden = tape.empty(hidden.shape, dtype)
    grad_weight = tape.empty(weight.shape, weight.dtype) if w_grad else None
    losses = tape.empty((tokens,), "float32")
    tape.memory(0, grad_hidden.nbytes + losses.nbytes + (grad_weight.nbytes if grad_weight else 0))
    for start in range(0, tokens, chunk):
        rows = min(chunk, tokens - start)
        logits = tape.empty((rows, vocab), product)
        tape.gemm(rows, vocab, width, product)
        tape.memory(2 * logits.nbytes + rows * ITEM["int64"], logits.nbytes + rows * ITEM["float32"])
        if x_grad:
            tape.gemm(rows, width, vocab, product)
        if w_grad:
            tape.gemm(vocab, width, rows, product)
        del logits
    loss = tape.empty((), "float32")
    tape.memory(losses.nbytes, loss.nbytes)
    if x_grad or w_grad:
        saved = tape.save(grad_hidden, *([grad_weight] if grad_weight else []))

        def backward(g: Tensor) -> tuple[Tensor | None, ...]:
            grads = saved()
            return grads[0] if x_grad else None, grads[1] if w_grad else None

        tape.link((hidden, weight), backward, loss)
    return loss

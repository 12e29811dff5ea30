"""Losses of pairs: log-probabilities of whole sequences, and what compares them (rules as in `functional`).

trl's trainer/dpo_trainer.py, get_batch_logps and concatenated_forward, and trainer/utils.py, selective_log_softmax.
"""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model.graph import Tensor, row_major
from zsim.model.layers import Net
from zsim.model.loss import cross_entropy, log_softmax

# Kernels over a number per token or sequence: masks, sums, ratios, the loss. On a CPU a micro-step of trl 1.14 with a
# second model has 134 outside the models, 30 of them for metrics; backward, the nodes from the loss to its sums.
SMALL_FORWARD, SMALL_BACKWARD = 52, 14


def preference_loss(net: Net, logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of all pairs; without gradients the log-probabilities of a reference."""
    how = net.preference
    assert how is not None
    net.compares = True
    if how.widened:
        logits = F.to(logits, "float32")
    likelihood = likelihood_of_chosen(logits, ids) if how.likelihood else None
    if how.log_probs == "selective":
        each = selective(logits, F.pointwise(ids))
    else:
        short = all_but_last(logits)
        net.tape.part()
        targets = F.contiguous(all_but_last(ids))
        if how.log_probs == "log_softmax":
            each = gather(log_softmax(short), targets)
        else:
            each = selective(F.contiguous(short) if how.log_probs == "shifted" else short, targets)
        del short
    for _ in range(2 if how.averaged else 0):  # logits[part][mask].mean()
        chosen_or_rejected = F.pointwise(logits, shape=(logits.shape[0] // 2, *logits.shape[1:]))
        net.tape.memory(chosen_or_rejected.nbytes, 0)
        del chosen_or_rejected
    return compared(F.sum_last(each), likelihood)


def all_but_last(tokens: Tensor) -> Tensor:
    return F.narrow(tokens, 1, tokens.shape[1] - 1)


def likelihood_of_chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """trl's cross_entropy_loss(all_logits[:len_chosen], labels[:len_chosen])."""
    chosen, labels = (F.narrow(tensor, 0, tensor.shape[0] // 2) for tensor in (logits, ids))
    short, targets = (F.contiguous(all_but_last(tensor)) for tensor in (chosen, labels))
    return cross_entropy(F.reshape(short, -1, short.shape[-1]), F.reshape(targets, -1))


def selective(logits: Tensor, targets: Tensor) -> Tensor:
    """Sequence by sequence: in float32 without a softmax, whose sum of exponentials is enough."""
    if logits.dtype == "float32":
        chosen = gather(logits, targets)
        sums = F.cat([F.reshape(log_sum_exp(row), 1, -1) for row in F.unbind(logits, 0)], 0)
        return F.add(chosen, F.neg(sums))
    rows, labels = F.unbind(logits, 0), F.unbind(targets, 0)
    found = [F.reshape(gather(log_softmax(row), label), 1, -1) for row, label in zip(rows, labels, strict=True)]
    del rows
    return F.cat(found, 0)


def gather(scores: Tensor, index: Tensor) -> Tensor:
    """`torch.gather(scores, -1, index)`, which saves both; its backward adds into zeros, out of place where recordings
    on a CPU look on (FunctionsManual.cpp, gather_backward)."""
    tape = scores.tape
    out = tape.empty(index.shape, scores.dtype)
    tape.memory(index.nbytes + out.nbytes, out.nbytes)
    if scores.needs_grad:
        saved, shape, dtype = tape.save(scores, index), scores.shape, scores.dtype

        def backward(g: Tensor) -> tuple[Tensor]:
            _scores, index = saved()
            zeros = tape.empty(shape, dtype)
            tape.memory(0, zeros.nbytes, "copy")
            grad = zeros if tape.cuda else tape.empty(shape, dtype)
            tape.memory(index.nbytes + 2 * g.nbytes, g.nbytes)
            return (grad,)

        tape.link((scores,), backward, out)
    return out


def log_sum_exp(x: Tensor) -> Tensor:
    """`x.logsumexp(-1)`: (x - maximum).exp_().sum(-1), of which recordings on a CPU see the result alone. Backward:
    grad * (x - result).exp()."""
    tape = x.tape
    result = tape.empty(x.shape[:-1], x.dtype)
    tape.memory(x.nbytes, result.nbytes)  # the maximum
    if tape.cuda:
        less = F.pointwise(x)
        tape.memory(less.nbytes, less.nbytes)
        tape.memory(less.nbytes, result.nbytes)
        del less
    if x.needs_grad:
        saved = tape.save(x, result)

        def backward(g: Tensor) -> tuple[Tensor]:
            x, result = saved()
            less = F.pointwise(x, result)
            powers = F.pointwise(less)
            del less
            return (F.pointwise(powers, g),)

        tape.link((x,), backward, result)
    return result


def compared(log_probs: Tensor, likelihood: Tensor | None) -> Tensor:
    """A loss of the sums of all sequences, [sequences, 1], and the likelihood of the chosen ones, if that is in it."""
    tape = log_probs.tape
    for _ in range(SMALL_FORWARD):
        tape.memory(log_probs.nbytes, log_probs.nbytes)
    loss = tape.empty((), log_probs.dtype)
    if log_probs.needs_grad:
        shape, dtype = log_probs.shape, log_probs.dtype

        def backward(g: Tensor) -> tuple[Tensor, ...]:
            grad = tape.empty(shape, dtype, row_major(shape))
            for _ in range(SMALL_BACKWARD):
                tape.memory(grad.nbytes, grad.nbytes)
            return (grad, g)[:terms]

        terms = 1 if likelihood is None else 2
        tape.link((log_probs,) if likelihood is None else (log_probs, likelihood), backward, loss)
    return loss


def check_compares(net: Net) -> None:
    """Raises NotModeled for a family whose loss is its own."""
    if net.preference is not None and not net.compares:
        what = f"training by preference of {net.arch.family}, whose loss is its own"
        raise NotModeled(what, field="objective", accepted="null")

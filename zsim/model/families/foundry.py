"""MPT in the manner of llm-foundry 0.2 to 0.5 under Composer: what differs from transformers is the work per token.

Learned positions, one fused projection for q, k and v, norms in low precision, and the fused cross-entropy of
flash-attn. Attention "flash" gathers rows before the kernel and scatters them after it (unpad, pad), "triton" does not
(`llmfoundry/models/layers/attention.py`, `flash_attn_fn` and `triton_flash_attn_fn`). After each
backward Composer updates two training metrics, LanguageCrossEntropy and LanguagePerplexity, each with a
`cross_entropy` of its own in float32 (`composer/trainer/trainer.py`, `_train_microbatch`, `_eval_train_metrics`).
"""

from __future__ import annotations

from collections.abc import Callable

from zsim.model import functional as F
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Embedding, LayerNorm, Linear, Module, Net
from zsim.model.loss import cross_entropy
from zsim.model.tape import Tape

TRAIN_METRICS = 2


class Attention(Module):
    kind = "copy"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = "MultiheadAttention"
        self.Wqkv = Linear(net, arch.hidden, 3 * arch.hidden, bias=True)
        self.out_proj = Linear(net, arch.hidden, arch.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        arch = self.net.arch
        b, s, h = x.shape
        padded = self.net.attention != "triton"
        q, k, v = F.split(self.Wqkv(x), (h, h, h))
        if padded:
            q, k, v = gather_rows(q), gather_rows(k), gather_rows(v)
        q, k, v = (F.transpose(F.reshape(t, b, s, arch.heads, arch.head_dim), 1, 2) for t in (q, k, v))
        out = F.reshape(F.contiguous(F.transpose(flash_attention(q, k, v, self.net.attention), 1, 2)), b, s, h)
        return self.out_proj(scatter_rows(out) if padded else out)


class FeedForward(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = "MPTMLP"
        self.up_proj = Linear(net, arch.hidden, arch.intermediate, bias=True)
        self.act = Activation(net, "gelu")
        self.down_proj = Linear(net, arch.intermediate, arch.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class Block(Module):
    kind = "residual"
    role = "block"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.class_name = "MPTBlock"
        self.norm_1 = LayerNorm(net, net.arch.hidden)
        self.attn = Attention(net)
        self.norm_2 = LayerNorm(net, net.arch.hidden)
        self.ffn = FeedForward(net)

    def forward(self, x: Tensor) -> Tensor:
        x = F.add(x, self.attn(self.norm_1(x)))
        return F.add(x, self.ffn(self.norm_2(x)))


class MPT(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = "MPTModel"
        self.wte = Embedding(net, arch.vocab, arch.hidden)
        self.wpe = Embedding(net, arch.positions, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: Block(net))
        self.layers.name = "blocks"
        self.norm_f = LayerNorm(net, arch.hidden)
        self.norm_f.role = "norm"
        self.lm_head = head(net, self.wte)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = F.pointwise(self.net.tape.empty((1, ids.shape[1]), "int64"))
        outputs: list[Tensor] = []
        end = after_backward(self.net.tape, lambda: update_metrics(outputs, labels))
        x = before(F.add(self.wte(ids), self.wpe(positions)), end)
        for block in self.layers:
            x = run_block(self.net, block, x)
        logits = self.lm_head(self.norm_f(x))
        logits = F.reshape(logits, -1, logits.shape[-1])
        outputs.append(logits.detach())
        return fused_cross_entropy(logits)


def after_backward(tape: Tape, work: Callable[[], None]) -> Tensor:
    """What every later tensor of the forward comes `before` in backward: once its turn has come `work` runs."""

    def backward(g: Tensor) -> tuple[()]:
        work()
        return ()

    end = tape.empty((1,), "float32")
    tape.link((), backward, end)
    return end


def before(x: Tensor, end: Tensor) -> Tensor:
    tape, out = x.tape, x.detach()
    tape.link((x, end), lambda g: (g, tape.empty((1,), "float32")), out)
    return out


def update_metrics(outputs: list[Tensor], labels: Tensor) -> None:
    """Composer holds the logits until here (`state.outputs`)."""
    logits = outputs.pop()
    for _ in range(TRAIN_METRICS):
        cross_entropy(F.to(logits, "float32"), F.reshape(labels, -1))


def gather_rows(x: Tensor) -> Tensor:
    """flash_attn.bert_padding `index_first_axis`: a copy; backward scatters into zeros."""
    out = F.pointwise(x)
    x.tape.link((x,), lambda g: (_scattered(g),), out)
    return out


def scatter_rows(x: Tensor) -> Tensor:
    """flash_attn.bert_padding `pad_input`: zeros, then the rows; backward gathers."""
    out = _scattered(x)
    x.tape.link((x,), lambda g: (F.pointwise(g),), out)
    return out


def _scattered(x: Tensor) -> Tensor:
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.memory(0, out.nbytes)
    x.tape.memory(x.nbytes, out.nbytes)
    return out


def fused_cross_entropy(logits: Tensor) -> Tensor:
    """flash_attn.losses.cross_entropy: reads the logits once, keeps the log-sum-exp; backward makes their gradient."""
    tape = logits.tape
    kept = tape.save(logits)
    loss = tape.empty((), "float32")
    tape.memory(logits.nbytes, 0)

    def backward(g: Tensor) -> tuple[Tensor]:
        (logits,) = kept()
        return (F.pointwise(logits),)

    tape.link((logits,), backward, loss)
    return loss

"""Llama 3.2 Vision (transformers 5.24, modeling_mllama.py): layers of the text model that attend to what the tower
returned, in between those that attend to the tokens."""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import split_heads
from zsim.model.decoder import head, run_block
from zsim.model.families import llama, towers
from zsim.model.families.mllama_vision import MllamaTower, tiles_of
from zsim.model.families.vlm import Combined, VisionLanguageModel, vision_of
from zsim.model.graph import Tensor
from zsim.model.layers import Embedding, Linear, Module, Net, RMSNorm, Weight, require_grad

TEXT = "MllamaText"


class SelfBlock(llama.Block):
    def __init__(self, net: Net, index: int) -> None:
        super().__init__(net, TEXT, index)
        self.class_name = "MllamaSelfAttentionDecoderLayer"
        self.self_attn.class_name = "MllamaTextSelfAttention"


class CrossAttention(Module):
    kind = "copy"
    class_name = "MllamaTextCrossAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.q_proj = Linear(net, arch.hidden, q)
        self.k_proj = Linear(net, arch.hidden, kv)
        self.v_proj = Linear(net, arch.hidden, kv)
        self.o_proj = Linear(net, q, arch.hidden)
        self.q_norm = RMSNorm(net, arch.head_dim, f"{TEXT}RMSNorm")
        self.k_norm = RMSNorm(net, arch.head_dim, f"{TEXT}RMSNorm")

    def forward(self, x: Tensor, seen: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        q = self.q_norm(split_heads(self.q_proj(x), d))
        k, v = self.k_proj(seen), self.v_proj(seen)
        k, v = (split_heads(F.reshape(part, x.shape[0], -1, part.shape[-1]), d) for part in (k, v))
        k = self.k_norm(k)
        repeats = arch.heads // arch.kv_heads
        out, weights = towers.attend(self.net, q, F.repeat_heads(k, repeats), F.repeat_heads(v, repeats), mask)
        out = F.reshape(out, *x.shape[:2], -1)
        out = self.o_proj(out)
        return out, weights


class CrossBlock(Module):
    kind = "residual"
    class_name = "MllamaCrossAttentionDecoderLayer"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.cross_attn = CrossAttention(net)
        self.input_layernorm = RMSNorm(net, width, f"{TEXT}RMSNorm")
        self.cross_attn_attn_gate = Weight(net, 1)
        self.mlp = llama.MLP(net, TEXT)
        self.post_attention_layernorm = RMSNorm(net, width, f"{TEXT}RMSNorm")
        self.cross_attn_mlp_gate = Weight(net, 1)

    def forward(self, x: Tensor, seen: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.cross_attn(x, seen, mask)
        x = F.add(residual, F.mul(F.activation_by_result(self.cross_attn_attn_gate), x))
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = F.mul(F.reshape(rows, rows.shape[0], *rows.shape[2:]), x)
        return F.add(residual, F.mul(F.activation_by_result(self.cross_attn_mlp_gate), x))


class TokenEmbedding(Embedding):
    """What it returns comes to the first layer as it is."""

    def forward(self, indices: Tensor) -> Tensor:
        return require_grad(self.net, P.embedding(indices, self.weight), copied=False)


class MllamaTextModel(llama.Model):
    def __init__(self, net: Net) -> None:
        super().__init__(net, TEXT)
        self.rotary_emb.class_name = "MllamaRotaryEmbedding"

    def embedding(self, prefix: str) -> Embedding:
        return TokenEmbedding(self.net, self.net.arch.vocab + 8, self.net.arch.hidden)

    def block(self, prefix: str, index: int) -> Module:
        return CrossBlock(self.net) if self.net.arch.kinds[index].crossed else SelfBlock(self.net, index)

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        self.rotary_emb.kept = extra[0].needs_grad
        return super().forward(ids, embeds, *extra)

    def run(self, block: Module, x: Tensor, context: tuple[Tensor | None, ...], extra: tuple[Tensor, ...]) -> Tensor:
        return run_block(self.net, block, x, *(extra if isinstance(block, CrossBlock) else context))


class MllamaModel(Combined):
    class_name = "MllamaModel"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.vision_model = MllamaTower(net.tower(), vision_of(net))
        self.language_model = MllamaTextModel(net)
        read = vision_of(net).blocks.hidden * (1 + len(tiles_of(net).read))
        self.multi_modal_projector = Linear(net, read, net.arch.hidden, bias=True)

    def forward(self, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        net = self.net
        last = self.vision_model(ids.shape[0])
        seen = self.multi_modal_projector(last)
        seen = F.reshape(seen, -1, seen.shape[-2], seen.shape[-1])
        if net.checkpointing != "none":  # an argument of every block
            net.tape.share(seen)
        mask, rows = self._cross_mask(ids, seen)
        return self.language_model(ids, None, seen, mask, rows), (last,)

    def _cross_mask(self, ids: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """_prepare_cross_attention_mask: which patches each token sees, and which tokens see any."""
        net, (b, s) = self.net, ids.shape
        images, tiles, patches = towers.images_of(net).per_sequence, tiles_of(net).most, seen.shape[1]
        given = towers.given(net, (b, s, images, tiles), "int64")
        wide = F.pointwise(given, shape=(b, 1, s, images * tiles * patches))
        inverted = F.to(F.pointwise(wide, dtype="float32"), net.dtype)
        mask = F.pointwise(inverted, F.pointwise(inverted, dtype="bool"))
        del wide
        rows = F.pointwise(F.pointwise(F.pointwise(mask, dtype="bool"), shape=(b, 1, s, 1)), dtype=net.dtype)
        net.tape.memory(mask.nbytes + rows.nbytes, mask.nbytes)
        if net.attention != "eager" or net.checkpointing != "none":
            net.tape.share(mask)
        net.tape.share(rows)
        return mask, rows


class MllamaForConditionalGeneration(VisionLanguageModel):
    class_name = "MllamaForConditionalGeneration"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        if net.attention not in ("sdpa", "efficient", "eager") and net.images is not None:
            raise NotModeled(
                f"{net.attention} attention in Llama 3.2 Vision, whose masks it does not take",
                field="attention", accepted="sdpa, efficient, eager",
            )  # fmt: skip
        self.model = MllamaModel(net)
        self.lm_head = head(net, self.model.language_model.embed_tokens)

"""Gemma 4 with its vision tower (transformers 5.24, modeling_gemma4.py).

Images come as rows of patches, all padded to as many, and their positions; what the tower returns is averaged over
squares of patches, without the padding.
"""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import pixels
from zsim.model import products as P
from zsim.model.architecture import Vision
from zsim.model.attention import dense_mask, positions, shared_mask
from zsim.model.decoder import head, run_block
from zsim.model.families import gemma4, llama, towers
from zsim.model.families.gemma import capped
from zsim.model.families.gemma4 import RMSNorm, rotated
from zsim.model.families.vlm import Combined, VisionLanguageModel, vision_of
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, Linear, Module, Net, Weight


class ClippableLinear(Module):
    """Between limits that the checkpoint states, if it has such."""

    kind = "activation"
    class_name = "Gemma4ClippableLinear"

    def __init__(self, net: Net, vision: Vision, inputs: int, outputs: int) -> None:
        super().__init__(net)
        self.clips = vision.clips
        self.linear = Linear(net, inputs, outputs)

    def buffers_bytes(self) -> int:
        return 4 * 4 if self.clips else 0

    def forward(self, x: Tensor) -> Tensor:
        if self.clips:
            x = pixels.clamped(x)
        x = self.linear(x)
        return pixels.clamped(x) if self.clips else x


class VisionMLP(llama.MLP):
    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net, "Gemma4Vision")
        hidden, width = net.arch.hidden, net.arch.intermediate
        self.gate_proj = ClippableLinear(net, vision, hidden, width)  # type: ignore[assignment]
        self.up_proj = ClippableLinear(net, vision, hidden, width)  # type: ignore[assignment]
        self.down_proj = ClippableLinear(net, vision, width, hidden)  # type: ignore[assignment]


class VisionAttention(Module):
    kind = "rotary"
    class_name = "Gemma4VisionAttention"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        hidden, d = net.arch.hidden, net.arch.head_dim
        width = net.arch.heads * d
        self.q_proj = ClippableLinear(net, vision, hidden, width)
        self.k_proj = ClippableLinear(net, vision, hidden, width)
        self.v_proj = ClippableLinear(net, vision, hidden, width)
        self.o_proj = ClippableLinear(net, vision, width, hidden)
        self.q_norm = RMSNorm(net, d)
        self.k_norm = RMSNorm(net, d)
        self.v_norm = RMSNorm(net, d, scaled=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        q = self.heads(self.q_proj(x))
        q = self.q_norm(q)
        q = by_row_and_column(q, cos, sin)
        q = F.transpose(q, 1, 2)
        k = self.heads(self.k_proj(x))
        k = self.k_norm(k)
        k = by_row_and_column(k, cos, sin)
        k = F.transpose(k, 1, 2)
        v = self.heads(self.v_proj(x))
        v = self.v_norm(v)
        v = F.transpose(v, 1, 2)
        wide = F.pointwise(mask, dtype=q.dtype) if mask is not None and mask.dtype == "bool" else mask
        out, weights = towers.attend(self.net, q, k, v, wide)
        del wide
        out = F.reshape(out, *out.shape[:2], -1)
        out = self.o_proj(out)
        return out, weights

    def heads(self, x: Tensor) -> Tensor:
        return F.reshape(x, *x.shape[:2], -1, self.net.arch.head_dim)


def by_row_and_column(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_multidimensional_rope`: each half of a head by one of them."""
    halves = [x.shape[-1] // 2] * 2
    parts, cosines, sines = F.split(x, halves), F.split(cos, halves), F.split(sin, halves)
    turned = [rotated(*each) for each in zip(parts, cosines, sines, strict=True)]
    return F.cat(turned)


class VisionLayer(Module):
    kind = "residual"
    class_name = "Gemma4VisionEncoderLayer"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.self_attn = VisionAttention(net, vision)
        self.mlp = VisionMLP(net, vision)
        self.input_layernorm = RMSNorm(net, width)
        self.post_attention_layernorm = RMSNorm(net, width)
        self.pre_feedforward_layernorm = RMSNorm(net, width)
        self.post_feedforward_layernorm = RMSNorm(net, width)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = self.post_attention_layernorm(x)
        x = F.add(residual, x)
        residual = x
        x = self.pre_feedforward_layernorm(x)
        x = self.mlp(x)
        x = self.post_feedforward_layernorm(x)
        return F.add(residual, x)


class VisionRotary(Module):
    """cos and sin of rows and columns, [n, patches, head_dim]."""

    kind = "rotary"
    class_name = "Gemma4VisionRotaryEmbedding"

    def buffers_bytes(self) -> int:
        return 2 * (self.net.arch.head_dim // 4) * 4

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        angles = F.pointwise(F.pointwise(places, dtype="float32"), shape=(*places.shape, self.net.arch.head_dim // 4))
        cos = F.pointwise(F.pointwise(angles))
        sin = F.pointwise(F.pointwise(angles))
        cos = self._recomposed(cos)
        sin = self._recomposed(sin)
        tables = F.to(cos, x.dtype), F.to(sin, x.dtype)
        if self.net.layers_save(x):
            self.net.tape.share(*tables)
        return tables

    def _recomposed(self, table: Tensor) -> Tensor:
        rows, columns = F.select(table, 2), F.select(table, 2)
        return F.cat((rows, rows, columns, columns))


class PatchEmbedder(Module):
    kind = "embedding"
    class_name = "Gemma4VisionPatchEmbedder"
    role = "unit"  # of _no_split_modules

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.input_proj = Linear(net, vision.channels * vision.patch**2, net.arch.hidden)
        self.position_embedding_table = Weight(net, 2, vision.positions, net.arch.hidden)

    def forward(self, values: Tensor, places: Tensor, padding: Tensor) -> Tensor:
        values = F.pointwise(F.pointwise(values))
        self.net.tape.read(self.input_proj.weight)  # asked for its dtype
        values = F.to(values, self.net.dtype)
        x = self.input_proj(values)
        at = self.positions(places, padding)
        return F.add(x, at)

    def positions(self, places: Tensor, padding: Tensor) -> Tensor:
        clamped = F.pointwise(places)
        across = P.embedding(F.select(clamped, 2), pixels.entry(self.position_embedding_table))
        down = P.embedding(F.select(clamped, 2), pixels.entry(self.position_embedding_table))
        found = F.add(across, down)
        return F.masked_fill(found, F.reshape(padding, *padding.shape, 1))


class Encoder(Module):
    class_name = "Gemma4VisionEncoder"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.rotary_emb = VisionRotary(net)
        self.layers = Blocks(net, net.arch.kinds, lambda _index: VisionLayer(net, vision))

    def forward(self, x: Tensor, valid: Tensor, places: Tensor, padded: bool) -> Tensor:
        mask = self._mask(valid, padded, x.needs_grad)
        tables = self.rotary_emb(x, places)
        for block in self.layers:
            x = run_block(self.net, block, x, *tables, mask)
        return x

    def _mask(self, valid: Tensor, padded: bool, trained: bool) -> Tensor | None:
        """Of patches that are no padding, where there is some."""
        net, (n, patches) = self.net, valid.shape
        if not padded:
            return None
        mask = F.pointwise(valid, shape=(n, 1, patches, patches))
        if net.attention == "eager":
            mask = F.pointwise(mask, dtype=net.dtype)
        if net.checkpointing != "none" and trained:
            net.tape.share(mask)
        return mask


class Pooler(Module):
    """Averages over squares, as a product with where each patch belongs; in float32."""

    kind = "pointwise"
    class_name = "Gemma4VisionPooler"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.vision = vision

    def forward(self, x: Tensor, places: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = F.masked_fill(x, F.reshape(padding, *padding.shape, 1))
        x, valid = self.pooled(x, places)
        x = F.scale(F.to(x, "float32"))
        return x, valid

    def pooled(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        n, patches, _ = x.shape
        clamped = F.pointwise(places)
        squares = F.pointwise(clamped)
        squares = F.pointwise(clamped, shape=(n, patches))
        shape = (n, patches, self.vision.most_tokens)
        weights = F.pointwise(F.pointwise(F.pointwise(squares, shape=shape), dtype="float32"))
        out = P.matmul(F.transpose(weights, 1, 2), F.to(x, "float32"), label="gemm")
        empty = F.pointwise(F.pointwise(weights, dtype="bool"), shape=(n, self.vision.most_tokens))
        valid = F.pointwise(empty)
        return F.to(out, x.dtype), valid


class Tower(Module):
    kind = "copy"
    class_name = "Gemma4VisionModel"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.vision = vision
        self.patch_embedder = PatchEmbedder(net, vision)
        self.encoder = Encoder(net, vision)
        self.pooler = Pooler(net, vision)

    def buffers_bytes(self) -> int:
        layer = next(iter(self.encoder.layers)).buffers_bytes() * self.net.arch.layers
        return self.encoder.rotary_emb.buffers_bytes() + layer + 2 * 4 * self.net.arch.hidden * self.vision.standardizes

    def forward(self, values: Tensor, places: Tensor) -> Tensor:
        net, vision = self.net, self.vision
        rows, columns = pixels.grid(vision, towers.images_of(net))
        padding = F.pointwise(F.pointwise(places, dtype="bool"), shape=places.shape[:2])
        embeds = self.patch_embedder(values, places, padding)
        out = self.encoder(embeds, F.pointwise(padding), places, rows * columns < places.shape[1])
        x, valid = self.pooler(out, places, padding)
        x = pixels.selected(x, valid, places.shape[0] * pixels.image_tokens(vision, towers.images_of(net)))
        if vision.standardizes:
            x = F.mul(F.shift(x), net.tape.empty((net.arch.hidden,), "float32"))
        return F.to(x, embeds.dtype)


class Embedder(Module):
    class_name = "Gemma4MultimodalEmbedder"

    def __init__(self, net: Net, width: int) -> None:
        super().__init__(net)
        self.embedding_projection = Linear(net, width, net.arch.hidden)
        self.embedding_pre_projection_norm = RMSNorm(net, width, scaled=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.embedding_pre_projection_norm(x)
        return self.embedding_projection(normed)


class Gemma4Model(Combined):
    class_name = "Gemma4Model"
    language_model: gemma4.Model  # type: ignore[assignment]

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        vision = vision_of(net)
        self.vision_tower = Tower(net.tower(), vision)
        self.language_model = gemma4.Model(net)
        sound = net.arch.sound
        if sound is not None:
            from zsim.model.families.gemma4_audio import AudioTower

            self.audio_tower = AudioTower(net, sound, vision)
        self.embed_vision = Embedder(net, vision.blocks.hidden)
        if sound is not None:
            self.embed_audio = Embedder(net, sound.outputs)

    def forward(self, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        net, text = self.net, self.language_model
        image_mask, video_mask, audio_mask = (F.pointwise(ids, dtype="bool") for _ in range(3))
        multimodal = F.pointwise(F.pointwise(image_mask, video_mask), audio_mask)
        text_ids = F.pointwise(ids)
        text_ids = F.pointwise(multimodal, text_ids, dtype="int64")
        embeds = text.embed_tokens(text_ids)
        layer_inputs = None
        if net.arch.gemma.layer_width:
            net.tape.read(text.embed_tokens.weight)
            unused = F.pointwise(embeds, multimodal)  # noqa: F841
            layer_inputs = text.layer_inputs(text_ids)
        parts, outputs = self.features(ids.shape[0])
        features = F.cat(parts, dim=0)
        count = F.pointwise(image_mask, shape=(), dtype="int64")  # noqa: F841
        mask = F.reshape(image_mask, *image_mask.shape, 1)
        F.pointwise(features)  # the places that are counted
        embeds = pixels.masked_scatter(embeds, mask, features)
        position_ids = positions(net, embeds)
        masks = self.masks_of(*ids.shape)
        return text(None, embeds, layer_inputs, position_ids, masks), outputs

    def masks_of(self, b: int, s: int) -> dict[bool, Tensor | None]:
        """Image tokens see each other in layers with a window alone, whose mask is there then, however long it is."""
        net = self.net
        masks = gemma4.masks_of(net, b, s)
        if net.arch.gemma.images_see_each_other and net.attention != "eager":
            masks[True] = None
            masks[True] = shared_mask(net, dense_mask(net, b, s, "bool"))
        return masks

    def features(self, batch: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        net, vision = self.net, vision_of(self.net)
        images = towers.images_of(net)
        count, patches = batch * images.per_sequence, vision.most_tokens * vision.pool**2
        values = towers.given(net, (count, patches, vision.channels * vision.patch**2), "float32")
        last = self.vision_tower(values, towers.given(net, (count, patches, 2), "int64"))
        projected = self.embed_vision(last)
        parts = F.split(projected, [pixels.image_tokens(vision, images)] * count, dim=0)
        return parts, (last, *parts)


class Gemma4ForConditionalGeneration(VisionLanguageModel):
    class_name = "Gemma4ForConditionalGeneration"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        if net.attention not in ("sdpa", "efficient", "eager") and net.images is not None:
            raise NotModeled(
                f"{net.attention} attention in Gemma 4, which transformers 5.24 does not run with its tower",
                field="attention", accepted="sdpa, efficient (SDPA with a mask for padding), eager",
            )  # fmt: skip
        self.model = Gemma4Model(net)
        self.lm_head = head(net, self.model.language_model.embed_tokens)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return capped(self.net, head(hidden))

"""Pixtral's vision tower and Mistral 3's patch merger (transformers 5.24, modeling_pixtral.py, modeling_mistral3.py).

The patches of all images lie in one sequence; positions are by row and column.
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import pixels
from zsim.model.architecture import Vision
from zsim.model.attention import rotate, split_heads
from zsim.model.decoder import run_block
from zsim.model.families.clip import ClipConvolution
from zsim.model.families.llama import MLP
from zsim.model.families.towers import attend, images_of
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.kernels import FLASH
from zsim.model.layers import Blocks, Linear, Module, Net, RMSNorm


class PixtralRotary(Module):
    """cos and sin of rows and columns, [patches, head_dim]."""

    kind = "rotary"
    class_name = "PixtralVisionRotaryEmbedding"

    def buffers_bytes(self) -> int:
        return 2 * (self.net.arch.head_dim // 2) * 4

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        half = self.net.arch.head_dim // 2
        wide = F.pointwise(places, dtype="float32")
        angles = F.pointwise(wide, shape=(places.shape[0], 2, half))
        del wide
        cos = F.pointwise(F.pointwise(angles))
        sin = F.pointwise(F.pointwise(angles))
        cos = self._recomposed(cos)
        sin = self._recomposed(sin)
        return F.to(cos, x.dtype), F.to(sin, x.dtype)

    def _recomposed(self, table: Tensor) -> Tensor:
        rows, columns = (F.select(part, 1) for part in F.split(table, [table.shape[-1] // 2] * 2))
        half = F.cat((rows, columns))
        return F.cat((half, half))


class PixtralAttention(Module):
    kind = "rotary"
    class_name = "PixtralAttention"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.vision, width = vision, net.arch.hidden
        for name in ("k_proj", "v_proj", "q_proj", "o_proj"):
            setattr(self, name, Linear(net, width, width))

    k_proj: Linear
    v_proj: Linear
    q_proj: Linear
    o_proj: Linear

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        net, d = self.net, self.net.arch.head_dim
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = split_heads(q, d), split_heads(k, d), split_heads(v, d)
        cos, sin = F.unsqueeze(cos, 0), F.unsqueeze(sin, 0)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if mask is None:
            rows, columns = pixels.grid(self.vision, images_of(net))
            each = {rows * columns: x.shape[1] // (rows * columns)}
            weights = None
            out = F.transpose(flash_attention(q, k, v, net.attention, causal=False, segments=each), 1, 2)
        else:
            out, weights = attend(net, q, k, v, mask)
        out = F.contiguous(F.reshape(out, *x.shape[:2], -1))
        out = self.o_proj(out)
        return out, weights


class PixtralLayer(Module):
    kind = "residual"
    class_name = "PixtralAttentionLayer"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.attention_norm = RMSNorm(net, width, "PixtralRMSNorm")
        self.feed_forward = MLP(net, "Pixtral")
        self.attention = PixtralAttention(net, vision)
        self.ffn_norm = RMSNorm(net, width, "PixtralRMSNorm")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.attention_norm(x)
        x, _weights = self.attention(x, *context)
        x = F.add(residual, x)
        residual = x
        x = self.ffn_norm(x)
        x = self.feed_forward(x)
        return F.add(residual, x)


class PixtralTransformer(Module):
    class_name = "PixtralTransformer"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.layers = Blocks(net, net.arch.kinds, lambda _index: PixtralLayer(net, vision))

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        for block in self.layers:
            x = run_block(self.net, block, x, *context)
        return x


class PixtralTower(Module):
    kind = "copy"
    class_name = "PixtralVisionModel"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.vision, width = vision, net.arch.hidden
        kernel = (vision.channels, vision.patch, vision.patch)
        self.patch_conv = ClipConvolution(net, "Conv2d", kernel, width, bias=False)
        self.ln_pre = RMSNorm(net, width, "PixtralRMSNorm")
        self.transformer = PixtralTransformer(net, vision)
        self.patch_positional_embedding = PixtralRotary(net)

    def forward(self, pixel_values: Tensor) -> Tensor:
        net, (count, _, height, width) = self.net, pixel_values.shape
        rows, columns = height // self.vision.patch, width // self.vision.patch
        patches = self.patch_conv(F.to(pixel_values, net.dtype), (count, net.arch.hidden, rows, columns))
        images = F.unbind(patches, 0)  # live to the end
        patches = F.cat([F.transpose(F.reshape(image, net.arch.hidden, -1), 0, 1) for image in images], dim=0)
        x = self.ln_pre(F.reshape(patches, 1, *patches.shape))
        del patches
        places = self._places(count, rows, columns)
        tables = self.patch_positional_embedding(x, places)
        if net.layers_save(x):
            net.tape.share(*tables)
        mask = self._mask(x)
        return self.transformer(x, *tables, mask)

    def _places(self, count: int, rows: int, columns: int) -> Tensor:
        """Row and column of each patch."""
        tape = self.net.tape
        each = []
        for _ in range(count):
            numbers = F.pointwise(tape.empty((rows * columns,), "int64")), tape.empty((rows * columns,), "int64")
            each.append(F.cat([F.reshape(axis, -1, 1) for axis in numbers]))
        return F.cat(each, dim=0)

    def _mask(self, x: Tensor) -> Tensor | None:
        """Of blocks on the diagonal; flash_attn_varlen is told where sequences begin."""
        net, patches = self.net, x.shape[1]
        if net.attention in FLASH:
            return None
        mask = net.tape.empty((1, 1, patches, patches), net.dtype)
        net.tape.memory(0, 2 * mask.nbytes, "copy")
        if x.needs_grad and (net.attention != "eager" or net.checkpointing != "none"):
            net.tape.share(mask)
        return mask


class PatchMerger(Module):
    """Mistral3PatchMerger"""

    kind = "copy"
    class_name = "Mistral3PatchMerger"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.vision, width = vision, vision.blocks.hidden
        self.merging_layer = Linear(net, width * vision.merge**2, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = pixels.grid(self.vision, images_of(self.net))
        merged = []
        for image in F.split(x, [rows * columns] * (x.shape[0] // (rows * columns)), dim=0):
            turned = F.permute(F.reshape(image, rows, columns, -1), 2, 0, 1)
            unfolded = pixels.unfold(F.reshape(turned, 1, *turned.shape), self.vision.merge)
            merged.append(F.transpose(F.reshape(unfolded, *unfolded.shape[1:]), 0, 1))
        return self.merging_layer(F.cat(merged, dim=0))

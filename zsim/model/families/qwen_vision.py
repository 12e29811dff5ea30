"""The towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 (transformers 5.24): packed patches, positions by row and
column, in 2.5 windows, and squares of patches merged into one token; Qwen3-VL's text model reads the tower's layers as
well."""

from __future__ import annotations

from math import prod

from zsim.model import functional as F
from zsim.model import pixels
from zsim.model import products as P
from zsim.model.architecture import Vision
from zsim.model.attention import rotate
from zsim.model.decoder import run_block
from zsim.model.families.llama import MLP
from zsim.model.families.towers import Convolution, PositionTable, attend, given, images_of
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.kernels import FLASH
from zsim.model.layers import Activation, Blocks, LayerNorm, Linear, Module, ModuleList, Net, RMSNorm, require_grad


class QwenPatches(Module):
    kind = "gemm"

    def __init__(self, net: Net, vision: Vision, class_name: str, bias: bool = False) -> None:
        super().__init__(net)
        self.class_name = class_name
        kernel = (vision.channels, vision.frames, vision.patch, vision.patch)
        self.proj = Convolution(net, "Conv3d", kernel, net.arch.hidden, bias)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches, width = pixel_values.shape[0], self.net.arch.hidden
        out = F.reshape(self.proj(pixel_values, (patches, width, 1, 1, 1)), -1, width)
        return require_grad(self.net, out, copied=self.class_name != "PatchEmbed")


class QwenRotary(Module):
    """cos and sin of rows and columns, [patches, head_dim], in float32."""

    kind = "rotary"

    def __init__(self, net: Net, class_name: str) -> None:
        super().__init__(net)
        self.class_name = class_name

    def buffers_bytes(self) -> int:
        return 2 * (self.net.arch.head_dim // 4) * 4

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        patches, quarter = places.shape[0], self.net.arch.head_dim // 4
        wide = F.pointwise(places, dtype="float32")
        angles = F.pointwise(wide, shape=(patches, 2, quarter))
        del wide
        cos = F.pointwise(F.pointwise(angles))
        sin = F.pointwise(F.pointwise(angles))
        cos = self._recomposed(cos)
        sin = self._recomposed(sin)
        return cos, sin

    def _recomposed(self, table: Tensor) -> Tensor:
        first, second = F.select(table, 1), F.select(table, 1)
        half = F.cat((first, second))
        return F.cat((half, half))


class QwenAttention(Module):
    kind = "rotary"

    def __init__(self, net: Net, vision: Vision, class_name: str, windowed: bool) -> None:
        super().__init__(net)
        self.vision, self.class_name, self.windowed = vision, class_name, windowed
        width = net.arch.hidden
        self.qkv = Linear(net, width, 3 * width, bias=True)
        self.proj = Linear(net, width, width, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        arch, patches = self.net.arch, x.shape[0]
        q, k, v = self.heads(x)
        q, k = self._rotated(q, k, cos, sin)
        shape = (1, arch.heads, patches, arch.head_dim)
        few = (1, arch.kv_heads, patches, arch.head_dim)
        q = F.reshape(F.transpose(q, 0, 1), *shape)
        k = F.reshape(F.transpose(k, 0, 1), *few)
        v = F.reshape(F.transpose(v, 0, 1), *few)
        lengths = self._lengths(patches)
        if self.net.attention in FLASH:
            counts = {length: lengths.count(length) for length in lengths}
            out = flash_attention(q, k, v, self.net.attention, causal=False, segments=counts)
            out = F.transpose(out, 1, 2)
        else:
            splits = [F.split(tensor, lengths, dim=2) for tensor in (q, k, v)]
            outputs = [attend(self.net, *part)[0] for part in zip(*splits, strict=True)]
            out = F.cat(outputs, dim=1)
        out = F.contiguous(F.reshape(out, patches, -1))
        return self.projected(out)

    def projected(self, out: Tensor) -> Tensor:
        return self.proj(out)

    def heads(self, x: Tensor) -> list[Tensor]:
        """[patches, heads, head_dim]"""
        qkv = F.reshape(self.qkv(x), x.shape[0], 3, self.net.arch.heads, -1)
        return F.unbind(F.permute(qkv, 1, 0, 2, 3), 0)

    def _lengths(self, patches: int) -> list[int]:
        """Of the sequences that attend to themselves: images, or the windows in them."""
        images = images_of(self.net)
        rows, columns = pixels.grid(self.vision, images)
        each = list(pixels.window_order(self.vision, images)) if self.windowed else [rows * columns]
        return each * (patches // (rows * columns))

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """In float32 and back (apply_rotary_pos_emb_vision)."""
        dtype = q.dtype
        q, k = F.to(q, "float32"), F.to(k, "float32")
        cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
        turned_q = rotate(q, cos, sin)
        turned_k = rotate(k, cos, sin)
        turned_q = F.to(turned_q, dtype)
        turned_k = F.to(turned_k, dtype)
        return turned_q, turned_k


class TwoLinears(Module):
    """The MLP of Qwen2-VL and Qwen3-VL. `names`: of its parts, in order of registration."""

    kind = "activation"

    def __init__(self, net: Net, class_name: str, names: tuple[str, str, str]) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = class_name
        parts = {
            "up": Linear(net, arch.hidden, arch.intermediate, bias=True),
            "act": Activation(net, arch.activation),
            "down": Linear(net, arch.intermediate, arch.hidden, bias=True),
        }
        order = ("up", "act", "down") if names[1] == "act" else ("up", "down", "act")
        for name, part in zip(names, order, strict=True):
            setattr(self, name, parts[part])
        self.run = [names[order.index(part)] for part in parts]  # by name: an adapter may take a part's place

    def forward(self, x: Tensor) -> Tensor:
        for name in self.run:
            x = self.children[name](x)
        return x


class QwenBlock(Module):
    kind = "residual"
    norm1: Module
    norm2: Module
    mlp: Module

    def __init__(self, net: Net, vision: Vision, prefix: str, windowed: bool) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.class_name = f"{prefix}VisionBlock"
        if prefix in ("Qwen2_5_VL", "Qwen2_5Omni", "Exaone4_5_"):
            self.norm1 = RMSNorm(net, width, f"{prefix}RMSNorm")
            self.norm2 = RMSNorm(net, width, f"{prefix}RMSNorm")
            self.attn = self.attention(vision, f"{prefix}VisionAttention", windowed)
            self.mlp = MLP(net, prefix)
            self.mlp.fused = False  # Liger leaves it, and the merger's norm, to torch
            return
        self.norm1, self.norm2 = LayerNorm(net, width), LayerNorm(net, width)
        old = prefix == "Qwen2VL"
        self.attn = QwenAttention(net, vision, "VisionAttention" if old else f"{prefix}VisionAttention", windowed)
        if old:
            self.mlp = TwoLinears(net, "VisionMlp", ("fc1", "act", "fc2"))
        else:
            self.mlp = TwoLinears(net, f"{prefix}VisionMLP", ("linear_fc1", "linear_fc2", "act_fn"))

    def attention(self, vision: Vision, class_name: str, windowed: bool) -> QwenAttention:
        return QwenAttention(self.net, vision, class_name, windowed)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        x = F.add(x, self.attn(self.norm1(x), *tables))
        return F.add(x, self.mlp(self.norm2(x)))


class Sequential(Module):
    class_name = "Sequential"

    def __init__(self, net: Net, *modules: Module) -> None:
        super().__init__(net)
        for number, module in enumerate(modules):
            setattr(self, str(number), module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children.values():
            x = module(x)
        return x


class QwenMerger(Module):
    """Patches normed, and each square of them side by side through an MLP."""

    ln_q: Module

    def __init__(self, net: Net, vision: Vision, prefix: str, width: int) -> None:
        super().__init__(net)
        old = prefix == "Qwen2VL"
        self.class_name = "PatchMerger" if old else f"{prefix}PatchMerger"
        self.inner = net.arch.hidden * vision.merge**2
        self.ln_q = LayerNorm(net, net.arch.hidden) if old else RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.ln_q.fused = False
        self.mlp = Sequential(
            net,
            Linear(net, self.inner, self.inner, bias=True),
            Activation(net, "nn.gelu"),
            Linear(net, self.inner, width, bias=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(F.reshape(self.ln_q(x), -1, self.inner))


class Qwen25Tower(Module):
    """Qwen2_5_VisionTransformerPretrainedModel. `width`: the text model's."""

    kind = "copy"
    class_name = "Qwen2_5_VisionTransformerPretrainedModel"
    prefix = "Qwen2_5_VL"
    returns_early = False  # the way back to the order of patches is found before the blocks
    layer: type[QwenBlock] = QwenBlock

    def __init__(self, net: Net, vision: Vision, width: int) -> None:
        super().__init__(net)
        prefix = self.prefix
        self.vision = vision
        self.patch_embed = QwenPatches(net, vision, "Qwen2_5_VisionPatchEmbed")
        self.rotary_pos_emb = QwenRotary(net, f"{prefix}VisionRotaryEmbedding")
        kinds = net.arch.kinds
        self.blocks = Blocks(net, kinds, lambda index: self.layer(net, vision, prefix, kinds[index].sliding))
        self.merger = QwenMerger(net, vision, prefix, width)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        patches = pixel_values.shape[0]
        places = given(self.net, (patches, 2), "int64")
        order = given(self.net, (patches // self.vision.merge**2,), "int64")
        x = self.patch_embed(pixel_values)
        back = F.pointwise(order) if self.returns_early else None
        x = self._permuted(x, order)
        tables = self.rotary_pos_emb(x, places)
        tables = tuple(self._permuted(table, order) for table in tables)
        if self.net.layers_save(x):
            self.net.tape.share(*tables)
        for block in self.blocks:
            x = run_block(self.net, block, x, *tables)
        if back is None:
            back = F.pointwise(order)
        merged = self.merger(x)
        merged = P.gather(merged, back)
        return x, merged

    def _permuted(self, x: Tensor, order: Tensor) -> Tensor:
        patches, width = x.shape[0], prod(x.shape[1:])
        x = F.reshape(x, order.shape[0], -1, width)
        x = P.gather(x, order)
        return F.reshape(x, patches, -1)


class Qwen2Tower(Module):
    """Qwen2VisionTransformerPretrainedModel"""

    kind = "copy"
    class_name = "Qwen2VisionTransformerPretrainedModel"

    def __init__(self, net: Net, vision: Vision, width: int) -> None:
        super().__init__(net)
        prefix = "Qwen2VL"
        self.patch_embed = QwenPatches(net, vision, "PatchEmbed")
        self.rotary_pos_emb = QwenRotary(net, f"{prefix}VisionRotaryEmbedding")
        self.blocks = Blocks(net, net.arch.kinds, lambda index: QwenBlock(net, vision, prefix, windowed=False))
        self.merger = QwenMerger(net, vision, prefix, width)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        places = given(self.net, (pixel_values.shape[0], 2), "int64")
        x = self.patch_embed(pixel_values)
        tables = self.rotary_pos_emb(x, places)
        if self.net.layers_save(x):
            self.net.tape.share(*tables)
        for block in self.blocks:
            x = run_block(self.net, block, x, *tables)
        return x, self.merger(x)


class Qwen3Merger(Module):
    """`after`: normed after squares of patches lie side by side (of a layer that the text model reads)."""

    kind = "activation"

    def __init__(self, net: Net, vision: Vision, prefix: str, width: int, after: bool) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}VisionPatchMerger"
        self.inner, self.after = net.arch.hidden * vision.merge**2, after
        self.norm = LayerNorm(net, self.inner if after else net.arch.hidden)
        self.linear_fc1 = Linear(net, self.inner, self.inner, bias=True)
        self.act_fn = Activation(net, "nn.gelu")
        self.linear_fc2 = Linear(net, self.inner, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.reshape(self.norm(F.reshape(x, -1, self.inner) if self.after else x), -1, self.inner)
        return self.linear_fc2(self.act_fn(self.linear_fc1(x)))


class Qwen3Tower(Module):
    """Qwen3VLVisionModel: learned positions besides, interpolated, and layers whose output the text model reads."""

    kind = "copy"
    prefix = "Qwen3VL"
    read_by_text = True  # its layers are
    merging: type[Qwen3Merger] = Qwen3Merger

    def __init__(self, net: Net, vision: Vision, width: int) -> None:
        super().__init__(net)
        prefix = self.prefix
        self.class_name = f"{prefix}VisionModel"
        self.patch_embed = QwenPatches(net, vision, f"{prefix}VisionPatchEmbed", bias=True)
        self.pos_embed = PositionTable(net, vision.positions, net.arch.hidden)
        self.rotary_pos_emb = QwenRotary(net, f"{prefix}VisionRotaryEmbedding")
        self.blocks = Blocks(net, net.arch.kinds, lambda index: QwenBlock(net, vision, prefix, windowed=False))
        self.merger = self.merging(net, vision, prefix, width, after=False)
        deep = [self.merging(net, vision, prefix, width, after=True) for _ in vision.read_layers]
        if self.read_by_text:
            self.deepstack_merger_list = ModuleList(net, list(deep))
        self.deep = dict(zip(vision.read_layers, deep, strict=True))

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        tape, patches = self.net.tape, pixel_values.shape[0]
        places = given(self.net, (patches, 2), "int64")
        corners, weights = given(self.net, (patches, 4), "int64"), given(self.net, (patches, 4, 1), "float32")
        x = self.patch_embed(pixel_values)
        positions = F.sum_middle(F.mul(self.pos_embed(corners), weights))
        x = F.add(x, F.to(positions, x.dtype))
        tables = self.rotary_pos_emb(x, places)
        if self.net.layers_save(x):
            tape.share(*tables)
        read = []
        for number, block in self.blocks.numbered():
            x = run_block(self.net, block, x, *tables)
            if number in self.deep:
                read.append(self.deep[number](x))
        return x, self.merger(x), read


class Qwen3MoeTower(Qwen3Tower):
    prefix = "Qwen3VLMoe"


class Qwen35Tower(Qwen3Tower):
    """Qwen3_5VisionModel: the text model reads its result alone."""

    prefix = "Qwen3_5"
    read_by_text = False


class Qwen35MoeTower(Qwen35Tower):
    prefix = "Qwen3_5Moe"

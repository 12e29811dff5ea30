"""The vision towers of CLIP and SigLIP (transformers 5.24, modeling_clip.py, modeling_siglip.py)."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.architecture import Vision
from zsim.model.attention import split_heads
from zsim.model.decoder import run_block
from zsim.model.families.phi import PhiMLP
from zsim.model.families.towers import Convolution, PositionTable, attend, given
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, LayerNorm, Linear, Module, Net, Weight, require_grad


class ClipConvolution(Convolution):
    """The input embedding of its tower (`_input_embed_layer`)."""

    def forward(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return require_grad(self.net, super().forward(x, shape), copied=True)


class ClipEmbeddings(Module):
    kind = "embedding"
    role = "unit"  # one of CLIP's _no_split_modules
    class_name = "CLIPVisionEmbeddings"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        width, side = net.arch.hidden, vision.image_size // vision.patch
        self.side = side
        self.class_embedding = Weight(net, width)
        kernel = (vision.channels, vision.patch, vision.patch)
        self.patch_embedding = ClipConvolution(net, "Conv2d", kernel, width, bias=False)
        self.position_embedding = PositionTable(net, side * side + 1, width)

    def buffers_bytes(self) -> int:
        return 8 * (self.side**2 + 1)

    def index_buffers_bytes(self) -> int:
        return self.buffers_bytes()

    def forward(self, pixel_values: Tensor) -> Tensor:
        count, width = pixel_values.shape[0], self.net.arch.hidden
        patches = self.patch_embedding(F.to(pixel_values, self.net.dtype), (count, width, self.side, self.side))
        patches = F.transpose(F.reshape(patches, count, width, -1), 1, 2)
        first = F.expand(self.class_embedding, (count, 1, width))
        embeddings = F.cat((first, patches), dim=1)
        places = given(self.net, (1, self.side**2 + 1), "int64")
        return F.add(embeddings, self.position_embedding(places))


class ClipAttention(Module):
    kind = "copy"
    class_name = "CLIPAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        h = net.arch.hidden
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, Linear(net, h, h, bias=True))

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        d = self.net.arch.head_dim
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = split_heads(q, d), split_heads(k, d), split_heads(v, d)
        out, weights = attend(self.net, q, k, v)
        out = F.reshape(out, *out.shape[:2], -1)
        out = self.out_proj(out)
        return out, weights


class ClipMLP(PhiMLP):
    class_name = "CLIPMLP"


class ClipLayer(Module):
    kind = "residual"
    class_name = "CLIPEncoderLayer"

    def __init__(self, net: Net, unread: bool) -> None:
        super().__init__(net)
        self.unread = unread
        self.self_attn = ClipAttention(net)
        self.layer_norm1 = LayerNorm(net, net.arch.hidden)
        self.mlp = ClipMLP(net)
        self.layer_norm2 = LayerNorm(net, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.layer_norm1(x)
        x, _weights = self.self_attn(x)
        x = F.add(residual, x)
        residual = x
        x = self.layer_norm2(x)
        x = self.mlp(x)
        return F.add(residual, x)


class ClipEncoder(Module):
    class_name = "CLIPEncoder"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        kinds = net.arch.kinds
        self.layers = Blocks(net, kinds, lambda index: ClipLayer(net, kinds[index].unread))

    def forward(self, x: Tensor, captured: list[Tensor]) -> Tensor:
        """Returns what the last layer does; a hook captures what the projector reads."""
        features = x
        for block in self.layers:
            if block.unread:
                with self.net.tape.without_backward(holding=not block.checkpointed):
                    x = block(x)
            else:
                x = features = run_block(self.net, block, x)
        captured.append(features)
        return x


class ClipTower(Module):
    class_name = "CLIPVisionModel"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.embeddings = ClipEmbeddings(net, vision)
        self.pre_layrnorm = LayerNorm(net, width)
        self.encoder = ClipEncoder(net)
        self.post_layernorm = LayerNorm(net, width)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        x = self.embeddings(pixel_values)
        x = self.pre_layrnorm(x)
        captured: list[Tensor] = []
        last = self.encoder(x, captured)
        with self.net.tape.without_backward(holding=True):
            pooled = F.select(last, 1)
            pooled = self.post_layernorm(pooled)
        return captured[0], last, pooled


class SiglipEmbeddings(ClipEmbeddings):
    """No token of the class, and a bias."""

    class_name = "SiglipVisionEmbeddings"

    def __init__(self, net: Net, vision: Vision) -> None:
        Module.__init__(self, net)
        self.side = vision.image_size // vision.patch
        kernel = (vision.channels, vision.patch, vision.patch)
        self.patch_embedding = ClipConvolution(net, "Conv2d", kernel, net.arch.hidden, bias=True)
        self.position_embedding = PositionTable(net, self.side**2, net.arch.hidden)

    def buffers_bytes(self) -> int:
        return 8 * self.side**2

    def forward(self, pixel_values: Tensor) -> Tensor:
        count, width = pixel_values.shape[0], self.net.arch.hidden
        patches = self.patch_embedding(F.to(pixel_values, self.net.dtype), (count, width, self.side, self.side))
        embeddings = F.transpose(F.reshape(patches, count, width, -1), 1, 2)
        places = given(self.net, (1, self.side**2), "int64")
        return F.add(embeddings, self.position_embedding(places))


class SiglipLayer(ClipLayer):
    class_name = "SiglipEncoderLayer"

    def __init__(self, net: Net, unread: bool) -> None:
        Module.__init__(self, net)
        self.unread = unread
        self.layer_norm1 = LayerNorm(net, net.arch.hidden)
        self.self_attn = ClipAttention(net)
        self.self_attn.class_name = "SiglipAttention"
        self.layer_norm2 = LayerNorm(net, net.arch.hidden)
        self.mlp = ClipMLP(net)
        self.mlp.class_name = "SiglipMLP"


class SiglipEncoder(ClipEncoder):
    class_name = "SiglipEncoder"

    def __init__(self, net: Net) -> None:
        Module.__init__(self, net)
        kinds = net.arch.kinds
        self.layers = Blocks(net, kinds, lambda index: SiglipLayer(net, kinds[index].unread))


class SiglipTower(Module):
    """Without the head that pools."""

    class_name = "SiglipVisionModel"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.embeddings = SiglipEmbeddings(net, vision)
        self.encoder = SiglipEncoder(net)
        self.post_layernorm = LayerNorm(net, net.arch.hidden)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.embeddings(pixel_values)
        captured: list[Tensor] = []
        x = self.encoder(x, captured)
        return self.post_layernorm(x)


class ReadEncoder(SiglipEncoder):
    """What it returns is not what was captured of its last layer: no gradient comes to it."""

    def forward(self, x: Tensor, captured: list[Tensor]) -> Tensor:
        x = super().forward(x, captured)
        return F.reshape(x, *x.shape)


class SiglipFeatures(SiglipTower):
    """Of which a projector reads the last layer; what the norm returns nobody does."""

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net, vision)
        self.encoder = ReadEncoder(net)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x = self.embeddings(pixel_values)
        captured: list[Tensor] = []
        x = self.encoder(x, captured)
        with self.net.tape.without_backward(holding=True):
            normed = self.post_layernorm(x)
        return captured[0], normed

"""The vision tower of InternVL (transformers 5.24, modeling_internvl.py): a scaled residual stream, a class token."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.architecture import Vision
from zsim.model.attention import split_heads
from zsim.model.decoder import run_block
from zsim.model.families.phi import PhiMLP
from zsim.model.families.towers import Convolution, attend
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, Dropout, Identity, LayerNorm, Linear, Module, Net, RMSNorm, Weight, require_grad


class PatchEmbeddings(Module):
    kind = "embedding"
    class_name = "InternVLVisionPatchEmbeddings"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.side = vision.image_size // vision.patch
        kernel = (vision.channels, vision.patch, vision.patch)
        self.projection = Convolution(net, "Conv2d", kernel, net.arch.hidden, bias=True)

    def forward(self, pixel_values: Tensor) -> Tensor:
        count, width = pixel_values.shape[0], self.net.arch.hidden
        patches = self.projection(pixel_values, (count, width, self.side, self.side))
        patches = F.transpose(F.reshape(patches, count, width, -1), 1, 2)
        return require_grad(self.net, patches, copied=True)


class Embeddings(Module):
    kind = "embedding"
    class_name = "InternVLVisionEmbeddings"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.cls_token = Weight(net, 1, 1, width)
        self.patch_embeddings = PatchEmbeddings(net, vision)
        self.position_embeddings = Weight(net, 1, self.patch_embeddings.side**2 + 1, width)
        self.dropout = Dropout(net, net.arch.dropout)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patch_embeddings(pixel_values)
        first = F.expand(self.cls_token, (x.shape[0], 1, x.shape[2]))
        x = F.cat((first, x), dim=1)
        x = F.add(x, self.position_embeddings)
        return self.dropout(x)


class Attention(Module):
    kind = "copy"
    class_name = "InternVLVisionAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch, width = net.arch, net.arch.hidden
        self.q_proj = Linear(net, width, width, arch.attention_bias)
        self.k_proj = Linear(net, width, width, arch.attention_bias)
        self.v_proj = Linear(net, width, width, arch.attention_bias)
        self.projection_layer = Linear(net, width, width, bias=True)
        self.projection_dropout = Identity(net)
        self.q_norm = self._norm()
        self.k_norm = self._norm()

    def _norm(self) -> Module:
        net = self.net
        return RMSNorm(net, net.arch.hidden, "InternVLVisionRMSNorm") if net.arch.qk_norm else Identity(net)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        d = self.net.arch.head_dim
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k, v = split_heads(q, d), split_heads(k, d), split_heads(v, d)
        out, weights = attend(self.net, q, k, v, upcast=False)
        out = F.reshape(out, *out.shape[:2], -1)
        out = self.projection_layer(out)
        return self.projection_dropout(out), weights


class MLP(PhiMLP):
    class_name = "InternVLVisionMLP"


class Layer(Module):
    kind = "residual"
    class_name = "InternVLVisionLayer"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.lambda_1, self.lambda_2 = Weight(net, width), Weight(net, width)
        self.attention = Attention(net)
        self.mlp = MLP(net)
        self.layernorm_before = self._norm(vision)
        self.layernorm_after = self._norm(vision)
        self.dropout = Dropout(net, net.arch.dropout)

    def _norm(self, vision: Vision) -> Module:
        net, width = self.net, self.net.arch.hidden
        return RMSNorm(net, width, "InternVLVisionRMSNorm") if vision.rms_norms else LayerNorm(net, width)

    def forward(self, x: Tensor) -> Tensor:
        out, _weights = self.attention(self.layernorm_before(x))
        out = F.mul(self.lambda_1, out)
        x = F.add(out, x)
        out = self.layernorm_after(x)
        out = self.mlp(out)
        out = self.dropout(out)
        out = F.mul(self.lambda_2, out)
        return F.add(out, x)


class Encoder(Module):
    class_name = "InternVLVisionEncoder"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.layer = Blocks(net, net.arch.kinds, lambda _index: Layer(net, vision))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = run_block(self.net, block, x)
        return x


class InternVLTower(Module):
    class_name = "InternVLVisionModel"

    def __init__(self, net: Net, vision: Vision) -> None:
        super().__init__(net)
        self.embeddings = Embeddings(net, vision)
        self.encoder = Encoder(net, vision)
        self.layernorm = LayerNorm(net, net.arch.hidden) if net.arch.final_norm else Identity(net)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states, and what the last layer returned, which a hook has captured."""
        x = self.embeddings(pixel_values)
        x = self.encoder(x)
        return self.layernorm(x), x


def shuffled(x: Tensor, merge: int) -> Tensor:
    """[n, r, c, h] -> [n, r / m, c / m, m * m * h], by way of columns first."""
    n, rows, columns, width = x.shape
    x = F.contiguous(F.permute(F.reshape(x, n, rows, columns // merge, width * merge), 0, 2, 1, 3))
    x = F.reshape(x, n, columns // merge, rows // merge, width * merge**2)
    return F.contiguous(F.permute(x, 0, 2, 1, 3))

"""What config.json means in the families whose layers are not all attention (rules as in `readers`)."""

from __future__ import annotations

from collections.abc import Callable

from zsim.model.architecture import Architecture, LayerKind, Moe, StateSpace
from zsim.model.fields import Fields
from zsim.model.reader_parts import bias_of, common, read_activation, read_layers, read_top_k, read_types


def _lfm2(fields: Fields, family: str) -> Architecture:
    layers, sparse = read_layers(fields, "num_hidden_layers"), family == "lfm2_moe"
    if "block_ff_dim" in fields:
        fields = fields.over({"intermediate_size": fields.size("block_ff_dim")})
    types = read_types(fields, layers, "layer_types", "full_attention", "conv")
    if types is None:
        if sparse:
            fields.fail("layer_types", "is missing", f"{layers} entries of full_attention, conv")
        attending = fields.items("full_attn_idxs")
        types = ["full_attention" if attending is None or i in attending else "conv" for i in range(layers)]
    dense = fields.size("num_dense_layers", default=2, least=0) if sparse else layers
    kinds = tuple(
        LayerKind(sparse=i >= dense, mixer="conv" if kind == "conv" else "attention") for i, kind in enumerate(types)
    )
    values = common(
        fields,
        family,
        kinds=kinds,
        activation="silu",
        attention_dropout=0.0,
        tied=fields.flag("tie_embedding", "tie_word_embeddings", default=True),
        conv_kernel=fields.size("conv_L_cache", default=3),
        conv_bias=fields.flag("conv_bias", default=False),
        intermediate=fields.size("intermediate_size") if sparse else _lfm2_width(fields),
    )
    if not sparse:
        return Architecture(**values)
    experts = fields.size("num_experts", default=32)
    width, norm = fields.size("moe_intermediate_size", default=1792), fields.flag("norm_topk_prob", default=True)
    bias = fields.flag("use_expert_bias", default=True)
    return Architecture(**values, moe=Moe(experts, read_top_k(fields, experts, default=4), width, norm, bias=bias))


def _lfm2_width(fields: Fields) -> int:
    """Lfm2MLP: of the width that is given two thirds, times a factor, up to a multiple."""
    width = fields.size("block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    if not fields.given("block_ffn_dim_multiplier", default=True):
        return width
    width = int(fields.number("block_ffn_dim_multiplier", default=1.0, low=0.01, high=100.0) * width)
    multiple = fields.size("block_multiple_of", default=256)
    return -(-width // multiple) * multiple


def _mamba2(fields: Fields, family: str) -> Architecture:
    hidden, layers = fields.size("hidden_size", default=4096), read_layers(fields, "num_hidden_layers")
    space = StateSpace(
        heads=fields.size("num_heads", default=128),
        head_dim=fields.size("head_dim", default=64),
        state=fields.size("state_size", default=128),
        groups=fields.size("n_groups", default=8),
        chunk=fields.size("chunk_size", default=256),
        kernel=fields.size("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias", default=False),
        out_bias=fields.flag("use_bias", default=False),
    )
    _check(fields, space, "num_heads", "n_groups", hidden * fields.size("expand", default=2), "hidden_act")
    wide = fields.flag("residual_in_fp32", default=True)
    return Architecture(
        family=family,
        hidden=hidden,
        heads=space.heads,
        kv_heads=space.heads,
        head_dim=space.head_dim,
        intermediate=space.inner,
        vocab=fields.size("vocab_size"),
        kinds=tuple(LayerKind(mixer="mamba", later=layer > 0) for layer in range(layers)),
        tied=fields.flag("tie_word_embeddings", default=False),
        mamba=space,
        wide_residual=wide,
    )


# transformers 5.24 configuration_utils.py, _LEGACY_LAYER_TYPE_REMAP
FORMER = {"mamba": "linear_attention", "attention": "full_attention"}
MIXERS = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp", "moe": "moe"}
PATTERN = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


def _nemotron_h(fields: Fields, family: str) -> Architecture:
    mixers = _nemotron_layers(fields)
    space = StateSpace(
        heads=fields.size("mamba_num_heads", default=128),
        head_dim=fields.size("mamba_head_dim", default=64),
        state=fields.size("ssm_state_size", default=128),
        groups=fields.size("mamba_n_groups", "n_groups", default=8),
        chunk=fields.size("mamba_chunk_size", "chunk_size", default=128),
        kernel=fields.size("mamba_d_conv", "conv_kernel", default=4),
        conv_bias=fields.flag("mamba_conv_bias", "use_conv_bias", default=True),
        bias=fields.flag("use_bias", default=False),
        out_bias=fields.flag("use_bias", default=False),
    )
    _check(fields, space, "mamba_num_heads", "n_groups", space.inner, "mamba_hidden_act")
    kinds = tuple(LayerKind(sparse=mixer == "moe", mixer=mixer, later=i > 0) for i, mixer in enumerate(mixers))
    values = common(
        fields.over({"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": len(mixers),
                     "intermediate_size": 21504}),
        family,
        kinds=kinds,
        tied=False,  # whatever the file says: its class ties nothing
        activation=read_activation(fields, "mlp_hidden_act", default="relu2"),
        mlp_bias=fields.flag("mlp_bias", default=False),
        positions=fields.size("max_position_embeddings", default=4096),
        mamba=space,
    )  # fmt: skip
    if "moe" not in mixers:
        return Architecture(**values)
    experts, groups = fields.size("n_routed_experts", "num_local_experts", default=8), fields.size("n_group", default=1)
    if experts % groups:
        fields.fail("n_group", f"is {groups}, which does not divide the {experts} experts", "a divisor")
    routed = Moe(
        experts,
        read_top_k(fields, experts, default=2),
        fields.size("moe_intermediate_size", default=7688),
        fields.flag("norm_topk_prob", default=True),
        fields.size("moe_shared_expert_intermediate_size", default=7688),
        groups=groups,
        latent=fields.size("moe_latent_size", default=0, least=0),
    )
    return Architecture(**values, moe=routed)


def _nemotron_layers(fields: Fields) -> list[str]:
    """NemotronHConfig: a list, else a pattern of one letter for each layer, else one layer of each."""
    name = next((name for name in ("layer_types", "layers_block_type") if name in fields), None)
    if name:
        types = fields.items(name) or []
        types = read_types(fields, len(types), name, *MIXERS, *FORMER) or []
        return [MIXERS[FORMER.get(kind, kind)] for kind in types]
    pattern = fields.text("hybrid_override_pattern", default="ME*-")
    if not pattern or set(pattern) - set(PATTERN):
        fields.fail("hybrid_override_pattern", f"is {pattern!r}", f"one of {' '.join(PATTERN)} for each layer")
    return [PATTERN[letter] for letter in pattern]


def _space(fields: Fields, inner: int, *, out_bias: bool, normed: bool = True, norm_first: bool = False) -> StateSpace:
    """The fields that Granite 4, Bamba and Falcon-H1 share. `inner`: the width of the mixer."""
    heads = fields.size("mamba_n_heads", default=128)
    automatic = fields.raw("mamba_d_head") in (None, "auto")
    space = StateSpace(
        heads=heads,
        head_dim=inner // heads if automatic else fields.size("mamba_d_head"),
        state=fields.size("mamba_d_state", default=256),
        groups=fields.size("mamba_n_groups", default=1),
        chunk=fields.size("mamba_chunk_size", default=256),
        kernel=fields.size("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias", default=False),
        out_bias=out_bias,
        normed=normed,
        norm_first=norm_first,
    )
    _check(fields, space, "mamba_n_heads", "mamba_n_groups", inner, "hidden_act")
    return space


def _granite(fields: Fields, family: str) -> Architecture:
    layers = read_layers(fields, "num_hidden_layers")
    name = "layers_block_type" if "layers_block_type" in fields else "layer_types"
    types = read_types(fields, layers, name, "linear_attention", "full_attention", *FORMER)
    mixers = [MIXERS[FORMER.get(kind, kind)] for kind in types or ["mamba"] * layers]
    experts = fields.size("num_local_experts", default=8, least=0)
    inner = fields.size("hidden_size") * fields.size("mamba_expand", default=2)
    position = fields.raw("position_embedding_type")
    values = common(
        fields.over({"intermediate_size": 11008}),
        family,
        kinds=tuple(LayerKind(sparse=experts > 0, mixer=kind, later=i > 0) for i, kind in enumerate(mixers)),
        rotary=position == "rope",
        mamba=_space(fields, inner, out_bias=fields.flag("mamba_proj_bias", default=False)),
        **bias_of(fields),
    )
    width = values["intermediate"]
    values["intermediate"] = fields.size("shared_intermediate_size", default=1024)
    if not experts:
        return Architecture(**values)
    return Architecture(**values, moe=Moe(experts, read_top_k(fields, experts, default=2), width))


def _bamba(fields: Fields, family: str) -> Architecture:
    layers = read_layers(fields, "num_hidden_layers")
    attending = fields.items("attn_layer_indices") or []
    mixers = ["attention" if layer in attending else "mamba" for layer in range(layers)]
    if fields.number("z_loss_coefficient", default=0.0, low=0.0, high=1e9):
        fields.refuse("z_loss_coefficient", "the z-loss of Bamba", "0")
    inner = fields.size("hidden_size") * fields.size("mamba_expand", default=2)
    values = common(
        fields,
        family,
        kinds=tuple(LayerKind(mixer=mixer, later=layer > 0) for layer, mixer in enumerate(mixers)),
        mlp_bias=fields.flag("mlp_bias", default=False),
        mamba=_space(fields, inner, out_bias=fields.flag("mamba_proj_bias", default=False)),
        **bias_of(fields),
    )
    values["rotary_dim"] = values["head_dim"] // 2  # whatever the file says of partial_rotary_factor
    return Architecture(**values)


def _falcon_h1(fields: Fields, family: str) -> Architecture:
    layers = read_layers(fields, "num_hidden_layers")
    wide = fields.size("hidden_size") * fields.size("mamba_expand", default=2)
    inner = fields.size("mamba_d_ssm", default=1024 if fields.absent("mamba_d_ssm") else wide)
    space = _space(
        fields,
        inner,
        out_bias=fields.flag("projectors_bias", default=False),
        normed=fields.flag("mamba_rms_norm", default=False),
        norm_first=fields.flag("mamba_norm_before_gate", default=True),
    )
    kinds = tuple(LayerKind(mixer="hybrid", later=layer > 0) for layer in range(layers))
    bias = fields.flag("mlp_bias", default=False)
    return Architecture(**common(fields, family, kinds=kinds, mlp_bias=bias, mamba=space, **bias_of(fields)))


def _check(fields: Fields, space: StateSpace, heads: str, groups: str, inner: int, activation: str) -> None:
    if space.inner != inner:
        fields.fail(heads, f"is {space.heads}: heads of {space.head_dim} are {space.inner} wide", f"{inner} in all")
    if space.heads % space.groups:
        fields.fail(groups, f"is {space.groups}, which does not divide the {space.heads} heads", "a divisor")
    if read_activation(fields, activation, default="silu") not in ("silu", "swish"):
        fields.fail(activation, "is another one than the state space is simulated with", "silu")


HYBRIDS: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
}

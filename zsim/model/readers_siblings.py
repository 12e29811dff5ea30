"""What config.json means in further families that differ from Llama by a few lines (rules as in `readers`)."""

from __future__ import annotations

from collections.abc import Callable

from zsim.model.architecture import Architecture, LayerKind
from zsim.model.fields import Fields
from zsim.model.reader_parts import bias_of, common, read_activation, read_layers, read_sliding
from zsim.model.readers_moe import latent


def _cwm(fields: Fields, family: str) -> Architecture:
    """All but every fourth layer, the first among these, have a window."""
    window = fields.size("sliding_window", default=8192 if fields.absent("sliding_window") else 0, least=0) or None
    sliding = read_sliding(fields, read_layers(fields, "num_hidden_layers"), lambda layer: layer % 4 != 0)
    kinds = tuple(LayerKind(sliding=on and window is not None) for on in sliding)
    mlp_bias = fields.flag("mlp_bias", default=False)
    return Architecture(**common(fields, family, kinds=kinds, window=window, mlp_bias=mlp_bias))


def _ministral(fields: Fields, family: str) -> Architecture:
    window = fields.size("sliding_window", default=4096 if fields.absent("sliding_window") else 0, least=0) or None
    sliding = read_sliding(fields, read_layers(fields, "num_hidden_layers"), lambda layer: window is not None)
    kinds = tuple(LayerKind(sliding=on and window is not None) for on in sliding)
    return Architecture(**common(fields, family, kinds=kinds, window=window))


def _helium(fields: Fields, family: str) -> Architecture:
    attention_bias, mlp_bias = fields.flag("attention_bias", default=False), fields.flag("mlp_bias", default=False)
    return Architecture(**common(fields, family, attention_bias=attention_bias, mlp_bias=mlp_bias))


def _hyperclovax(fields: Fields, family: str) -> Architecture:
    mlp_bias, norms = fields.flag("mlp_bias", default=False), fields.flag("use_post_norm", default=True)
    return Architecture(**common(fields, family, mlp_bias=mlp_bias, sandwich=norms, **bias_of(fields)))


def _jais2(fields: Fields, family: str) -> Architecture:
    mlp_bias, activation = fields.flag("mlp_bias", default=True), read_activation(fields, "hidden_act", default="relu2")
    bias = bias_of(fields, default=True)
    return Architecture(**common(fields, family, mlp_bias=mlp_bias, activation=activation, **bias))


def _apertus(fields: Fields, family: str) -> Architecture:
    if (name := fields.text("hidden_act", default="xielu")) != "xielu":
        fields.fail("hidden_act", f"is {name!r}", "xielu")
    return Architecture(**common(fields, family, activation=name, qk_norm="head", **bias_of(fields)))


def _minicpm3(fields: Fields, family: str) -> Architecture:
    """Attention of DeepSeek-V3, by halves."""
    ours = {
        "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "tie_word_embeddings": True,
    }  # fmt: skip
    fields = fields.over(ours)
    width = fields.size("hidden_size") // fields.size("num_attention_heads")
    values = latent(fields.over({"v_head_dim": width, "rope_interleave": False}), family)
    return Architecture(**values)


def _nanochat(fields: Fields, family: str) -> Architecture:
    cap = fields.given("final_logit_softcapping", default=True)
    activation = read_activation(fields, "hidden_act", default="relu2")
    return Architecture(**common(fields, family, activation=activation, final_softcap=cap, **bias_of(fields)))


def _bitnet(fields: Fields, family: str) -> Architecture:
    activation = read_activation(fields, "hidden_act", default="relu2")
    return Architecture(**common(fields, family, activation=activation, **bias_of(fields)))


READERS: dict[str, Callable[[Fields, str], Architecture]] = {
    "cwm": _cwm,
    "ministral": _ministral,
    "helium": _helium,
    "hyperclovax": _hyperclovax,
    "jais2": _jais2,
    "apertus": _apertus,
    "minicpm3": _minicpm3,
    "nanochat": _nanochat,
    "bitnet": _bitnet,
}

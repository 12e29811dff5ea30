"""Reads a Hugging Face config.json: which family it is, and its normalized architecture."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from zsim.errors import InputError
from zsim.model.architecture import Architecture
from zsim.model.families import ENCODERS, SEQ2SEQ, VISION, build
from zsim.model.fields import Fields
from zsim.model.lacking import MECHANISMS
from zsim.model.layers import Net
from zsim.model.readers import READERS
from zsim.model.spec import ModelSpec
from zsim.model.trace import parameters

_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining")


class Same(NamedTuple):
    """A family whose model is that of another one in transformers: which fields its files name otherwise (their name ->
    that one's), and what it takes where they are left out."""

    family: str
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}


_SARVAM = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
SAME = {  # by model_type: with code on the hub, or in transformers 5.24 a configuration alone
    "kimi_k2": Same("deepseek_v3"),
    "exaone": Same(
        "llama",
        {"num_layers": "num_hidden_layers", "activation_function": "hidden_act"},
        {"num_key_value_heads": 8},
    ),
    "internlm": Same("llama", {"bias": "attention_bias"}, {"attention_bias": True}),
    "iquestcoder": Same("llama", defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "internlm3": Same(
        "llama",
        {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        {"num_key_value_heads": 2, "head_dim": 128},
    ),
    "sarvam_moe": Same(
        "glm4_moe",
        _SARVAM | {"use_qkv_bias": "attention_bias"},
        {
            "num_key_value_heads": 4, "head_dim": 64, "num_experts_per_tok": 6, "use_qk_norm": True,
            "partial_rotary_factor": 1.0,
        },
    ),
    "sarvam_mla": Same(
        "deepseek_v3",
        _SARVAM,
        {"q_lora_rank": None, "n_routed_experts": 128, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
}  # fmt: skip

THINKERS = ("qwen2_5_omni", "qwen3_omni_moe")  # whose file has a part for the model that is trained


def known_families() -> list[str]:
    """Every model_type that a config.json may have; docs/families.md lists them."""
    return sorted((*READERS, *VISION, *SEQ2SEQ, *SAME, *THINKERS))


def read_config(path: Path | str) -> ModelSpec:
    """The model of a config.json (or of the directory that holds one).

    Raises InputError for a file or field that is wrong, NotModeled for a family that `known_families` lacks.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    return _from_fields(Fields.read(path), path.resolve().parent.name if path.name == "config.json" else path.stem)


def from_config(config: dict[str, Any], name: str, source: Path | str = "config.json") -> ModelSpec:
    """The model of a configuration already in memory; `source` is the file that errors name. Raises as read_config."""
    return _from_fields(Fields(Path(source), "", config), name)


def _from_fields(fields: Fields, name: str) -> ModelSpec:
    family = fields.text("model_type", default="")
    if not family:
        fields.fail("model_type", "is missing", _accepted(""))
    said: list[str] = []
    if family in THINKERS:
        fields = fields.section("thinker_config").over({"model_type": f"{family}_thinker"})
        family = f"{family}_thinker"
        said.append("what it thinks with is trained; the talker is left out")
    same = SAME.get(family, Same(family))
    read_as, fields = same.family, fields.renamed(same.names).over(same.defaults)
    _refuse(fields, read_as)
    other = said if read_as == family else [f"{family} is run as transformers' {read_as}"]
    notes = tuple(f"{name}: {text}" for text in (*other, *_other_code(fields, read_as)))
    if read_as in VISION:
        from zsim.model.readers_vision import VISION_READERS

        try:
            return from_architecture(name, VISION_READERS[read_as](fields, read_as), notes)
        except InputError as error:
            if fields.absent("vision_config") and (error.field or "").startswith("vision_config."):
                error.notes += (
                    f"there is no vision_config in it, for which {read_as}'s defaults in transformers stand",
                )
            raise
    if read_as in SEQ2SEQ:
        from zsim.model.readers_seq2seq import SEQ2SEQ_READERS

        return from_architecture(name, SEQ2SEQ_READERS[read_as](fields, read_as), notes)
    return from_architecture(name, READERS[read_as](fields, read_as), notes)


def _other_code(fields: Fields, family: str) -> Iterator[str]:
    """What a file says of other classes than those that are simulated."""
    said = fields.items("architectures") or []
    if said and family not in ENCODERS and not str(said[0]).endswith(_LANGUAGE_MODELS):
        yield f"architectures names {said[0]}: {family} with the head of a language model is simulated"
    if family == "llama4_text":
        yield "every expert works on every token, as in transformers' class"
    if (family == "gemma4" and "audio_config" in fields) or family.endswith("_thinker"):
        yield "its audio tower is there, and given nothing"
    own = fields.raw("auto_map")
    code = isinstance(own, dict) and (own.get("AutoModelForCausalLM") or own.get("AutoModel"))
    if code:
        yield f"auto_map names code of its own ({code}), for trust_remote_code: transformers' {family} is simulated"


@lru_cache(maxsize=4)
def from_architecture(name: str, arch: Architecture, notes: tuple[str, ...] = ()) -> ModelSpec:
    """The spec of an architecture: its parameters in `named_parameters()` order.

    The same one for equal arguments, so that the many setups of a search share its traces.
    """
    model = build(Net(arch))
    buffers = model.buffers_bytes(), model.index_buffers_bytes(), model.complex_buffers_bytes()
    return ModelSpec(name, arch.family, parameters(model), arch, *buffers, notes)


def _refuse(fields: Fields, family: str) -> None:
    """What this reader knows it cannot describe."""
    lacks = f": {MECHANISMS[family]}" if family in MECHANISMS else ""
    for tower in ("text_config", "vision_config", "audio_config"):
        if fields.raw(tower) is not None and family not in VISION:
            text = fields.raw("text_config")
            alone = isinstance(text, dict) and text.get("model_type") in (*READERS, *SAME)
            own = " (the text_config, as a file of its own, is the model without the tower)" if alone else ""
            message = f"{family}: a language model inside a multimodal one" + lacks.replace(":", ", with", 1)
            fields.refuse(tower, message, f"a text model's config.json{own}")
    if family not in READERS and family not in VISION and family not in SEQ2SEQ:
        fields.refuse("model_type", f"model family {family!r}{lacks}", _accepted("" if lacks else family))
    if fields.raw("quantization_config") is not None:
        fields.refuse(
            "quantization_config",
            "weights quantized by the checkpoint",
            "the same file without it, for training in 16 bits (transformers dequantizes such weights as it loads "
            "them, where its quantization_config says dequantize=True); the scenario's quantize, for 4 or 8 bits "
            "under adapters",
        )


def _accepted(family: str) -> str:
    """What a model_type may be: those spelled like it, and where all are listed."""
    known = known_families()
    near = "".join(f"{name}, " for name in get_close_matches(family, known, n=8))
    rest = "any other of" if near else "one of"
    return (
        f"{near}{rest} {len(known)} families (docs/families.md); or a size alone, in a scenario: model: {{params: 7e9}}"
    )

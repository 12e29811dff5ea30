"""What models with an encoder and a decoder do in one step, as families.py has it for decoders: parameters, calls,
gradient order, live bytes, FLOPs.

    python -m validation.oracles.seq2seq [NAME ...] --out FILE.json.gz

`sdpa` goes to the ops that torch takes on a GPU: with a mask or a bias its memory-efficient kernel.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from validation.oracles.families import begin, observe, once, write
from validation.oracles.vision import attend

T5 = {"d_model": 64, "d_kv": 12, "d_ff": 176, "num_layers": 4, "num_heads": 4, "vocab_size": 199,
      "decoder_start_token_id": 0}  # fmt: skip
BOTH = ("sdpa", "eager")

# name -> (attention implementations, config.json)
CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "t5": (BOTH, {"model_type": "t5", **T5}),
    "flan-t5": (
        BOTH,
        {
            "model_type": "t5", **T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
            "num_decoder_layers": 3,
        },
    ),
    "mt5": (("sdpa",), {"model_type": "mt5", **T5, "dropout_rate": 0.0}),
    "umt5": (BOTH, {"model_type": "umt5", **T5}),
    "umt5-xxl": (("sdpa",), {"model_type": "umt5", **T5, "tie_word_embeddings": False, "feed_forward_proj": "relu"}),
    "whisper": (
        BOTH,
        {
            "model_type": "whisper", "d_model": 64, "encoder_layers": 4, "decoder_layers": 3, "encoder_ffn_dim": 176,
            "decoder_ffn_dim": 160, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "vocab_size": 199,
            "num_mel_bins": 20, "max_source_positions": 64, "max_target_positions": 80, "dropout": 0.1,
            "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
}  # fmt: skip
BART = {
    "d_model": 64, "encoder_layers": 4, "decoder_layers": 3, "encoder_ffn_dim": 176, "decoder_ffn_dim": 160,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "vocab_size": 199, "max_position_embeddings": 80,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.1,
}  # fmt: skip
CONFIGS |= {
    "bart": (BOTH, {"model_type": "bart", **BART}),
    "mbart": (BOTH, {"model_type": "mbart", **BART, "activation_dropout": 0.1}),
    "pegasus": (BOTH, {"model_type": "pegasus", **BART}),
    "marian": (BOTH, {"model_type": "marian", **BART, "activation_function": "swish"}),
    "m2m_100": (BOTH, {"model_type": "m2m_100", **BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
}
FROZEN = {"": (), "encoder": ("encoder.", "shared."), "decoder": ("decoder.", "lm_head.", "shared.", "proj_out.")}
RUNS = (
    (1, 64, 64, "none"),
    (2, 64, 32, "none"),
    (2, 64, 32, "full"),
)  # micro-batch, tokens, of the target, checkpoints
HALF = (
    "t5",
    "flan-t5",
    "umt5",
    "whisper",
    "m2m_100",
)  # with everything trained in float16 too, where infinities are clamped


def build(config: dict[str, Any], attention: str, dtype: str) -> Any:
    fields = dict(config)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    made._attn_implementation, made.use_cache = attention, False
    torch.set_default_dtype(getattr(torch, dtype))
    sound = made.model_type == "whisper"
    auto = transformers.AutoModelForSpeechSeq2Seq if sound else transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(made).train()
    if made.model_type in ("t5", "mt5", "umt5") and not config.get("tie_word_embeddings", made.model_type != "mt5"):
        # without a checkpoint transformers 5 ties them; with the published ones, which have both, it does not
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    torch.set_default_dtype(torch.float32)
    return model


def record(
    config: dict[str, Any], attention: str, frozen: str, run: tuple[int, int, int, str], dtype: str = "bfloat16"
) -> dict[str, Any]:
    batch, seq, target, checkpointing = run
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(config, attention, dtype)
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in FROZEN[frozen]):
                parameter.requires_grad_(False)
        if checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids, labels = torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, target, dtype=torch.long)
        given = {"input_ids": ids}
        if config["model_type"] == "whisper":
            given = {"input_features": torch.zeros(batch, config["num_mel_bins"], 2 * seq, dtype=getattr(torch, dtype))}
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        found = observe(model, {**given, "labels": labels, "use_cache": False})
        found |= {"trained": trained}
    about = {
        "frozen": frozen,
        "attention": attention,
        "batch": batch,
        "seq": seq,
        "target": target,
        "checkpointing": checkpointing,
        "dtype": dtype,
    }
    return about | found


def main(arguments: list[str]) -> None:
    options = begin(arguments, __doc__, CONFIGS)
    torch.nn.functional.scaled_dot_product_attention = attend
    masking_utils._ignore_causal_mask_sdpa = lambda *_, **__: True  # no token is padding
    models = {}
    for name in options.names or CONFIGS:
        attentions, config = CONFIGS[name]
        runs = [
            record(config, attention, frozen, run)
            for attention in attentions
            for frozen in FROZEN
            for run in RUNS
            if not (frozen and attention != attentions[0])
        ]
        if name in HALF:
            runs += [record(config, attention, "", run, "float16") for attention in attentions for run in RUNS]
        models[name] = {"config": config, **once(name, runs, "parameters", "calls"), "runs": runs}
    write(options.out, models)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Small encoders that `families` runs: trained to fill masks, and to tell sequences apart."""

from __future__ import annotations

from typing import Any

FLASH, BOTH, EAGER = ("sdpa",), ("sdpa", "eager"), ("eager",)
PLAIN = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 199}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # inside the small vocabulary
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "esm", "distilbert", "modernbert")
ENCODER = {"intermediate_size": 256, "max_position_embeddings": 130, "attention_probs_dropout_prob": 0.0}
DISTILLED = {
    "dim": 64, "hidden_dim": 256, "n_layers": 3, "n_heads": 4, "vocab_size": 199, "max_position_embeddings": 130,
    "attention_dropout": 0.0,
}  # fmt: skip


def classifier(family: str, prefix: str, **fields: Any) -> dict[str, Any]:
    architectures = [f"{prefix}ForSequenceClassification"]
    return {"model_type": family, "architectures": architectures, **PLAIN, **ENCODER, "num_labels": 3, **fields}


# name -> (attention implementations that the family has, config.json)
ENCODER_CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bert": (BOTH, {"model_type": "bert", "architectures": ["BertForMaskedLM"], **PLAIN, **ENCODER}),
    "roberta": (BOTH, {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], **PLAIN, **ENCODER}),
    "xlm-roberta": (
        BOTH, {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"], **PLAIN, **ENCODER},
    ),
    "camembert": (BOTH, {"model_type": "camembert", "architectures": ["CamembertForMaskedLM"], **PLAIN, **ENCODER}),
    "electra": (
        BOTH, {"model_type": "electra", "architectures": ["ElectraForMaskedLM"], **PLAIN, **ENCODER,
               "embedding_size": 32},
    ),
    "electra-wide": (
        FLASH, {"model_type": "electra", "architectures": ["ElectraForMaskedLM"], **PLAIN, **ENCODER,
                "embedding_size": 64, "tie_word_embeddings": False},
    ),
    "distilbert": (
        BOTH, {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], **DISTILLED},
    ),
    "distilbert-classifier": (
        FLASH, {"model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"], **DISTILLED,
                "num_labels": 3},
    ),
    "esm": (
        BOTH, {"model_type": "esm", "architectures": ["EsmForMaskedLM"], **PLAIN, **ENCODER, "pad_token_id": 1,
               "mask_token_id": 32, "position_embedding_type": "rotary", "token_dropout": True},
    ),
    "esm-1b": (
        FLASH, {"model_type": "esm", "architectures": ["EsmForMaskedLM"], **PLAIN, **ENCODER, "pad_token_id": 1,
                "mask_token_id": 32, "emb_layer_norm_before": True},
    ),
    "modernbert": (
        BOTH, {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], **PLAIN, **TOKENS,
               "intermediate_size": 96, "num_hidden_layers": 5, "local_attention": 32},
    ),
    "modernbert-biases": (
        FLASH, {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], **PLAIN, **TOKENS,
                "intermediate_size": 96, "layer_types": ["full_attention"] * 3, "norm_bias": True, "mlp_bias": True,
                "attention_bias": True, "decoder_bias": False, "embedding_dropout": 0.1, "mlp_dropout": 0.1},
    ),
    "modernbert-decoder": (
        BOTH, {"model_type": "modernbert-decoder", **PLAIN, **TOKENS, "intermediate_size": 96, "num_hidden_layers": 5,
               "local_attention": 32},
    ),
    "bert-classifier": (BOTH, classifier("bert", "Bert")),
    "roberta-classifier": (BOTH, classifier("roberta", "Roberta", classifier_dropout=0.2)),
    "xlm-roberta-classifier": (FLASH, classifier("xlm-roberta", "XLMRoberta")),
    "camembert-classifier": (FLASH, classifier("camembert", "Camembert")),
    "electra-classifier": (FLASH, classifier("electra", "Electra", embedding_size=32)),
    "esm-classifier": (FLASH, classifier("esm", "Esm", pad_token_id=1, mask_token_id=32)),
    "modernbert-classifier": (
        FLASH, {"model_type": "modernbert", "architectures": ["ModernBertForSequenceClassification"], **PLAIN, **TOKENS,
                "intermediate_size": 96, "num_hidden_layers": 5, "local_attention": 32, "classifier_dropout": 0.1,
                "num_labels": 3},
    ),
}  # fmt: skip

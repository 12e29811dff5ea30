"""The configurations recorded, each a point where the frameworks' rules differ.

A configuration: name, engine (ds, fsdp2, fsdp1, ddp), world, model (a key of models.TINY), `over` (changes of the
model), `freeze`, `ckpt`, `ga` (accumulation), and the engine's own settings under ds, fsdp or ddp.
"""

from __future__ import annotations

from validation.oracles.configuration_parts import (
    ACCELERATE,
    FLOAT8,
    LORA,
    ODD_SIZES,
    REGATHER,
    SMALL_ZERO,
    TIED,
    WIDE,
    WIDE_GPT2,
    Config,
    config_of,
    zero_of,
)
from validation.oracles.configurations_adapters import adapter_configurations
from validation.oracles.configurations_deepspeed import deepspeed_configurations
from validation.oracles.configurations_evaluation import evaluation_configurations
from validation.oracles.configurations_experts import expert_module_configurations
from validation.oracles.configurations_fsdp1 import fsdp1_configurations
from validation.oracles.configurations_hybrid import hybrid_configurations
from validation.oracles.configurations_preference import preference_configurations
from validation.oracles.configurations_vision import gemma4_vision, vision_configurations
from validation.oracles.tiny_gemma import GEMMA4_EXPERTS, GEMMA4_KEYS
from validation.oracles.tiny_relatives import TINY_ENCODERS

# Further families that differ from others by a few lines.
EXPERTS = (
    "glm4_moe_lite", "dots1", "solar_open", "exaone_moe", "minimax_m2", "hunyuan_v1_moe", "ernie4_5_moe",
    "granitemoeshared", "phimoe", "mistral4", "axk1", "hy_v3", "mellum", "afmoe", "flex_olmo", "kolibri1",
    "glm_moe_dsa", "deepseek_v2", "cohere2_moe", "dbrx",
)  # fmt: skip
DENSE = (
    "youtu", "cwm", "ministral", "helium", "hyperclovax", "jais2", "vaultgemma", "apertus", "modernbert-decoder",
    "minicpm3", "nanochat", "bitnet", "codegen", "gemma3n_text",
)  # fmt: skip


def configurations() -> list[Config]:
    return [
        *_ddp(),
        *_fsdp2(),
        *fsdp1_configurations(),
        *_by_class(),
        *_adapter_units(),
        *deepspeed_configurations(),
        *vision_configurations(),
        *_pairs(),
        *_further(),
        *hybrid_configurations(),
        *expert_module_configurations(),
        *adapter_configurations(),
        *preference_configurations(),
        *evaluation_configurations(),
    ]


def _ddp() -> list[Config]:
    cap = {"bucket_cap_mb": 1}
    return [
        config_of("ddp", "default"),
        config_of("ddp", "cap1", 4, ddp=cap),
        config_of("ddp", "cap1_static", ddp=cap | {"static_graph": True}),
        config_of("ddp", "cap1_static_sync", ga=2, ddp=cap | {"static_graph": True}),
        config_of("ddp", "cap1_unused", ddp=cap | {"find_unused_parameters": True}),
        config_of("ddp", "cap1_unused_nosync", ga=2, ddp=cap | {"find_unused_parameters": True}, no_sync=True),
        config_of("ddp", "cap1_view", ddp=cap | {"gradient_as_bucket_view": True}),
        config_of("ddp", "cap1_nosync", ga=2, ddp=cap, no_sync=True),
        config_of("ddp", "cap1_sync", ga=2, ddp=cap),
        config_of("ddp", "cap1_bf16", ddp=cap, dtype="bfloat16"),
        config_of("ddp", "cap1_ckpt", ddp=cap, ckpt=True),
        config_of("ddp", "autocast", autocast="bfloat16", over=WIDE),
        config_of("ddp", "autocast", autocast="bfloat16", model="gpt2", over=WIDE_GPT2),
        config_of("ddp", "autocast", autocast="bfloat16", model="qwen2", over=WIDE),
        config_of("ddp", "autocast", autocast="bfloat16", model="mixtral", over={"hidden_size": 64, "vocab_size": 300}),
        config_of("ddp", "autocast_ckpt", autocast="bfloat16", ckpt=True, over=WIDE),
        config_of("ddp", "cap1", model="gpt2", ddp=cap),
        config_of("ddp", "cap1", model="qwen2", ddp=cap),
        config_of("ddp", "cap1", model="mixtral", ddp=cap | {"find_unused_parameters": True}),
        config_of("ddp", "cap1_tied", ddp=cap, over=TIED),
        config_of("ddp", "lora", ddp={"bucket_cap_mb": 0.02}, lora=LORA),
        config_of("ddp", "cap1_frozen", ddp=cap, freeze=["embed_tokens", "layers.0.", "layers.1."]),
    ]


def _fsdp2() -> list[Config]:
    return [
        config_of("fsdp2", "raf_true", 4),
        config_of("fsdp2", "raf_false", fsdp={"reshard_after_forward": False}),
        config_of("fsdp2", "raf_int2", 4, fsdp={"reshard_after_forward": 2}),
        config_of("fsdp2", "root_default", fsdp={"root_reshard": "default"}),
        config_of("fsdp2", "reduce_bf16", fsdp={"reduce_dtype": "bfloat16"}),
        config_of("fsdp2", "reduce_fp16", fsdp={"param_dtype": "float16", "reduce_dtype": "float16"}),
        config_of("fsdp2", "fp32", fsdp={"mp": False}),
        config_of("fsdp2", "titan", fsdp={"titan": True}),
        config_of("fsdp2", "titan_raf_false", fsdp={"titan": True, "reshard_after_forward": False}),
        config_of("fsdp2", "ga_sync_every", ga=2),
        config_of("fsdp2", "ga_sync_last", ga=2, fsdp={"sync_only_last": True}),
        config_of(
            "fsdp2", "ga_sync_last_noreshard", ga=2, fsdp={"sync_only_last": True, "no_reshard_bwd_until_last": True}
        ),
        config_of("fsdp2", "ga_last_backward", ga=3, fsdp={"is_last_backward": True}),
        config_of("fsdp2", "ckpt", ckpt=True),
        config_of("fsdp2", "prefetch2", fsdp={"prefetch": 2}),
        config_of("fsdp2", "prefetch1_titan", fsdp={"prefetch": 1, "titan": True}),
        config_of("fsdp2", "noclip", clip=False),
        config_of("fsdp2", "bf16", dtype="bfloat16"),
        config_of("fsdp2", "hsdp2x2", 4, fsdp={"mesh": [2, 2]}),
        config_of("fsdp2", "hsdp2x2_raf_false", 4, fsdp={"mesh": [2, 2], "reshard_after_forward": False}),
        config_of("fsdp2", "hsdp2x2_ga_sync_last", 4, 2, fsdp={"mesh": [2, 2], "sync_only_last": True}),
        config_of("fsdp2", "hsdp2x2_ga_allreduce_last", 4, 2, fsdp={"mesh": [2, 2], "all_reduce_only_last": True}),
        config_of("fsdp2", "hsdp4x1", 4, fsdp={"mesh": [4, 1]}),
        config_of("fsdp2", "hsdp1x4", 4, fsdp={"mesh": [1, 4]}),
        config_of("fsdp2", "cpuoffload", fsdp={"offload": True}),
        config_of("fsdp2", "odd_hidden", 4, over=ODD_SIZES),
        config_of("fsdp2", "tied", over=TIED),
        config_of("fsdp2", "lora", lora=LORA),
        config_of("fsdp2", "lora_ckpt", lora=LORA, ckpt=True),
        config_of("fsdp2", "accelerate", fsdp=ACCELERATE),
        config_of("fsdp2", "accelerate", 4, ga=2, fsdp=ACCELERATE),
        config_of("fsdp2", "accelerate_ckpt", ckpt=True, fsdp=ACCELERATE),
        config_of("fsdp2", "accelerate_tied", over=TIED, fsdp=ACCELERATE),
        config_of("fsdp2", "accelerate_tied", ga=2, model="qwen2", fsdp=ACCELERATE),
        config_of("fsdp2", "accelerate_tied", model="gpt2", fsdp=ACCELERATE),
        config_of("fsdp2", "accelerate_grad_op", fsdp=ACCELERATE | {"reshard_after_forward": False}),
        config_of("fsdp2", "accelerate_offload", fsdp=ACCELERATE | {"offload": True}),
        config_of("fsdp2", "raf_true", model="gpt2"),
        config_of("fsdp2", "raf_true", model="qwen3"),
        config_of("fsdp2", "raf_true", model="mixtral"),
        config_of("fsdp2", "frozen", freeze=["embed_tokens", "layers.0.", "layers.1."]),
        config_of("fsdp2", "frozen_titan", fsdp={"titan": True}, freeze=["embed_tokens", "layers.0."]),
        config_of("fsdp2", "float8", float8={"recipe": "rowwise"}),
        config_of("fsdp2", "float8_gather", float8=FLOAT8),
        config_of("fsdp2", "float8_gather_ckpt", ga=2, ckpt=True, float8=FLOAT8, fsdp=ACCELERATE),
        config_of("fsdp2", "float8_gather_hsdp2x2", 4, float8=FLOAT8, fsdp={"mesh": [2, 2]}),
        config_of("fsdp2", "float8_precompute", ga=2, float8=FLOAT8 | {"precompute": True}, fsdp={"titan": True}),
        config_of("fsdp2", "float8_precompute", model="qwen3", float8=FLOAT8 | {"precompute": True}),
    ]


def _by_class() -> list[Config]:
    both, parts = ["LlamaDecoderLayer", "LlamaMLP"], ["LlamaAttention", "LlamaMLP"]
    experts: Config = {"model": "mixtral", "ckpt": True}
    return [
        config_of("fsdp1", "class_parts", ckpt=True, fsdp={"wrap": parts}),
        config_of("fsdp1", "class_both", ga=2, fsdp={"wrap": both, "forward_prefetch": True}),
        config_of("fsdp1", "class_experts", **experts, fsdp={"wrap": ["MixtralSparseMoeBlock"]}),
        config_of("fsdp2", "class_parts", ckpt=True, fsdp={"wrap": parts}),
        config_of("fsdp2", "class_both", ga=2, fsdp=ACCELERATE | {"wrap": both}),
        config_of("fsdp2", "class_experts", **experts, fsdp=ACCELERATE | {"wrap": ["MixtralSparseMoeBlock"]}),
    ]


def _adapter_units() -> list[Config]:
    """Adapters wrapped one by one, as transformers' Trainer has it done for every model of peft's. Without autocast
    FSDP1 needs all in one dtype: peft casts an adapter's input to the dtype of its shard."""
    units = {"adapter_units": True}
    one: Config = {"lora": LORA, "dtype": "bfloat16"}
    return [
        config_of("fsdp1", "units_lora", **one, fsdp=units),
        config_of("fsdp1", "units_lora_ckpt", ga=2, **one, ckpt=True, fsdp=units),
        config_of("fsdp1", "units_lora_offload", **one, fsdp=units | {"offload": True}),
        config_of("fsdp1", "units_lora_flat", 4, **one, fsdp=units | {"use_orig_params": False}),
        config_of("fsdp1", "units_lora_grad_op", ga=2, **one, fsdp=units | {"strategy": "SHARD_GRAD_OP"}),
        config_of("fsdp1", "units_lora_no_shard", **one, fsdp=units | {"strategy": "NO_SHARD"}),
        config_of("fsdp1", "units_lora_post", **one, ckpt=True, fsdp=units | {"backward_prefetch": "BACKWARD_POST"}),
        config_of("fsdp2", "units_lora", lora=LORA, fsdp=units),
        config_of("fsdp2", "units_lora_ckpt", ga=2, lora=LORA, ckpt=True, fsdp=units),
        config_of("fsdp2", "units_lora_offload", lora=LORA, fsdp=units | {"offload": True}),
        config_of("fsdp2", "units_lora_accelerate", lora=LORA, fsdp=units | ACCELERATE),
        config_of("fsdp2", "units_lora_upcast", **one, over=WIDE, fsdp=units | ACCELERATE | {"upcast_trained": True}),
        config_of("fsdp2", "lora_upcast", **one, over=WIDE, fsdp=ACCELERATE | {"upcast_trained": True}),
        *_other_linear(),
    ]


def _other_linear() -> list[Config]:
    """Adapters on GPT-2's Conv1D and on Falcon's subclass of Linear."""
    found = []
    for model, targets in (("gpt2", ["c_attn", "c_fc", "c_proj"]), ("falcon", ["query_key_value", "dense"])):
        lora = {"r": 8, "targets": targets}
        found += [
            config_of("fsdp2", "lora", model=model, lora=lora),
            config_of(
                "fsdp2", "units_lora_ckpt", ga=2, model=model, lora=lora, ckpt=True, fsdp={"adapter_units": True}
            ),
            config_of("fsdp1", "lora", model=model, lora=lora),
            zero_of("lora", 2, model=model, zero=SMALL_ZERO, lora=lora),
            zero_of("lora_ckpt", 3, ga=2, model=model, zero=REGATHER, lora=lora, ckpt=True),
        ]
    return found


def _further() -> list[Config]:
    """Further families of decoders."""
    found = []
    for model in ("glm4_moe", "granitemoe", "llama4_text", "ministral3"):
        tag = "dense" if model == "ministral3" else "moe"
        found += [
            config_of("fsdp2", tag, model=model),
            config_of("fsdp2", f"{tag}_accelerate", model=model, fsdp={"accelerate": True}),
            config_of("fsdp1", tag, model=model),
            zero_of(tag, 2, model=model, zero=SMALL_ZERO),
            zero_of(tag, 3, model=model, zero=SMALL_ZERO),
            zero_of(f"{tag}_regather", 3, ga=2, model=model, zero=REGATHER),
        ]
    for name in (*EXPERTS, *DENSE):
        tag, model = "moe" if name in EXPERTS else "dense", {"model": name}
        if name == "vaultgemma":  # has no other
            model["attention"] = "eager"
        found += [
            config_of("fsdp2", tag, **model)
            if name == "nanochat"  # whose norm comes twice
            else config_of("fsdp2", f"{tag}_accelerate", **model, fsdp={"accelerate": True}),
            config_of("fsdp1", tag, **model),
            zero_of(tag, 2, **model, zero=SMALL_ZERO),
            zero_of(f"{tag}_regather", 3, ga=2, **model, zero=REGATHER),
        ]
    return [*found, *_indexed(), *_gemma3n(), *_gemma4(), *gemma4_vision()]


def _gemma3n() -> list[Config]:
    """Blocks that read weights of modules which are never called, and call a router twice, before and behind."""
    model: Config = {"model": "gemma3n_text"}
    return [
        config_of("ddp", "twice", **model, ddp={"bucket_cap_mb": 1}),
        config_of("fsdp2", "twice_ckpt", ga=2, **model, ckpt=True),
        config_of("fsdp1", "twice_ckpt", **model, ckpt=True),
        zero_of("twice", 1, **model, zero=SMALL_ZERO),
        zero_of("twice", 3, ga=2, **model, zero={}),
        zero_of("twice_ckpt", 3, ga=2, **model, zero=REGATHER, ckpt=True),
        zero_of("twice_init", 3, **model, over={"pad_token_id": None}, zero=SMALL_ZERO, zero_init=True),
    ]


def _indexed() -> list[Config]:
    """DeepSeek-V3.2, whose indexers are called without gradients, trained all and with the indexers frozen."""
    model: Config = {"model": "deepseek_v32"}
    frozen, unused = model | {"freeze": ["indexer."]}, {"bucket_cap_mb": 1, "find_unused_parameters": True}
    return [
        config_of("ddp", "index", **model, ddp=unused),
        config_of("ddp", "index_static", **model, ddp={"bucket_cap_mb": 0.02, "static_graph": True}),
        config_of("ddp", "index_frozen", **frozen, ddp={"bucket_cap_mb": 1}),
        config_of("fsdp2", "index", **model),
        config_of("fsdp2", "index_accelerate", **model, fsdp={"accelerate": True}),
        config_of("fsdp2", "index_ckpt", ga=2, **model, ckpt=True),
        config_of("fsdp1", "index", **model),
        config_of("fsdp1", "index_frozen", **frozen),
        *(zero_of("index", stage, **model, zero=SMALL_ZERO) for stage in (0, 1, 2, 3)),
        zero_of("index_frozen", 2, **frozen, zero=SMALL_ZERO),
        zero_of("index_frozen", 3, **frozen, zero=SMALL_ZERO),
        zero_of("index_ckpt", 3, ga=2, **model, zero=REGATHER, ckpt=True),
        zero_of("index_init", 3, **model, zero=SMALL_ZERO, zero_init=True),
    ]


def _gemma4() -> list[Config]:
    """Layers that share keys and values and have embeddings of their own; experts; dense."""
    found = []
    for tag, over in (("layers", {}), ("experts", GEMMA4_EXPERTS), ("dense", GEMMA4_KEYS)):
        model = {"model": "gemma4_text", "over": over}
        found += [
            config_of("fsdp2", tag, **model),
            config_of("fsdp1", tag, **model),
            zero_of(tag, 2, **model, zero=SMALL_ZERO),
            zero_of(tag, 3, **model, zero=SMALL_ZERO),
            zero_of(f"{tag}_regather", 3, ga=2, **model, zero=REGATHER),
        ]
    model = {"model": "gemma4_text"}
    return [
        *found,
        config_of("ddp", "layers", **model, ddp={"bucket_cap_mb": 1}),
        config_of("fsdp2", "layers_accelerate", **model, fsdp={"accelerate": True}),
        config_of("fsdp2", "layers_ckpt", ga=2, **model, ckpt=True),
        config_of("fsdp2", "layers_lora", **model, lora=LORA),
        config_of("fsdp2", "layers_frozen", **model, freeze=["embed_tokens_per_layer", "layers.0."]),
        config_of("fsdp1", "layers_ckpt", **model, ckpt=True),
        zero_of("layers", 1, **model, zero=SMALL_ZERO),
        zero_of("layers_ckpt", 3, ga=2, **model, zero=REGATHER, ckpt=True),
        # transformers 5.24 cannot initialize an embedding's padding under zero.Init
        zero_of("layers_init", 3, **model, over={"pad_token_id": None}, zero=SMALL_ZERO, zero_init=True),
        zero_of("layers_frozen", 3, **model, zero=SMALL_ZERO, freeze=["embed_tokens_per_layer", "layers.0."]),
        zero_of("layers_lora", 3, **model, zero=SMALL_ZERO, lora=LORA),
    ]


def _pairs() -> list[Config]:
    """Models with an encoder and a decoder: all of it trained, the encoder frozen, checkpointed."""
    found = []
    frozen = {"t5": ["encoder.block", "encoder.final"], "whisper": ["encoder."], "bart": ["encoder."]}
    for model, encoder in frozen.items():
        found += [
            config_of("ddp", "pair", model=model, ddp={"bucket_cap_mb": 1}),
            config_of("fsdp2", "pair", model=model),
            config_of("fsdp2", "pair_frozen", model=model, freeze=encoder),
            config_of("fsdp2", "pair_ckpt", ga=2, model=model, ckpt=True),
            config_of("fsdp1", "pair", model=model),
            config_of("fsdp1", "pair_frozen", model=model, freeze=encoder),
            zero_of("pair", 1, model=model, zero=SMALL_ZERO),
            zero_of("pair", 2, ga=2, model=model, zero=SMALL_ZERO),
            zero_of("pair", 3, model=model, zero=SMALL_ZERO),
            zero_of("pair_frozen", 3, model=model, zero=SMALL_ZERO, freeze=encoder),
            zero_of("pair_regather", 3, ga=2, model=model, zero=REGATHER),
            zero_of("pair_ckpt", 3, model=model, zero=REGATHER, ckpt=True),
            zero_of("pair_init", 3, model=model, zero=SMALL_ZERO, zero_init=True),
        ]
    for name in ("electra", "modernbert"):  # torch refuses the others, whose head's bias is known by two names
        found.append(config_of("fsdp2", "encoder_accelerate", model=name, fsdp={"accelerate": True}))
    for name in TINY_ENCODERS:
        silent = {"freeze": ["contact_head."]} if name == "esm" else {}  # gets no gradient, which DDP waits for
        found += [
            config_of("ddp", "encoder", model=name, ddp={"bucket_cap_mb": 1}, **silent),
            config_of("fsdp2", "encoder", model=name),
            config_of("fsdp1", "encoder", model=name),
            zero_of("encoder", 2, model=name, zero=SMALL_ZERO),
            zero_of("encoder_regather", 3, ga=2, model=name, zero=REGATHER),
        ]
    for name, prefix in (("bert", "Bert"), ("xlm-roberta", "XLMRoberta"), ("modernbert", "ModernBert")):
        over = {"architectures": [f"{prefix}ForSequenceClassification"], "num_labels": 3}
        found += [
            config_of("ddp", "classifier", model=name, over=over, ddp={"bucket_cap_mb": 1}),
            config_of("fsdp2", "classifier", model=name, over=over),
            config_of("fsdp1", "classifier", model=name, over=over),
            zero_of("classifier", 2, model=name, over=over, zero=SMALL_ZERO),
            zero_of("classifier_regather", 3, ga=2, model=name, over=over, zero=REGATHER),
        ]
    for name in ("mbart", "pegasus", "marian", "m2m_100", "umt5"):
        model = {"model": name}
        if name == "m2m_100":  # whose table of sines has the type that it was loaded in, which engines leave alone
            model["dtype"] = "bfloat16"
        found += [
            config_of("ddp", "pair", **model, ddp={"bucket_cap_mb": 1}),
            config_of("fsdp2", "pair", **model),
            config_of("fsdp1", "pair", **model),
            zero_of("pair", 2, ga=2, **model, zero=SMALL_ZERO),
            zero_of("pair", 3, **model, zero=SMALL_ZERO),
            zero_of("pair_frozen_ckpt", 3, ga=2, **model, zero=REGATHER, freeze=["encoder."], ckpt=True),
            zero_of("pair_init", 3, **model, zero=SMALL_ZERO, zero_init=True),
        ]
    return found

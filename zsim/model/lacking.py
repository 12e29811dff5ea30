"""Families of transformers 5.24 that are not read, and what of them zsim has no kernels, or no memory, for."""

from __future__ import annotations

_MAMBA_1 = "the selective scan of Mamba 1, a loop over tokens without its own kernels"
_DELTA = "delta attention whose gates are an element's own (KDA)"
_DISENTANGLED = "attention by contents and positions apart"
_SPARSE = "attention over blocks, windows and chosen tokens"
_SOUND = "a tower of sounds"
_QUERIES = "a Q-Former between tower and text model"

MECHANISMS = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), _MAMBA_1),
    "zamba2": "layers that share their weights, each with adapters of its own in the model",
    "deepseek_v4": "hyper-connections between layers, and attention to compressed keys",
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _DELTA),
    "minimax": "lightning attention",
    "longcat_flash": "experts that hand tokens on as they are",
    "recurrent_gemma": "a gated linear recurrence",
    "rwkv": "the recurrence of RWKV",
    "xlstm": "the recurrence of xLSTM",
    **dict.fromkeys(("deberta", "deberta-v2"), _DISENTANGLED),
    **dict.fromkeys(("longformer", "led", "big_bird", "bigbird_pegasus", "longt5"), _SPARSE),
    "albert": "layers that share their weights",
    **dict.fromkeys(("switch_transformers", "nllb-moe"), "experts with a capacity, which drop tokens"),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), _QUERIES),
    "florence2": "a DaViT, which attends to channels",
    "idefics2": "a perceiver, which resamples what the tower returns",
    "lfm2_vl": "a tower over patches that are padded to as many for every image",
    "kimi_k25": "positions that are summed out of a table, and frames that are averaged",
    "gemma3n": "a MobileNet",
    **dict.fromkeys(("got_ocr2", "deepseek_ocr2"), "a tower with positions in its attention (SAM)"),
    **dict.fromkeys(("chameleon", "emu3", "janus"), "images as tokens of a quantizer"),
    **dict.fromkeys(
        ("qwen2_audio", "voxtral", "granite_speech", "audioflamingo3", "phi4_multimodal", "qwen3_asr"), _SOUND
    ),
}

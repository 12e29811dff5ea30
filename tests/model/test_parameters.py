"""Parameter counts, names, shapes and order of published models, and of other people's config.json files."""

from __future__ import annotations

import csv
import gzip
import io
from functools import cache
from pathlib import Path

import pytest

from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config, read_config
from zsim.model.spec import Images, ModelSpec, Workload
from zsim.model.trace import trace

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / ".." / "shared" / "reference" / "corpus"

LLAMA2 = {"model_type": "llama", "vocab_size": 32000, "tie_word_embeddings": False}
MODELS = {
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "Llama-2-7B": {
        **LLAMA2, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "Llama-2-13B": {
        **LLAMA2, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
    "Llama-2-70B": {
        **LLAMA2, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "Qwen2.5-32B": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "GPT-2-XL": {
        "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257, "n_positions": 1024,
    },
    "OPT-13B": {
        "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40,
        "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 5120,
    },
}  # fmt: skip


@cache
def recorded() -> dict[str, list[dict[str, str]]]:
    text = gzip.decompress((ROOT / "validation" / "oracles" / "params" / "params.csv.gz").read_bytes()).decode()
    rows: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        rows.setdefault(row["model"], []).append(row)
    return rows


def test_every_recorded_model_is_here():
    assert set(recorded()) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models(name: str):
    total, *rows = recorded()[name]
    spec = from_config(MODELS[name], name)
    assert spec.numel == int(total["numel"])
    ours = [(p.name, p.module_class, "x".join(map(str, p.shape)), p.numel) for p in spec.parameters]
    assert ours == [(row["parameter"], row["module_class"], row["shape"], int(row["numel"])) for row in rows]


def test_tied_head_is_the_embedding():
    spec = from_config({**MODELS["Qwen2.5-7B"], "tie_word_embeddings": True}, "tied")
    assert "lm_head.weight" not in [parameter.name for parameter in spec.parameters]
    tree = trace(spec, Workload(1, 64))
    head = next(module for module in tree.body if getattr(module, "role", "") == "head")
    assert head.params == (0,)
    assert spec.parameters[0].name == "model.embed_tokens.weight"


def test_experts_are_marked():
    spec = from_config(MODELS["Mixtral-8x7B"], "mixtral")
    experts = [parameter for parameter in spec.parameters if parameter.expert]
    assert len(experts) == 2 * 32
    assert all(".experts." in parameter.name for parameter in experts)
    assert sum(parameter.numel for parameter in experts) == 32 * 8 * 3 * 4096 * 14336


def corpus_files() -> list[Path]:
    return sorted((CORPUS / "hf_config").glob("*.json")) if CORPUS.exists() else []


@pytest.mark.skipif(not CORPUS.exists(), reason="other people's files are not in the repository")
@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.stem)
def test_other_peoples_configs_are_read_exactly_or_refused(path: Path):
    with (CORPUS / "params.csv").open() as file:
        counts = next(row for row in csv.DictReader(file) if row["file"].endswith(path.name))
    wanted = {int(counts[key]) for key in ("stated_exact_count", "computed_closed_form") if counts[key]}
    outcome = attempt(path)
    if isinstance(outcome, ModelSpec):
        assert wanted in (set(), {outcome.numel})
        arch = outcome.arch
        images, attention = (Images(1, 56, 56) if arch.vision else None), "sdpa" if arch.seq2seq else "flash"
        tokens = (arch.positions or 128) if arch.seq2seq else 128
        trace(outcome, Workload(1, tokens, images=images, attention=attention, target_len=128))
    elif isinstance(outcome, NotModeled):
        assert outcome.file == path
        assert outcome.line
        assert outcome.accepted
    else:
        # not in Hugging Face's words, or (the class's defaults of Qwen2.5-VL and Llama 4) widths that do not fit
        unfit = "is 3584, and the text model's width 8192", "is 5632, and merged patches are 4 x 768 wide"
        assert outcome.message in ("is missing", *unfit)
        assert not wanted


def attempt(path: Path) -> ModelSpec | InputError:
    try:
        return read_config(path)
    except InputError as refusal:
        return refusal

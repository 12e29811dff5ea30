"""A model's name against the config.json that stands for it."""

from __future__ import annotations

import pytest

from tests.model.test_published_models import MODELS
from zsim.model.huggingface import from_config
from zsim.model.named import contradiction


@pytest.mark.parametrize("name", MODELS)
def test_published_models_fit_their_names(name: str) -> None:
    count, config = MODELS[name]
    assert contradiction(f"org/{name}", from_config(config, name).family, count) is None


@pytest.mark.parametrize(
    ("name", "family", "parameters", "why"),
    [
        ("meta-llama/Llama-3.1-70B", "llama", 8_030_261_248, "has 8,030,261,248 parameters"),
        ("meta-llama/Llama-3.1-8B", "llama", 8_030_261_248, None),
        ("/models/70B/llama-8b/", "llama", 8_030_261_248, None),  # of a path the last part
        ("Qwen/Qwen2.5-7B-Instruct-1M", "qwen2", 7_615_616_512, None),  # the second one is of tokens
        ("unsloth/llama-3-8b-bnb-4bit", "llama", 8_030_261_248, None),
        ("Yarn-Llama-2-7b-128k", "llama", 6_738_415_616, None),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral", 46_702_792_704, None),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral", 46_702_792_704, "has 46,702,792,704 parameters"),
        ("Qwen/Qwen3-235B-A22B", "qwen3_moe", 30_532_122_624, "has 30,532,122,624 parameters"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama4", 107_770_000_000, None),  # 17 billion active ones
        ("google/gemma-3n-E4B-it", "gemma3n", 7_850_000_000, None),
        ("bigscience/bloom-1b7", "bloom", 1_722_408_960, None),
        ("bigscience/bloom-1b7", "bloom", 7_069_016_064, "has 7,069,016,064 parameters"),
        ("stabilityai/stablelm-2-1_6b", "stablelm", 1_644_515_328, None),
        ("HuggingFaceTB/SmolLM2-135M", "llama", 1_711_376_384, "has 1,711,376,384 parameters"),
        ("mistralai/Mistral-7B-v0.1", "qwen2", 7_615_616_512, "is of another family, qwen2"),
        ("Qwen/Qwen3-8B", "qwen2", 7_615_616_512, "is of another family, qwen2"),
        ("Qwen/Qwen2.5-7B", "qwen3", 8_190_735_360, "is of another family, qwen3"),
        ("Qwen/Qwen1.5-7B", "qwen2", 7_721_324_544, None),
        ("Qwen/Qwen2-VL-2B-Instruct", "qwen2_vl", 2_208_985_600, None),
        ("google/gemma-2b", "gemma", 2_506_172_416, None),
        ("google/gemma-2-2b", "gemma", 2_506_172_416, "is of another family, gemma"),
        ("google/gemma-3n-E2B-it", "gemma3n", 5_440_000_000, None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2", 7_615_616_512, None),
        ("dphn/dolphin-2.9-llama3-8b", "llama", 8_030_261_248, None),  # no phi
        ("openai/gpt-oss-20b", "gpt2", 20_900_000_000, "is of another family, gpt2"),
        ("./model", "llama", 8_030_261_248, None),
        (
            "hub/models--meta-llama--Llama-3.1-8B/snapshots/d04e592b",
            "llama",
            70_553_706_496,
            "has 70,553,706,496 parameters",
        ),
        ("", "llama", 8_030_261_248, None),
    ],
)
def test_what_a_name_says(name: str, family: str, parameters: int, why: str | None) -> None:
    assert contradiction(name, family, parameters) == why

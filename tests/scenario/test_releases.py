"""What a release of torch or transformers, or torch.compile, makes of attention and loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.plan.spec import Fsdp2Plan
from zsim.program.lower import under
from zsim.scenario import Setup, load

ROOT = Path(__file__).parents[2]


def resolve(path: Path) -> Setup:
    return load(path).resolve()


def test_sdpa_is_flash_attention_first_in_older_torch_where_that_takes_the_heads() -> None:
    plan, workload = Fsdp2Plan(world_size=8, version="2.6.0"), Workload(1, 64, attention="sdpa")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = from_config({"model_type": "llama", "vocab_size": 96, **sizes}, "llama")
    deepseek = from_config({"model_type": "deepseek_v3", "vocab_size": 96, **sizes}, "deepseek")
    assert under(plan, workload, llama).attention == "flash"
    wide = from_config({"model_type": "llama", "vocab_size": 96, "head_dim": 512, **sizes}, "wide")
    pair = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 96}
    biased = from_config({"model_type": "t5", **pair}, "t5")
    assert [under(plan, workload, model).attention for model in (deepseek, wide, biased)] == ["sdpa"] * 3


@pytest.mark.parametrize(
    ("framework", "loss"),
    [
        ("{name: deepspeed, version: 0.14.2}", "copied"), ("{name: deepspeed, version: 0.16.4}", "hf"),
        ("{name: fsdp1, version: 2.6.0}", "copied"), ("fsdp2", "hf"),
        ("{name: deepspeed, version: 0.9.5}", "copied_uncast"), ("{name: deepspeed, version: 0.10.0}", "copied"),
        ("{name: fsdp1, version: 2.0.0}", "copied_cast"), ("{name: fsdp1, version: 2.0.1}", "copied"),
        ("{name: fsdp1, version: 2.0.1, transformers: 4.28.1}", "copied_cast"),
        ("{name: deepspeed, version: 0.9.5, transformers: 4.49.0}", "hf"),
    ],
)  # fmt: skip
def test_the_loss_is_that_of_the_frameworks_time(write, framework: str, loss: str) -> None:
    setup = resolve(write(framework=framework))
    assert setup.workload.loss == loss
    assert any(note.startswith(f"loss: {loss}") for note in setup.assumptions) == (loss != "hf")
    assert resolve(write("loss: held\n", framework=framework)).workload.loss == "held"


def test_torch_compile_takes_the_loss_with_the_model(write) -> None:
    """`Trainer(torch_compile=True)` compiles the whole forward, of which the loss is the end."""
    setup = resolve(write("compile: true\n", framework="ddp"))
    assert setup.workload.loss == "compiled"
    assert any(note.startswith("loss: compiled with the model") for note in setup.assumptions)
    for text in ("compile: true\nloss: hf\n", "compile: true\nkernels: liger\n"):
        assert resolve(write(text, framework="ddp")).workload.loss == "hf"


@pytest.mark.parametrize(
    ("text", "framework", "attention"),
    [
        ("", "ddp", "efficient"), ("loss: hf\n", "ddp", "sdpa"), ("implementation: torchtitan\n", "fsdp2", "sdpa"),
        ("", "{name: ddp, transformers: 4.45.0}", "efficient"), ("", "{name: ddp, transformers: 4.44.2}", "sdpa"),
    ],
)  # fmt: skip
def test_torch_compile_leaves_no_mask_to_sdpa(write, text: str, framework: str, attention: str) -> None:
    setup = resolve(write("compile: true\nattention: sdpa\n" + text, framework=framework))
    assert setup.workload.attention == attention
    assert any(note.startswith("attention: efficient") for note in setup.assumptions) == (attention == "efficient")


def test_says_which_blocks_torch_compile_leaves_alone(write) -> None:
    def says(text: str = "", **fields: str) -> bool:
        setup = resolve(write("compile: true\ncheckpointing: {policy: full}\n" + text, **fields))
        return any(note.startswith("compile: checkpointed blocks run") for note in setup.assumptions)

    assert says()
    assert not says("attention: sdpa\n")
    assert not says(micro_batch="2")


@pytest.mark.parametrize(
    ("rest", "framework", "attention"),
    [
        ("", "{name: deepspeed, version: 0.12.4}", "eager"), ("", "{name: deepspeed, version: 0.12.5}", "flash"),
        ("", "{name: fsdp1, version: 2.1.2}", "eager"), ("", "{name: fsdp1, version: 2.2.0}", "flash"),
        ("", "deepspeed", "flash"), ("attention: flash\n", "{name: deepspeed, version: 0.9.5}", "flash"),
        ("kernels: flash-attn\n", "{name: ddp, version: 2.1.0}", "flash"),
        ("", "{name: deepspeed, version: 0.9.5, transformers: 4.37.2}", "flash"),
    ],
)  # fmt: skip
def test_attention_that_nobody_chose_is_eager_before_transformers_had_sdpa(
    write, rest: str, framework: str, attention: str
) -> None:
    setup = resolve(write(rest, framework=framework))
    assert setup.workload.attention == attention
    assert any(note.startswith("attention: eager") for note in setup.assumptions) == (attention == "eager")


def test_a_release_of_transformers_that_is_none_is_refused(write) -> None:
    with pytest.raises(InputError) as caught:
        resolve(write(framework="{name: deepspeed, version: 0.9.5, transformers: new}"))
    assert caught.value.field == "framework.transformers"


@pytest.mark.parametrize(("attention", "said"), [("flash", True), ("sdpa", False), ("eager", False)])
def test_a_gpu_without_flash_attention_says_what_runs_in_its_place(write, attention: str, said: bool) -> None:
    old = str(ROOT / "topologies/dgx1_v100_8.yaml")
    setup = resolve(write("zero: {stage: 3}\n", cluster=old, precision="fp16", attention=attention))
    note = "FlashAttention 2 does not run on V100-SXM2-32GB: torch's memory-efficient kernel in its place"
    assert (note in setup.assumptions) == said
    assert not any("does not run" in note for note in resolve(write("zero: {stage: 3}\n")).assumptions)

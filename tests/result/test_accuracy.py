"""What the report says of its own error: whose runs stand behind it, and how far they are from this one."""

import dataclasses

from zsim.cost.profile import Evidence, load_profile
from zsim.result.measure import accuracy

TITAN = Evidence("torchtitan, H100-SXM, torchtitan (FSDP2)", 11.0, 3.0, 1, 8, 8, "default")
FOUNDRY = Evidence("llm-foundry, H100-SXM, Composer (PyTorch FSDP1)", 2.0, 0.5, 20, 8, 64, "default")
OTHERS = Evidence("GPUs of which no run was fitted", 9.5, -5.0, 248, 1, 512)


def said(*evidence, gpus=8, framework="fsdp2", on_cpu=False, adapters=False, tokens=4096):
    profile = dataclasses.replace(load_profile("H100-SXM"), evidence=evidence)
    return accuracy(profile, gpus, framework, on_cpu, adapters, tokens)


def test_runs_of_the_same_framework_come_first():
    assert said(FOUNDRY, TITAN).evidence == "torchtitan, H100-SXM, torchtitan (FSDP2), 1 run on 8 GPUs"
    own = said(FOUNDRY, TITAN, gpus=512, framework="fsdp1")
    assert (
        own.evidence == "llm-foundry, H100-SXM, Composer (PyTorch FSDP1), 20 runs on 8 to 64 GPUs, and this is on 512"
    )
    assert own.step_time_error == 0.02


def test_all_that_is_equally_near_counts_together():
    other = Evidence("litgpt, H100-SXM, litgpt (FSDP1)", 12.0, -4.0, 5, 8, 16, "default")
    both = said(FOUNDRY, other, TITAN, framework="fsdp1")
    assert both.step_time_error == (2.0 * 20 + 12.0 * 5) / 25 / 100
    assert both.evidence.endswith("Composer (PyTorch FSDP1) and 1 more, 25 runs on 8 to 64 GPUs")


def test_borrowed_runs_are_called_so():
    borrowed = said(FOUNDRY, TITAN, framework="deepspeed")
    assert borrowed.step_time_error == 0.11  # the worse
    assert borrowed.evidence.startswith("no measurement with DeepSpeed on this kind of GPU; nearest is torchtitan")


def test_runs_of_the_gpu_that_this_one_is_like_are_called_so():
    profile = dataclasses.replace(load_profile("H200-SXM"), evidence=(TITAN,))
    assert accuracy(profile, 8, "fsdp2").evidence.startswith("no measurement on H200-SXM itself; nearest is torchtitan")


def test_an_optimizer_on_the_cpu_is_said_to_be_less_certain():
    assert said(FOUNDRY, on_cpu=True).evidence.endswith("steps up to twice as long as predicted were measured")
    assert "CPU" not in said(FOUNDRY).evidence


def test_a_gpu_that_nobody_measured():
    assert said(OTHERS).evidence.startswith("no measurement on this kind of GPU; this is the error on GPUs of which")
    assert said().step_time_error is None


def test_each_shipped_evidence_names_its_framework():
    for device in ("H100-SXM", "A100-SXM-80GB", "RTX 4090", "RTX 3090", "V100-SXM2-32GB", "A40"):
        profile = load_profile(device)
        assert profile.evidence
        for evidence in profile.evidence:
            assert any(evidence.is_of(name) for name in ("deepspeed", "fsdp2", "fsdp1", "ddp")), evidence.text


def test_runs_of_adapters_speak_for_adapters() -> None:
    """Near in scale is worth less than alike: adapters keep the host busier than a GPU."""
    full = Evidence("TinyLlama, H100-SXM, Trainer (DDP)", 2.0, 0.5, 4, 1, 8, "default")
    lora = Evidence("Qwen, H100-SXM, peft (DDP)", 15.0, -10.0, 18, 1, 1, "default", adapters=True)
    assert said(full, lora, gpus=4, framework="ddp").step_time_error == 0.02
    found = said(full, lora, gpus=4, framework="ddp", adapters=True)
    assert found.step_time_error == 0.15
    assert found.evidence.endswith("18 runs on 1 GPU, and this is on 4")
    assert said(full, gpus=4, framework="ddp", adapters=True).evidence.endswith("on 1 to 8 GPUs, without adapters")


def test_short_micro_batches_do_not_speak_for_long_ones() -> None:
    """What Python holds up says nothing of a GPU that is busy, and the other way round."""
    short = Evidence(
        "bf16 example, H100-SXM, DeepSpeed", 51.0, -51.0, 2, 8, 8, "default", min_tokens=512, max_tokens=512
    )
    found = said(short, TITAN, framework="deepspeed")
    assert found.step_time_error == 0.51  # of others the worst
    assert "no measurement with DeepSpeed and about 4,096 tokens in a micro-batch" in found.evidence
    far = dataclasses.replace(short, min_gpus=4, max_gpus=4)
    assert said(far, TITAN, framework="deepspeed").step_time_error == 0.11
    assert said(far, TITAN, framework="deepspeed", tokens=1024).evidence.startswith("bf16 example")

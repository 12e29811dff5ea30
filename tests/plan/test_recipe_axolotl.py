"""What axolotl's plugins and options do to a run beside what their names say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.recipes import read, said
from zsim.errors import InputError, NotModeled

CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
LIGER = "axolotl.integrations.liger.LigerPlugin"


def axolotl(data: dict[str, Any]):
    return read("axolotl", {"base_model": "m"} | data)


@pytest.mark.parametrize(
    ("data", "fused"),
    [
        ({"plugins": [CUT]}, True),  # its args.py: cut_cross_entropy: Optional[bool] = True
        ({"plugins": [CUT], "cut_cross_entropy": None}, True),
        ({"plugins": [CUT], "cut_cross_entropy": False}, False),
        ({"plugins": [CUT], "cut_cross_entropy": True}, True),
        ({"cut_cross_entropy": True}, False),
        ({"plugins": [LIGER]}, False),
        ({"plugins": [LIGER], "liger_fused_linear_cross_entropy": True}, True),
        ({"plugins": LIGER, "liger_fused_linear_cross_entropy": True}, True),
        ({"liger_fused_linear_cross_entropy": True}, False),
        ({"plugins": [CUT], "liger_fused_linear_cross_entropy": True}, True),
    ],
)
def test_a_fused_loss_comes_with_its_plugin(data: dict[str, Any], fused: bool) -> None:
    assert said(axolotl(data)).get("loss") == ("fused" if fused else None)


def test_keys_of_a_plugin_that_is_not_named_are_said_to_have_no_effect() -> None:
    reading = axolotl({"liger_rms_norm": True, "liger_glu_activation": True, "cut_cross_entropy": True})
    assert not {"kernels", "loss"} & said(reading).keys()
    assert [note for note in reading.notes if "no effect" in note] == [
        "liger_glu_activation, liger_rms_norm: no effect, as plugins does not name axolotl.integrations.liger",
        "cut_cross_entropy: no effect, as plugins does not name axolotl.integrations.cut_cross_entropy",
    ]
    named = axolotl({"plugins": [LIGER], "liger_rms_norm": True, "liger_glu_activation": True})
    assert said(named)["kernels"] == "liger"


@pytest.mark.parametrize(
    ("plugin", "data", "why"),
    [
        ("hatchery.HatcheryPlugin", {}, "machines of a service"),
        ("spectrum.SpectrumPlugin", {}, "trains the layers that it chooses"),
        ("grokfast.GrokfastPlugin", {}, "averages of gradients"),
        ("densemixer.DenseMixerPlugin", {}, "router"),
        ("diffusion.DiffusionPlugin", {}, "diffusion"),
        ("kd.KDPlugin", {"kd_trainer": True}, "teacher"),
        ("nemo_gym.NemoGymPlugin", {"nemo_gym_enabled": True}, "generates"),
    ],
)
def test_plugins_that_train_otherwise_are_refused(plugin: str, data: dict[str, Any], why: str) -> None:
    with pytest.raises(NotModeled, match=why):
        axolotl({"plugins": [f"axolotl.integrations.{plugin}"]} | data)


def test_plugins_that_are_switched_off_or_not_known() -> None:
    off = ["axolotl.integrations.kd.KDPlugin", "axolotl.integrations.densemixer.DenseMixerPlugin"]
    reading = axolotl({"plugins": [*off, "mine.Plugin"], "dense_mixer": False})
    assert reading.not_modeled == ["mine.Plugin: a plugin that is not known here"]


@pytest.mark.parametrize("plugins", [3, True, {"liger": True}, [3]])
def test_what_is_no_list_of_plugins_is_refused(plugins: Any) -> None:
    with pytest.raises(InputError, match="is not a list of names") as error:
        axolotl({"plugins": plugins})
    assert error.value.field == "plugins"


def test_all_linear_modules_beside_those_that_are_named() -> None:
    data = {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q_proj"]}
    assert said(axolotl(data))["lora.targets"] == "all-linear"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"flash_attention": True}, "flash"),
        ({"sdp_attention": True}, "sdpa"),
        ({"flash_attention": True, "eager_attention": True}, "flash"),
        ({"attn_implementation": "kernels-community/vllm-flash-attn3"}, "flash3"),
        ({"attn_implementation": "flash_attention_4"}, "flash4"),
        ({"attn_implementation": "kernels-community/flash-attn2"}, "flash"),
        ({"xformers_attention": None}, None),
    ],
)
def test_attention(data: dict[str, Any], kind: str | None) -> None:
    assert said(axolotl(data)).get("attention") == kind


@pytest.mark.parametrize("name", ["xformers_attention", "sage_attention", "flex_attention"])
def test_other_attention_is_refused_by_its_switch_too(name: str) -> None:
    with pytest.raises(NotModeled, match=r"attention (xformers|sage|flex_attention)"):
        axolotl({name: True, "flash_attention": True})


def test_a_checkpoint_in_few_bits_is_trained_in_16_where_it_is_dequantized() -> None:
    kind = {"model_quantization_config": "Mxfp4Config"}
    axolotl(kind | {"model_quantization_config_kwargs": {"dequantize": True}})
    with pytest.raises(NotModeled, match="few bits"):
        axolotl(kind)


def test_overrides_of_bitsandbytes() -> None:
    data = {"adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True}
    options = {"bnb_4bit_use_double_quant": False, "llm_int8_skip_modules": ["lm_head"]}
    reading = axolotl(data | {"bnb_config_kwargs": options})
    assert said(reading)["quantize.double_quant"] is False
    assert reading.not_modeled == ["bnb_config_kwargs.llm_int8_skip_modules: which weights are quantized, or how"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("lora_rank_pattern", {"q_proj": 4}), ("peft_layers_to_transform", [0]), ("peft_trainable_token_indices", [7])],
)
def test_adapters_that_are_not_alike(name: str, value: Any) -> None:
    base = {"adapter": "lora", "lora_target_linear": True}
    with pytest.raises(NotModeled, match=name):
        axolotl(base | {name: value})
    axolotl(base | {name: type(value)()})


def test_a_key_without_a_value_is_not_one_that_was_not_read() -> None:
    reading = axolotl({"something_else": None, "something": 1})
    assert "something" in reading.not_read


@pytest.mark.parametrize(
    ("optim", "name"),
    [("adamw_torch_4bit", "adamw4bit"), ("ao_adamw_4bit", "adamw4bit"), ("ao_adamw_8bit", "adamw8bit")],
)
def test_torchaos_optimizers(optim: str, name: str) -> None:
    assert said(axolotl({"optimizer": optim}))["optimizer.name"] == name


def test_fsdp2_keeps_the_type_that_the_model_is_loaded_in() -> None:
    """monkeypatch/accelerate/fsdp2.py, which widens nothing to float32 and leaves embedding, norm and head to the root;
    FSDP1 is accelerate's own."""
    sharded = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    fields = said(axolotl({"bf16": True} | sharded))
    assert (fields["fsdp.storage_dtype"], fields["fsdp.grouping"]) == ("bfloat16", "hf")
    assert "fsdp.storage_dtype" not in said(axolotl({"bf16": False} | sharded))
    adapters = {"adapter": "lora", "lora_target_linear": True}
    assert "fsdp.storage_dtype" not in said(axolotl({"bf16": True} | adapters | sharded))
    one = said(axolotl({"bf16": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}))
    assert not {"fsdp.storage_dtype", "fsdp.grouping"} & one.keys()


def test_fsdp1_widens_it_but_where_all_is_in_bf16() -> None:
    """utils/trainer.py, prepare_optim_env: `bf16: full` is no mixed precision, under which accelerate widens."""
    sharded = {"fsdp_version": 1, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
    full = said(axolotl({"bf16": "full"} | sharded))
    assert (full["framework.name"], full["precision"], full["fsdp.storage_dtype"]) == ("fsdp1", "bf16", "bfloat16")
    for other in ({"bf16": "auto"}, {"bf16": True}, {"bf16": "full", "adapter": "lora", "lora_target_linear": True}):
        assert "fsdp.storage_dtype" not in said(axolotl(other | sharded))


def test_experts_in_few_bits() -> None:
    adapters = {"adapter": "lora", "lora_target_linear": True}
    assert said(axolotl(adapters | {"load_in_4bit": True, "quantize_moe_experts": True}))["quantize.experts"] is True
    assert "quantize.experts" not in said(axolotl(adapters | {"load_in_4bit": True, "quantize_moe_experts": False}))
    with pytest.raises(InputError, match="quantize_moe_experts: experts in few bits beside weights in 16"):
        axolotl(adapters | {"quantize_moe_experts": True})
    with pytest.raises(NotModeled, match="quantized experts without adapters"):
        axolotl({"quantize_moe_experts": True})
    with pytest.raises(NotModeled, match="experts as Linear modules"):
        axolotl(adapters | {"load_in_4bit": True, "llama4_linearized_experts": True})


def test_an_attention_that_is_not_modeled_is_named_as_the_recipe_names_it() -> None:
    with pytest.raises(NotModeled, match="xformers_attention: attention xformers") as caught:
        read("axolotl", {"base_model": "m", "micro_batch_size": 1, "xformers_attention": True})
    assert caught.value.accepted == "flash_attention, sdp_attention, eager_attention"

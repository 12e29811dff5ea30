"""Adapters and 4-bit weights: parameter counts as peft's, saved tensors and gradients as torch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture, LayerKind
from zsim.model.huggingface import from_architecture, from_config, read_config
from zsim.model.kernels import Gemm, Memory
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.spec import Compute, ModelSpec, Module, Workload
from zsim.model.trace import trace

MODELS = Path(__file__).parents[2] / "scenarios" / "models"


def small(layers: int = 2, family: str = "llama") -> ModelSpec:
    return from_architecture(
        "small",
        Architecture(
            family=family, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256,
            kinds=(LayerKind(),) * layers, tied=False,
        ),
    )  # fmt: skip


def computes(module: Module) -> list[Compute]:
    own = [item for item in module.body if not isinstance(item, Module)]
    return own + [compute for item in module.body if isinstance(item, Module) for compute in computes(item)]


@pytest.mark.parametrize(
    ("r", "targets", "trainable"),
    [
        # peft's print_trainable_parameters for Llama-3-8B: 6,815,744 with q_proj and v_proj at rank 16
        (16, ("q_proj", "v_proj"), 6_815_744),
        (8, ("q_proj", "v_proj"), 3_407_872),
        (16, ("all-linear",), 41_943_040),
    ],
)
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_trainable_parameters_of_llama_3_8b(r: int, targets: tuple[str, ...], trainable: int, quantize: str) -> None:
    model = tune(read_config(MODELS / "llama-3.1-8b"), Tuning(Lora(r, targets), quantize))
    assert model.trainable_numel == trainable
    assert model.numel == 8_030_261_248 + trainable


def test_targets_may_be_told_apart_by_their_parents() -> None:
    """peft takes the end of a module's name."""
    base = small()
    short, long = (
        tune(base, Tuning(Lora(8, targets)))
        for targets in (("q_proj", "down_proj"), ("self_attn.q_proj", "mlp.down_proj"))
    )
    assert long.parameters == short.parameters
    with pytest.raises(InputError, match=r"the model has no mlp\.q_proj"):
        tune(base, Tuning(Lora(8, ("mlp.q_proj",))))
    some = tune(base, Tuning(Lora(8, ("q_proj", "mlp.down_proj", "query_key_value", "w1"))))
    assert some.parameters == short.parameters
    assert some.notes[-1] == "lora.targets: the model has no query_key_value, w1, which peft passes over"
    for other in ("embed_tokens", "norm"):
        with pytest.raises(NotModeled, match=f"adapters on {other}"):
            tune(base, Tuning(Lora(8, ("q_proj", other))))
    with pytest.raises(NotModeled, match="some layers only"):
        tune(base, Tuning(Lora(8, ("layers.0.self_attn.q_proj",))))


def test_bytes_of_four_bit_weights() -> None:
    """6.98e9 Linear weights at half a byte, their scales at 1/64 byte and 4 bytes for every 256 of them."""
    base = read_config(MODELS / "llama-3.1-8b")
    model = tune(base, Tuning(Lora(16), "nf4"))
    packed = [p for p in model.parameters if p.packed > 1]
    assert len(packed) == 7 * 32
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert 2 * sum(p.numel for p in packed) == weights // 2
    assert model.buffers_bytes - base.buffers_bytes == weights // 64 + 4 * (weights // 64 // 256)
    single = tune(base, Tuning(Lora(16), "nf4", double_quant=False))
    assert single.buffers_bytes - base.buffers_bytes == 4 * weights // 64


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_quantized_weights_of_gpt2_are_turned(quantize: str) -> None:
    """transformers 5.24 quantizers_utils.py: Conv1D becomes a Linear of bitsandbytes, its weight [outputs, inputs]."""
    base = from_config({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 199}, "gpt2")
    model = tune(base, Tuning(Lora(4), quantize))
    weights = [p for p in model.parameters if p.name.endswith("c_attn.base_layer.weight")]
    assert [p.shape for p in weights] == [(144, 48) if quantize == "int8" else (144 * 48 // 4, 1)] * 2
    assert [p.shape for p in model.parameters if p.name.endswith("c_attn.lora_B.default.weight")] == [(144, 4)] * 2
    trace(model, Workload(2, 8))


def test_transformers_5_quantizes_no_subclass_of_linear() -> None:
    """integrations/bitsandbytes.py: `type(module) is nn.Linear`, before 5 `isinstance(module, nn.Linear)`."""
    config = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    falcon = from_config(config | {"vocab_size": 199}, "falcon")
    with pytest.raises(NotModeled, match="quantized weights of falcon"):
        tune(falcon, Tuning(Lora(4), "nf4"))
    old = tune(falcon, Tuning(Lora(4), "nf4", before_5=True))
    assert sum(p.packed > 1 for p in old.parameters) == 4 * 2  # two products of attention, two of the MLP
    trace(old, Workload(2, 8))


def test_bytes_of_eight_bit_weights() -> None:
    """6.98e9 Linear weights at a byte, and a float32 for each of their rows."""
    base = read_config(MODELS / "llama-3.1-8b")
    model = tune(base, Tuning(Lora(16), "int8"))
    eight = [p for p in model.parameters if p.dtype == "int8"]
    assert {p.module_class for p in eight} == {"Linear8bitLt"}
    assert sum(p.numel for p in eight) == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert model.buffers_bytes - base.buffers_bytes == 4 * 32 * (3 * 4096 + 2 * 1024 + 2 * 14336)
    assert model.numel - model.trainable_numel == base.numel


def test_inputs_of_eight_bit_products_stay_through_checkpointing() -> None:
    """bitsandbytes 0.50 holds them as attributes of its function. Run for torch 2.13: alive after the forward of a
    non-reentrant checkpoint, as without one."""
    tokens, hidden, wide = 2 * 8, 64, 128
    inputs = 2 * tokens * (hidden + hidden + hidden + wide)  # of q, k and v; of o; of gate and up; of down
    held = {}
    for quantize in (None, "int8"):
        model = tune(small(1), Tuning(Lora(4, ("q_proj",)), quantize))
        tree = trace(model, Workload(2, 8, checkpointing="full"))
        held[quantize] = sum(compute.saved_bytes for compute in computes(tree))
    assert held["int8"] - held[None] == inputs


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_inputs_of_eight_bit_products_did_not_stay_through_reentrant_checkpoints(checkpointing: str) -> None:
    """Until transformers 5. Run for torch 2.13: needs_input_grad of a function in one is (False, False) forward."""
    tokens, hidden, wide = 2 * 8, 64, 128
    lora, workload = Lora(4, ("q_proj",)), Workload(2, 8, checkpointing=checkpointing)
    models = (tune(small(1), Tuning(lora, "int8", before_5=before)) for before in (True, False))
    then, now = (sum(compute.saved_bytes for compute in computes(trace(model, workload))) for model in models)
    inputs = 2 * tokens * (hidden + hidden + hidden + wide)  # as above
    assert now - then == (inputs if checkpointing == "full" else 0)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_inputs_of_four_bit_products_were_kept_until_july_2024(checkpointing: str) -> None:
    """Those that nothing else keeps: of down, and of gate and up, as weights of norms are frozen. What attention gives
    to o is kept by attention, the input of v and k by the adapter of q. A checkpointed block keeps none."""
    tokens, hidden, wide = 2 * 8, 64, 128
    model = tune(small(1), Tuning(Lora(4, ("q_proj",)), "nf4"))
    then, now = (
        sum(c.saved_bytes for c in computes(trace(model, Workload(2, 8, checkpointing=checkpointing, transformers=of))))
        for of in ((4, 42), (4, 43))
    )
    assert then - now == (2 * tokens * (wide + hidden) if checkpointing == "none" else 0)


def test_eight_bit_weights_are_multiplied_as_they_are() -> None:
    """int8 forward, 16 bits backward, and no gradient of theirs."""
    model = tune(small(1), Tuning(Lora(4, ("q_proj",)), "int8"))
    found = computes(trace(model, Workload(2, 8)))
    forward = [k for c in found for k in c.forward if isinstance(k, Gemm) and k.dtype == "int8"]
    assert sorted((k.n, k.k) for k in forward) == sorted(
        [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    )
    assert not [k for c in found for k in c.backward if isinstance(k, Gemm) and k.dtype == "int8"]


@pytest.mark.parametrize(("quantize", "elements"), [(None, 64 + 128), ("nf4", 0), ("int8", 0)])
def test_under_autocast_an_input_goes_through_float32_where_the_base_is_not_quantized(
    quantize: str | None, elements: int
) -> None:
    """peft 0.21 tuners/lora: layer.py casts it to the adapters' dtype under autocast, too; bnb.py leaves it alone."""
    model, wide = tune(small(1), Tuning(Lora(4, ("all-linear",)), quantize)), Workload(4, 64, weights="float32")
    moved = [
        sum(
            k.read_bytes + k.write_bytes
            for c in computes(trace(model, load))
            for k in c.forward
            if isinstance(k, Memory)
        )
        for load in (wide, replace(wide, adapters="float32"))
    ]
    assert (
        moved[1] - moved[0] == 4 * 64 * elements * (2 + 4) * 2
    )  # and back, for the product; what norms give is in float32


def test_only_adapters_get_gradients() -> None:
    model = tune(small(), Tuning(Lora(4, ("q_proj", "down_proj"))))
    trained = {i for i, parameter in enumerate(model.parameters) if parameter.trainable}
    produced = [grad for compute in computes(trace(model, Workload(2, 8))) for grad in compute.grads]
    assert sorted(produced) == sorted(trained)
    assert all(".lora_" in model.parameters[i].name for i in trained)


def test_targets_as_a_regular_expression_of_whole_names() -> None:
    """As axolotl's recipes have them; peft matches text with re.fullmatch."""
    for quantize in (None, "nf4"):
        listed = tune(small(), Tuning(Lora(8, ("q_proj", "v_proj", "up_proj")), quantize))
        pattern = r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|q|v)_proj"
        matched = tune(small(), Tuning(Lora(8, pattern=pattern), quantize))
        assert matched.parameters == listed.parameters
    for pattern, error, says in (
        (r"(q|v)_proj", InputError, "the whole name of no Linear module"),
        (r".*layers\.0\..*q_proj", NotModeled, "some layers only"),
        ("(", InputError, "no regular expression"),
    ):
        with pytest.raises(error, match=says):
            tune(small(), Tuning(Lora(8, pattern=pattern)))


def test_an_adapter_on_the_head_is_one_that_is_named() -> None:
    """peft leaves it out of all-linear, transformers out of what it quantizes."""
    listed = tune(small(), Tuning(Lora(8, ("q_proj", "lm_head")), "nf4"))
    matched = tune(small(), Tuning(Lora(8, pattern=r"(lm_head|.*q_proj)"), "nf4"))
    everywhere = tune(small(), Tuning(Lora(8)))
    assert matched.parameters == listed.parameters
    shapes = {p.name: p.shape for p in listed.parameters if p.name.startswith("lm_head.")}
    base = next(p for p in small().parameters if p.name == "lm_head.weight")
    assert shapes == {
        "lm_head.base_layer.weight": base.shape,
        "lm_head.lora_A.default.weight": (8, base.shape[1]),
        "lm_head.lora_B.default.weight": (base.shape[0], 8),
    }
    assert not any(p.name.startswith("lm_head.lora_") for p in everywhere.parameters)
    with pytest.raises(NotModeled, match="under a fused loss"):
        trace(listed, Workload(2, 8, loss="fused"))


def test_unknown_target_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError) as error:
        tune(small(), Tuning(Lora(4, ("query_key_value",))))
    assert "query_key_value" in error.value.message
    assert "q_proj" in (error.value.accepted or "")


def test_quantized_weights_alone_train_nothing() -> None:
    with pytest.raises(InputError, match="cannot be trained without adapters"):
        tune(small(), Tuning(None, "nf4"))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("all-linear",), ("down_proj",)])
def test_saved_tensors_are_torchs(dropout: float, targets: tuple[str, ...]) -> None:
    """A real model with the same adapters, written out by hand, on the CPU: every byte that autograd keeps."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class Adapted(torch.nn.Module):
        def __init__(self, base, r):
            super().__init__()
            self.base_layer = base
            self.dropout = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
            self.lora_A = torch.nn.Linear(base.in_features, r, bias=False)
            self.lora_B = torch.nn.Linear(r, base.out_features, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.lora_B(self.lora_A(self.dropout(x))) * 2.0

    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=128,
        vocab_size=256, tie_word_embeddings=False, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    real = transformers.LlamaForCausalLM(config).requires_grad_(False)
    for module in list(real.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and (targets == ("all-linear",) or name in targets):
                setattr(module, name, Adapted(child, 4))
    real.train()
    kept = {}
    parameters = {p.untyped_storage().data_ptr() for p in real.parameters()}
    ids = torch.randint(0, 256, (2, 8))

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and storage.data_ptr() != ids.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = real(input_ids=ids, labels=ids).loss
    loss.backward()
    trainable = sum(p.numel() for p in real.parameters() if p.requires_grad)

    model = tune(small(), Tuning(Lora(4, targets, dropout=dropout)))
    tree = trace(model, Workload(2, 8, dtype="float32", attention="eager", device="cpu"))
    assert model.trainable_numel == trainable
    ours = sum(compute.saved_bytes for compute in computes(tree))
    assert ours == sum(nbytes for _, nbytes in kept.values())

"""What modules own, read and save, as hooks of ZeRO-3 (DeepSpeed 0.19.8) and autograd see it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from zsim.model.spec import ModelSpec, Module, Parameter
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.versions import before
from zsim.program.walk import modules_in_order
from zsim.program.zero3_coordinator import Params


def saved_weights(
    model: ModelSpec, tree: Module, plan: DeepSpeedPlan, in_backward: Collection[str], leaves: Collection[str]
) -> dict[str, Params]:
    """By module of `in_backward`: what autograd saves a view of, of its own or of all inside a leaf."""
    linear = _torch_linear(plan)

    def viewed(param: int, module: Module) -> bool:
        parameter = model.parameters[param]
        if module.module_class == "ParamWrapper":  # baddbmm saves the halves of the adapter
            return parameter.trainable
        return (
            _transposed_experts(parameter)
            or _squeezed_kernel(parameter)
            or (linear and (module.role == "head" or _in_linear(parameter, module)))
        )

    return {
        module.name: tuple(
            param
            for inner in (modules_in_order(module) if module.name in leaves else (module,))
            for param in inner.params
            if viewed(param, inner)
        )
        for module in modules_in_order(tree)
        if module.name in in_backward
    }


def external(model: ModelSpec, tree: Module, hooked: Collection[str]) -> dict[str, Params]:
    """What a module's own code read of another one in the first forward (parameter_offload.py, ZeROOrderedDict).

    peft's LoraLayer.forward asks for the dtype of lora_A's weight, a vision tower's embedding for that of its patch
    embedding, T5's MLP for that of wo, HunYuan's gate for that of wg, DeepSeek-V3.2's indexer for that of weights_proj,
    Llama 4 for the device of its embedding. In the first forward none is there, persistent or not.
    """
    return {
        module.name: tuple(param for param in item.params if model.parameters[param].name.endswith(".weight"))
        for module in modules_in_order(tree)
        if module.name in hooked
        for item in module.body
        if isinstance(item, Module) and _reads_weight(module, item.name, item.module_class)
    }


def _torch_linear(plan: DeepSpeedPlan) -> bool:
    """Whether linear layers are torch's own, of which autograd saves `weight.t()`, a view: after a release the gathered
    bytes stay until backward. DeepSpeed's saves the parameter itself. zero.Init puts that one in place,
    the engine only from 0.19.4 on (github.com/deepspeedai/DeepSpeed pull request 8189)."""
    return not plan.memory_efficient_linear or (before(plan, 0, 19, 4) and not plan.zero_init)


def _transposed_experts(parameter: Parameter) -> bool:
    """Whether torch._grouped_mm gets the weights of experts as `weight.transpose(-2, -1)`, a view that autograd saves:
    so transformers 5.24 integrations/moe.py `_grouped_linear` and DeepSpeed's moe/ep_experts.py do, but not for
    GPT-OSS, whose weights lie the other way."""
    return parameter.expert and len(parameter.shape) == 3 and parameter.module_class != "GptOssExperts"


def _in_linear(parameter: Parameter, module: Module) -> bool:
    """Whether `module` is the torch.nn.Linear that has it: kernels that take its weight by themselves save no view."""
    return parameter.module_class == "Linear" and parameter.name.rpartition(".")[0] == module.name


def _squeezed_kernel(parameter: Parameter) -> bool:
    """Whether a convolution gets it as a view, whose module is not called (`model.causal_conv`)."""
    return parameter.module_class == "Conv1d" and parameter.shape[1:2] == (1,)


def _reads_weight(module: Module, name: str, module_class: str) -> bool:
    part = name.removeprefix(f"{module.name}.")
    if part == "embed_tokens":
        return module.module_class == "Llama4TextModel"
    if module_class in ("Conv2d", "Conv3d"):
        without = ("Idefics3", "SmolVLM", "Glm4vVisionModel", "Glm4vMoeVisionModel", "GlmOcrVisionModel")
        return not module.module_class.startswith(without)
    return part in ("lora_A.default", "wo", "wg", "weights_proj")


def reads(module: Module) -> Iterator[int]:
    for item in module.body:
        if not isinstance(item, Module):
            yield from item.reads


def linear_biases(model: ModelSpec) -> dict[int, int]:
    """nn.Linear's weight -> bias, where both are trained."""
    index = {
        parameter.name: number
        for number, parameter in enumerate(model.parameters)
        if parameter.trainable and parameter.module_class == "Linear"
    }
    pairs = ((index.get(name.removesuffix("bias") + "weight"), number) for name, number in index.items())
    return {weight: bias for weight, bias in pairs if weight is not None and weight != bias}


def inside(tree: Module) -> dict[str, Params]:
    """By module, its parameters and those of all in it."""
    found: dict[str, Params] = {}

    def visit(module: Module) -> set[int]:
        children = (visit(item) for item in module.body if isinstance(item, Module))
        params = set(module.params).union(*children)
        found[module.name] = tuple(sorted(params))
        return params

    visit(tree)
    return found


def lent(model: ModelSpec, tree: Module) -> dict[str, Params]:
    """By module, the parameters that peft's wrappers take from it while they call it (torch.nn.utils.parametrize)."""
    found: dict[str, Params] = {}
    for module in modules_in_order(tree):
        for param in module.params if module.module_class == "ParamWrapper" else ():
            if not model.parameters[param].trainable:
                owner = model.parameters[param].name.rpartition(".")[0]
                found[owner] = (*found.get(owner, ()), param)
    return found


def hooked(module: Module, leaves: frozenset[str]) -> Iterator[str]:
    """_register_deepspeed_module goes down to leaves, not into them."""
    yield module.name
    if module.name not in leaves:
        for item in module.body:
            if isinstance(item, Module):
                yield from hooked(item, leaves)

"""Adapters on parameters instead of modules: peft's target_parameters, and what it makes of the names of experts that
are stacked in one tensor (0.21 tuners/lora/layer.py, ParamWrapper).

Each forward builds the whole adapted tensor: every expert's weight plus the product of its halves, whether tokens come
to it or not, and a second time to check that shape and type are right (torch.nn.utils.parametrize). Autograd saves it
for the products of the experts, and its gradient is as large.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError, NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.architecture import Architecture
from zsim.model.graph import Tensor
from zsim.model.layers import Dropout, Linear, Module, Net
from zsim.model.modules_to_save import ModuleDict

if TYPE_CHECKING:
    from zsim.model.lora import Lora

FIELD, SOME = "lora.target_parameters", "experts.gate_up_proj, experts.down_proj"


# transformers_weight_conversion.py, _convert_peft_config_moe with transformers 5: names that it takes, and all-linear,
# for the router, for the two halves of gate_up_proj and for down_proj, and for nothing else in the model.
OF_EXPERTS = {
    **dict.fromkeys(("mixtral", "minimax_m2"), ("gate", "w1", "w3", "w2")),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe",
         "glm4_moe_lite", "glm4v_moe", "hunyuan_v1_moe", "olmoe", "qwen3_moe", "qwen3_next", "solar_open",
         "glm_moe_dsa", "mellum", "afmoe", "flex_olmo", "cohere2_moe"),
        ("gate", "gate_proj", "up_proj", "down_proj"),
    ),
}  # fmt: skip


def of_experts(model: Module, arch: Architecture, lora: Lora) -> tuple[Lora, dict[str, int]]:
    """What is left for modules, and the rank of each parameter that gets an adapter: twice as high where two old names
    are one tensor now. Raises NotModeled for the router's, InputError for one half of two."""
    ranks = dict.fromkeys(lora.parameters, lora.r)
    if not (arch.moe and not arch.moe.modules and arch.family in OF_EXPERTS):
        return lora, ranks
    names = router, *halves, down = OF_EXPERTS[arch.family]
    weights = [name for name, *_ in model.named_weights()]
    known = {key for name in weights for key in (name, name.rpartition(".")[0])}
    known |= {f"{name.rpartition('.')[0]}.{old}" for name in weights if name.endswith(".gate_up_proj") for old in names}
    wanted = {key for key in known if re.fullmatch(lora.pattern, key)} if lora.pattern else set(lora.targets)
    meant = {key: name for key in wanted for name in names if f".{key}".endswith(f".{name}")}
    if "all-linear" in wanted or router in meant.values() or (lora.pattern and meant):
        raise NotModeled(
            f"adapters on the stacked experts of {arch.family} by a regular expression, or on its router, for which "
            f"peft 0.21 takes all-linear and {router}",
            field="lora.targets",
            accepted=f"names of modules and of experts: [q_proj, v_proj, {', '.join(names[1:])}]; any with "
            "framework.transformers: '4.57' where it has experts as modules (docs/expert-parallel.md)",
        )  # fmt: skip
    missing = set(halves) - set(meant.values())
    if 0 < len(missing) < len(halves):
        why = f"peft adapts {', '.join(set(halves) - missing)} with {', '.join(missing)} alone: they are one tensor"
        raise InputError(why, field="lora.targets", accepted=f"both of {', '.join(halves)}, or none")
    if not missing:
        ranks["gate_up_proj"] = 2 * lora.r
    if down in meant.values():
        ranks["down_proj"] = lora.r
    return replace(lora, targets=tuple(target for target in lora.targets if target not in meant)), ranks


class ParamWrapper(Module):
    """Wraps the module that has the parameter, or the wrapper of another parameter of it."""

    kind = "experts"
    class_name = "ParamWrapper"

    def __init__(self, net: Net, base: Module, name: str, r: int) -> None:
        super().__init__(net)
        self.name = name
        self.owner: _Owner = base.owner if isinstance(base, ParamWrapper) else _Owner(base)
        owner = self.owner.module
        experts, outputs, inputs = owner.weights[name].shape
        self.experts = experts
        self.base_layer = base
        self.lora_dropout = ModuleDict(net)
        self.lora_dropout.add(Dropout(net, 0.0)).class_name = "Identity"
        self.lora_A, self.lora_B = ModuleDict(net), ModuleDict(net)
        halves = Linear(net, inputs, r * experts), Linear(net, r * experts, outputs)
        self.lora_A.add(halves[0])
        self.lora_B.add(halves[1])
        for half in halves:
            half.weight.expert = True
        # parametrize.register_parametrization takes the parameter from its module for the time of the call
        self.holds = owner.weights[name], halves[0].weight, halves[1].weight
        owner.lent = (*owner.lent, owner.weights[name])

    def forward(self, x: Tensor, *others: Any) -> Any:
        module = self.owner.module
        weight, a, b = self.holds
        self.net.tape.read(*self.holds)
        right = F.reshape(a, self.experts, -1, a.shape[-1])
        left = F.permute(F.reshape(b, b.shape[0], -1, self.experts), 2, 0, 1)
        left, right = F.to(left, weight.dtype), F.to(right, weight.dtype)
        P.fold(weight, left, right)  # ParametrizationList.__init__, "Consistency checks"
        module.adapted = {**module.adapted, self.name: lambda: self.owner.cached(self.name, weight, left, right)}
        try:
            return self.base_layer(x, *others)
        finally:
            module.adapted = {name: fold for name, fold in module.adapted.items() if name != self.name}
            if not module.adapted:
                self.owner.cache.clear()


class _Owner:
    """The module in the innermost wrapper, which is a child of that one alone. What is built in place of its weights
    stays until the outermost wrapper's call is over (parametrize.cached)."""

    def __init__(self, module: Module) -> None:
        self.module: Any = module
        self.cache: dict[str, Tensor] = {}

    def cached(self, name: str, weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
        if name not in self.cache:
            self.cache[name] = P.fold(weight, left, right)
        return self.cache[name]


def adapt_parameters(model: Module, net: Net, ranks: dict[str, int]) -> list[str]:
    """Wrap the modules of experts that have a parameter whose name ends with one of `ranks` (`_inject_parameters`).
    Returns the names that the model has not. Raises NotModeled."""
    if numbered := [name for name in ranks if any(part.isdecimal() for part in name.split("."))]:
        raise NotModeled(f"adapters on some layers only: {numbered[0]}", field=FIELD, accepted=SOME)
    model.set_paths("")
    places = [(parent, name) for parent in list(model.all_modules()) for name in list(parent.children)]
    hit: set[str] = set()
    for parent, name in places:
        owner = parent.children[name]
        for parameter, weight in owner.weights.items():
            meant = [each for each in ranks if f"{owner.path}.{parameter}".endswith(f".{each}")]
            if not meant:
                continue
            if not hasattr(owner, "adapted") or len(weight.shape) != 3 or owner.class_name == "GptOssExperts":
                what = f"adapters on {owner.path}.{parameter}, which is no stack of experts' matrices, or one that lies"
                raise NotModeled(f"{what} the other way (GPT-OSS)", field=FIELD, accepted=SOME)
            if net.compile:
                raise NotModeled("torch.compile of adapters on parameters", field="compile", accepted="false")
            hit.update(meant)
            setattr(parent, name, ParamWrapper(net, parent.children[name], parameter, ranks[meant[0]]))
    return sorted(ranks.keys() - hit)

"""Configurations of models whose layers are not all attention."""

from __future__ import annotations

from validation.oracles.configuration_parts import REGATHER, SMALL_ZERO, Config, config_of, zero_of
from validation.oracles.tiny_hybrid import TINY_HYBRIDS


def hybrid_configurations() -> list[Config]:
    found = []
    for name in TINY_HYBRIDS:
        model = {"model": name} | ({"attention": "eager"} if name == "mamba2" else {})
        found += [
            config_of("fsdp2", "hybrid", **model),
            config_of("fsdp2", "hybrid_accelerate", **model, fsdp={"accelerate": True}),
            config_of("fsdp1", "hybrid", **model),
            zero_of("hybrid", 2, **model, zero=SMALL_ZERO),
            zero_of("hybrid", 3, **model, zero=SMALL_ZERO),
            zero_of("hybrid_regather", 3, ga=2, **model, zero=REGATHER),
            zero_of("hybrid_ckpt", 3, ga=2, **model, zero=REGATHER, ckpt=True),
        ]
    return found

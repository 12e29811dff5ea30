"""How long the targets of a model with an encoder and a decoder are, and what was not stated of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.model.spec import ModelSpec

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario


def target_of(scenario: Scenario, model: ModelSpec) -> tuple[int | None, list[str]]:
    """Tokens of the decoder, None of a model without one, and notes on them. Raises InputError."""
    stated = scenario.fields.target_len
    if getattr(model.arch, "seq2seq", None) is None:
        if stated is not None:
            raise scenario.error(("target_len",), f"{model.name} has no encoder beside its decoder", "null")
        return None, []
    length = stated or scenario.fields.seq_len
    chosen = "" if stated else " (target_len: ... says otherwise)"
    return length, [f"the encoder reads {scenario.fields.seq_len:,} tokens, which tokens/s counts, and the decoder "
                    f"{length:,}{chosen}"]  # fmt: skip

"""docs/deepspeed-keys.md, from the table of keys: `python -m zsim.plan.key_table > docs/deepspeed-keys.md`."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.plan.deepspeed_keys import ALIASES, REMOVED, SECTIONS, USED, Key

INTRODUCTION = """# Every key of a DeepSpeed configuration

DeepSpeed 0.19.8, and what zsim does with each key. Each row is a test of its own,
`tests/plan/test_deepspeed_keys.py::test_every_key_does_what_the_table_says[KEY]`; that no key is missing here is tested
against DeepSpeed's pydantic models and the names that its `runtime/config.py` looks up.

- used: becomes a field of the scenario, which decides what is simulated
- no effect: on a simulation, for the reason given
- not simulated: it has an effect in reality; the report lists it, and runs as if it were not there
- not modeled: refused, unless it has its harmless default

| key | effect | default | why |
|---|---|---|---|"""


def markdown() -> Iterator[str]:
    yield INTRODUCTION
    short = {canonical: name for name, canonical in ALIASES.items()}
    for section, keys in SECTIONS.items():
        for name, key in keys.items():
            full = f"{section}.{name}" if section else name
            if full not in SECTIONS or key.effect != USED:  # a section's keys have rows of their own
                also = f", `{short[name]}`" if section == "zero_optimization" and name in short else ""
                yield f"| `{full}`{also} | {key.effect} | {_default(key)} | {key.why} |"
    yield "\nRefused, as by DeepSpeed from 0.19.7 or 0.19.8 on. With an older one MiCS is simulated, and the others are"
    yield "not modeled unless switched off:\n"
    yield "| key | what it was |\n|---|---|"
    for name, what in REMOVED.items():
        yield f"| `{name}` | {what} |"


def _default(key: Key) -> str:
    if key.default is None:
        return ""
    return f"{str(key.default).lower() if isinstance(key.default, bool) else key.default}"


if __name__ == "__main__":
    print("\n".join(markdown()))

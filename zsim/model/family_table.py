"""docs/families.md, from the tables of families: `python -m zsim.model.family_table > docs/families.md`."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.model.families import ENCODERS, SEQ2SEQ, VISION
from zsim.model.huggingface import SAME, known_families
from zsim.model.lacking import MECHANISMS
from zsim.model.readers import READERS

INTRODUCTION = """# Which models zsim reads

The `model_type` of a Hugging Face config.json says what is simulated, layer by layer, with the parameters of
transformers 5.24. A scenario without such a file names a size instead: `model: {params: 7e9}` is a Llama of about that
many parameters.
"""


def markdown() -> Iterator[str]:
    yield INTRODUCTION
    groups = {
        "Decoders, with and without experts": [name for name in READERS if name not in ENCODERS],
        "With images, video or sound": [name for name in known_families() if name in VISION],
        "Encoders with labels": ENCODERS,
        "Encoder and decoder": SEQ2SEQ,
    }
    for what, names in groups.items():
        yield f"## {what}\n\n{', '.join(f'`{name}`' for name in sorted(names))}\n"
    yield "## Run as another family's model\n\n| model_type | whose model |\n|---|---|"
    for name, same in sorted(SAME.items()):
        yield f"| `{name}` | `{same.family}` |"
    for name in sorted(set(known_families()) - {*READERS, *VISION, *SEQ2SEQ, *SAME}):
        yield f"| `{name}` | `{name}_thinker`; the talker is left out |"
    yield "\n## Refused, for what is missing\n\n| model_type | what zsim does not model |\n|---|---|"
    for name, what in sorted(MECHANISMS.items()):
        yield f"| `{name}` | {what} |"


if __name__ == "__main__":
    print("\n".join(markdown()))

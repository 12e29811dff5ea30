"""Reads a GPT-NeoX configuration: DeepSpeed's keys next to NeoX's own, with dashes or underscores."""

from __future__ import annotations

from zsim.document import Document
from zsim.errors import NotModeled
from zsim.plan.deepspeed import read_document
from zsim.plan.deepspeed_keys import TOP
from zsim.plan.reading import Reading

# megatron/neox_arguments/arguments.py, calculate_derived: `precision` stands for DeepSpeed's sections.
_PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16"}


def merged(documents: list[Document]) -> Document:
    """Several files as one, as NeoX takes them (neox_arguments/neox_args.py, from_ymls). Raises InputError for a key
    that two of them have."""
    whole = Document(documents[0].file, {})
    for document in documents:
        for name in document.data:
            if name in whole.data:
                raise document.error((name,), f"stands in {whole.place((name,))[0]} too, which GPT-NeoX refuses")
        whole.data |= document.data
        whole.places |= document.places
        whole.repeated += document.repeated
    return whole


def read_neox(document: Document, ranks: int | None = None) -> Reading:
    """The plan and workload in a GPT-NeoX configuration. Raises InputError, NotModeled."""
    data = {str(key).replace("-", "_"): value for key, value in document.data.items()}
    places = {(str(path[0]).replace("-", "_"), *path[1:]): place for path, place in document.places.items()}
    whole = Document(document.file, data, places)
    for name, why in (("pipe_parallel_size", "pipeline parallelism"), ("model_parallel_size", "tensor parallelism")):
        if data.get(name, 1) not in (0, 1):
            raise whole.error((name,), why, "0 or 1", kind=NotModeled)
    for half in ("fp16", "bf16"):
        if isinstance(section := data.get(half), dict):
            data[half] = {key: value for key, value in section.items() if key not in ("fp16", "bf16", "type")}  # NeoX's
    if "fp16" not in data and "bf16" not in data and (half := _PRECISIONS.get(str(data.get("precision")), "")):
        data[half] = {"enabled": True}
        places[half, "enabled"] = whole.place(("precision",))
    if isinstance(optimizer := data.get("optimizer"), dict) and isinstance(optimizer.get("params"), dict):
        params = {key: value for key, value in optimizer["params"].items() if key != "max_grad_norm"}
        data["optimizer"] = optimizer | {"params": params}  # NeoX moves it to gradient_clipping
    deepspeed = {name: value for name, value in data.items() if name in TOP}
    reading = read_document(Document(document.file, deepspeed, places))
    reading.kind = "GPT-NeoX configuration"
    reading.ranks = ranks
    if isinstance(data.get("seq_length"), int):
        reading.set(("seq_len",), data["seq_length"], ("seq_length",))
    on = bool(data.get("checkpoint_activations", False))
    reading.set(("checkpointing",), "full" if on else "none", ("checkpoint_activations",))
    own = sorted(data.keys() - deepspeed.keys() - {"seq_length", "checkpoint_activations"})
    reading.without_effect.append(f"{', '.join(own)} (GPT-NeoX's own keys, not read)")
    reading.lacks("model", "(a config.json; NeoX describes the model by its sizes)")
    return reading

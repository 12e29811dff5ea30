"""zsim from: a scenario out of the configuration files somebody has."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from zsim.cli.options import new_app
from zsim.document import Document, Given, dotted, parse_yaml
from zsim.errors import InputError
from zsim.plan import detect
from zsim.plan.reading import Reading

app = new_app()

_NAMED_LAST = {"accelerate": 1, "deepspeed": 2}  # kinds of file that the others name
_FIRST = ("name", "model", "cluster", "framework", "zero", "fsdp", "ddp")


@app.command()
def convert(
    files: Annotated[
        list[Path], typer.Argument(help="DeepSpeed JSON, accelerate, config.json ...", show_default=False)
    ],
    topology: Annotated[Path, typer.Option(help="A topology file.", show_default=False)],
    nodes: Annotated[int | None, typer.Option(help="This many copies of its node.", show_default=False)] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences per GPU and micro-step.", show_default=False)
    ] = None,
    seq_len: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Per sequence; 4k is 4096.", show_default=False)
    ] = None,
    set_: Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Any field of the scenario.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it here.", show_default=False)] = None,
) -> None:
    """Write a scenario from configuration files. What none of them says has to be given; nothing is guessed."""
    from zsim.cluster.files import assumed, read_machine

    if out is not None and not out.absolute().parent.is_dir():
        raise InputError("no such folder", out.parent, field="--out")
    cluster, machine = read_machine(topology, nodes=nodes)
    ranks = cluster.world_size
    reading, model = _read_all(files, ranks)
    if cluster.devices[0].without_cuda:
        reading.without_launcher()
    if reading.ranks not in (None, ranks):
        message = f"is written for {reading.ranks} GPUs, and the topology has {ranks}"
        hint = "--nodes says how many nodes there are"
        if nodes is None and reading.ranks % cluster.gpus_per_node:
            few = f"gpus: {reading.ranks} and no others in its pcie tree"
            hint = f"a part of a node is a topology of its own: a copy of {topology} with {few}"
        elif nodes is not None:
            hint = f"a scenario S written for {reading.ranks} runs on others too: zsim S --set cluster.nodes={nodes}"
        raise InputError(message, reading.document.file, notes=(hint,))
    folder = out.parent if out else Path.cwd()
    fields = reading.nested()
    if model is not None:
        fields["model"] = os.path.relpath(model, folder)
        given_parts = _with_tower(reading, model)
        _compare_name(reading, model)
    else:
        given_parts = []
    named = os.path.relpath(topology, folder)
    fields["cluster"] = named if nodes is None else {"topology": named, "nodes": nodes}
    if machine.document:  # else it is a topology file, which says all itself
        reading.notes += [f"Assumed: {text}" for text in assumed(topology, machine)]
    given = {"micro_batch": micro_batch, "seq_len": seq_len}
    given_fields = [f"{name}={value}" for name, value in given.items() if value is not None]
    overrides = [*given_parts, *given_fields, *set_]

    text = _compose(fields, overrides, reading, folder)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def _read_all(files: list[Path], ranks: int) -> tuple[Reading, Path | None]:
    """What all files say together, and which of them is the model."""
    model: Path | None = None
    documents: list[tuple[str, Document]] = []
    for path in files:
        document = detect.parse(path / "config.json" if path.is_dir() else path)
        kind = detect.identify(document)
        if kind == "scenario":
            raise InputError("is a scenario already", path)
        if kind == "model":
            if model not in (None, path):
                raise InputError(f"is a second model beside {model}", path, accepted="one config.json")
            model = path
        else:
            documents.append((kind, document))
    reading = _read_together(documents, ranks)
    if reading is None:
        raise InputError("none of the files says how training is sharded", accepted=detect.READERS)
    return reading, model


def _read_together(documents: list[tuple[str, Document]], ranks: int) -> Reading | None:
    """What they all say; one that another one names is read where that one names it."""
    neox = [document for kind, document in documents if kind == "neox"]
    if len(neox) > 1:
        from zsim.plan.neox import merged

        documents = [("neox", merged(neox)), *(each for each in documents if each[0] != "neox")]
    given = Given([(kind, Path(document.file)) for kind, document in documents])
    readings: dict[int, Reading] = {}
    for index in sorted(range(len(documents)), key=lambda index: _NAMED_LAST.get(documents[index][0], 0)):
        kind, document = documents[index]
        if Path(document.file) not in given.named:
            for one in (document, document.launch or document):
                one.given = given
            readings[index] = detect.read(document, kind, ranks)
    ordered = [readings[index] for index in sorted(readings)]
    if any(kind == "accelerate" for kind, _ in documents):
        for reading in ordered:
            reading.without_launcher()
    for other in ordered[1:]:
        ordered[0].include(other)
    return ordered[0] if ordered else None


def _with_tower(reading: Reading, model: Path) -> list[str]:
    """What the recipe says of a vision tower, as overrides, if the model has one."""
    document = detect.parse(model / "config.json" if model.is_dir() else model)
    if document.data.get("vision_config") is not None or document.data.get("model_type") == "llava":
        reading.not_modeled = [text for text in reading.not_modeled if not text.startswith("vision_tower:")]
        return [f"{dotted(path)}={json.dumps(value)}" for path, value in reading.vision.items()]
    if any("language_model" in name for name in reading.vision.get(("model", "freeze"), ())):
        raise InputError("trains a projector that this model has not", model, accepted="the whole model's config.json")
    return []


def _compare_name(reading: Reading, model: Path) -> None:
    """A note, and a line on stderr, where the recipe's name is clearly not that of the config.json's model."""
    from zsim.model.huggingface import read_config
    from zsim.model.named import contradiction

    spec = read_config(model / "config.json" if model.is_dir() else model)
    if why := contradiction(reading.model_name, spec.family, spec.numel):
        text = f"{reading.document.file} names {reading.model_name}, but {model} {why}; that one is simulated"
        reading.notes.append(text)
        print(f"zsim: {text}", file=sys.stderr)


def _compose(fields: dict[str, Any], overrides: list[str], reading: Reading, folder: Path) -> str:
    """The scenario as YAML, after it has been checked and resolved as `zsim run` would."""
    import yaml

    from zsim.scenario.load import apply, check

    document = parse_yaml(yaml.safe_dump(fields, sort_keys=False), "the scenario from these files")
    document.places = dict(reading.places)
    for override in overrides:
        apply(document, override)
    said = {dotted(path) for path in reading.fields} | set(document.data)
    missing = [what for what in reading.missing if not {what.split(" ")[0], what.split(".")[0]} & said]
    if missing:
        names = ", ".join(what.split(" ")[0] for what in missing)
        options = "--micro-batch, --seq-len, a config.json, --set FIELD=VALUE (--set precision=bf16 --set grad_accum=1)"
        if any("is not there)" in what for what in missing):
            options = f"that file as one more argument, {options}"
        raise InputError(f"no file says {names}", accepted=options, notes=tuple(missing))
    check(document, folder).resolve()
    ordered = {name: document.data[name] for name in _FIRST if name in document.data} | document.data
    head = [f"# From {reading.document.file}, by zsim."]
    head += [f"# {text}" for text in reading.notes]
    head += [f"# Not modeled: {text}" for text in reading.not_modeled]
    head += [f"# Not read: {text}" for text in reading.not_read]
    return "\n".join(head) + "\n" + yaml.safe_dump(ordered, sort_keys=False, width=120)

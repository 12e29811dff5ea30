"""zsim read: what a file is, and what zsim understands of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zsim import units
from zsim.cli.options import Json, new_app
from zsim.document import dotted, flat, read_text
from zsim.errors import InputError
from zsim.plan import detect
from zsim.plan.reading import Reading, text_of

app = new_app()

_MODEL = "Hugging Face model"


@app.command()
def read(
    files: Annotated[
        list[Path],
        typer.Argument(help="Configurations, models, scenarios, topologies, logs of collectives.", show_default=False),
    ],
    json: Json = False,
) -> int:
    """What each file is, what was understood, what has no effect, what is missing. Exit code 2 if one is refused."""
    described, refused = [], 0
    for path in files:
        try:
            described.append(describe(path))
        except InputError as error:
            refused += 1
            described.append({"file": str(path), "kind": None, "refused": str(error)})
    _compare_names(described)
    if json:
        from json import dumps

        print(dumps(described))
    else:
        print("\n\n".join(_text(entry) for entry in described))
    return 2 if refused else 0


def _compare_names(described: list[dict[str, Any]]) -> None:
    """Notes where a recipe's name of the model is clearly not that of the config.json given with it."""
    from zsim.model.named import contradiction

    models = [entry for entry in described if entry["kind"] == _MODEL]
    for entry in described if len(models) == 1 else ():
        said, file = models[0]["understood"], models[0]["file"]
        why = contradiction(entry.get("model_name", ""), said["family"], said["parameters"])
        if why:
            entry["notes"].append(f"names {entry['model_name']}, but {file} {why}")


def describe(path: Path) -> dict[str, Any]:
    """What `path` is and says, in plain types. Raises InputError, NotModeled."""
    if path.is_dir():
        path = path / "config.json"
    if path.suffix.lower() in (".txt", ".xml", ".log", ""):
        return _log(path) or _machine(path)
    if path.suffix.lower() not in detect.SUFFIXES:
        try:
            return _log(path) or _machine(path)
        except InputError:
            if "CPU Affinity" in read_text(path):  # a matrix; anything else is said better by what follows
                raise
    document = detect.parse(path)
    if {"gpu", "gpus"} & document.data.keys() and path.suffix.lower() in (".yaml", ".yml"):
        return _machine(path)
    kind = detect.identify(document)
    if kind == "model":
        return _model(path)
    if kind == "scenario":
        return _scenario(path)
    return _reading(path, detect.read(document, kind))


def _reading(path: Path, reading: Reading) -> dict[str, Any]:
    return {
        "file": str(path),
        "kind": reading.kind,
        "understood": {dotted(to): value for to, value in reading.fields.items()},
        "places": {dotted(to): text_of(reading.places.get(to), reading) for to in reading.fields},
        "ranks": reading.ranks,
        "model_name": reading.model_name,
        "notes": reading.notes,
        "without_effect": reading.without_effect,
        "not_read": reading.not_read,
        "not_modeled": reading.not_modeled,
        "missing": reading.still_missing(),
    }


def _model(path: Path) -> dict[str, Any]:
    from zsim.model.huggingface import read_config

    model = read_config(path)
    understood = {"name": model.name, "family": model.family, "parameters": model.numel}
    return {"file": str(path), "kind": _MODEL, "understood": understood, "notes": list(model.notes)}


def _scenario(path: Path) -> dict[str, Any]:
    from zsim.scenario import load

    scenario = load(path)
    understood = dict(flat(scenario.fields.model_dump(exclude_none=True)))
    return {"file": str(path), "kind": "scenario", "understood": understood, "notes": list(scenario.notes)}


def _log(path: Path) -> dict[str, Any] | None:
    """Output of nccl-tests, or DeepSpeed's comms log; None: the file is neither."""
    from zsim.validation import nccl_log

    try:
        tables = nccl_log.read(path)
    except InputError:
        return None
    understood, notes = {}, []
    for number, table in enumerate(tables, 1):
        best = max(table.rows, key=lambda row: row.busbw)
        sizes = " to ".join(f"{pick(row.nbytes for row in table.rows):,} bytes" for pick in (min, max))
        understood[f"table {number}"] = (
            f"{table.op or 'unnamed collective'}, {table.ranks or 'unknown number of'} ranks"
            f"{f' of {table.devices[0]}' if table.devices else ''}, {len(table.rows)} sizes, {sizes}, "
            f"bus bandwidth up to {best.busbw / 1e9:.4g} GB/s"
        )
        notes += [f"table {number}: {warning}" for warning in table.warnings]
    notes.append("zsim calibrate fits a profile to it, zsim validate collectives compares it with a topology")
    return {"file": str(path), "kind": "measured collectives", "understood": understood, "notes": notes}


def _machine(path: Path) -> dict[str, Any]:
    from zsim.cluster.files import read_machine

    cluster, reading = read_machine(path)
    understood = {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "devices": sorted({device.name for device in cluster.devices}),
        "links": sorted({link.kind for link in cluster.templates[0].links.values()}),
    }
    return {"file": str(path), "kind": reading.source, "understood": understood, "notes": reading.assumptions}


def _text(entry: dict[str, Any]) -> str:
    if entry["kind"] is None:
        return f"{entry['file']}: refused\n  {entry['refused'].replace(chr(10), chr(10) + '  ')}"
    lines = [f"{entry['file']}: {entry['kind']}"]
    places = entry.get("places", {})
    for name, value in entry["understood"].items():
        file, _, line = places.get(name, "").rpartition(":")
        named = "" if file == entry["file"] else f"{Path(file).name}, "
        lines.append(f"  {name}: {_value(name, value)}{f'   ({named}line {line})' if line.isdecimal() else ''}")
    if entry.get("ranks"):
        lines.append(f"  written for {entry['ranks']} GPUs")
    for title in ("notes", "not_modeled", "without_effect", "not_read", "missing"):
        if entry.get(title):
            lines.append(f"  {title.replace('_', ' ')}:")
            lines += [f"    {text}" for text in entry[title]]
    return "\n".join(lines)


def _value(name: str, value: Any) -> str:
    from zsim.plan.deepspeed import AUTO_FROM_HIDDEN_SIZE

    if value == "auto":
        return f"auto: {AUTO_FROM_HIDDEN_SIZE[name.removeprefix('zero.')]}, as the Hugging Face Trainer sets it"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    if isinstance(value, int) and value >= 100_000:
        return f"{value:,} ({units.format_count(value)})"
    return str(value)

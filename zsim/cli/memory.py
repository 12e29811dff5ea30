"""zsim memory: the textbook's bytes per GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim import units
from zsim.cli.options import Json, new_app
from zsim.errors import InputError

app = new_app()


@app.command()
def memory(
    params: Annotated[str | None, typer.Option(help='Parameters: 8e9 or "8B".', show_default=False)] = None,
    model: Annotated[
        Path | None, typer.Option(help="Instead of --params: a Hugging Face config.json.", show_default=False)
    ] = None,
    gpus: Annotated[str, typer.Option(help="GPUs that share the states.")] = "8",
    json: Json = False,
) -> None:
    """The textbook's bytes per GPU: model states of mixed-precision Adam, without activations and buffers."""
    from zsim.result.textbook import table

    lines = table(_parameters(params, model), _count("--gpus", gpus, MOST_GPUS))
    if json:
        from json import dumps

        stages = {
            name: {"gpu_bytes": _whole(line.per_gpu_bytes), "formula": line.formula}
            | ({"host_bytes": _whole(line.host_bytes), "host_formula": line.host_formula} if line.host_bytes else {})
            for name, line in lines.items()
        }
        print(dumps({"stages": stages}))
        return

    for name, line in lines.items():
        host = f"   host {units.format_gb(line.host_bytes):>8} = {line.host_formula}" if line.host_bytes else ""
        print(f"{_TITLES[name]:<30}{units.format_gb(line.per_gpu_bytes):>9}   {line.formula:<24}{host}".rstrip())


MOST_PARAMETERS, MOST_GPUS = 10**15, 10**6
_TITLES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero1_offload": "ZeRO-1, optimizer on CPU",
    "zero2_offload": "ZeRO-2, optimizer on CPU",
    "zero3_offload": "ZeRO-3, optimizer on CPU",
    "zero3_offload_params": "ZeRO-3, all states on CPU",
}


def _parameters(params: str | None, model: Path | None) -> int:
    if (params is None) == (model is None):
        raise InputError("one of --params and --model is needed", accepted="--params 8e9, or --model config.json")
    if model is not None:
        from zsim.model.huggingface import read_config

        return read_config(model / "config.json" if model.is_dir() else model).numel
    assert params is not None
    return _count("--params", params, MOST_PARAMETERS)


def _count(option: str, text: str, most: int) -> int:
    try:
        number = units.parse_count(text)
    except InputError as error:
        raise InputError(error.message, field=option, accepted=error.accepted) from None
    if not 1 <= number <= most:
        raise InputError(f"{text} is out of range", field=option, accepted=f"a whole number from 1 to {most:,}")
    return number


def _whole(size: float) -> float | int:
    return int(size) if size == int(size) else size

"""How ms-swift is started: `swift sft`, or its files by a launcher, and for how many processes.

ms-swift's own command starts torchrun where NPROC_PER_NODE or NNODES is set (cli/main.py), else one process, in which
the layers of a model are spread over all GPUs that it sees (utils/env.py is_mp, model/utils.py).
"""

from __future__ import annotations

import re

from zsim.errors import NotModeled
from zsim.plan.recipe import Recipe

TASKS = ("sft", "pt", "rlhf")
_FILES = re.compile(r"(?:^|.*[/.])(?:swift[/.]cli[/.](sft|pt|rlhf)|llm_(sft|pt|rlhf|dpo|orpo))(?:\.py)?$")
_MAIN = re.compile(r"(?:^|.*[/.])swift(?:[/.]cli[/.]main(?:\.py)?)?$")
_COMMAND = re.compile(r"swift (sft|pt|rlhf)( launched)?")
_AS_MANY = ("gpu", "auto")


def program_of(program: str, given: list[str], launched: bool) -> str:
    """What a document says of its program: "swift sft", of a file of ms-swift's by a launcher "swift sft launched";
    "": it is none of ms-swift's."""
    if _MAIN.match(program) and given[:1] and given[0] in TASKS:
        return f"swift {given[0]}"
    found = _FILES.match(program)
    if found is None:
        return ""
    task = found.group(1) or found.group(2)
    return f"swift {task if task in TASKS else 'rlhf'}{' launched' if launched else ''}"


def task_of(program: str) -> str | None:
    """sft, pt or rlhf, of a document's program."""
    found = _COMMAND.fullmatch(program)
    return found.group(1) if found else None


def processes(recipe: Recipe) -> int | None:
    """How many ms-swift starts. None: not known, or somebody else starts them. Raises NotModeled for one that has
    several GPUs."""
    document = recipe.document
    variables = recipe.get("ENV") or {}
    if not isinstance(variables, dict):
        raise recipe.error(("ENV",), f"{variables!r} is not a section", "a mapping of variables")
    for name, value in variables.items():  # cli/main.py of 4.1 on: where it is not set already
        document.environment.setdefault(str(name), (str(value), document.place(("ENV", name))[1]))
    if document.program.endswith("launched") or document.ranks or document.launch:
        return None
    given = {name: document.environment.get(name, ("", None))[0] for name in ("NPROC_PER_NODE", "NNODES")}
    if not task_of(document.program) and not any(given.values()):
        return recipe.count("global_world_size")  # of args.json
    for name, text in given.items():
        if text and not re.fullmatch(r"[1-9]\d*", text):
            why = "as many as there are" if text in _AS_MANY else "which is not known here"
            recipe.reading.notes.append(f"{name}: {text}, {why}")
            return None
    local, nodes = int(given["NPROC_PER_NODE"] or 1), int(given["NNODES"] or 1)
    _refuse_spread(recipe, local, any(given.values()))
    return local * nodes


def _refuse_spread(recipe: Recipe, local: int, by_torchrun: bool) -> None:
    document = recipe.document
    devices, line = document.environment.get("CUDA_VISIBLE_DEVICES", ("", None))
    seen = len(devices.split(",")) if re.fullmatch(r"\d+(,\d+)*", devices) else None
    if seen and seen // local > 1 and "SWIFT_SINGLE_DEVICE_MODE" not in document.environment:
        own = "one process" if local == 1 else f"{local} processes"
        why = f"{own} for {seen} GPUs: a model whose layers are spread over them (device_map)"
        accepted = f"NPROC_PER_NODE={seen}"
        raise NotModeled(why, document.file, line, "CUDA_VISIBLE_DEVICES", accepted)
    if seen is None and not by_torchrun:
        recipe.reading.notes.append(
            "one process, as NPROC_PER_NODE is not set: where it sees several GPUs, it spreads the model's layers over "
            "them, which is not simulated"
        )

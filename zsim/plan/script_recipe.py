"""Commands that hand a recipe to what they start: `axolotl train FILE`, `accelerate launch ... sft.py --config FILE`.

Such a script is read as its recipe, with what the command says besides: further options go before those of the file, as
in trl's TrlParser, LLaMA-Factory's OmegaConf.merge, axolotl's and torchtitan's command lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from zsim.document import Document, Place
from zsim.errors import InputError, NotModeled
from zsim.plan import swift_start
from zsim.plan.shell import Command

_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
_LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_DEBUGGER_FLAGS = ("--wait-for-client", "--log-to-stderr")  # its other options have values
_TRAIN = {  # commands of tools, by the subcommand that trains
    "axolotl": ("train",), "llamafactory-cli": ("train",), "lmf": ("train",), "trl": ("sft", "dpo"),
    "swift": swift_start.TASKS, "oumi": ("train",),
}  # fmt: skip
_OPTIONS = ("config", "config_file", "job.config_file")
_RECIPE = re.compile(r"[^=]*\.(ya?ml|toml)$")
_POSITIONAL = re.compile(r"[^=]*\.(ya?ml|toml|json)$")
_NOT_KNOWN = re.compile(r"\$.*")  # a variable that the script does not set
_OTHER_WORK = re.compile(r"eval|infer|generat|convert|merge|export|test|preprocess|prepare|serve|dry_run|download")
_WITHOUT_TRAINING = re.compile(
    r"infer|export|deploy|eval|merge[-_]lora|rollout|sample|app|web[-_]ui|webui|chat|api|preprocess|inference|vllm-serve"
)
_MEGATRON = re.compile(r"(^|[ /])(_?megatron[ /](sft|pt|rlhf)\b)")
# What else is started by its name, for which there is no reader.
_TORCHTITAN = ("torchtitan.train", "torchtitan/train.py")
_TOOLS = {
    "openrlhf": "OpenRLHF", "verl": "verl", "tune": "torchtune",
    "xtuner": "xtuner", "litgpt": "LitGPT", "nanotron": "nanotron", "megatron": "Megatron", "nemo": "NeMo",
    "nemo_automodel": "NeMo AutoModel",
}  # fmt: skip


def from_launcher(words: list[str]) -> list[str]:
    """A command without what starts its launcher elsewhere: srun, env, a container; and without a debugger in it."""
    words = _without_debugger(words)
    names = (*_LAUNCHERS, *_TRAIN)
    starts = (
        n for n, word in enumerate(words) if Path(word).name in names or re.fullmatch(r"(.*/)?python[\d.]*", word)
    )
    return words[next(starts, 0) :]


def _without_debugger(words: list[str]) -> list[str]:
    """python -m debugpy --listen 5678 --wait-for-client train.py"""
    at = next((n for n in range(1, len(words)) if words[n - 1 : n + 1] == ["-m", "debugpy"]), None)
    if at is None:
        return words
    end = at + 1
    while end < len(words) and words[end].startswith("--"):
        end += 1 if words[end] in _DEBUGGER_FLAGS else 2
    return words[: at - 1] + words[end:]


def program_at(words: list[str]) -> int | None:
    """Where the program stands that a command starts: a file, a module or a tool's own command."""
    for n, word in enumerate(words):
        name, before = Path(word).name, words[n - 1] if n else ""
        if name in _TRAIN and before != "-m" and n + 1 < len(words) and words[n + 1] != "distributed":
            return n  # `oumi distributed torchrun -m oumi train`: the second one trains
        if word.endswith(".py") or (before in ("-m", "--module") and name not in _LAUNCHING_MODULES):
            return n
    return None


def program_name(words: list[str], launched: bool) -> str:
    """What a document says of its program: ms-swift's by what it does, else the name of a Python file or a module."""
    at = program_at(words)
    if at is not None:
        launched = launched or any(Path(word).name in (*_LAUNCHERS, *_LAUNCHING_MODULES) for word in words[:at])
        if program := swift_start.program_of(words[at], words[at + 1 :], launched):
            return program
        if Path(words[at]).name == "trl" and words[at + 1] != "sft":
            return f"trl {words[at + 1]}"
    module = words[at].rpartition(".")[2] if at and words[at - 1] in ("-m", "--module") else ""
    return next((Path(word).name for word in words if word.endswith(".py")), module)


def recipe_of(words: list[str]) -> str | None:
    """The recipe that a command's program reads. None: it reads none, or trains nothing."""
    at = program_at(words)
    if at is None:
        return None
    name, given = Path(words[at]).name, words[at + 1 :]
    if name in _TRAIN:
        if given[:1] == [] or given[0] not in _TRAIN[name]:
            return None
        given = given[1:]
    elif _OTHER_WORK.search(name) or name == "coverage":
        return None
    for option, value in [
        *pairwise(given),
        *(word.split("=", 1) for word in given if word.startswith("--") and "=" in word),
    ]:
        named = option.startswith("--") and option.lstrip("-").replace("-", "_") in _OPTIONS
        if not named and (option, name) != ("-c", "oumi"):
            continue
        if name in _TRAIN or _RECIPE.fullmatch(value) or _NOT_KNOWN.fullmatch(value):
            return value
    first = given[0] if given else ""
    if name in _TRAIN and _NOT_KNOWN.fullmatch(first):
        return first
    return first if _POSITIONAL.fullmatch(first) and not first.startswith("-") else None


def parse_recipe(command: Command, recipe: str, options: Document, launched: bool) -> Document:
    """The recipe that `command` names, with the `options` that follow it there. Raises InputError."""
    from zsim.plan import detect

    words, path = command.words, Path(options.file)
    program = words[program_at(words) or 0]
    file = Document(path, {}).beside(recipe)
    if "$" in recipe or not file.is_file():
        why = f"starts {Path(program).name} with {recipe}, which is not " + ("known" if "$" in recipe else "there")
        raise InputError(why, path, command.line, accepted="that recipe itself, or beside the script that names it")
    document = detect.parse(file)
    own = program_name(words, launched)
    document.program = own if own.startswith(("swift ", "trl ")) else Path(program).name
    # ms-swift appended what its own `--config` held to the command, up to 4.0 (cli/main.py)
    last = swift_start.task_of(document.program) is not None and "--config" in words
    order = "behind" if last else "before"
    document.notes.append(f"started by {path}, line {command.line}, whose options go {order} the recipe's")
    for name, value in options.data.items():
        if name not in _OPTIONS and not (last and name in document.data):
            _put(document, name, value, options.place((name,)))
    return document


def _put(document: Document, name: str, value: Any, place: Place) -> None:
    """Write an option, of a section by its dots, as torchtitan has it, of a list by a number, as oumi has it."""
    path, inner = list[Any](), document.data
    for section in name.split("."):
        if not isinstance(inner, dict | list):
            raise InputError(f"{path[-1]} is no section", *place, field=name)
        if isinstance(inner, list):
            if not section.isdecimal() or int(section) >= len(inner):
                raise InputError(f"{path[-1]} is a list of {len(inner)}", *place, field=name)
            path.append(int(section))
            inner = inner[path[-1]]
        else:
            path.append(section)
            inner = inner.setdefault(section, {})
    document.set(tuple(path), value, place)


def nothing_trains(path: Path, found: Iterable[Command]) -> InputError:
    """Of a script without a command that is read: what it starts instead."""
    accepted = "a command with --per_device_train_batch_size, --deepspeed or --fsdp, or one that names a recipe"
    for command in found:
        if _MEGATRON.search(" ".join(command.words)):
            why = "starts Megatron-SWIFT: training by Megatron, whose parallelism and optimizer are others"
            return NotModeled(why, path, command.line, accepted="swift sft, swift pt")
    for command in found:
        words = command.words
        tool = next((_TOOLS[part] for word in words for part in re.split(r"[./]", word) if part in _TOOLS), None)
        if tool and program_at(words) is not None:
            return InputError(f"starts {tool}, whose options are not read", path, command.line, accepted=accepted)
    for command in found:
        words = command.words
        at = program_at(words)
        if at is not None and Path(words[at]).name in _TRAIN and _WITHOUT_TRAINING.fullmatch(words[at + 1]):
            why = f"starts {Path(words[at]).name} {words[at + 1]}, which does not train"
            return InputError(why, path, command.line, accepted=accepted)
        if at is not None and words[at] in _TORCHTITAN and "--config" in words:
            why = "starts torchtitan with a configuration in Python, by --config, which is not read"
            return InputError(why, path, command.line, accepted="torchtitan's TOML, by --job.config_file")
        if at is not None and any(Path(word).name in (*_LAUNCHERS, *_LAUNCHING_MODULES) for word in words[:at]):
            why = f"starts {Path(words[at]).name}, with options that are not those of Hugging Face's Trainer"
            why = f"starts {words[at]}, which is not known here" if words[at].startswith("$") else why
            return InputError(why, path, command.line, accepted=accepted)
    return InputError("no command in it that trains with Hugging Face's Trainer", path, accepted=accepted)

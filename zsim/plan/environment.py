"""Environment variables that a script sets for the command that trains, as fields of the scenario."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.plan import alloc_conf
from zsim.plan.reading import ALLOCATOR, Reading

THREADS = "OMP_NUM_THREADS"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def read_environment(reading: Reading) -> None:
    """Raises InputError, NotModeled at the line of a value."""
    environment, file = reading.document.environment, reading.document.file
    if THREADS in environment:
        text, line = environment[THREADS]
        if text.startswith(("$", "`")):
            reading.not_modeled.append(f"{THREADS}: {text} is not known here (omp_num_threads of a scenario)")
        elif not text.isdecimal() or int(text) < 1:
            raise InputError(f"{text!r} is not a number of threads", file, line, THREADS, "a whole number from 1")
        else:
            reading.fields[("omp_num_threads",)] = int(text)
            reading.places[("omp_num_threads",)] = file, line
    given = [name for name in _ALLOCATOR if name in environment]
    if len({environment[name][0] for name in given}) > 1:
        line = environment[given[1]][1]
        raise InputError(f"says something else than {given[0]}", file, line, given[1], "one of them")
    for name in given[:1]:
        text, line = environment[name]
        try:
            settings, _ = alloc_conf.parse(text)
            if divided := settings.get("roundup_power2_divisions"):
                alloc_conf.divisions(str(divided))
        except InputError as error:
            raise type(error)(error.message, file, line, name, error.accepted) from None
        reading.without_launcher()
        reading.fields[ALLOCATOR] = text
        reading.places[("allocator",)] = reading.places[ALLOCATOR] = file, line

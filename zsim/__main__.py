"""`python -m zsim` and the `zsim` console script."""

import atexit
import io
import os
import sys
from typing import NoReturn

from zsim.cli.app import main


def run() -> NoReturn:
    """Run one command, and leave without freeing a simulation's objects one by one: a tenth of the command's time."""
    # pydantic would look for plugins in all packages that are installed: a hundredth of the time where there are many
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding has not is no reason to stop
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        main()
    except SystemExit as end:  # which still holds what the command made: outside of this block Python would free it
        code = end.code if isinstance(end.code, int) else 1
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BrokenPipeError:  # whoever read our output has left
            pass
        except OSError as error:  # no space left for output so short that it is written only now
            print(f"zsim: standard output: {error.strerror}", file=sys.stderr)
            code = 2
        os._exit(code)


if __name__ == "__main__":
    run()

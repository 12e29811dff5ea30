"""`python -m zsim` and the `zsim` console script."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from zsim.cli.app import main


def run() -> NoReturn:
    """Run one command, and leave without freeing a simulation's objects one by one: a tenth of the command's time."""
    # pydantic would look for plugins in all packages that are installed: a hundredth of the time where there are many
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        main()
    except SystemExit as end:  # which still holds what the command made: outside of this block Python would free it
        atexit._run_exitfuncs()
        with suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


if __name__ == "__main__":
    run()

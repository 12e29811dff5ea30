"""zsim schema: what a scenario file may hold, for editors."""

from __future__ import annotations

from zsim.cli.options import new_app

app = new_app()


@app.command()
def schema() -> None:
    """Print the JSON Schema of scenario files."""
    from json import dumps

    from zsim.scenario import json_schema

    print(dumps(json_schema(), indent=2))

"""What models with adapters on the parameters of stacked experts do in one step, as adapters.py has it.

    python -m validation.oracles.param_adapters --out FILE.json.gz

By peft's own words for parameters, and by the names of modules that it turns into them. Needs peft 0.21.
"""

from __future__ import annotations

import sys
import warnings

from validation.oracles import families
from validation.oracles.adapters import RANK, step

BOTH = ("experts.gate_up_proj", "experts.down_proj")
STEPS = [
    *((name, ["q_proj"], list(BOTH)) for name in ("mixtral", "qwen2_moe", "olmoe", "glm4_moe", "nemotron_h")),
    ("mixtral", ["q_proj"], ["experts.down_proj"]),
    ("mixtral", ["q_proj", "w1", "w2", "w3"], None),
    ("glm4_moe", ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"], None),
]


def main(arguments: list[str]) -> None:
    options = families.begin(arguments, __doc__, ())
    warnings.filterwarnings("ignore")
    steps = []
    for name, targets, parameters in STEPS:
        runs = [step(name, targets, 0.0, *run, parameters) for run in families.RUNS]
        shared = families.once(name, runs, "parameters", "calls", "ready")
        said = {"model": name, "r": RANK, "targets": targets, "target_parameters": parameters}
        steps.append(said | shared | {"runs": runs})
    from peft import __version__ as peft

    families.write(options.out, {"steps": steps}, peft=peft)


if __name__ == "__main__":
    main(sys.argv[1:])

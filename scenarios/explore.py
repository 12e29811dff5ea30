"""A Result as tables: run it as a script, or cell by cell in a notebook."""

# %%
from pathlib import Path

import zsim

here = Path(__file__).parent
result = zsim.simulate(here / "qwen7b_8x4090.yaml")
result  # noqa: B018 (a notebook shows verdict, memory and step)

# %% Where the compute stream's time goes, by phase and kind of kernel.
print(result.to_dict()["time"]["compute_by_family"])

# %% The ten ops that take longest in the steady step.
steady = result.ops[result.ops.step == result.ops.step.max()]
print(steady.groupby(["lane", "phase", "label"]).duration_s.agg(["sum", "count"]).nlargest(10, "sum"))

# %% What the GPU holds over time, in the order in which the host allocates.
gpu = result.memory[result.memory.device == "gpu"]
print(gpu.set_index("time_s").allocated_bytes.describe())

# %% The fullest links.
print(result.links.head(5))

# %% The same run with twice the micro-batch.
other = zsim.simulate(here / "qwen7b_8x4090.yaml", ["micro_batch=2"])
print(other.throughput.tokens_per_s_per_gpu / result.throughput.tokens_per_s_per_gpu)

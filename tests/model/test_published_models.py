"""Published models of all families have as many parameters as transformers 5.24 counts on the meta device, and run."""

from __future__ import annotations

import pytest

from tests.model import (
    relative_counts,
    test_further,
    test_hybrids,
    test_masked_models,
    test_moe_relatives,
    test_siblings,
)
from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace

TABLES = (relative_counts, test_further, test_hybrids, test_masked_models, test_moe_relatives, test_siblings)
MODELS = {name: model for table in TABLES for name, model in table.MODELS.items()}


def test_no_model_is_listed_twice() -> None:
    assert len(MODELS) == sum(len(table.MODELS) for table in TABLES)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models(name: str) -> None:
    count, config = MODELS[name]
    spec = from_config(config, name)
    assert spec.numel == count
    trace(spec, Workload(1, 128, attention="sdpa" if "index_topk" in config else "flash"))  # whose mask SDPA takes

"""The default model, fetched as `make serve` fetches it; one engine for all tests that need real values."""

from __future__ import annotations

import pytest

from jaxserve import LLM
from jaxserve.hub import ModelNotFound, resolve_model


@pytest.fixture(scope="session")
def real_llm():
    """Float32, so that equal values are no luck; few rows, so that there is little to compile."""
    try:
        path = str(resolve_model("smollm2-135m", progress=False).path)
    except ModelNotFound as error:
        if "could not be fetched" in str(error):
            pytest.skip(f"the default model is not cached and cannot be fetched here: {error}")
        raise
    with LLM(
        path, dtype="float32", max_model_len=1024, max_num_rows=12, max_step_tokens=64, warmup=False, progress=False
    ) as llm:
        yield llm

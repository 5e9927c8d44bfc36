"""The default model, fetched as `make serve` fetches it."""

from __future__ import annotations

import pytest

from jaxserve.hub import ModelNotFound, resolve_model


@pytest.fixture(scope="session")
def smollm2() -> str:
    try:
        return str(resolve_model("smollm2-135m", progress=False).path)
    except ModelNotFound as error:
        if "could not be fetched" in str(error):
            pytest.skip(f"the default model is not cached and cannot be fetched here: {error}")
        raise

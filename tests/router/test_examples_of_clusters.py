"""The examples for Ray and Kubernetes say what the commands understand."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
import yaml
from jaxserve.server.ray_config import load_config

from jaxserve.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_ray_example_is_valid():
    config = load_config(EXAMPLES / "ray.yaml")
    assert len(config.models) == 2 and config.models[0].autoscaling is not None


@pytest.mark.parametrize("name", ["engines.yaml", "router.yaml"])
def test_manifests_use_options_that_exist_and_probe_readiness(name: str):
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text()))
    (workload,) = [d for d in documents if d["kind"] in ("StatefulSet", "Deployment")]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    command, *options = container["args"][1:]
    known = {
        option
        for parameter in typer.main.get_command(app).commands[command].params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    used = {option.split("=")[0] for option in options if option.startswith("--")}
    assert used and used <= known, used - known
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert "preStop" in container["lifecycle"]
    service = next(d for d in documents if d["kind"] == "Service")
    assert service["spec"]["selector"] == workload["spec"]["selector"]["matchLabels"]


def test_every_engine_of_the_example_is_a_worker_of_its_router():
    manifests = {
        name: list(yaml.safe_load_all((EXAMPLES / "kubernetes" / f"{name}.yaml").read_text()))
        for name in ("engines", "router")
    }
    (engines,) = [d for d in manifests["engines"] if d["kind"] == "StatefulSet"]
    (router,) = [d for d in manifests["router"] if d["kind"] == "Deployment"]
    arguments = router["spec"]["template"]["spec"]["containers"][0]["args"]
    workers = [argument.removeprefix("--workers=") for argument in arguments if argument.startswith("--workers=")]
    count, name, service = engines["spec"]["replicas"], engines["metadata"]["name"], engines["spec"]["serviceName"]
    assert workers == [f"http://{name}-{index}.{service}:8000" for index in range(count)]

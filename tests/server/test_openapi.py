"""schemathesis over the document: requests made from it, answers held against it. Bounded in number and time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jaxserve.server.field_table import table
from jaxserve.server.openapi import ROUTES
from jaxserve.server.settings import ServerSettings
from live import Live, engine_command, serving
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

MAX_EXAMPLES = int(os.environ.get("JAXSERVE_SCHEMATHESIS_EXAMPLES", "5"))
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def documented(toy_tokenizer: Path) -> Iterator[Live]:
    # Random requests may ask for very many continuations.
    options = {"max_n": 4, "max_sequences": 16}
    with serving(ServerSettings(engine_command=engine_command(toy_tokenizer, step=0.0002), **options)) as live:
        yield live.wait_ready()


OPERATIONS = sorted(f"{method} {path.replace(':path', '')}" for method, path in ROUTES)


@pytest.fixture(scope="module")
def operations(documented: Live) -> dict[str, schemathesis.APIOperation]:
    schema = schemathesis.openapi.from_url(f"{documented.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return {f"{operation.method.upper()} {operation.path}": operation for operation in found}


def test_the_document_has_every_route(operations: dict[str, schemathesis.APIOperation]) -> None:
    assert sorted(operations) == OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_answers_are_what_the_document_says(
    documented: Live, operations: dict[str, schemathesis.APIOperation], name: str
) -> None:
    @given(case=operations[name].as_strategy())
    @settings(
        max_examples=MAX_EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=20)

    check()
    assert documented.http.get("/health").status_code == 200


DOCS = Path(__file__).parents[2] / "docs"


def test_the_chapter_names_every_route_and_field() -> None:
    assert (DOCS / "fields.md").read_text() == table(), "run: python -m jaxserve.server.field_table > docs/fields.md"
    chapter = (DOCS / "server.md").read_text()
    for operation in OPERATIONS:
        assert f"`{operation}`" in chapter, operation

"""How much of JSON Schema is kept to: every test of the JSON-Schema-Test-Suite, through the grammar compiler.

    pip download --no-deps --no-binary :all: jsonschema==4.26.0     # its source distribution carries the suite
    python benchmarks/json_schema_suite.py jsonschema-4.26.0.tar.gz

Each instance is written as compact JSON and fed to the schema's matcher. Right: accepted exactly if it is valid.
Refused by name: the schema does not compile, and the error says why. Exit status 1 for a wrong acceptance, or fewer
right answers than asked for.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

from jaxserve.structured.compiler import compile_grammar, make_vocabulary
from jaxserve.structured.grammar import Grammar, GrammarError

WANTED = {"draft2020-12": 580, "draft7": 545}
DIALECTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


class ByteVocabulary:
    """One token for each byte."""

    vocab_size = 257
    special_ids = frozenset({256})
    eos_token_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def read_groups(path: str, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, group of tests with one schema) of the suite's required tests."""
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if re.search(rf"/json/tests/{re.escape(draft)}/[^/]+\.json$", member.name):
                file = archive.extractfile(member)
                assert file is not None
                for group in json.load(file):
                    yield member.name.rsplit("/", 1)[1], group


def accepts(matcher: Any, instance: Any) -> bool:
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    matcher = matcher.deep_copy()
    return bool(matcher.consume_tokens(list(text.encode("utf-8", "surrogatepass")))) and matcher.is_accepting()


def judge(path: str, draft: str, *, show: bool) -> dict[str, int]:
    vocabulary = make_vocabulary(ByteVocabulary(), 257)
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for name, group in read_groups(path, draft):
        tests = group["tests"]
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DIALECTS[draft], **schema}  # the suite's older tests leave it to their folder
        try:
            matcher = compile_grammar(vocabulary, Grammar.json_schema(schema).text)
        except GrammarError as error:
            counts["refused by name"] += len(tests)
            counts["without a reason"] += 0 if str(error) else len(tests)
            reasons[re.sub(r"['\"/].*", "", str(error))[:60]] += len(tests)
            continue
        for test in tests:
            accepted = accepts(matcher, test["data"])
            kind = "right" if accepted == test["valid"] else "wrongly accepted" if accepted else "wrongly refused"
            counts[kind] += 1
            if show and kind != "right":
                print(f"  {kind}: {name}: {group['description']}: {test['description']}")
    if show:
        for reason, count in reasons.most_common():
            print(f"  {count:5d} refused: {reason}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive", help="source distribution of jsonschema")
    parser.add_argument("--show", action="store_true", help="name what was not right")
    options = parser.parse_args()
    failed = False
    for draft, wanted in WANTED.items():
        counts = judge(options.archive, draft, show=options.show)
        ok = not counts["wrongly accepted"] and not counts["without a reason"] and counts["right"] >= wanted
        failed |= not ok
        told = ", ".join(
            f"{counts[kind]} {kind}" for kind in ("right", "wrongly accepted", "wrongly refused", "refused by name")
        )
        print(f"{'PASS' if ok else 'FAIL'}  {draft}: {told} (wanted: {wanted} right, none wrongly accepted)")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""docs/fields.md, made from the types that parse requests: python -m jaxserve.server.field_table > docs/fields.md"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from jaxserve.server.openapi import ROUTES
from msgspec import inspect as types

_HEAD = """# Fields of requests

Every field that a request may hold, as the server parses it. Everything else is refused by name, and so is a value
outside the range; what each field does stands in the docstrings of the types, beside them in the OpenAPI document at
`/openapi.json`. `null` means "not given". Made by `python -m jaxserve.server.field_table`; a test compares.
"""


def table() -> str:
    """The whole chapter."""
    by_kind: dict[type, list[str]] = {}
    for (method, path), route in ROUTES.items():
        if route.request is not None:
            by_kind.setdefault(route.request, []).append(f"`{method} {path}`")
    parts = [_HEAD]
    for kind, paths in by_kind.items():
        parts.append(f"## {', '.join(paths)}\n\n{_fields(kind)}")
    return "\n".join(parts)


def _fields(kind: type) -> str:
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    rows = ["| field | value |", "|---|---|"]
    for field in info.fields:
        need = " (required)" if field.required else ""
        rows.append(f"| `{field.encode_name}` | {_text(field.type).replace('|', '&#124;')}{need} |")
    return "\n".join(rows) + "\n"


def _text(info: Any) -> str:
    """A type in a few words."""
    while isinstance(info, types.Metadata):
        info = info.type
    match info:
        case types.UnionType(types=inner):
            return " or ".join(_text(one) for one in inner if not isinstance(one, types.NoneType))
        case types.NoneType():
            return "null"
        case types.BoolType():
            return "true or false"
        case types.IntType(ge=low, le=high):
            return "integer" + _range(low, high)
        case types.FloatType(gt=above, ge=low, le=high):
            return "number" + (f" above {above:g} up to {high:g}" if above is not None else _range(low, high))
        case types.StrType(min_length=low, max_length=high):
            return "text" + (f" of {low or 0} to {high} characters" if high is not None else "")
        case types.LiteralType(values=values):
            return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
        case types.ListType(item_type=inner, min_length=low, max_length=high):
            if high == 0:
                return "empty list"
            bounds = "" if low is None and high is None else f" ({low or 0} to {'any' if high is None else high})"
            return f"list{bounds} of [{_text(inner)}]"
        case types.DictType(value_type=inner):
            return "object" if isinstance(inner, types.AnyType) else f"object of [{_text(inner)}]"
        case types.StructType(cls=cls, fields=fields):
            return f"{cls.__name__} {{{', '.join(field.encode_name for field in fields)}}}"
        case _:
            return "anything"


def _range(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    return f" {'' if low is None else low} to {'' if high is None else high}"


if __name__ == "__main__":
    sys.stdout.write(table())

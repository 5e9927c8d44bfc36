"""A JSON schema as its compiler should see it: without keywords that say nothing where they stand. No jax.

Every change keeps the set of accepted values, but for one: fractions of a second end after nine digits, as a model
may otherwise write digits for ever. What remains unsupported is for the compiler to refuse, by name.
"""

from __future__ import annotations

from typing import Any

_SCHEMAS = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_SIZES = ("maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength",
          "minProperties")  # fmt: skip
_LONGEST = {"date-time": 35, "time": 24}  # characters with nine digits of a fraction and an offset
_OLD_DRAFTS = ("draft-04", "draft-06", "draft-07")
_NOTHING: dict[str, Any] = {}


def simplify(schema: dict[str, Any]) -> dict[str, Any]:
    """An equal schema. Raises RecursionError for one that is nested too deeply to be read."""
    dialect = schema.get("$schema")
    is_old = isinstance(dialect, str) and any(draft in dialect for draft in _OLD_DRAFTS)
    return _simplified(schema, is_old=is_old)


def _simplified(schema: Any, *, is_old: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    if is_old and "$ref" in schema:
        # Up to draft 7 everything beside a reference is left out of account, but it may be referred to itself.
        schema = {key: value for key, value in schema.items() if key in ("$ref", "$schema", "$defs", "definitions")}
    result = {key: value for key, value in schema.items() if not _is_idle(key, value, schema)}
    longest = _LONGEST.get(result["format"]) if isinstance(result.get("format"), str) else None
    if longest is not None:
        result.setdefault("maxLength", longest)
    for key, value in result.items():
        if key in _SIZES and isinstance(value, float) and value.is_integer():
            result[key] = int(value)
        elif key in _LISTS and isinstance(value, list):
            result[key] = [_simplified(item, is_old=is_old) for item in value]
        elif key in _MAPS and isinstance(value, dict):
            result[key] = {name: _simplified(item, is_old=is_old) for name, item in value.items()}
        elif key in _SCHEMAS:
            result[key] = _simplified(value, is_old=is_old)
    return result


def _is_idle(key: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a keyword allows every value, given those beside it."""
    match key:
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema or (value is True or value == _NOTHING)
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "propertyNames" | "unevaluatedItems" | "unevaluatedProperties":
            return value is True or value == _NOTHING
        case "not":
            return value is False
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return value == {}
        case _:
            return False

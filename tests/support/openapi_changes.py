"""Compares two OpenAPI documents: which changes could break a client of the earlier one. Pure.

A client breaks if something that it sends is refused, or if something that it reads is gone or has
another type. Additions break none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]
_METHODS = ("get", "put", "post", "delete", "patch", "head")
_SUCCESSES = ("200", "201", "202", "204")


def breaking_changes(before: Document, now: Document) -> list[str]:
    """A line for each change, sorted. A schema is named once, however many operations use it."""
    return sorted({*_operations(before, now), *_schemas(before, now)})


def _operations(before: Document, now: Document) -> Iterator[str]:
    for path, operations in before["paths"].items():
        for method in _METHODS:
            old, name = operations.get(method), f"{method.upper()} {path}"
            if old is None:
                continue
            new = now["paths"].get(path, {}).get(method)
            if new is None:
                yield f"{name}: removed"
                continue
            yield from _parameters(name, old, new)
            yield from _answers(name, old, new)


def _parameters(name: str, old: Document, new: Document) -> Iterator[str]:
    before = {(item["in"], item["name"]): item for item in old.get("parameters", ())}
    now = {(item["in"], item["name"]): item for item in new.get("parameters", ())}
    for key, item in before.items():
        where, parameter = key
        if key not in now:
            yield f"{name}: {where} parameter {parameter} removed"
        elif _of_parameter(item) != _of_parameter(now[key]):
            yield f"{name}: {where} parameter {parameter} has another type"
    for (where, parameter), item in now.items():
        if item.get("required") and not before.get((where, parameter), {}).get("required"):
            yield f"{name}: {where} parameter {parameter} is required"


def _answers(name: str, old: Document, new: Document) -> Iterator[str]:
    for status in _SUCCESSES:
        if status not in old["responses"]:
            continue
        if status not in new["responses"]:
            yield f"{name}: answer {status} removed"
            continue
        contents = new["responses"][status].get("content", {})
        for media_type, content in old["responses"][status].get("content", {}).items():
            if media_type not in contents:
                yield f"{name}: answer {status} is not {media_type}"
            elif _kind(content["schema"]) != _kind(contents[media_type]["schema"]):
                yield f"{name}: answer {status} is another document"


def _schemas(before: Document, now: Document) -> Iterator[str]:
    schemas = now["components"]["schemas"]
    for name, old in before["components"]["schemas"].items():
        if name not in schemas:
            continue  # operations name their documents
        new = schemas[name]
        fields = new.get("properties", {})
        for field, schema in old.get("properties", {}).items():
            if field not in fields:
                yield f"{name}.{field} removed"
            elif _kind(schema) != _kind(fields[field]):
                yield f"{name}.{field} has another type"
        missing = set(old.get("enum", ())) - set(new.get("enum", ()))
        yield from (f"{name}: value {value} removed" for value in missing)


def _of_parameter(parameter: Document) -> Any:
    """The kind of what may be sent: whether it may be left out is no part of it."""
    schema = parameter["schema"]
    given = [item for item in schema.get("anyOf", [schema]) if item.get("type") != "null"]
    return sorted((_kind(item) for item in given), key=repr)


def _kind(schema: Any) -> Any:
    """What a client depends on: types and references, without descriptions, titles and limits."""
    if not isinstance(schema, Mapping):
        return schema
    kept = ("type", "format", "$ref", "items", "additionalProperties", "anyOf", "prefixItems")
    found = {key: schema[key] for key in kept if key in schema}
    if "anyOf" in found:
        found["anyOf"] = sorted((_kind(item) for item in found["anyOf"]), key=repr)
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = _kind(found[key])
    return found

"""The reference pages of the site, made from the code while it is built: nothing in them is written
by hand, so nothing in them can be out of date."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from holdfast.cli.main import build
from holdfast.rest import openapi
from holdfast.rest.metric_series import SERIES
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.policy import decision_table

METHODS = ("get", "post", "put", "patch", "delete")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    return {
        "spec": "\n".join(_spec()),
        "cli": _command_line(),
        "rest": "\n".join(_rest(openapi.document())),
        "metrics": "\n".join(_metrics()),
        "decisions": f"# Decision table\n\n{decision_table.table()}\n",
    }


def _spec() -> Iterator[str]:
    schema = JobSpec.model_json_schema(by_alias=True)
    yield "# Job spec\n\nA YAML or JSON document. Unknown keys are refused.\n"
    yield from _section("", schema, schema["$defs"])


def _section(path: str, schema: dict[str, Any], known: dict[str, Any]) -> Iterator[str]:
    if path:
        yield f"\n## `{path}`\n"
        yield f"{_cell(schema.get('description', ''))}\n"
    yield "| Key | Type | Default | |\n|---|---|---|---|"
    below: list[tuple[str, dict[str, Any]]] = []
    for name, field in schema.get("properties", {}).items():
        inner = _referred(field, known)
        if inner is not None and inner.get("properties"):
            below.append((f"{path}.{name}".lstrip("."), inner))
            continue
        needed = name in schema.get("required", ())
        default = "**needed**" if needed else f"`{_default(field)}`"
        yield f"| `{name}` | {_type(field, known)} | {default} | {_cell(_said(field))} |"
    for name, inner in below:
        yield from _section(name, inner, known)


def _referred(field: dict[str, Any], known: dict[str, Any]) -> dict[str, Any] | None:
    for one in (field, *field.get("allOf", ()), *field.get("anyOf", ())):
        if "$ref" in one:
            found: dict[str, Any] = known[one["$ref"].rpartition("/")[2]]
            return found
    return None


def _type(field: dict[str, Any], known: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(one, known) for one in field["anyOf"]))
    if "enum" in field:
        return " or ".join(f"`{one}`" for one in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        return _type(_referred(field, known) or {}, known)
    words = {"object": "mapping", "array": "list", "string": "text", "integer": "whole number"}
    return words.get(field.get("type", ""), field.get("type", "any"))


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return (
        "null"
        if default is None
        else str(default).lower()
        if default in (True, False)
        else str(default)
    )


def _said(field: dict[str, Any]) -> str:
    bounds = [
        f"{words} {field[key]}"
        for key, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in field
    ]
    return "; ".join(filter(None, (field.get("description", ""), ", ".join(bounds))))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _command_line() -> str:
    return str(build().generate_docs(output_format="markdown", heading_level=1))


def _rest(document: dict[str, Any]) -> Iterator[str]:
    yield "# REST\n\nErrors are problem documents (RFC 9457) with a stable `code`."
    yield "The document itself is served at `/api/v1/openapi.json`.\n"
    yield "| | | |\n|---|---|---|"
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method in methods:
                answers = ", ".join(sorted(methods[method]["responses"]))
                said = _cell(methods[method].get("summary", ""))
                yield f"| `{method.upper()} {path}` | {said} | {answers} |"
    for path, methods in document["paths"].items():
        for method in METHODS:
            if methods.get(method, {}).get("parameters"):
                yield f"\n## `{method.upper()} {path}`\n\n| Parameter | In | |\n|---|---|---|"
                for one in methods[method]["parameters"]:
                    said = _cell(one.get("description", ""))
                    yield f"| `{one['name']}` | {one['in']} | {said} |"


def _metrics() -> Iterator[str]:
    yield "# Metrics\n\nAt `/metrics`, in Prometheus' text format.\n"
    yield "| Name | Kind | Labels | |\n|---|---|---|---|"
    for one in SERIES:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        yield f"| `{one.name}` | {one.kind} | {labels} | {_cell(one.help)} |"

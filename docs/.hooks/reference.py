"""Generates the reference pages of the site from the code while the site is built.

No part of these pages is written by hand, so they are never out of date. Tables that are read
outside of the site too are committed: `python docs/.hooks/reference.py` writes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from holdfast.cli.hosting.server import serve
from holdfast.cli.main import build
from holdfast.rest import openapi
from holdfast.rest.monitoring.metric_series import SERIES
from holdfast_service.cluster.rank_metrics import GAUGES
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.policy import decision_table
from holdfast_service.settings import Settings
from holdfast_workers.fault_injection.kinds import FaultKind
from holdfast_workers.protocol.metrics import METRICS

DOCS = Path(__file__).parents[1]
HOOK = "docs/.hooks/reference.py"
WRITTEN = {
    "decisions": "recovery-policy.md",
    "faults": "operations/drills.md",
    "gauges": "operations/watch.md",
    "series": "operations/watch.md",
    "settings": "operations/configure.md",
}
"""The page of each committed table, which lies between two comments."""
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


def written_pages() -> dict[Path, str]:
    """The pages of WRITTEN with the tables of the present code."""
    tables = {
        "decisions": decision_table.table(),
        "faults": "\n".join(_faults()),
        "gauges": "\n".join(_gauges()),
        "series": "\n".join(_series()),
        "settings": "\n".join(_settings()),
    }
    found = {DOCS / path: (DOCS / path).read_text() for path in WRITTEN.values()}
    for name, path in WRITTEN.items():
        begin, end = f"<!-- {name}, written by {HOOK} -->", f"<!-- end of {name} -->"
        before, after = found[DOCS / path].split(begin)
        found[DOCS / path] = f"{before}{begin}\n\n{tables[name]}\n\n{end}{after.split(end)[1]}"
    return found


def _faults() -> Iterator[str]:
    yield "| Kind | Hits | What happens | Parameters |\n|---|---|---|---|"
    for kind in FaultKind:
        spec = kind.spec
        happens = ", ".join(filter(None, (spec.label, spec.detail)))
        names = ", ".join(f"`{parameter.name}`" for parameter in spec.parameters)
        yield f"| `{kind}` | {spec.victim} | {happens} | {names} |"


def _series() -> Iterator[str]:
    yield "| Series | Unit | Meaning |\n|---|---|---|"
    for metric in METRICS.values():
        yield f"| `{metric.name}` | {metric.unit} | {metric.description} |"


def _gauges() -> Iterator[str]:
    yield "| Gauge | Value |\n|---|---|"
    for gauge in GAUGES:
        yield f"| `ray_{gauge.name}` | {gauge.help} |"


def _settings() -> Iterator[str]:
    options = inspect.signature(serve).parameters
    yield "| Variable | Default | |\n|---|---|---|"
    for name, field in Settings.model_fields.items():
        value = "~/.holdfast" if name == "data_dir" else field.default
        shown = f"{value:.12g}" if isinstance(value, float) else str(value)
        default = f"`{shown.lower()}`" if isinstance(value, (bool, int, float, str)) else ""
        flag = "*" if name in options else ""
        yield f"| `HOLDFAST_{name.upper()}`{flag} | {default} | {field.description} |"


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
        inner = _referenced(field, known)
        if inner is not None and inner.get("properties"):
            below.append((f"{path}.{name}".lstrip("."), inner))
            continue
        required = name in schema.get("required", ())
        default = "**required**" if required else f"`{_default(field)}`"
        yield f"| `{name}` | {_type(field, known)} | {default} | {_cell(_description(field))} |"
    for name, inner in below:
        yield from _section(name, inner, known)


def _referenced(field: dict[str, Any], known: dict[str, Any]) -> dict[str, Any] | None:
    for variant in (field, *field.get("allOf", ()), *field.get("anyOf", ())):
        if "$ref" in variant:
            found: dict[str, Any] = known[variant["$ref"].rpartition("/")[2]]
            return found
    return None


def _type(field: dict[str, Any], known: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(variant, known) for variant in field["anyOf"]))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        return _type(_referenced(field, known) or {}, known)
    names = {"object": "mapping", "array": "list", "string": "text", "integer": "whole number"}
    return names.get(field.get("type", ""), field.get("type", "any"))


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return (
        "null"
        if default is None
        else str(default).lower()
        if default in (True, False)
        else str(default)
    )


def _description(field: dict[str, Any]) -> str:
    bounds = [
        f"{text} {field[key]}"
        for key, text in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in field
    ]
    described = str(field.get("description", "")).rstrip(".")
    return "; ".join(filter(None, (described, ", ".join(bounds))))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _command_line() -> str:
    return str(build().generate_docs(output_format="markdown", heading_level=1))


def _rest(document: dict[str, Any]) -> Iterator[str]:
    yield "# REST\n\nErrors are problem documents (RFC 9457) with a stable `code`."
    yield "The document itself is served at `/api/v1/openapi.json`.\n"
    yield "| Request | | Statuses |\n|---|---|---|"
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method in methods:
                answers = ", ".join(sorted(methods[method]["responses"]))
                summary = _cell(methods[method].get("summary", ""))
                yield f"| `{method.upper()} {path}` | {summary} | {answers} |"
    for path, methods in document["paths"].items():
        for method in METHODS:
            if methods.get(method, {}).get("parameters"):
                yield f"\n## `{method.upper()} {path}`\n\n| Parameter | In | |\n|---|---|---|"
                for parameter in methods[method]["parameters"]:
                    description = _cell(parameter.get("description", ""))
                    yield f"| `{parameter['name']}` | {parameter['in']} | {description} |"


def _metrics() -> Iterator[str]:
    yield "# Metrics\n\nExported at `/metrics`, in Prometheus' text format.\n"
    yield "| Name | Kind | Labels | |\n|---|---|---|---|"
    for series in SERIES:
        labels = ", ".join(f"`{label}`" for label in series.labels)
        yield f"| `{series.name}` | {series.kind} | {labels} | {_cell(series.help)} |"


if __name__ == "__main__":
    for page, text in written_pages().items():
        page.write_text(text)

"""Generates the table of settings in `docs/operations/configure.md` from the settings.

`python -m holdfast.cli.hosting.settings_table docs/operations/configure.md` writes it into that
page; without a page, it is printed.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from pydantic.fields import FieldInfo

from holdfast.cli.hosting.server import serve
from holdfast_service.settings import Settings

BEGIN = "<!-- the settings, made by holdfast.cli.hosting.settings_table -->"
END = "<!-- the end of the settings -->"


def table() -> str:
    options = inspect.signature(serve).parameters
    rows = [
        f"| `HOLDFAST_{name.upper()}`{'*' if name in options else ''} "
        f"| {_default(name, field)} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join([BEGIN, "", "| Variable | Default | |", "|---|---|---|", *rows, "", END])


def _default(name: str, field: FieldInfo) -> str:
    value = "~/.holdfast" if name == "data_dir" else field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (str, int, float)):
        return f"`{value:.12g}`" if isinstance(value, float) else f"`{value}`"
    return ""  # unset, or nothing


def updated_page(page: str) -> str:
    """The page with the current table. Raises ValueError if a marker is missing."""
    start, stop = page.index(BEGIN), page.index(END) + len(END)
    return page[:start] + table() + page[stop:]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(updated_page(path.read_text()))
    if not sys.argv[1:]:
        print(table())

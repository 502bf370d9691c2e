"""Parses a user's YAML document (JSON is a subset of YAML) into plain values.

The result consists of mappings, lists and scalars only. Aliases are refused (a short text could
expand to gigabytes), and so are duplicate keys (one of them would be ignored silently).
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_DEPTH = 50
MAX_NODES = 4000
"""Number of keys and values; a spec with every option has a few hundred."""
MAX_BITS = 1024
"""Size of an integer; `1:1:1:...`, in base 60, may have any number of bits."""


class DocumentError(ValueError):
    """The text is not a valid document; the message has the place and a remedy."""


class _Loader(yaml.SafeLoader):
    depth = 0
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise DocumentError(f"{where}: aliases (*{event.anchor}) are not allowed; write it out")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise DocumentError(f"{where}: more than {MAX_NODES} keys and values")
        if self.depth >= MAX_DEPTH:
            raise DocumentError(f"{where}: nested deeper than {MAX_DEPTH} levels")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def fetch_flow_collection_start(self, token_class: type[yaml.Token]) -> None:
        """Limits the depth here, too: the scanner runs ahead of the composer, at a cost that grows
        with the square of the depth."""
        if self.flow_level >= MAX_DEPTH:
            raise DocumentError(f"line {self.line + 1}: nested deeper than {MAX_DEPTH} levels")
        super().fetch_flow_collection_start(token_class)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > MAX_BITS:
            raise DocumentError(f"line {node.start_mark.line + 1}: a number with too many digits")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise DocumentError(f"line {line}: key {key.value!r} is given twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read(text: str | bytes) -> dict[str, Any]:
    """Parse `text` as a mapping. Raises DocumentError."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DocumentError(f"{where}{error.problem or 'not YAML or JSON'}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(f"not YAML or JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise DocumentError("a job spec must be a mapping of names to values")
    return value


def set_path(document: dict[str, Any], assignment: str) -> None:
    """Apply `path.to.key=value` to `document`; the value is YAML. Raises DocumentError."""
    path, equals, text = assignment.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise DocumentError(f"{assignment!r}: write path.to.key=value")
    section = document
    for key in keys[:-1]:
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            raise DocumentError(f"{path}: {key} is not a section")
        section = inner
    section[keys[-1]] = read(f"value: {text}")["value"]

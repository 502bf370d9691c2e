"""Reads a user's JSON or YAML document as plain values (what JSON can express, and no more), and
writes YAML.

Keys are text, and none is given twice (one of the two would be ignored silently). Of YAML, aliases
are refused (a short text could expand to gigabytes) and so are tags; dates, numbers in base 60 and
merge keys are text, as in YAML 1.2. Depth and number of values are limited in both formats. Any
other text raises DocumentError, whatever its bytes are.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import yaml

from holdfast_service.job_model.spec_document import MAX_DEPTH, MAX_VALUES, size_fault

MAX_BITS = 1024
"""Size of an integer in YAML."""
_TYPES = "tag:yaml.org,2002:"
_STR = f"{_TYPES}str"
_NUMBERS = (f"{_TYPES}int", f"{_TYPES}float")
_PLAIN_TYPES = (*_NUMBERS, f"{_TYPES}bool", f"{_TYPES}null")


class DocumentError(ValueError):
    """The text is not a valid document; the message has the place and a remedy."""


class _Loader(yaml.SafeLoader):
    depth = 0
    values = 0
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, form) for tag, form in forms if tag in _PLAIN_TYPES]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        where = _line(event)
        if isinstance(event, yaml.AliasEvent):
            raise DocumentError(
                f"{where}: aliases (*{event.anchor:.40}) are not allowed; write it out"
            )
        if event.tag is not None:
            raise DocumentError(f"{where}: tags ({event.tag:.40}) are not allowed; remove it")
        self.values += 1
        if self.values > MAX_VALUES:
            raise DocumentError(f"{where}: more than {MAX_VALUES} keys and values")
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

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        """Numbers in base 60 (`1:30`) are text: their cost grows with the square of their length,
        and hardly anybody expects a number."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return _STR if tag in _NUMBERS and ":" in value else tag

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        try:
            value: int = super().construct_yaml_int(node)
        except ValueError as error:
            raise DocumentError(f"{_line(node)}: a number with too many digits, or none") from error
        if value.bit_length() > MAX_BITS:
            raise DocumentError(f"{_line(node)}: a number with too many digits")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise DocumentError(f"{_line(key)}: a key must be text")
            if key.tag != _STR:
                raise DocumentError(
                    f"{_line(key)}: key {key.value:.40} is not text: write '{key.value:.40}'"
                )
            if key.value in seen:
                raise DocumentError(f"{_line(key)}: key {key.value!r} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_COMMENT = re.compile(r"""^[^"'\[{]*(?<!\S)#""")
"""The start of a comment, outside of quotes and brackets."""

_Loader.add_constructor(f"{_TYPES}int", _Loader.construct_yaml_int)


_BREAKS = "\x85\u2028\u2029"
"""The line breaks of Unicode, which a reader of YAML would replace by others."""
_OVERRIDES = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Characters that change the direction of a text: a terminal shows another text than there is."""


class _Dumper(yaml.SafeDumper):
    """Quotes what is escaped: what PyYAML escapes by itself, and the overrides."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        odd = any(character in _BREAKS or ord(character) in _OVERRIDES for character in data)
        return self.represent_scalar(_STR, data, style='"' if odd else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def read(text: bytes) -> dict[str, Any]:
    """Parse `text`, which is JSON or YAML, as a mapping. Raises DocumentError."""
    try:
        return read_json(text)
    except DocumentError:
        return read_yaml(text)  # reports the errors of JSON, too


def read_json(text: str | bytes) -> dict[str, Any]:
    """Parse JSON as a mapping. Raises DocumentError."""
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=_distinct, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise DocumentError(
            f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        ) from error
    except RecursionError as error:
        raise DocumentError(f"nested deeper than {MAX_DEPTH} levels") from error
    except DocumentError:
        raise
    except ValueError as error:
        raise DocumentError(f"not JSON: {error}") from error
    fault = size_fault(value)
    if fault is not None:
        raise DocumentError(fault)
    return _mapping(value)


def read_yaml(text: str | bytes) -> dict[str, Any]:
    """Parse YAML as a mapping. Raises DocumentError."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DocumentError(f"{where}{error.problem or 'not YAML':.200}") from error
    except DocumentError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        # An escape as "\UFFFFFFFF" is an OverflowError.
        raise DocumentError(f"not YAML: {error}") from error
    return _mapping(value)


def write_yaml(value: Any) -> str:
    """Plain values as YAML that is easy to read, and that reads as the same values again."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text.translate(_OVERRIDES)


def set_path(document: dict[str, Any], assignment: str) -> None:
    """Apply `path.to.key=value` to `document`. The value is YAML, or else text. Raises
    DocumentError."""
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
    section[keys[-1]] = _value_of(text)


def _value_of(text: str) -> Any:
    """The value in YAML; the text itself, if YAML refuses it or reads a part of it only."""
    if _COMMENT.search(text):
        return text
    try:
        document = read_yaml(f"value: {text}")
    except DocumentError:
        return text
    return document["value"] if len(document) == 1 else text


def _line(place: Any) -> str:
    """The line where a node or an event of YAML begins."""
    return f"line {place.start_mark.line + 1}"


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DocumentError("the document must be a mapping of names to values")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DocumentError(f"key {key!r} is given twice")
        found[key] = value
    return found


def _refuse(constant: str) -> NoReturn:
    raise DocumentError(f"{constant} is not JSON: write a number, or null")

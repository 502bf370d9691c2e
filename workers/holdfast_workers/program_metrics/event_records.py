"""The records of a TensorBoard event file: framing with checksums, and the scalars of an event.

Pure. The framing: length (8 bytes), its masked CRC-32C (4), the data, their masked CRC-32C (4), all
little endian. The data are a protocol buffer, of which only the fields of scalars are read. Source:
TensorFlow, `core/lib/io/record_writer.h`, `core/util/event.proto`, `core/framework/summary.proto`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

LARGEST = 1 << 16
"""Bytes of a record; a larger one contains no scalar, such as an image, and is skipped."""
HEADER = 12
_FOOTER = 4
_MASK = 0xA282EAD8


class DamagedRecord(ValueError):
    """The bytes are not those of a record."""


@dataclass(frozen=True)
class Scalar:
    """A number that a program logged."""

    at: float
    step: int
    tag: str
    value: float


def record_bytes(header: bytes) -> int:
    """The length of a whole record, from its first `HEADER` bytes. Raises DamagedRecord."""
    length, checksum = struct.unpack("<QI", header)
    if _masked_crc(header[:8]) != checksum:
        raise DamagedRecord("the checksum of a record's length is wrong")
    return HEADER + int(length) + _FOOTER


def scalars(record: bytes) -> list[Scalar]:
    """The scalars of a whole record. Raises DamagedRecord."""
    payload = record[HEADER:-_FOOTER]
    (checksum,) = struct.unpack("<I", record[-_FOOTER:])
    if _masked_crc(payload) != checksum:
        raise DamagedRecord("the checksum of a record is wrong")
    try:
        return list(_scalars_of_event(payload))
    except (struct.error, IndexError) as error:
        raise DamagedRecord(f"a record cannot be read: {error}") from error


def _scalars_of_event(event: bytes) -> Iterator[Scalar]:
    at, step, summaries = 0.0, 0, []
    for number, value in _fields(event):
        if number == 1 and isinstance(value, float):
            at = value
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            if number == 1 and isinstance(value, bytes):
                tag, found = _value_of_summary(value)
                if found is not None:
                    yield Scalar(at, step, tag, found)


def _value_of_summary(message: bytes) -> tuple[str, float | None]:
    tag, found = "", None
    for number, value in _fields(message):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, float):
            found = value
        elif number == 8 and isinstance(value, bytes):
            found = _value_of_tensor(value)
    return tag, found


def _value_of_tensor(message: bytes) -> float | None:
    """The number of a tensor of one float; None for any other tensor."""
    floats: list[float] = []
    kind = 0
    for number, value in _fields(message):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5) and isinstance(value, bytes) and len(value) == 4:
            floats += struct.unpack("<f", value)
        elif number == 5 and isinstance(value, float):
            floats.append(value)
    return floats[0] if kind == 1 and len(floats) == 1 else None


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(number, value) of each field of a protocol buffer. Raises struct.error, IndexError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
                yield key >> 3, value
            case 1:
                yield key >> 3, struct.unpack_from("<d", message, at)[0]
                at += 8
            case 5:
                yield key >> 3, struct.unpack_from("<f", message, at)[0]
                at += 4
            case 2:
                length, at = _varint(message, at)
                if at + length > len(message):
                    raise IndexError("a field ends after its message")
                yield key >> 3, message[at : at + length]
                at += length
            case kind:
                raise IndexError(f"there is no kind {kind} of fields")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise IndexError("a number has too many bytes")


def _masked_crc(content: bytes) -> int:
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


@functools.cache
def _crc_table() -> tuple[int, ...]:
    """The table of CRC-32C (Castagnoli), reflected."""
    found = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        found.append(value)
    return tuple(found)

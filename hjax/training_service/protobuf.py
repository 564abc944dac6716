"""Protocol buffers' wire format: as much as the Tinker API's messages need, without a library.

https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator

from hjax.errors import ConfigError

Value = int | float | bytes
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_LONGEST_VARINT = 10
# Fields of a message at most, unless more are expected.
MOST_FIELDS = 16
_DAMAGED = "the body is no protobuf message of the expected kind"


def read_fields(data: bytes | memoryview, most: int = MOST_FIELDS) -> Iterator[tuple[int, Value]]:
    """The fields of a message, as (number, value): an int, a float, or bytes of anything longer.

    Raises:
      ConfigError: the message is damaged, or has more fields than ``most``.
    """
    view, at, count = memoryview(data), 0, 0
    while at < len(view):
        count += 1
        if count > most:
            raise ConfigError(f"the body has a message of more than {most} fields")
        tag, at = _read_varint(view, at)
        number, kind = tag >> 3, tag & 7
        value: Value
        if kind == _VARINT:
            value, at = _read_varint(view, at)
        elif kind in (_DOUBLE, _FLOAT):
            size, form = (8, "<d") if kind == _DOUBLE else (4, "<f")
            if at + size > len(view):
                raise ConfigError(_DAMAGED)
            (value,) = struct.unpack_from(form, view, at)
            at += size
        elif kind == _BYTES:
            size, at = _read_varint(view, at)
            if at + size > len(view):
                raise ConfigError(_DAMAGED)
            value, at = bytes(view[at : at + size]), at + size
        else:
            raise ConfigError(_DAMAGED)
        yield number, value


def last_fields(data: bytes) -> dict[int, Value]:
    """The last value of each field of a message."""
    return dict(read_fields(data))


def read_ints(value: Value) -> list[int]:
    """A repeated integer: packed, or one of its values."""
    if isinstance(value, int):
        return [value]
    view, at, found = memoryview(as_bytes(value)), 0, []
    while at < len(view):
        one, at = _read_varint(view, at)
        found.append(one)
        if len(found) > MOST_FIELDS:
            raise ConfigError(f"the body has a list of more than {MOST_FIELDS} whole numbers")
    return found


def as_bytes(value: Value) -> bytes:
    """A field's bytes; ConfigError if it is a number."""
    if not isinstance(value, bytes):
        raise ConfigError(_DAMAGED)
    return value


def as_text(value: Value) -> str:
    """A field's text; ConfigError if it is none."""
    try:
        return as_bytes(value).decode()
    except UnicodeDecodeError:
        raise ConfigError(_DAMAGED) from None


def as_int32(value: Value) -> int:
    """A field's signed number; ConfigError if it is none."""
    if not isinstance(value, int):
        raise ConfigError(_DAMAGED)
    return value - 2**64 if value >= 2**63 else value


def as_number(value: Value) -> float:
    """A field's floating-point number; ConfigError if it is none."""
    if not isinstance(value, float):
        raise ConfigError(_DAMAGED)
    return value


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_LONGEST_VARINT):
        if at >= len(view):
            break
        byte, at = view[at], at + 1
        value |= (byte & 0x7F) << (7 * shift)
        if not byte & 0x80:
            return value, at
    raise ConfigError(_DAMAGED)


def bytes_field(number: int, value: bytes | str) -> bytes:
    """A field of text, bytes or a message."""
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def int_field(number: int, value: int) -> bytes:
    """A field of a whole number of 0 or more."""
    return varint(number << 3 | _VARINT) + varint(value)


def double_field(number: int, value: float) -> bytes:
    """A field of a double."""
    return varint(number << 3 | _DOUBLE) + struct.pack("<d", value)


def varint(value: int) -> bytes:
    """A whole number of 0 or more, as a varint."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)

"""A serialised ModelProto without its weights: the bytes that protobuf must parse, and where the weights lie.

protobuf copies every `raw_data` it parses, and once more each time it is read. Walking the wire format far enough to cut
the large ones out (model -> graph -> initializer -> raw_data) keeps a model's weights in the mapped file, once.
Source of the format: https://protobuf.dev/programming-guides/encoding; the field numbers are onnx.proto's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
CUT_BYTES = 4096  # smaller ones are cheaper to copy than to track


class _NotPlain(Exception):  # noqa: N818 - never leaves this module
    """The bytes are malformed, or use something too rare to follow: protobuf shall judge them whole."""


@dataclass(frozen=True)
class Stripped:
    """`model` is a serialised ModelProto; `spans[i]` is where initializer i's raw data lies in the original, or None."""

    model: bytes | memoryview
    spans: tuple[tuple[int, int] | None, ...]


def strip_weights(data: memoryview) -> Stripped:
    """`data` without the large `raw_data` of its graph's initializers; `data` itself if there are none to cut."""
    spans: list[tuple[int, int] | None] = []
    try:
        parts: list[bytes | memoryview] = []
        for number, kind, start, value, end in _fields(data, 0, len(data)):
            if number == _GRAPH and kind == _BYTES:
                parts.append(_message(_GRAPH, _graph(data, value, end, spans)))
            else:
                parts.append(data[start:end])
    except _NotPlain:
        return Stripped(data, ())
    return Stripped(b"".join(parts), tuple(spans)) if any(spans) else Stripped(data, ())


def _graph(data: memoryview, start: int, stop: int, spans: list[tuple[int, int] | None]) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = []
    for number, kind, field_start, value, end in _fields(data, start, stop):
        if number != _INITIALIZER or kind != _BYTES:
            parts.append(data[field_start:end])
            continue
        rest: list[bytes | memoryview] = []
        span: tuple[int, int] | None = None
        for inner, inner_kind, inner_start, inner_value, inner_end in _fields(data, value, end):
            if inner == _RAW_DATA and inner_kind == _BYTES and inner_end - inner_value >= CUT_BYTES:
                span = (inner_value, inner_end)
            elif inner == _RAW_DATA and span is not None:
                raise _NotPlain  # protobuf keeps the last of several
            else:
                rest.append(data[inner_start:inner_end])
        spans.append(span)
        parts.append(_message(_INITIALIZER, rest) if span else data[field_start:end])
    return parts


def _fields(data: memoryview, at: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(field number, wire type, where the field starts, where its value starts, where it ends) of each field."""
    while at < stop:
        start = at
        tag, at = _varint(data, at, stop)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(data, at, stop)
            end = at + size
        elif kind == _VARINT:
            _, end = _varint(data, at, stop)
        elif kind in (_FIXED64, _FIXED32):
            end = at + (8 if kind == _FIXED64 else 4)
        else:
            raise _NotPlain
        if end > stop or tag >> 3 == 0:
            raise _NotPlain
        yield tag >> 3, kind, start, at, end
        at = end


def _varint(data: memoryview, at: int, stop: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            raise _NotPlain
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise _NotPlain


def _message(number: int, parts: list[bytes | memoryview]) -> bytes:
    """A length-delimited field holding the parts."""
    body = b"".join(parts)
    return _encoded(number << 3 | _BYTES) + _encoded(len(body)) + body


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)

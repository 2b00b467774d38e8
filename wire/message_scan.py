"""Checks counts, nesting and field numbers of an encoded message before protobuf parses it.

A parser allocates an object for every two bytes of empty submessages and holds the GIL meanwhile. The scan
stops at the first violation. Encoding: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from wire.errors import InvalidRequest, MessageTooLarge

MAX_DEPTH = 32
"""Maximum nesting of messages."""

_CONTINUED = bytes(range(0x80, 0x100))
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPES = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64), _FIXED64),
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32), _FIXED32),
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    **dict.fromkeys((FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES), _LENGTH),
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
}
_NUM_BYTES = {_FIXED64: 8, _FIXED32: 4}


class UnknownFields(Enum):
    """Handling of fields that the schema does not contain."""

    REFUSE = auto()
    SKIP = auto()


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    max_count: int | None  # None: not a repeated field
    wire_type: int
    is_packed: bool = False
    message: "_Message | None" = None


@dataclass(frozen=True, slots=True)
class _Message:
    name: str
    fields: dict[int, _Field]  # by tag: number and wire type


class MessageScan:
    """Scan for one message type. Stateless and thread-safe."""

    def __init__(
        self,
        descriptor: Descriptor,
        *,
        max_fields: int,
        max_counts: Mapping[str, int] | None = None,
        unknown: UnknownFields = UnknownFields.REFUSE,
    ) -> None:
        """`max_fields` limits all fields together, `max_counts` the elements of repeated fields by full name.

        A full name is, for example, "stageline.v1.TokenIds.ids". Packed elements count.
        """
        self._max_fields = max_fields
        self._max_counts = dict(max_counts or {})
        self._unknown = unknown
        self._messages: dict[str, _Message] = {}
        self._root = self._message(descriptor)
        unused = self._max_counts.keys() - {
            field.name for message in self._messages.values() for field in message.fields.values()
        }
        if unused:
            raise ValueError(f"{descriptor.full_name} has no field {', '.join(sorted(unused))}")

    def check(self, data: bytes) -> None:
        """Raise MessageTooLarge, InvalidRequest (a field would be ignored) or DecodeError."""
        _FieldWalker(data, self._max_fields, self._unknown).message(self._root, 0, len(data), depth=1)

    def _message(self, descriptor: Descriptor) -> _Message:
        if (known := self._messages.get(descriptor.full_name)) is not None:
            return known
        message = self._messages[descriptor.full_name] = _Message(descriptor.name, {})
        for field in descriptor.fields:
            self._add(message.fields, field)
        return message

    def _add(self, fields: dict[int, _Field], field: FieldDescriptor) -> None:
        wire_type = _WIRE_TYPES.get(field.type, _VARINT)
        # Map entries have only key and value; protobuf drops all other fields.
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = None
        max_count = self._max_counts.get(field.full_name, self._max_fields) if field.is_repeated else None
        message = None if inner is None else self._message(inner)
        rule = _Field(field.full_name, max_count, wire_type, message=message)
        fields[field.number << 3 | wire_type] = rule
        if field.is_repeated and wire_type != _LENGTH:
            packed = _Field(field.full_name, max_count, wire_type, is_packed=True)
            fields[field.number << 3 | _LENGTH] = packed


class _FieldWalker:
    def __init__(self, data: bytes, max_fields: int, unknown: UnknownFields) -> None:
        self._data = data
        self._max_fields = max_fields
        self._unknown = unknown
        self._num_fields = 0
        self._counts: dict[str, int] = {}

    def message(self, message: _Message, start: int, end: int, *, depth: int) -> None:
        """Scan the fields in [start, end)."""
        if depth > MAX_DEPTH:
            raise MessageTooLarge(f"messages are nested too deeply, the limit is {MAX_DEPTH}")
        data, find, position = self._data, message.fields.get, start
        while position < end:
            tag, position = data[position], position + 1
            if tag >= 0x80:
                tag, position = self._varint(position - 1, end)
            field = find(tag)
            if field is None:
                begin, position = position, self._skip_unknown(message, tag, position, end)
            elif tag & 7 == _LENGTH and position < end and data[position] < 0x80:  # the common case, inlined
                begin = position + 1
                position = begin + data[position]
            else:
                begin, position = self._bounds(tag & 7, position, end)
            if position > end:
                raise DecodeError("truncated")
            self._num_fields += 1
            if self._num_fields > self._max_fields:
                raise MessageTooLarge(f"message has too many fields, the limit is {self._max_fields}")
            if field is not None:
                self._enter(field, begin, position, depth)

    def _enter(self, field: _Field, begin: int, end: int, depth: int) -> None:
        if field.max_count is not None:
            self._count(field, _num_packed(self._data, field, begin, end) if field.is_packed else 1)
        if field.message is not None:
            self.message(field.message, begin, end, depth=depth + 1)

    def _count(self, field: _Field, number: int) -> None:
        count = self._counts[field.name] = self._counts.get(field.name, 0) + number
        if field.max_count is not None and count > field.max_count:
            short = ".".join(field.name.split(".")[-2:])
            raise MessageTooLarge(f"{short} has at least {count} entries, the limit is {field.max_count}")

    def _skip_unknown(self, message: _Message, tag: int, position: int, end: int) -> int:
        if not tag >> 3:
            raise DecodeError("field number 0")
        if self._unknown is UnknownFields.REFUSE:
            raise InvalidRequest(f"{message.name} has field {tag >> 3}, unknown to this version")
        return self._bounds(tag & 7, position, end)[1]

    def _bounds(self, wire_type: int, position: int, end: int) -> tuple[int, int]:
        """Return start and end of the value whose tag ends at `position`."""
        if wire_type == _VARINT:
            return position, self._varint(position, end)[1]
        if wire_type == _LENGTH:
            length, position = self._varint(position, end)
            return position, position + length
        if (num_bytes := _NUM_BYTES.get(wire_type)) is None:
            raise DecodeError(f"wire type {wire_type}")
        return position, position + num_bytes

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = shift = 0
        for index in range(position, min(position + 10, end)):
            byte = self._data[index]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, index + 1
            shift += 7
        raise DecodeError("truncated or too long varint")


def _num_packed(data: bytes, field: _Field, begin: int, end: int) -> int:
    if (num_bytes := _NUM_BYTES.get(field.wire_type)) is not None:
        return (end - begin) // num_bytes
    return len(data[begin:end].translate(None, _CONTINUED))

"""Mutations of protobuf messages: of their fields, and of the bytes that encode them.

Encoding: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.mutations import BIG_NUMBERS, FLOATS, NUMBERS, any_text, mutate_bytes, mutate_text
from tests.hostile_messages import inside, varint

Fields: TypeAlias = list[tuple[bytes, bytes]]
"""Tag and content, with its length, of each field."""

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def mutate_message(message: Message, random: Random) -> bytes:
    """Encode a copy of `message` with changed fields, changed encoding or both."""
    copy = type(message)()
    copy.CopyFrom(message)
    kind = random.random()
    if kind < 0.75:
        for _ in range(random.randint(1, 3)):
            _change(copy, random)
    data = copy.SerializeToString()
    if kind >= 0.6:
        data = mutate_encoding(data, random)
    return mutate_bytes(data, random) if kind >= 0.9 else data


def _change(message: Message, random: Random) -> None:
    """Change one field, or one of a message inside, which is preferred if there are any."""
    present = [(field, value) for field, value in message.ListFields() if _is_message(field)]
    if present and random.random() < 0.7:
        field, value = random.choice(present)
        inner = _entries(field, value)
        if inner and random.random() < 0.8:
            _change(random.choice(inner), random)
            return
    fields = message.DESCRIPTOR.fields
    if fields:
        _change_field(message, random.choice(fields), random)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not _is_map(field)


def _entries(field: FieldDescriptor, value: Any) -> Sequence[Message]:
    return list(value) if field.is_repeated else [value]


def _change_field(message: Message, field: FieldDescriptor, random: Random) -> None:
    value: Any = getattr(message, field.name)
    if random.random() < 0.15:
        message.ClearField(field.name)
    elif _is_map(field):
        _change_map(value, field, random)
    elif field.is_repeated:
        _change_repeated(value, field, random)
    elif field.message_type is not None:
        value.SetInParent()
    else:
        setattr(message, field.name, _scalar(field, value, random))


def _change_map(value: Any, field: FieldDescriptor, random: Random) -> None:
    key, item = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    if item.message_type is not None:
        value[_scalar(key, key.default_value, random)].SetInParent()
    else:
        value[_scalar(key, key.default_value, random)] = _scalar(item, item.default_value, random)


def _change_repeated(value: Any, field: FieldDescriptor, random: Random) -> None:
    if value and random.random() < 0.3:
        del value[random.randrange(len(value)) :]
    for _ in range(random.choice((1, 2, 40))):
        if field.message_type is None:
            value.append(_scalar(field, (field.type == FieldDescriptor.TYPE_STRING and "") or 0, random))
        elif value and random.random() < 0.5:
            value.add().CopyFrom(random.choice(value))
        else:
            value.add()


def _scalar(field: FieldDescriptor, value: Any, random: Random) -> Any:
    if (bounds := _INTEGERS.get(field.cpp_type)) is not None:
        number = random.choice((*NUMBERS, *BIG_NUMBERS, value + 1 if isinstance(value, int) else 1))
        return max(bounds[0], min(number, bounds[1]))
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return random.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return random.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return mutate_bytes(bytes(value or b"\0" * 16), random)
    is_new = not isinstance(value, str) or random.random() < 0.5
    return any_text(random) if is_new else mutate_text(value, random)


def mutate_encoding(data: bytes, random: Random) -> bytes:
    """Change the fields of an encoded message: order, number, type, repetition, unknown ones, nesting."""
    fields = split(data)
    if fields is None:
        return mutate_bytes(data, random)
    for _ in range(random.randint(1, 3)):
        random.choice(_CHANGES)(fields, random)
    return b"".join(tag + content for tag, content in fields)


def split(data: bytes) -> Fields | None:
    """The fields of an encoded message; None if it is none."""
    fields: Fields = []
    position = 0
    while position < len(data):
        begin = position
        tag, position = _read_varint(data, position)
        content = position
        match tag & 7:
            case 0:
                _, position = _read_varint(data, position)
            case 1:
                position += 8
            case 2:
                size, position = _read_varint(data, position)
                position += size
            case 5:
                position += 4
            case _:
                return None
        if position > len(data):
            return None
        fields.append((data[begin:content], data[content:position]))
    return fields


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number, and the position behind it, which is behind the end of truncated data."""
    number = shift = 0
    for at in range(position, min(len(data), position + 10)):
        number |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return number, at + 1
        shift += 7
    return number, len(data) + 1


def _repeat(fields: Fields, random: Random) -> None:
    if fields:
        fields += [random.choice(fields)] * random.choice((1, 2, 300))


def _drop(fields: Fields, random: Random) -> None:
    if fields:
        del fields[random.randrange(len(fields))]


def _shuffle(fields: Fields, random: Random) -> None:
    random.shuffle(fields)


def _retag(fields: Fields, random: Random) -> None:
    if fields:
        at = random.randrange(len(fields))
        tag = random.choice((random.randint(0, 40), 99, 18_999, 2**29 - 1)) << 3 | random.randrange(8)
        fields[at] = (varint(tag), fields[at][1])


def _add_unknown(fields: Fields, random: Random) -> None:
    content = random.choice(
        (varint(1 << 3 | 3) * 90 + varint(1 << 3 | 4) * 90, inside(99, b"x"), b"\xff" * 11)
    )
    fields.insert(random.randint(0, len(fields)), (b"", content))


def _nest(fields: Fields, random: Random) -> None:
    """Wrap everything into one field many times."""
    data = b"".join(tag + content for tag, content in fields)
    number = random.randint(1, 12)
    for _ in range(random.choice((1, 3, 40, 110))):
        data = inside(number, data)
    fields[:] = [(b"", data)]


def _change_content(fields: Fields, random: Random) -> None:
    """Change the content of a field, and its length with it: a message inside stays readable."""
    if not fields:
        return
    at = random.randrange(len(fields))
    tag, content = fields[at]
    if tag and tag[-1] & 7 == 2:
        _, begin = _read_varint(content, 0)
        changed = random.choice((mutate_encoding, mutate_bytes))(content[begin:], random)
        fields[at] = (tag, varint(len(changed)) + changed)
    else:
        fields[at] = (tag, mutate_bytes(content, random))


_CHANGES: Sequence[Callable[[Fields, Random], None]] = (
    _repeat,
    _drop,
    _shuffle,
    _retag,
    _add_unknown,
    _nest,
    _change_content,
    _change_content,
)

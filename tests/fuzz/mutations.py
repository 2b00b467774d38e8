"""Mutations of bytes, JSON values and texts, reproducible from a `Random`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

Json: TypeAlias = Any
MAX_BYTES = 200_000
"""Cases stay below this, so that a run of many measures parsers, not copies."""

NUMBERS = (0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 32_767, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
BIG_NUMBERS = (2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30, 10**400)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e308, 3.4e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    " ",
    "\0",
    "a",
    "..",
    "../../etc/passwd",
    "/dev/zero",
    "a\nb\r\nc",
    "\x1b[2J",
    "é",
    "🙂",
    "\u202e",
    "%s%n{}{0}",
    "{{ 7 * 7 }}",
    "x" * 300,
    "y" * 5_000,
    "null",
    "true",
    "-1",
)
SURROGATES = ("\ud800", "\udc80", "a\udfffb")
"""JSON can have them, UTF-8 cannot."""
BROKEN_UTF8 = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe2\x82")


def mutate_bytes(data: bytes, random: Random, *, most: int = 4) -> bytes:
    """Apply one to `most` changes of bytes: bits, numbers, parts removed, repeated or swapped."""
    mutated = bytearray(data)
    for _ in range(random.randint(1, most)):
        random.choice(_CHANGES)(mutated, random)
    return bytes(mutated[:MAX_BYTES])


def _span(data: bytearray, random: Random) -> tuple[int, int]:
    begin = random.randrange(len(data) + 1)
    return begin, min(len(data), begin + random.choice((1, 2, 4, 8, 16, 64, 512)))


def _flip(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set_byte(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def _set_number(data: bytearray, random: Random) -> None:
    size = random.choice((2, 4, 8))
    if len(data) >= size:
        begin = random.randrange(len(data) - size + 1)
        number = random.choice((*NUMBERS, 2**63, 2**64 - 1)) % 2 ** (8 * size)
        data[begin : begin + size] = number.to_bytes(size, random.choice(("little", "big")))


def _truncate(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data) + 1) :]


def _drop(data: bytearray, random: Random) -> None:
    begin, end = _span(data, random)
    del data[begin:end]


def _repeat(data: bytearray, random: Random) -> None:
    begin, end = _span(data, random)
    data[end:end] = data[begin:end] * random.choice((1, 1, 2, 100))


def _move(data: bytearray, random: Random) -> None:
    begin, end = _span(data, random)
    part = data[begin:end]
    del data[begin:end]
    at = random.randrange(len(data) + 1)
    data[at:at] = part


def _insert(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.choice((random.randbytes(random.randint(1, 16)), random.choice(BROKEN_UTF8)))


_CHANGES: Sequence[Callable[[bytearray, Random], None]] = (
    _flip,
    _flip,
    _set_byte,
    _set_number,
    _truncate,
    _drop,
    _repeat,
    _move,
    _insert,
)


def any_text(random: Random) -> str:
    """A text that parsers stumble over; without surrogates."""
    return random.choice(TEXTS)


def any_json(random: Random) -> Json:
    """A value of any type and size."""
    match random.randrange(9):
        case 0:
            return random.choice(NUMBERS)
        case 1:
            return random.choice(BIG_NUMBERS)
        case 2:
            return random.choice(FLOATS)
        case 3:
            return random.choice((*TEXTS, *SURROGATES))
        case 4:
            return random.choice((None, True, False))
        case 5:
            return random.choice(([], {}, [[]], {"": {}}, [None] * 50, {"a": [{}]}))
        case 6:
            return _nested(random)
        case 7:
            return [random.choice(NUMBERS) for _ in range(random.choice((1, 3, 400)))]
        case _:
            return {any_text(random): random.choice(NUMBERS) for _ in range(random.choice((1, 3, 40)))}


def _nested(random: Random) -> Json:
    value: Json = 1
    is_list = random.random() < 0.5
    for _ in range(random.choice((5, 40, 150, 400))):
        value = [value] if is_list else {"a": value}
    return value


def mutate_json(value: Json, random: Random, *, most: int = 3) -> Json:
    """A copy of `value` with one to `most` changes anywhere in it."""
    for _ in range(random.randint(1, most)):
        value = _changed(value, random)
    return value


def _changed(value: Json, random: Random) -> Json:
    if isinstance(value, dict) and value and random.random() < 0.85:
        return _changed_object(value, random)
    if isinstance(value, list) and value and random.random() < 0.85:
        return _changed_list(value, random)
    return _changed_leaf(value, random)


def _changed_object(value: dict[str, Json], random: Random) -> Json:
    key = random.choice(list(value))
    match random.randrange(8):
        case 0:
            return {name: item for name, item in value.items() if name != key}
        case 1:
            other = random.choice((*value, *TEXTS, *SURROGATES, key + "x", key.upper()))
            return {other if name == key else name: item for name, item in value.items()}
        case 2:
            return value | {key: any_json(random)}
        case 3:
            return value | {random.choice((*TEXTS, "additional")): any_json(random)}
        case _:
            return value | {key: _changed(value[key], random)}


def _changed_list(value: list[Json], random: Random) -> Json:
    at = random.randrange(len(value))
    match random.randrange(7):
        case 0:
            return value[:at] + value[at + 1 :]
        case 1:
            return value[:at] + [value[at]] * random.choice((2, 3, 100)) + value[at + 1 :]
        case 2:
            return [*value[:at], any_json(random), *value[at:]]
        case 3:
            return random.sample(value, len(value))
        case _:
            return [*value[:at], _changed(value[at], random), *value[at + 1 :]]


def _changed_leaf(value: Json, random: Random) -> Json:
    if isinstance(value, str) and random.random() < 0.6:
        return mutate_text(value, random)
    if isinstance(value, int | float) and random.random() < 0.6:
        return random.choice((*NUMBERS, *BIG_NUMBERS, *FLOATS, -value, value * 2, str(value)))
    return any_json(random)


def mutate_text(text: str, random: Random) -> str:
    """Change, repeat or replace a part of a text."""
    at = random.randrange(len(text) + 1)
    end = min(len(text), at + random.choice((0, 1, 3, 10)))
    piece = random.choice((any_text(random), text[at:end] * 3, text[:at][::-1]))
    return (text[:at] + piece + text[end:])[:MAX_BYTES]


def json_bytes(value: Json, random: Random) -> bytes:
    """Encode, sometimes in forms that JSON does not allow, sometimes with changed bytes."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.7)
    match random.randrange(24):
        case 0:
            return b"\xef\xbb\xbf" + text.encode(errors="surrogatepass")
        case 1:
            return text.encode("utf-16", errors="surrogatepass")
        case 2:
            return (text + text).encode(errors="surrogatepass")
        case 3:
            return text.replace(":", ": 9" + "9" * 4400 + ', "x":', 1).encode(errors="surrogatepass")
        case 4:
            return ("[" * random.choice((500, 100_000)) + text).encode(errors="surrogatepass")
        case 5 | 6 | 7:
            return mutate_bytes(text.encode(errors="surrogatepass"), random)
        case _:
            return text.encode(errors="surrogatepass")[:MAX_BYTES]

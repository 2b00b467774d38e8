"""Items of stored responses that an input continues or refers to.

A gateway keeps nothing: items are read from the coordinator again, by the secret in their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.call import Gateway
from gateway.api.errors import ApiError, http_error, invalid
from gateway.api.responses.fields import Item, ResponseRequest, input_items, is_reference, string_of
from gateway.api.responses.reading import ResponseReading, look
from gateway.api.responses.stored import INPUT_ITEM, item_id, parse_response_id, response_of_item

MAX_REFERRED_RESPONSES = 32
"""Responses that are read for the references of one input, one after the other."""
_SHOWN_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class InputItems:
    """All items of a request, whole; the first `num_earlier` are those of its previous response."""

    items: list[Item]
    num_earlier: int


async def read_input(gateway: Gateway, fields: ResponseRequest) -> InputItems:
    """Return the items of a request, with those that it refers to. Raises ApiError, UpstreamFailure."""
    earlier = await _previous_items(gateway, fields.previous_response_id)
    given = input_items("" if fields.input is None else fields.input)
    finder = _ItemFinder(gateway, earlier)
    # From the last one: the input of a response repeats the items of those before it, which may be gone.
    own = [await finder.whole(index, item) for index, item in reversed(list(enumerate(given)))]
    return InputItems([*earlier, *reversed(own)], len(earlier))


def identified_items(reading: ResponseReading) -> list[dict[str, Any]] | None:
    """Return the items of a response's input with their ids; None if the input was too long to keep."""
    if (given := reading.stored.request.input) is None:
        return None
    identity = reading.writer.identity
    return [
        {"type": "message", **item, "id": item.get("id") or item_id(INPUT_ITEM, identity, number)}
        for number, item in enumerate(input_items(given))
    ]


async def _previous_items(gateway: Gateway, previous: str | None) -> Sequence[Item]:
    """Input and output of the previous response. Raises ApiError."""
    if previous is None:
        return ()
    try:
        reading = await look(gateway, parse_response_id(previous))
    except ApiError as error:
        raise invalid(str(error), param="previous_response_id", code="previous_response_not_found") from None
    if not reading.writer.is_over:
        raise invalid("the previous response is in progress", param="previous_response_id")
    if (given := identified_items(reading)) is None:
        raise invalid(
            "the previous response was too long to keep its input: send all items as input",
            param="previous_response_id",
        )
    return [*given, *reading.writer.items]


class _ItemFinder:
    """Finds items by their ids; each response is read once."""

    def __init__(self, gateway: Gateway, known: Sequence[Item]) -> None:
        self._gateway = gateway
        self._items: dict[str, Item] = {}
        self._num_read = 0
        self._add(known)

    async def whole(self, index: int, item: Item) -> Item:
        """Return an item of the input, or the one that it refers to. Raises ApiError, UpstreamFailure."""
        if not is_reference(item):
            return item
        param = f"input[{index}].id"
        identity = string_of(item, "id", f"input[{index}]")
        if identity not in self._items:
            self._add(await self._items_near(identity, param))
        if identity not in self._items:
            raise _item_not_found(identity, param)
        return self._items[identity]

    def _add(self, items: Sequence[Item]) -> None:
        for item in items:
            self._items.setdefault(str(item.get("id")), item)

    async def _items_near(self, identity: str, param: str) -> Sequence[Item]:
        """Output and input of the item's response."""
        if (response := response_of_item(identity)) is None:
            raise _item_not_found(identity, param)
        if self._num_read == MAX_REFERRED_RESPONSES:
            raise invalid(
                f"{param} names an item of response {self._num_read + 1} that has to be read for this input, "
                f"the limit is {MAX_REFERRED_RESPONSES}: send the item itself",
                param=param,
            )
        self._num_read += 1
        try:
            reading = await look(self._gateway, response)
        except ApiError:
            raise _item_not_found(identity, param) from None
        if not reading.writer.is_over:
            raise invalid(f"{param} names an item of a response that is in progress", param=param)
        return [*reading.writer.items, *(identified_items(reading) or ())]


def _shown(identity: str) -> str:
    """The beginning of an id, without its secret."""
    return identity if len(identity) <= _SHOWN_CHARACTERS else f"{identity[:_SHOWN_CHARACTERS]}..."


def _item_not_found(identity: str, param: str) -> ApiError:
    return http_error(
        404,
        f"{param} is {_shown(identity)!r}, which is no item of a stored response: it was made with "
        "store = false, or its response is gone: send the item itself",
        param=param,
    )

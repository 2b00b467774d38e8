"""The secrets of requests, which attaching to them and cancelling them take."""

import secrets
from collections import OrderedDict

from stageline.errors import InvalidRequest

MAX_REMEMBERED = 4096


def new_attach_secret() -> str:
    """An unguessable secret: 43 characters of base64url."""
    return secrets.token_urlsafe(32)


class AttachSecrets:
    """Those of the last requests of one client, by request id."""

    def __init__(self) -> None:
        self._secrets: OrderedDict[str, str] = OrderedDict()

    def remember(self, request_id: str, secret: str) -> None:
        """The oldest one is forgotten when there are too many."""
        self._secrets[request_id] = secret
        while len(self._secrets) > MAX_REMEMBERED:
            self._secrets.popitem(last=False)

    def of(self, request_id: str, given: str | None) -> str:
        """`given`, or that of a request which this client has sent. Raises InvalidRequest without either."""
        secret = given or self._secrets.get(request_id)
        if secret is None:
            raise InvalidRequest(f"request {request_id} was not sent by this client: give its secret")
        return secret

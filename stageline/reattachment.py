"""What to do after a call that was cut off: attach, send the request again, or give up. Pure."""

from enum import Enum

import grpc


class Way(Enum):
    """How a call gets at the outputs of a request."""

    GENERATE = "generate"
    ATTACH = "attach"


class Reattachment:
    """Decides for one detached request which call comes next. `can_generate`: the request itself is at hand.

    | the call that failed | with | next |
    |---|---|---|
    | any | the connection lost | Attach |
    | Attach, after a loss | NOT_FOUND, and nothing has come yet: it never arrived | Generate, same id |
    | Generate, after a loss | ALREADY_EXISTS: it did arrive | Attach |
    | any | anything else | none |

    Sending Generate again is safe: the id is used once, and nobody has seen an output.
    """

    def __init__(self, *, can_generate: bool) -> None:
        self._can_generate = can_generate
        self.way = Way.GENERATE if can_generate else Way.ATTACH
        self.has_heard = False
        """Something of the request has come."""
        self.was_lost = False

    def follow(self, code: grpc.StatusCode, *, is_connection_loss: bool) -> bool:
        """Whether another call is worth it after one that ended so; `way` is which."""
        if is_connection_loss:
            self.way, self.was_lost = Way.ATTACH, True
            return True
        if not self.was_lost:
            return False
        if code == grpc.StatusCode.NOT_FOUND and self.way is Way.ATTACH and not self.has_heard:
            self.way = Way.GENERATE
            return self._can_generate
        if code == grpc.StatusCode.ALREADY_EXISTS and self.way is Way.GENERATE:
            self.way = Way.ATTACH
            return True
        return False

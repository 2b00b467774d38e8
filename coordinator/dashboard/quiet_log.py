"""What aiohttp's server has to say, in this coordinator's log."""

import logging
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger(__name__)


class QuietLog(logging.LoggerAdapter[logging.Logger]):
    """Whoever connects can send bytes that are no HTTP: no error of ours, and no reason to fill a log."""

    def __init__(self) -> None:
        super().__init__(log, {})

    def exception(self, msg: object, *args: object, exc_info: Any = True, **named: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            reason = " ".join(exc_info.message.split())
            super().debug("a request that is no HTTP from %s: %.200r", args[0] if args else None, reason)
        else:
            super().error(msg, *args, exc_info=exc_info, **named)

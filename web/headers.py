"""Headers of every response that is sent to browsers, as OWASP's list of secure headers asks."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Message

_CONTENT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_UNUSED_FEATURES = (
    "accelerometer",
    "autoplay",
    "camera",
    "display-capture",
    "encrypted-media",
    "fullscreen",
    "geolocation",
    "gyroscope",
    "magnetometer",
    "microphone",
    "midi",
    "payment",
    "picture-in-picture",
    "publickey-credentials-get",
    "screen-wake-lock",
    "usb",
    "xr-spatial-tracking",
)
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _CONTENT,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": ", ".join(f"{feature}=()" for feature in _UNUSED_FEATURES),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ONLY_HTTPS = "max-age=31536000"


def security_headers(*, is_only_https: bool) -> list[tuple[str, str]]:
    """Nothing from outside is loaded, and no other site embeds or reads what is served.

    With `is_only_https` browsers keep off plain text, on all ports of the host name.
    """
    headers = list(_HEADERS.items())
    if is_only_https:
        headers.append(("Strict-Transport-Security", _ONLY_HTTPS))
    return headers


def keep_out_of_caches(message: Message) -> None:
    """Add to the start of a response that it is not stored, unless it says how long it may be."""
    headers: list[tuple[bytes, bytes]] = message.setdefault("headers", [])
    if not any(name.lower() == b"cache-control" for name, _ in headers):
        message["headers"] = [*headers, (b"cache-control", b"no-store")]

"""HOST:PORT is read in one way only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.addresses import Address, parse_address, parse_peer_address

hosts = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True) | st.ip_addresses().map(str)


@given(hosts, st.integers(0, 65535))
def test_an_address_survives_its_text_form(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.7:7480", "10.0.0.7", 7480),
        ("gpu-a:1", "gpu-a", 1),
        ("[::1]:0", "::1", 0),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ],
)
def test_the_usual_forms_are_read(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":80", "80", "host:80:90", "::1:80", "[::1]", "[::1]80", "[]:80"),
        *("host: 80", " host:80", "host:80 ", "host:80\n", "host:-1", "host:+1", "host:1e3", "host:٣"),
        *("http://host:80", "host/path:80", "host:123456"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_ports_end_at_65535() -> None:
    with pytest.raises(ValueError, match="port 65536, above 65535"):
        parse_address("host:65536")


def test_nobody_can_be_dialled_at_port_0() -> None:
    assert parse_peer_address("host:1") == Address("host", 1)
    with pytest.raises(ValueError, match="port 0, which nobody can be reached at"):
        parse_peer_address("host:0")

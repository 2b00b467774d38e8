import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.addresses import Address, counted_host, parse_address, parse_peer_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7480", Address("127.0.0.1", 7480)),
        ("gpu-a.example:65535", Address("gpu-a.example", 65535)),
        ("[::1]:0", Address("::1", 0)),
        ("[fe80::1%eth0]:9", Address("fe80::1%eth0", 9)),
    ],
)
def test_an_address_reads_and_writes_the_same(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
hosts = st.lists(labels, min_size=1, max_size=4).map(".".join) | st.ip_addresses().map(str)


@given(hosts, st.integers(0, 65535))
def test_every_host_and_port_survives_its_text_form(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":7480",
        "host:port",
        "host:-1",
        "::1:7480",
        "[::1]",
        "[host]:1",
        "a b:1",
        "a/b:1",
        "host:1\n",
        "host:+1",
        "host:1e3",
        "host:\N{ARABIC-INDIC DIGIT THREE}",
        "http://host:80",
    ],
)
def test_an_invalid_address_is_rejected_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_address(text)


def test_a_port_above_65535_is_rejected_with_its_number() -> None:
    with pytest.raises(ValueError, match="port 65536, the limit is 65535"):
        parse_address("host:65536")


def test_port_0_is_accepted_for_listening_only() -> None:
    assert parse_address("host:0").port == 0
    with pytest.raises(ValueError, match="port 0"):
        parse_peer_address("host:0")


@pytest.mark.parametrize(
    "host", ["a..b", ".a", "a" * 64, f"b.{'a' * 64}.c", "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 64]
)
def test_a_host_that_no_name_can_have_is_rejected_with_the_address(host: str) -> None:
    with pytest.raises(ValueError, match="which is no host name") as raised:
        parse_address(f"{host}:7480")
    assert repr(f"{host}:7480") in str(raised.value)


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("unix:", "unix:"),
    ],
)
def test_the_addresses_of_one_ipv6_network_count_as_one_host(host: str, counted: str) -> None:
    assert counted_host(host) == counted

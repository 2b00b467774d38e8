"""Settings of a gateway, and where it gets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import GatewayConfig, existing_file, page_url, parse_names


def test_names_are_separated_by_commas() -> None:
    assert parse_names("mine, org/mine") == ("mine", "org/mine")
    with pytest.raises(ValueError, match="empty name"):
        parse_names("mine,")


def test_a_chat_template_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("")
    assert existing_file(str(tmp_path / "template.jinja")) == tmp_path / "template.jinja"
    with pytest.raises(ValueError, match="does not exist"):
        existing_file(str(tmp_path / "none"))


def test_a_dashboard_is_a_url() -> None:
    assert page_url("https://head:7481/") == "https://head:7481/"
    for text in ("head:7481", "ftp://head/", "http:///"):
        with pytest.raises(ValueError, match="is not a page"):
            page_url(text)


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="--drain-timeout is 0"):
        GatewayConfig(drain_timeout_s=0)
    with pytest.raises(ValueError, match="port 0"):
        GatewayConfig(coordinator="127.0.0.1:0")

"""Tenants of requests, their salts, and prompts that all tenants share."""

from __future__ import annotations

import pytest

from certificates.identity import Identity, Role
from coordinator.api.tenants import PublicPrefixes, tenant_of, tenant_salt
from wire.errors import AccessDenied, InvalidRequest

SECRET = b"s" * 32


def caller(role: Role) -> Identity:
    return Identity(cluster="default", role=role, name="me")


@pytest.mark.parametrize("who", [None, Role.GATEWAY, Role.OPERATOR])
def test_a_gateway_names_the_tenant_and_so_does_everyone_without_certificates(who: Role | None) -> None:
    assert tenant_of(who and caller(who), "acme/team") == "acme/team"
    assert tenant_of(who and caller(who), "") == ""


def test_a_client_is_its_own_tenant() -> None:
    assert tenant_of(caller(Role.CLIENT), "") == tenant_of(caller(Role.CLIENT), "client/me") == "client/me"
    with pytest.raises(AccessDenied, match="client me may not act for tenant acme"):
        tenant_of(caller(Role.CLIENT), "acme")


@pytest.mark.parametrize("name", [" ", "a b", "é", "/a", "a" * 129, "a\n"])
def test_names_that_could_be_confused_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not 1 to 128 letters"):
        tenant_of(None, name)


def test_salts_of_tenants_differ_and_cannot_be_named() -> None:
    salts = {
        tenant_salt(secret, tenant, own)
        for secret in (SECRET, b"t" * 32)
        for tenant, own in (("a", ""), ("a", "b"), ("ab", ""), ("b", "a"), ("a", "ab"))
    }
    assert len(salts) == 10
    mine = tenant_salt(SECRET, "a", "")
    assert tenant_salt(SECRET, "b", mine) not in salts
    assert tenant_salt(SECRET, "", "own") == "own"


def test_tokens_are_public_as_far_as_they_begin_a_registered_prompt() -> None:
    public = PublicPrefixes([(1, 2, 3, 4), (1, 2, 9)])
    for prompt, expected in (((1, 2, 3, 4, 5), 4), ((1, 2, 9, 9), 3), ((1, 2), 2), ((2, 1), 0), ((), 0)):
        assert public.num_in(prompt) == expected

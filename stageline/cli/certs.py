"""`stageline certs`: a cluster's own certificate authority, for hosts without another one."""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.authority import (
    MAX_LEAF_LIFE,
    KeyPair,
    general_name,
    hosts_of,
    identity_of,
    is_issued_by,
    issue,
    make_authority,
    new_key,
)
from certificates.files import (
    certificate_pem,
    key_pem,
    read_authority,
    read_certificates,
    read_tls_material,
    replace,
    write_authority,
    write_new,
)
from certificates.identity import DEFAULT_CLUSTER, DEFAULT_TRUST_DOMAIN, Identity, Role, parse_role
from stageline.cli.options import Json, build_config, option_parser
from wire.exit_codes import ExitCode

certs = typer.Typer(
    help="Make and show certificates of a cluster's processes.", no_args_is_help=True, rich_markup_mode="rich"
)
DEFAULT_AUTHORITY = Path("certs/ca")
AUTHORITY_LIFE, LEAF_LIFE = "3650d", "30d"
_LIFE = re.compile(r"(\d{1,5})([mhd])", re.ASCII)
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def parse_life(text: str) -> timedelta:
    """Parse a time such as 90m, 24h or 30d. Raises ValueError."""
    match = _LIFE.fullmatch(text)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is not a time such as 90m, 24h or 30d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _parse_host(text: str) -> str:
    general_name(text)
    return text


def _parse_holder(text: str) -> Identity:
    role, slash, name = text.partition("/")
    if not slash:
        raise ValueError(f"{text!r} is not ROLE/NAME, such as coordinator/head")
    return Identity(cluster=DEFAULT_CLUSTER, role=parse_role(role), name=name)


_Authority: TypeAlias = Annotated[
    Path, typer.Option("--ca", metavar="DIR", help="Directory of the authority, which `certs ca` made.")
]
_Life: TypeAlias = Annotated[
    Any,  # a timedelta; typer parses the text of the default
    typer.Option(
        "--ttl",
        metavar="TIME",
        parser=option_parser(parse_life),
        help=f"Time until it ends, such as 24h or 30d; at most {MAX_LEAF_LIFE.days}d.",
    ),
]


@certs.command("ca")
def make_ca(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write ca.crt and ca.key.")] = (
        DEFAULT_AUTHORITY
    ),
    name: Annotated[str, typer.Option(metavar="TEXT", help="Common name.")] = "Stageline CA",
    life: Annotated[
        Any,
        typer.Option("--ttl", metavar="TIME", parser=option_parser(parse_life), help="Time until it ends."),
    ] = AUTHORITY_LIFE,
    holders: Annotated[
        list[Any] | None,  # identities; typer knows no type of lists of parsed values
        typer.Option(
            "--issue",
            metavar="ROLE/NAME",
            parser=option_parser(_parse_holder),
            help=f"Also issue a certificate for {LEAF_LIFE}, in directory NAME beside the authority's; NAME "
            "is also the host of a process. Repeat it for several.",
        ),
    ] = None,
) -> int:
    """Make a certificate authority. Keep its key off the hosts of the cluster."""
    authority = build_config(lambda: make_authority(name, life=life))
    leaves = [
        (out.parent / holder.name, *_new_leaf(authority, holder, _hosts_of(holder), parse_life(LEAF_LIFE)))
        for holder in holders or []
    ]
    _check_apart([out, *(directory for directory, *_ in leaves)])
    write_authority(out, authority)
    typer.echo(f"{out / CA_FILE} is valid until {_day(authority.certificate)}; SHA-256 {_sha256(authority)}")
    for directory, leaf, key in leaves:
        _write_leaf(directory, leaf, key, authority)
    return ExitCode.DONE


@certs.command("issue")
def issue_leaf(
    role: Annotated[
        Role,
        typer.Option(metavar="ROLE", parser=option_parser(parse_role), help="What its holder is."),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Its holder's name; a worker's own name.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write ca.crt, tls.crt and tls.key.")],
    cluster: Annotated[str, typer.Option(metavar="NAME", help="Cluster that it is for.")] = DEFAULT_CLUSTER,
    san: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            parser=option_parser(_parse_host),
            help="DNS name or IP address at which others reach it; repeat it for several.",
        ),
    ] = None,
    ca: _Authority = DEFAULT_AUTHORITY,
    life: _Life = LEAF_LIFE,
    trust_domain: Annotated[
        str, typer.Option(metavar="DOMAIN", help="Trust domain of the SPIFFE id.")
    ] = DEFAULT_TRUST_DOMAIN,
) -> int:
    """Make a key, and a certificate that an authority signs."""
    identity = build_config(
        lambda: Identity(trust_domain=trust_domain, cluster=cluster, role=role, name=name)
    )
    authority = read_authority(ca)
    _write_leaf(out, *_new_leaf(authority, identity, san or [], life), authority)
    return ExitCode.DONE


@certs.command("renew")
def renew(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory with tls.crt and tls.key.")],
    ca: _Authority = DEFAULT_AUTHORITY,
    life: _Life = LEAF_LIFE,
) -> int:
    """Replace a certificate by one of the same identity and hosts, with a new key.

    Running processes read it within seconds. An authority that is not in ca.crt yet is added to it.
    """
    path = directory / CERTIFICATE_FILE
    before, authority, key = read_certificates(path)[0], read_authority(ca), new_key()
    identity = build_config(lambda: identity_of(before))
    leaf = build_config(lambda: issue(authority, identity, hosts_of(before), key.public_key(), life=life))
    trusted = read_certificates(directory / CA_FILE)
    files = {KEY_FILE: key_pem(key), CERTIFICATE_FILE: certificate_pem(leaf)}
    if authority.certificate not in trusted:
        bundle = b"".join(map(certificate_pem, [*trusted, authority.certificate]))
        files = {CA_FILE: bundle, **files}
    replace(directory, files)
    typer.echo(f"{path} of {identity} is valid until {_day(leaf)}")
    return ExitCode.DONE


@certs.command("show")
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory with tls.crt and tls.key.")],
    as_json: Json = False,
) -> int:
    """Show whose certificate it is, where it is valid, and until when. Exit code 1 if it cannot be used."""
    material = read_tls_material(directory)
    leaf, trusted = material.leaf, read_certificates(directory / CA_FILE)
    facts = {
        "identity": material.identity.uri,
        "hosts": hosts_of(leaf),
        "serial": f"{leaf.serial_number:x}",
        "sha256": leaf.fingerprint(hashes.SHA256()).hex(),
        "not_before": leaf.not_valid_before_utc.isoformat(),
        "not_after": leaf.not_valid_after_utc.isoformat(),
        "life_left": round(material.life_left(datetime.now(UTC)), 3),
        "is_signed_by_ca": any(is_issued_by(leaf, authority) for authority in trusted),
        "authorities": [authority.fingerprint(hashes.SHA256()).hex() for authority in trusted],
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return ExitCode.DONE
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else str(value)
        typer.echo(f"{name.replace('_', ' '):<16} {shown or '-'}")
    return ExitCode.DONE


def _hosts_of(holder: Identity) -> list[str]:
    """Its own name, for processes that others dial."""
    return [] if holder.role in (Role.CLIENT, Role.OPERATOR) else [holder.name]


def _new_leaf(
    authority: KeyPair, identity: Identity, hosts: Sequence[str], life: timedelta
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = new_key()
    return build_config(lambda: issue(authority, identity, hosts, key.public_key(), life=life)), key


def _write_leaf(
    out: Path, leaf: x509.Certificate, key: ec.EllipticCurvePrivateKey, authority: KeyPair
) -> None:
    ca_pem = certificate_pem(authority.certificate)
    write_new(out, {KEY_FILE: key_pem(key), CERTIFICATE_FILE: certificate_pem(leaf), CA_FILE: ca_pem})
    identity = identity_of(leaf)
    typer.echo(f"{out / CERTIFICATE_FILE} of {identity} is valid until {_day(leaf)}: {identity.uri}")


def _check_apart(directories: Sequence[Path]) -> None:
    """Before anything is written. Raises FileExistsError and a usage error."""
    for place, directory in enumerate(directories):
        if directory in directories[:place]:
            raise typer.BadParameter(f"two certificates in {directory}: use different names")
        for name in (CERTIFICATE_FILE, KEY_FILE, CA_FILE):
            if place and (directory / name).exists():
                raise FileExistsError(f"{directory / name} exists: remove it first, or issue another name")


def _day(certificate: x509.Certificate) -> str:
    return certificate.not_valid_after_utc.strftime("%Y-%m-%d %H:%M UTC")


def _sha256(authority: KeyPair) -> str:
    return authority.certificate.fingerprint(hashes.SHA256()).hex()

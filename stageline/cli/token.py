"""`stageline token`: join tokens, with which hosts get their certificate from the coordinator."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from cryptography.hazmat.primitives import hashes

from certificates import CA_FILE
from certificates.files import read_certificates, write_new
from certificates.identity import Role, parse_role
from certificates.join_tokens import JoinTokenStore
from stageline.cli.certs import DEFAULT_AUTHORITY, parse_life
from stageline.cli.options import CommandFailed, Json, build_config, option_parser
from wire.exit_codes import ExitCode

token = typer.Typer(help="Make, list and revoke join tokens.", no_args_is_help=True, rich_markup_mode="rich")
DEFAULT_FILE = Path("certs/tokens.json")
_File: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--tokens-file", metavar="FILE", help="File of the tokens' hashes, which the coordinator reads."
    ),
]


@token.command("create")
def create_token(
    role: Annotated[
        Role,
        typer.Option(
            metavar="ROLE", parser=option_parser(parse_role), help="Role of the certificates; worker."
        ),
    ] = Role.WORKER,
    life: Annotated[
        Any,  # a timedelta; typer parses the text of the default
        typer.Option("--ttl", metavar="TIME", parser=option_parser(parse_life), help="Time until it ends."),
    ] = "1h",
    uses: Annotated[int, typer.Option(metavar="N", help="How many hosts may use it.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it, instead of printing it.")
    ] = None,
    file: _File = DEFAULT_FILE,
    ca: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory of the authority, which `certs ca` made.")
    ] = DEFAULT_AUTHORITY,
) -> int:
    """Make a token, which is stored as a hash, and print it, or write it to a file of mode 0600."""
    authority = read_certificates(ca / CA_FILE)[0].fingerprint(hashes.SHA256()).hex()
    made = build_config(lambda: JoinTokenStore(file).create(authority, role, life=life, uses=uses))
    if out is None:
        typer.echo(made.text)
    else:
        write_new(out.parent, {out.name: f"{made.text}\n".encode()}, is_secret=True)
    return ExitCode.DONE


@token.command("list")
def list_tokens(file: _File = DEFAULT_FILE, as_json: Json = False) -> int:
    """Show tokens without their secrets."""
    rows = [
        {
            "id": record.token_id,
            "role": record.role.value,
            "expires_at": record.expires_at.isoformat(timespec="seconds"),
            "has_ended": record.expires_at <= datetime.now(UTC),
            "uses": record.uses,
            "uses_left": record.uses_left,
        }
        for record in JoinTokenStore(file).records()
    ]
    if as_json:
        typer.echo(json.dumps({"tokens": rows}))
        return ExitCode.DONE
    for row in rows:
        state = "ended" if row["has_ended"] else "until"
        typer.echo(
            f"{row['id']}  {row['role']}  {row['uses_left']} of {row['uses']} uses left, "
            f"{state} {row['expires_at']}"
        )
    return ExitCode.DONE


@token.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id that `token list` shows.")],
    file: _File = DEFAULT_FILE,
) -> int:
    """Remove a token at once. Certificates that it gave stay valid: see --deny-list."""
    if not JoinTokenStore(file).revoke(token_id):
        raise CommandFailed(f"join token {token_id[:64]!r} not found in {file}", reason="NO_TOKEN")
    typer.echo(f"join token {token_id} revoked")
    return ExitCode.DONE

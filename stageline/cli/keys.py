"""`stageline keys`: API keys of gateways and dashboards."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, TypeAlias, TypedDict

import typer

from stageline.cli.certs import parse_life
from stageline.cli.options import CommandFailed, Json, build_config, option_parser, takes
from web.api_keys import PRIORITIES, ROLES, ApiKey, changed_keys, new_key, read_keys
from wire.exit_codes import ExitCode
from wire.flags import file_path

keys = typer.Typer(
    help="Create, revoke and list the API keys of gateways and dashboards.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
_KeysFile: TypeAlias = Annotated[
    Any,
    typer.Option(
        "--keys-file",
        metavar="FILE",
        parser=option_parser(file_path),
        help="File of keys, as in `gateway --keys-file`; running processes read it again.",
    ),
]


def _parse_priority(text: str) -> str:
    if text not in PRIORITIES:
        raise ValueError(f"priority {text[:64]!r} is not one of {', '.join(PRIORITIES)}")
    return text


def _parse_role(text: str) -> str:
    if text not in ROLES:
        raise ValueError(f"role {text[:64]!r} is not one of {', '.join(ROLES)}")
    return text


class KeyLimitFlags(TypedDict, total=False):
    """What a key is for."""

    role: Annotated[
        Any,
        typer.Option(
            metavar="|".join(ROLES),
            parser=option_parser(_parse_role),
            help="Viewers read metrics and the dashboard, operators also act there (default: user).",
        ),
    ]
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model that it is for; repeat it for several (default: all)."),
    ]
    max_priority: Annotated[
        Any,
        typer.Option(
            metavar="|".join(PRIORITIES),
            parser=option_parser(_parse_priority),
            help="Highest priority (default: high).",
        ),
    ]
    max_concurrent: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Waiting and running sequences of the tenant, everywhere."),
    ]
    requests_per_minute: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests per minute at one gateway.")
    ]
    tokens_per_minute: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens per minute at one gateway.")
    ]
    ttl: Annotated[
        Any,
        typer.Option(metavar="TIME", parser=option_parser(parse_life), help="Time until it ends, as in 30d."),
    ]


@keys.command("create")
@takes(KeyLimitFlags)
def create(
    keys_file: _KeysFile,
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="Whose key it is; tenants share no cached prompts.")
    ],
    **flags: Any,
) -> int:
    """Create a key and print it, once: the file has its digest only."""
    limits = {name: value for name, value in flags.items() if value is not None}
    limits["models"] = tuple(limits.pop("model", ()))
    if (ttl := limits.pop("ttl", None)) is not None:
        limits["expires"] = (datetime.now(UTC) + ttl).replace(microsecond=0)
    text, key = build_config(lambda: new_key(tenant=tenant, **limits))
    with changed_keys(keys_file) as known:
        known[key.id] = key
    typer.echo(text)
    return ExitCode.DONE


@keys.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as in `keys list`.")],
    keys_file: _KeysFile,
) -> int:
    """Revoke a key; running gateways refuse it at once."""
    with changed_keys(keys_file) as known:
        if key_id not in known:
            raise CommandFailed(f"{keys_file} has no key {key_id!r}", reason="NO_KEY")
        del known[key_id]
    typer.echo(f"key {key_id} revoked")
    return ExitCode.DONE


@keys.command("list")
def list_keys(keys_file: _KeysFile, as_json: Json = False) -> int:
    """List the keys: ids, tenants and limits."""
    entries = [_facts(key) for key in read_keys(keys_file).values()]
    if as_json:
        typer.echo(json.dumps(entries))
        return ExitCode.DONE
    for entry in entries:
        facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in entry.items() if value)
        typer.echo(facts)
    return ExitCode.DONE


def _facts(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "role": key.role,
        "models": list(key.models),
        "max_priority": key.max_priority,
        "max_concurrent": key.max_concurrent,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "expires": None if key.expires is None else key.expires.isoformat(),
    }

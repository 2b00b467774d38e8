"""`stageline deploy`: a cluster from a cluster file, on an engine."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from deploy.commands import read_cluster_spec
from deploy.engines import RENDERERS, RenderedFile
from deploy.spec.cluster_spec import ClusterSpec
from deploy.spec.document import WrongField, read_document
from stageline.cli.options import build_config, option_parser
from wire.exit_codes import ExitCode

deploy = typer.Typer(
    help="Run a cluster from a file that describes it.", no_args_is_help=True, rich_markup_mode="rich"
)


def _engine(text: str) -> str:
    if text not in RENDERERS:
        raise ValueError(f"engine {text!r} is unknown, must be one of {', '.join(RENDERERS)}")
    return text


_ClusterFile: TypeAlias = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="Cluster file (docs/deploy.md).")
]


@deploy.command("render")
def render(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            parser=option_parser(_engine),
            help=f"What runs the cluster: {', '.join(RENDERERS)}.",
            show_default=False,
        ),
    ],
    file: _ClusterFile,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Directory to write to; created if missing.")
    ],
) -> int:
    """Write the files with which an engine runs a cluster, and print their paths."""
    spec = build_config(lambda: read_cluster_spec(file))
    for rendered in build_config(lambda: _render(engine, spec, file)):
        path = out / rendered.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rendered.text, encoding="utf-8")
        print(path)
    return ExitCode.DONE


def _render(engine: str, spec: ClusterSpec, file: Path) -> tuple[RenderedFile, ...]:
    """Raises SpecError for what the engine cannot do."""
    try:
        return RENDERERS[engine](spec)
    except WrongField as error:
        raise read_document(file).error_at(error) from None

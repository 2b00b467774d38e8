"""`stageline coordinator`: one coordinator in this process."""

import os
from typing import Any

import typer

from coordinator.config import CoordinatorConfig
from stageline.cli.config_flags import config_parameters, file_parameters, make_config, toml_of
from stageline.cli.options import default_token_directory, read_token, takes, telemetry_settings
from wire.user_files import user_cache_directory


@takes(config_parameters(CoordinatorConfig), file_parameters(CoordinatorConfig))
def coordinator(context: typer.Context, **flags: Any) -> int:
    """Plan the stages, and serve clients and workers until stopped."""
    config = make_config(
        CoordinatorConfig,
        context,
        flags,
        token=read_token(flags["token_file"]),
        token_directory=default_token_directory(),
        cache_directory=user_cache_directory(os.environ),
        telemetry=telemetry_settings(),
    )
    if flags["print_config"]:
        print(toml_of(config), end="")
        return 0
    from coordinator.server import run  # only this command needs it

    return run(config)

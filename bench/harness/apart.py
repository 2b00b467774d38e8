"""Measures a group in a child process, isolated from this one's imports and memory.

python -m bench.harness.apart MODULE QUICK OUTPUT CACHE
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.figure import Better, Figure, NotMeasured
from bench.harness.group import Measure, Setting


def measured_apart(
    module: str, *, python: Path = Path(sys.executable), folder: Path | None = None
) -> Measure:
    """Measure `module` in a child process. Raises NotMeasured with the end of its output.

    `python` and `folder` belong to another checkout, if it is to measure its own.
    """

    async def measure(setting: Setting) -> list[Figure]:
        directories = (setting.output_directory, setting.cache_directory)
        folders = [str(directory.absolute()) for directory in directories]
        child = await asyncio.create_subprocess_exec(
            *(str(python), "-m", __name__, module, str(int(setting.is_quick)), *folders),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await child.communicate()
        except asyncio.CancelledError:
            child.kill()
            await child.wait()
            raise
        if child.returncode != 0:
            raise NotMeasured(f"exit code {child.returncode}: {errors.decode().strip()[-500:]}")
        return [_figure(values) for values in json.loads(output)]

    return measure


def _figure(values: Mapping[str, Any]) -> Figure:
    changed = {"better": Better(values["better"]), "ratios": tuple(values["ratios"])}
    return Figure(**{**values, **changed})


def _main(module: str, is_quick: str, output: str, cache: str) -> None:
    setting = Setting(
        is_quick=is_quick == "1",
        output_directory=Path(output),
        cache_directory=Path(cache),
        say=lambda text: print(text, file=sys.stderr),
    )
    measure: Measure = import_module(module).measure

    async def run() -> list[Figure]:
        return await measure(setting)

    print(json.dumps([asdict(figure) for figure in asyncio.run(run())]))


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""Surface of cluster files: read, turned into command lines, and rendered for every engine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from deploy.commands import read_cluster_spec
from deploy.engines import RENDERERS
from deploy.spec.cluster_spec import ClusterSpec
from deploy.spec.document import SpecError, WrongField
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.mutations import mutate_bytes, mutate_json, mutate_text
from tests.unit.deploy.cluster_files import HOSTS, JOB, LEAST

_ANYWHERE = LEAST + "security: {insecure: true}\n"
_FILES = (LEAST, HOSTS, JOB, _ANYWHERE)
_CONTROLS = [chr(code) for code in (*range(9), *range(11, 32), 127)]
_ODD_YAML = (
    "<<: *a",
    "a: &a [*a]",
    "!!python/object/apply:os.system ['true']",
    "? [1, 2]\n: 3",
    "--- 1\n--- 2",
    "%YAML 9.9\n---\n",
    "[" * 3000,
    "- " * 3000,
    "{a: " * 2000,
)
"""Of what YAML can do, what a cluster file does not need."""


def make(random: Random) -> bytes:
    """Files with changed text, with changed values, and with what few files of YAML have."""
    text = random.choice(_FILES)
    match random.randrange(8):
        case 0 | 1:
            return mutate_text(mutate_text(text, random), random).encode(errors="surrogatepass")
        case 2:
            return mutate_bytes(text.encode(), random)
        case 3:
            at = random.choice([0, len(text), text.index("\n") + 1])
            return (text[:at] + random.choice(_ODD_YAML) + "\n" + text[at:]).encode()
        case _:
            return json.dumps(mutate_json(_value(text), random, most=1)).encode()


@cache
def _value(text: str) -> Any:
    """With each value as it is written."""
    return yaml.load(text, Loader=yaml.BaseLoader)


@contextmanager
def opened() -> Iterator[Opened]:
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        file = Path(made) / "cluster.yaml"

        def examine(data: bytes) -> str:
            file.write_bytes(data)
            try:
                spec = read_cluster_spec(file)
            except SpecError as error:
                if len(str(error)) > 20_000:
                    raise Broken(f"an error of {len(str(error))} characters") from None
                return "SpecError"
            return "/".join(_rendered(engine, spec) for engine in RENDERERS)

        def check() -> None:
            if examine(_ANYWHERE.encode()) != "/".join("ok" for _ in RENDERERS):
                raise Broken("a valid file is refused")

        yield Opened(examine, check, (os.getpid(),))


def _rendered(engine: str, spec: ClusterSpec) -> str:
    try:
        files = RENDERERS[engine](spec)
    except WrongField:
        return "WrongField"
    for file in files:
        if file.path.endswith(".yaml") and not file.path.startswith("templates/"):
            yaml.safe_load(file.text)
        if not set(_CONTROLS).isdisjoint(file.text):
            raise Broken(f"control characters in {file.path}: {file.text!r}")
    return "ok"


SURFACES = (Surface(name="cluster-file", share=3, make=make, opened=opened),)

"""Containers of the image, by docs/deploy/compose.md and image.md, without a container engine."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from stageline.cli import main
from tests.deploy.compose_engine import ComposeEngine
from tests.deploy.images import IMAGE, UID, build_image, buildah, mounted_image
from tests.deploy.pages import commands_of, file_of
from tests.e2e.commands import ENVIRONMENT, STAGELINE
from tests.fake_processes import ROOT
from tests.unit.deploy.cluster_files import HOSTS, LEAST

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """The root of a container of the image, which is built first; a first build takes minutes."""
    build_image()
    with mounted_image() as root:
        yield root


_VALIDATE = """
import json, sys, zipfile
import jsonschema, yaml
schema = json.loads(zipfile.ZipFile(sys.argv[1]).read("compose/config/compose_spec.json"))
# Newer than this schema, the last one that PyPI has.
schema["properties"]["name"] = {"type": "string"}
for file in sys.argv[2:]:
    jsonschema.Draft201909Validator(schema).validate(yaml.safe_load(open(file)))
"""


class Host:
    """Types the commands of the page on a host, with an engine that stands for Docker's."""

    def __init__(self, root: Path, network: str, folder: Path) -> None:
        self._root, self._network, self._folder = root, network, folder
        self.engine: ComposeEngine | None = None

    async def type(self, line: str) -> str:
        words = shlex.split(line)
        if words[:2] == ["docker", "compose"]:
            return await self._compose(words[2:])
        program = [*STAGELINE, *words[1:]] if words[0] == "stageline" else words
        enter = ["nsenter", f"--net=/run/netns/{self._network}", *program]
        finished = await asyncio.to_thread(
            subprocess.run,
            enter,
            cwd=self._folder,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=660,
            check=False,
        )
        assert finished.returncode == 0, f"{line}\n{finished.stderr}\n{self.logs()}"
        return finished.stdout

    async def _compose(self, words: list[str]) -> str:
        option, file, *action = words
        assert option == "-f"
        if action == ["up", "-d"]:
            folder = self._folder
            self.engine = ComposeEngine(folder / file, root=self._root, network=self._network, folder=folder)
            await self.engine.up()
            return ""
        assert (action, self.engine is None) == (["down"], False)
        assert self.engine is not None
        return json.dumps(await asyncio.to_thread(self.engine.down))

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("*.log")))


@pytest_asyncio.fixture
async def host(image: Path, network: str, tmp_path: Path) -> AsyncIterator[Host]:
    (tmp_path / "cluster.yaml").write_text(file_of("compose"))
    host = Host(image, network, tmp_path)
    yield host
    if host.engine is not None:
        host.engine.kill()


@pytest.mark.asyncio
async def test_the_page_word_for_word(host: Host) -> None:
    render, up, wait, ask, down = commands_of("compose")
    assert (await host.type(render.line)).splitlines() == list(render.output)
    await host.type(up.line)
    await host.type(wait.line)
    assert host.engine is not None
    for name in host.engine.services:
        await host.engine.until_healthy(name)
    answer = json.loads((await host.type(ask.line.replace("curl ", "curl -s ", 1))).strip())
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 20)

    worker = host.engine.containers["w0"]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    )
    assert status["Uid"].split() == [str(UID)] * 4
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]) == (0, 0, "1")
    for path in ("/etc/written", "/opt/stageline/written", "/written"):
        assert worker.exec(["touch", path]).stderr.endswith("Read-only file system\n")
    for path in ("/var/lib/stageline/written", "/var/cache/stageline/written", "/tmp/written"):
        assert worker.exec(["touch", path]).returncode == 0

    worker.kill()
    assert host.engine.containers["coordinator"].exec(["true"]).returncode == 0, "it alone was killed"
    codes = json.loads(await host.type(down.line))
    assert codes.pop("w0") != 0
    assert codes == dict.fromkeys(("coordinator", "gateway", "w1", "w2"), 0), host.logs()


@pytest.mark.asyncio
async def test_a_health_check_fails_while_the_process_is_not_ready(host: Host) -> None:
    render, *_ = commands_of("compose")
    await host.type(render.line)
    await host.type("docker compose -f compose/compose.yaml up -d")
    assert host.engine is not None
    await host.engine.until_healthy("gateway")
    host.engine.containers["coordinator"].kill()
    async with asyncio.timeout(120):
        while host.engine.check("gateway").returncode == 0:
            await asyncio.sleep(0.2)
    assert host.engine.check("gateway").returncode == 1


def test_the_image_has_what_its_page_says(image: Path) -> None:
    build, gateway = commands_of("image")
    assert gateway.line == build.line.replace("-t stageline", "--target gateway -t stageline-gateway")
    assert build.line.startswith("docker build -f deploy/image/Dockerfile --build-arg BASE=")
    config = json.loads(buildah("inspect", IMAGE))["OCIv1"]["config"]
    assert (config["User"], config["Entrypoint"]) == (f"{UID}:{UID}", ["stageline"])
    assert set(config["Volumes"]) == {"/var/lib/stageline", "/var/cache/stageline"}
    assert config["Labels"]["org.opencontainers.image.version"] == "test"
    owned = [
        path for path in ("var/lib/stageline", "var/cache/stageline") if (image / path).stat().st_uid == UID
    ]
    assert len(owned) == 2
    packages = next((image / "opt/stageline/lib").glob("python3.*/site-packages"))
    assert list(packages.glob("stage_worker/model/_cpu_kernels.*.so")), "the compiled kernels"
    weights = list((image / "opt").rglob("*.safetensors"))
    assert weights, "the built-in model"
    assert all(path.is_relative_to(packages / "builtin_model") for path in weights)
    assert not (image / "source").exists()
    assert not list(packages.glob("tests"))


@pytest.mark.parametrize("text", [LEAST, HOSTS], ids=["least", "hosts"])
def test_files_fit_the_schema_of_the_compose_specification(text: str, tmp_path: Path) -> None:
    environment = ROOT / ".venv" / "deploy-compose"
    if not (environment / ".installed").exists():
        pytest.skip("needs .venv/deploy-compose: run `make test-deploy`")
    (tmp_path / "cluster.yaml").write_text(text)
    assert main(["deploy", "render", "compose", "-f", f"{tmp_path}/cluster.yaml", "-o", str(tmp_path)]) == 0
    (wheel,) = environment.glob("*.whl")
    files = sorted(tmp_path.rglob("compose.yaml"))
    command = [str(environment / "bin" / "python"), "-c", _VALIDATE, str(wheel), *map(str, files)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    files[0].write_text(files[0].read_text().replace("read_only: true", "read_only: often"))
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 1

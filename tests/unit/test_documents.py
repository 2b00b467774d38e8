"""The documents name modules, functions, paths, flags and pages that exist."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

from tests.repository import REPOSITORY
from wire.channels import PROTOCOL_VERSION

DOCS = REPOSITORY / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
MODULES = (DOCS / "reference" / "modules.md").read_text()
FLAGS = (DOCS / "reference" / "flags.md").read_text()
PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md"), *(REPOSITORY / "bench").glob("*.md")])
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_OTHER_TOOLS = {
    *(
        "--address",
        "--against",
        "--check",
        "--force-reinstall",
        "--grace-period",
        "--head",
        "--help",
        "--hypothesis-profile",
        "--json",
        "--minutes",
        "--no-block",
        "--no-deps",
        "--no-trace",
        "--openai-url",
        "--output",
        "--quick",
        "--rate",
        "--record",
        "--seconds",
        "--recurrent",
        "--storm",
        "--strict",
        "--version",
        "--vllm-python",
    ),
}
ROOM = re.compile(r"^\| \d+ \| `([\w/.]+)` \| [^`|]", re.MULTILINE)
STEP = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| ([^|]+) \|", re.MULTILINE)


def test_every_module_is_in_a_table() -> None:
    assert "| `state_machine` | " in MODULES
    empty = re.findall(r"^\| `(\w+)` \|\s*\|$", MODULES, flags=re.MULTILINE)
    assert not empty, f"modules without a docstring: {empty}"


def test_every_path_that_a_document_names_exists() -> None:
    folders = "|".join(path.name for path in REPOSITORY.iterdir() if path.is_dir() and path.name[0] != ".")
    missing = [
        f"{page.name}: {path}"
        for page in PAGES
        for path in re.findall(rf"`((?:{folders})/[\w./]*)`", page.read_text())
        if not (REPOSITORY / path).exists()
    ]
    assert not missing


def test_the_page_about_uninstalling_has_every_folder_that_is_written() -> None:
    page = (DOCS / "installing.md").read_text()
    kinds = {"cache": "~/.cache/stageline", "state": "~/.local/state/stageline"}
    found = set()
    for path in (*REPOSITORY.glob("*/*.py"), *REPOSITORY.glob("*/*/*.py")):
        if path.relative_to(REPOSITORY).parts[0] not in ("tests", "tools", "bench"):
            written = re.findall(r'\b(cache|state)_directory(?:\([^)]*\))? / (\w+|"\w+")', path.read_text())
            found |= {(kind, _value_of(path, name)) for kind, name in written}
    assert {("cache", "weights"), ("cache", "references"), ("state", "tokens"), ("state", "gpus")} <= found
    missing = [f"{kinds[kind]}/{name}" for kind, name in found if f"`{kinds[kind]}/{name}`" not in page]
    assert not missing


def _value_of(path: Path, name: str) -> str:
    """A literal, or a constant of a module or of one that it imports from."""
    if name.startswith('"'):
        return name.strip('"')
    module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    return str(getattr(importlib.import_module(module), name))


def test_every_link_leads_to_a_page_and_heading_that_exist() -> None:
    for page in PAGES:
        for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not heading or heading in headings(linked.read_text()), f"{page.name}: {target}#{heading}"


def headings(text: str) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_walks_name_functions_that_exist() -> None:
    steps = STEP.findall(ARCHITECTURE)
    assert len(steps) > 30
    for path, names in steps:
        defined = names_defined(REPOSITORY / path)
        for name in re.findall(r"`([\w.]+)`", names):
            assert name in defined, f"{path}: {name}"


def names_defined(path: Path) -> set[str]:
    """Functions, classes and methods (`Class.method`) of a module."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if hasattr(inner, "name")}
    return found


def test_every_flag_that_a_document_names_exists() -> None:
    known = set(FLAG.findall(FLAGS)) | OF_OTHER_TOOLS
    for page in PAGES:
        text = page.read_text()
        shown = re.findall(r"`[^`\n]*`", text) + re.findall(r"^.*\bstageline [a-z].*$", text, re.MULTILINE)
        named = {flag for line in shown for flag in FLAG.findall(line)}
        assert named <= known, f"{page.name}: {sorted(named - known)}"


def test_the_documented_layers_equal_the_import_contracts() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = [
        layer
        for name in ("Imports point one way", "The rooms of the coordinator")
        for contract in contracts
        if contract["name"] == name
        for layer in contract["layers"]
    ]
    level = {room(module): index for index, layer in enumerate(layers) for module in layer.split(" | ")}
    listed = ROOM.findall(ARCHITECTURE)
    assert set(listed) == set(level)
    assert listed == sorted(listed, key=lambda path: level[path])


def room(module: str) -> str:
    """The folder or file of a module, as the tables of rooms name it."""
    path = module.replace(".", "/")
    if module == "stageline_rpc":
        return "proto/stageline_rpc/"
    return f"{path}.py" if (REPOSITORY / f"{path}.py").exists() else f"{path}/"


def test_every_rpc_that_a_document_names_exists() -> None:
    known = rpcs()
    services = {rpc.split(".")[0] for rpc in known}
    for page in PAGES:
        named = set(re.findall(r"`(\w+\.[A-Z]\w+)`", page.read_text()))
        assert {name for name in named if name.split(".")[0] in services} <= known, page.name


def rpcs() -> set[str]:
    """Every `Service.Method` of the contracts."""
    found = set[str]()
    for path in (REPOSITORY / "proto").rglob("*.proto"):
        for service, body in re.findall(
            r"^service (\w+) \{(.*?)^\}", path.read_text(), re.MULTILINE | re.DOTALL
        ):
            found |= {f"{service}.{method}" for method in re.findall(r"rpc (\w+)", body)}
    assert found
    return found


def test_prose_is_wrapped() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        long = [line for line in prose.splitlines() if len(line) > 110 and not line.lstrip().startswith("|")]
        assert not long, f"{page.name}: {long}"


def test_the_protocol_version_is_the_documented_one() -> None:
    unreleased = (REPOSITORY / "CHANGELOG.md").read_text().split("\n## [")[1]
    assert f"Protocol version: {PROTOCOL_VERSION}." in unreleased
    assert f"protocol version {PROTOCOL_VERSION} (`wire/channels.py`)" in (DOCS / "protocol.md").read_text()

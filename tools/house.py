"""Measures the structure of the code base: size, files that a request enters, duplicates, cycles.

    python tools/house.py                       tables
    python tools/house.py --json --root DIR     of another tree, as JSON
    python tools/house.py --check --no-trace    exit code 1 if a count exceeds its limit in [tool.house]

The product is every tracked `*.py` file with code outside `tests`, `bench` and `tools` that is not generated.
The trace needs an environment in which the measured tree runs, and about a minute (see `house_trace.py`).
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

MAX_FUNCTION_LINES = 40
MIN_MODULE_LINES = 40
MAX_FILE_LINES = 600
SMALL_IMPORTED_LINES = 60

_NOT_PRODUCT = ("tests", "bench", "tools")
_GENERATED = ("_pb2.py", "_pb2_grpc.py")
_CONTROL_ROOMS = ("coordinator/cluster/", "coordinator/recovery/")
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
)  # fmt: skip

_ERROR_MIRROR = "the client's error for the reason code of a server's error; callers import it from stageline"
CLIENT_MIRRORS: Mapping[str, str] = {
    "ChatMessage": "keyword of the client's calls; the server's is parsed from the request",
    "FinishReason": "read by callers from outputs; the server's has members that no client sees",
    "InvalidRequest": _ERROR_MIRROR,
    "Overloaded": _ERROR_MIRROR,
    "Priority": "keyword of the client's calls; the server's orders its queue",
    "RequestExists": _ERROR_MIRROR,
    "RequestNotFound": _ERROR_MIRROR,
    "StepFailed": _ERROR_MIRROR,
    "Superseded": _ERROR_MIRROR,
    "TokenLogprobs": "read by callers from outputs; the server's is what a stage sends",
    "WorkerNotFound": _ERROR_MIRROR,
}
"""Public classes of the client that have the name of a server's type, with the reason."""

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module of the product."""

    target: str
    is_for_types_only: bool


class Module:
    """One parsed file of the product."""

    def __init__(self, path: str, name: str, text: str) -> None:
        self.path = path
        self.name = name
        self.text = text
        self.tree = ast.parse(text, path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def folder(self) -> str:
        """Top-level folder, "." for a file beside them."""
        return self.path.split("/")[0] if "/" in self.path else "."

    @cached_property
    def num_lines(self) -> int:
        """Physical lines."""
        return len(self.text.splitlines())

    @cached_property
    def docstring_lines(self) -> set[int]:
        """Lines of strings that are statements: docstrings, also of attributes."""
        return {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in _lines_of(node)
        }

    @cached_property
    def code_lines(self) -> set[int]:
        """Lines without docstrings, comments and blank lines."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {
            line
            for token in tokens
            if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        } - self.docstring_lines

    def functions(self) -> Iterator[tuple[str, int]]:
        """`path:line name` and length of every function, from its `def` to its last line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{self.path}:{node.lineno} {node.name}", len(_lines_of(node))

    def public_classes(self) -> list[str]:
        """Names of the classes at module level."""
        classes = (node.name for node in self.tree.body if isinstance(node, ast.ClassDef))
        return [name for name in classes if not name.startswith("_")]

    def reach_throughs(self) -> list[str]:
        """`path:line expression` of every `self._a.b.c`."""
        attributes = sorted(
            (node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)),
            key=lambda node: node.lineno,
        )
        inner = {node.value for node in attributes}
        chains = ((node, _attributes_of_self(node)) for node in attributes if node not in inner)
        return [
            f"{self.path}:{node.lineno} {ast.unparse(node)}"
            for node, names in chains
            if len(names) > 2 and names[0].startswith("_")
        ]

    def imports(self, known: Mapping[str, "Module"]) -> set[Import]:
        """Imported modules out of `known`, wherever the statement is."""
        return {
            Import(target, is_for_types_only)
            for node, is_for_types_only in _import_statements(self.tree, is_for_types_only=False)
            for target in self._targets(node, known)
            if target != self.name
        }

    def _targets(self, node: ast.Import | ast.ImportFrom, known: Mapping[str, "Module"]) -> Iterator[str]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = self._base(node)
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name

    def _base(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".")
        parents = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parents, *([node.module] if node.module else [])])


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _attributes_of_self(node: ast.expr) -> list[str]:
    """["_a", "b", "c"] for `self._a.b.c`; empty for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return names[::-1] if isinstance(node, ast.Name) and node.id == "self" else []


def _import_statements(
    node: ast.AST, *, is_for_types_only: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, is_for_types_only
    guarded = node.body if isinstance(node, ast.If) and _is_type_checking(node.test) else []
    for child in ast.iter_child_nodes(node):
        yield from _import_statements(child, is_for_types_only=is_for_types_only or child in guarded)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@dataclass(frozen=True, slots=True)
class Tree:
    """The product's modules by dotted name, and their imports."""

    root: Path
    modules: dict[str, Module]
    imports: dict[str, set[Import]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> "Tree":
        """Parse the product files of a repository. Raises CalledProcessError outside of one."""
        source_folders = _source_folders(root)
        modules = {}
        for path in product_files(root):
            name = _dotted_name(path, source_folders)
            module = Module(path, name, (root / path).read_text(encoding="utf-8"))
            if module.code_lines:
                modules[name] = module
        return cls(root, modules, {name: module.imports(modules) for name, module in modules.items()})

    def importers(self) -> dict[str, list[str]]:
        """Modules that import each module, type-only imports included."""
        importers: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, imports in self.imports.items():
            for imported in imports:
                importers[imported.target].add(name)
        return {name: sorted(names) for name, names in importers.items()}

    def import_cycles(self) -> list[list[str]]:
        """Groups of modules that import each other at run time, directly or through others."""
        edges = {
            name: {found.target for found in imports if not found.is_for_types_only}
            for name, imports in self.imports.items()
        }
        reachable = {name: _reachable(name, edges) for name in edges}
        cycles = {
            tuple(sorted(other for other in reachable[name] if name in reachable[other]))
            for name in edges
            if name in reachable[name]
        }
        return [list(cycle) for cycle in sorted(cycles)]

    def classes(self) -> dict[str, list[str]]:
        """Files of each public class name."""
        files = defaultdict(list)
        for module in self.modules.values():
            for name in module.public_classes():
                files[name].append(module.path)
        return dict(sorted(files.items()))


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    to_visit = list(edges[start])
    while to_visit:
        name = to_visit.pop()
        if name not in found:
            found.add(name)
            to_visit.extend(edges[name])
    return found


def product_files(root: Path) -> list[str]:
    """Tracked Python files with product code, relative to the top of the repository."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "*.py"], capture_output=True, check=True, text=True
    )
    files = [path for path in listed.stdout.split("\0") if path]
    return [
        path
        for path in files
        if path.split("/")[0] not in _NOT_PRODUCT and not path.endswith(_GENERATED) and (root / path).exists()
    ]


def _pyproject(root: Path) -> dict[str, Any]:
    file = root / "pyproject.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _source_folders(root: Path) -> list[str]:
    """Folders that contain packages: `where` of setuptools."""
    setuptools = _pyproject(root).get("tool", {}).get("setuptools", {})
    folders: list[str] = setuptools.get("packages", {}).get("find", {}).get("where", ["."])
    return [folder for folder in folders if folder != "."]


def _dotted_name(path: str, source_folders: Iterable[str]) -> str:
    for folder in source_folders:
        path = path.removeprefix(f"{folder}/")
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def measure_code(tree: Tree) -> Report:
    """Metrics of the files themselves."""
    modules = list(tree.modules.values())
    num_code = sum(len(module.code_lines) for module in modules)
    num_docstring = sum(len(module.docstring_lines) for module in modules)
    num_lines = sum(module.num_lines for module in modules)
    functions = [function for module in modules for function in module.functions()]
    return {
        "modules": len(modules),
        "lines": num_lines,
        "code_lines": num_code,
        "docstring_lines": num_docstring,
        "docstring_percent": round(100 * num_docstring / max(1, num_lines), 1),
        "folders": _measure_folders(modules),
        **_measure_importers(tree),
        **_measure_classes(tree),
        "long_functions": sorted(f"{name} ({length})" for name, length in functions if _is_long(length)),
        "small_modules": [
            module.path for module in modules if module.num_lines < MIN_MODULE_LINES and not module.is_package
        ],
        "large_files": [module.path for module in modules if module.num_lines > MAX_FILE_LINES],
        "import_cycles": tree.import_cycles(),
        "reach_throughs": [found for module in modules for found in module.reach_throughs()],
    }


def _is_long(length: int) -> bool:
    return length > MAX_FUNCTION_LINES


def _measure_folders(modules: Iterable[Module]) -> dict[str, dict[str, int]]:
    num_modules: Counter[str] = Counter()
    num_lines: Counter[str] = Counter()
    for module in modules:
        num_modules[module.folder] += 1
        num_lines[module.folder] += len(module.code_lines)
    return {
        folder: {"modules": num_modules[folder], "code_lines": num_lines[folder]}
        for folder in sorted(num_modules)
    }


def _measure_importers(tree: Tree) -> Report:
    single = {
        tree.modules[name]: importers[0]
        for name, importers in tree.importers().items()
        if len(importers) == 1 and not tree.modules[name].is_package
    }
    return {
        "single_importer_modules": [f"{module.path} <- {importer}" for module, importer in single.items()],
        "small_single_importer_modules": [
            module.path for module in single if module.num_lines < SMALL_IMPORTED_LINES
        ],
    }


def _measure_classes(tree: Tree) -> Report:
    repeated = {name: files for name, files in tree.classes().items() if len(files) > 1}
    mirrors = {name for name, files in repeated.items() if _is_client_mirror(name, files)}
    return {
        "duplicate_classes": {name: files for name, files in repeated.items() if name not in mirrors},
        "client_mirrors": {name: CLIENT_MIRRORS[name] for name in sorted(mirrors)},
    }


def _is_client_mirror(name: str, files: Iterable[str]) -> bool:
    """Whether a listed name stands for one type of the client and one other."""
    is_in_client = [path.startswith("stageline/") for path in files]
    return name in CLIENT_MIRRORS and sorted(is_in_client) == [False, True]


def measure_trace(tree: Tree, windows: Mapping[str, Mapping[str, Any]]) -> Report:
    """Product files whose functions ran during a request and a worker's death.

    Several lists for each, because periodic work runs in any window: all files; without the files that an
    idle cluster enters; only files with a function that an idle cluster does not run; of these, the files of
    the coordinator and of the folders that decide about the cluster.
    """
    paths = {str(tree.root / module.path): module.path for module in tree.modules.values()}
    report: Report = {"window_seconds": {window: recorded["seconds"] for window, recorded in windows.items()}}
    for window in ("request", "death"):
        ran = {tuple(function) for function in windows[window]["functions"] if function[1] in paths}
        idle = {tuple(function) for function in windows[f"{window}_idle"]["functions"]}
        idle_files = {path for _, path, _ in idle}
        other = [function for function in ran if function not in idle]
        lists = (
            {path for _, path, _ in ran},
            {path for _, path, _ in ran if path not in idle_files},
            {path for _, path, _ in other},
            {path for process, path, _ in other if process == "coordinator"},
            {path for _, path, _ in other if paths[path].startswith(_CONTROL_ROOMS)},
        )
        for name, files in zip(_trace_lists(window), lists, strict=True):
            report[name] = sorted(paths[path] for path in files)
        entered = set(report[f"{window}_files"])
        report[f"{window}_code_lines"] = sum(
            len(module.code_lines) for module in tree.modules.values() if module.path in entered
        )
    return report


def _trace_lists(window: str) -> list[str]:
    endings = (
        "files",
        "files_beside_idle",
        "files_with_other_functions",
        "coordinator_files_with_other_functions",
        "control_files_with_other_functions",
    )
    return [f"{window}_{ending}" for ending in endings]


TRACE_COUNTS = frozenset(
    name for window in ("request", "death") for name in (*_trace_lists(window), f"{window}_code_lines")
)


def run_trace(tree: Tree) -> Report:
    """Run `tools/house_trace.py` against the tree. Raises CalledProcessError."""
    folders = [tree.root, *(tree.root / folder for folder in _source_folders(tree.root))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "GRPC_VERBOSITY": "NONE"}
    script = Path(__file__).resolve().with_name("house_trace.py")
    command = [sys.executable, "-P", str(script), str(tree.root)]
    traced = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, cwd="/")
    return measure_trace(tree, json.loads(traced.stdout))


def counts(report: Report) -> dict[str, float]:
    """The numbers of a report: lengths of its lists and tables, and figures."""
    plain = {name: value for name, value in report.items() if name not in ("folders", "window_seconds")}
    return {name: value if isinstance(value, int | float) else len(value) for name, value in plain.items()}


def violations(report: Report, limits: Mapping[str, float], *, traced: bool) -> list[str]:
    """One line for each count above its limit. Raises ValueError for an unknown count."""
    found = counts(report)
    lines = []
    for name, limit in limits.items():
        if name in found:
            if found[name] > limit:
                lines.append(f"{name}: {found[name]:g}, the limit is {limit:g}")
        elif traced or name not in TRACE_COUNTS:
            raise ValueError(f"[tool.house] {name}: unknown count; known are {', '.join(sorted(found))}")
    return lines


def print_tables(report: Report) -> None:
    """Print counts, folders and the entries of each list."""
    for name, value in counts(report).items():
        print(f"{name:36}{value:>10g}")
    for window, seconds in report.get("window_seconds", {}).items():
        print(f"{'window ' + window:36}{seconds:>9g}s")
    print(f"\n{'folder':36}{'modules':>10}{'code lines':>12}")
    for folder, row in report["folders"].items():
        print(f"{folder:36}{row['modules']:>10}{row['code_lines']:>12}")
    for name, value in report.items():
        if value and isinstance(value, list):
            print(f"\n{name}")
            for entry in value:
                print("  " + (entry if isinstance(entry, str) else " ".join(entry)))
    for name in ("duplicate_classes", "client_mirrors"):
        if report[name]:
            print(f"\n{name}")
            for class_name, what in report[name].items():
                print(f"  {class_name}: {what if isinstance(what, str) else ', '.join(what)}")


def _parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--root", type=Path, default=here, help="Measured repository (default: this one).")
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")
    parser.add_argument("--no-trace", action="store_true", help="Skip the trace of a request and a death.")
    parser.add_argument(
        "--check", action="store_true", help="Print counts above their limit in [tool.house]; exit 1 if any."
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = _parse_arguments(arguments)
    tree = Tree.read(options.root.resolve())
    report = measure_code(tree)
    if not options.no_trace:
        report |= run_trace(tree)
    if options.json:
        print(json.dumps(report, indent=2))
    elif not options.check:
        print_tables(report)
    if not options.check:
        return 0
    limits = _pyproject(tree.root).get("tool", {}).get("house", {})
    lines = violations(report, limits, traced=not options.no_trace)
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Writes `SyncClient` from `Client`: the same methods, which wait for the result, or return a generator.

    python tools/sync_client.py           # stageline/client/sync_client.py
    python tools/sync_client.py --check   # exit code 1 if the file is not up to date

The output is committed, so that editors, type checkers and `help()` have plain signatures and docstrings. A
wrapper at run time (`__getattr__`, a decorator of the class) has none of them for type checkers, and a
translation of the whole client to blocking gRPC would be a second implementation of reattaching to test.
"""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "stageline" / "client" / "client.py"
TARGET = ROOT / "stageline" / "client" / "sync_client.py"
_HEAD = '''\
"""The Python client of a coordinator, for threads that block.

Generated from `Client` by tools/sync_client.py; do not edit.
"""
'''
_DOCSTRING = """Client of the coordinator at `address` (HOST:PORT), for threads that block.

        with SyncClient("127.0.0.1:7480") as client:
            for output in client.generate("Once upon a time", max_tokens=100):
                print(output.text, end="", flush=True)

    It has the methods of `Client`. Threads can share a client, and their calls are concurrent; a running
    event loop does not matter. The client opens at its first call, waits up to `connect_timeout_s` for the
    coordinator, and closes at the end of `with`, by `close`, or when it is collected. Detached requests
    survive outages of up to `reattach_timeout_s`. In a process that was forked after the first call of any
    client, calls raise RuntimeError.
    """
_TEXTS = {"cancelling the task or losing": "interrupting the thread or losing"}
"""Replaced in the docstrings of methods; each occurs once."""
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def sync_client(source: str) -> str:
    """The module of `SyncClient`. Raises LookupError for what it cannot translate."""
    tree = ast.parse(source)
    (client,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Client")
    functions = [node for node in client.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    (constructor,) = (node for node in functions if node.name == "__init__")
    methods = [_method(node) for node in functions if not node.name.startswith("_")]
    body = [ast.Expr(ast.Constant(_DOCSTRING)), _constructor(constructor), *methods]
    names = {node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
    code = ast.unparse(_class("SyncClient(BlockingCalls[Client])", body))
    return _formatted("\n\n".join([_HEAD, *_imports(tree, names), _translate(code)]))


def _method(node: _Function) -> ast.FunctionDef:
    """The same method, which waits."""
    call = f"self._asynchronous.{node.name}({_passed_on(node.args)})"
    if isinstance(node, ast.AsyncFunctionDef):
        returns, body = node.returns, f"return self._run({call})"
    else:
        returns, body = _generator(node), f"return self._iterate({call})"
    return _function(node, [node.body[0], *ast.parse(body).body], returns)


def _constructor(node: _Function) -> ast.FunctionDef:
    made = f"super().__init__(Client({_passed_on(node.args)}))"
    return _function(node, ast.parse(made).body, node.returns)


def _generator(node: ast.FunctionDef) -> ast.expr:
    """The type of the generator for an asynchronous one."""
    match node.returns:
        case ast.Subscript(value=ast.Name(id="AsyncGenerator"), slice=ast.Tuple(elts=[item, sent])):
            types = ast.Tuple(elts=[item, sent, ast.Constant(None)])
            return ast.Subscript(value=ast.Name(id="Generator"), slice=types)
    raise LookupError(f"Client.{node.name} is neither `async def` nor does it return an AsyncGenerator")


def _function(node: _Function, body: list[ast.stmt], returns: ast.expr | None) -> ast.FunctionDef:
    function = ast.FunctionDef(name=node.name, args=node.args, body=body, decorator_list=[], returns=returns)
    return ast.fix_missing_locations(function)


def _class(head: str, body: list[ast.stmt]) -> ast.Module:
    module = ast.parse(f"class {head}: pass")
    (made,) = module.body
    assert isinstance(made, ast.ClassDef)
    made.body = body
    return ast.fix_missing_locations(module)


def _passed_on(arguments: ast.arguments) -> str:
    """The arguments of a call with a function's parameters."""
    positional = [argument.arg for argument in arguments.args if argument.arg != "self"]
    keywords = [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    rest = [] if arguments.kwarg is None else [f"**{arguments.kwarg.arg}"]
    return ", ".join([*positional, *keywords, *rest])


def _imports(tree: ast.Module, used: Collection[str]) -> Iterator[str]:
    """The imports of `Client` that are used, and the imports of the translation."""
    yield "from collections.abc import Generator"
    yield "from stageline.client.blocking import BlockingCalls\nfrom stageline.client.client import Client"
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names = [alias for alias in node.names if alias.name in used]
            if names:
                yield ast.unparse(ast.ImportFrom(module=node.module, names=names, level=0))


def _translate(code: str) -> str:
    for old, new in _TEXTS.items():
        if code.count(old) != 1:
            raise LookupError(
                f"{old!r} occurs {code.count(old)} times in the docstrings of Client, expected 1"
            )
        code = code.replace(old, new)
    return code


def _formatted(code: str) -> str:
    """Sort the imports and format, as `make lint` wants it."""
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    for command in (["check", "--quiet", "--select", "I,F401", "--fix"], ["format", "--quiet"]):
        command = [*ruff, *command, "--stdin-filename", str(TARGET), "-"]
        code = subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout
    return code


def main(arguments: Sequence[str]) -> int:
    code = sync_client(SOURCE.read_text(encoding="utf-8"))
    if list(arguments) == ["--check"]:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == code:
            return 0
        print(f"{TARGET.relative_to(ROOT)} is not up to date; run: python tools/sync_client.py")
        return 1
    TARGET.write_text(code, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

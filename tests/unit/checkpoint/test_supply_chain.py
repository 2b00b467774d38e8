"""Nothing in a checkpoint is unpickled or run, whatever its files say."""

from __future__ import annotations

import ast
import json
import os
import pickle
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint import Checkpoint
from checkpoint.errors import UnsupportedFormat, UnsupportedModel
from tests.checkpoints import edit_config, make_checkpoint
from tests.repository import REPOSITORY
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer
from text.chat_template import ConversationError, TemplateOptions
from text.tokenizer import UnreadableTokenizer, load_text_codec

ROOTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
UNPICKLERS = {
    "cloudpickle", "copyreg", "dill", "joblib", "jsonpickle", "marshal", "multiprocessing", "pickle",
    "shelve", "torch.package",
}  # fmt: skip
UNSAFE_CALLS = {
    "eval", "exec", "__import__", "torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load",
    "yaml.load", "runpy.run_path", "runpy.run_module",
}  # fmt: skip


def unsafe_code(source: str) -> Iterator[str]:
    """What in `source` unpickles or runs code of files, by what Python's syntax tree names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _unpickles(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            yield from (name for name in names if _unpickles(name) or name in UNSAFE_CALLS)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            yield ast.unparse(node.func)
        elif isinstance(node, ast.keyword) and _permits_code(node):
            yield ast.unparse(node)


def _unpickles(module: str) -> bool:
    return module in UNPICKLERS or module.split(".")[0] in UNPICKLERS


def _permits_code(keyword: ast.keyword) -> bool:
    is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not is_false


def test_no_module_unpickles_or_runs_code_of_files() -> None:
    files = [file for root in ROOTS for file in (REPOSITORY / root).rglob("*.py")]
    assert len(files) > 200
    assert {str(file): found for file in files if (found := [*unsafe_code(file.read_text())])} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "from torch import load",
        "import multiprocessing.pool",
        "torch.load(path)",
        "np.load(path)",
        "eval(text)",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=flag)",
        "f(shell=True)",
    ],
)
def test_unsafe_code_is_found(source: str) -> None:
    assert list(unsafe_code(source))


class Plant:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def plant_pickle(directory: Path, name: str) -> Path:
    """Write a pickle to `directory / name`; return what exists once it was unpickled."""
    ran = directory / f"{name} was unpickled"
    (directory / name).write_bytes(pickle.dumps(Plant(ran)))
    return ran


def plant_code(directory: Path, *names: str) -> Path:
    """Write modules to `directory`; return what exists once one was imported."""
    ran = directory / "code was run"
    for name in names:
        source = f"import os\nos.mkdir({str(ran)!r})\nclass Planted:\n    pass\n"
        (directory / name).write_text(source)
    return ran


def test_what_is_planted_runs_where_it_is_loaded(tmp_path: Path) -> None:
    ran = plant_pickle(tmp_path, "a.bin")
    pickle.loads((tmp_path / "a.bin").read_bytes())
    assert ran.exists()
    ran = plant_code(tmp_path, "planted.py")
    exec((tmp_path / "planted.py").read_text(), {})
    assert ran.exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "a.pkl"]
)
def test_a_pickle_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=1)
    for shard in directory.glob("*.safetensors"):
        shard.unlink()
    ran = plant_pickle(directory, name)
    with pytest.raises(UnsupportedFormat) as refused:
        Checkpoint.open(directory)
    assert name in str(refused.value) and "\n" not in str(refused.value)
    assert not ran.exists()


def test_a_pickle_beside_safetensors_is_never_opened(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=1)
    before = Checkpoint.open(directory).fingerprint
    ran = plant_pickle(directory, "pytorch_model.bin")
    assert Checkpoint.open(directory).fingerprint == before
    assert not ran.exists()


AUTO_MAP = {
    "AutoConfig": "planted.Planted",
    "AutoModelForCausalLM": "planted.Planted",
    "AutoTokenizer": ["planted.Planted", "planted.Planted"],
}
CODE_FILES = ("planted.py", "tokenization_planted.py", "configuration_planted.py", "__init__.py", "setup.py")


@pytest.mark.parametrize("is_unknown", [False, True])
def test_code_of_a_model_is_not_run(is_unknown: bool, tmp_path: Path) -> None:
    """It is loaded by native layers, or refused if only that code knows it."""
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=1)
    plain = Checkpoint.open(directory).config
    ran = plant_code(directory, *CODE_FILES)
    edit_config(directory, auto_map=AUTO_MAP, architectures=["Planted" if is_unknown else "LlamaForCausalLM"])
    if is_unknown:
        with pytest.raises(UnsupportedModel, match="Planted"):
            Checkpoint.open(directory)
    else:
        assert Checkpoint.open(directory).config == plain
    assert not ran.exists()


@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_code_of_a_tokenizer_is_not_run(vocabulary: str, tmp_path: Path) -> None:
    settings = {"auto_map": AUTO_MAP, "tokenizer_class": "Planted"}
    ran = plant_code(tmp_path, *CODE_FILES)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "planted", "auto_map": AUTO_MAP}))
    save_tokenizer(tmp_path, byte_level(), **settings)
    if vocabulary == "tokenizer.json":
        codec = load_text_codec(tmp_path)
        assert codec is not None and codec.encode("hello")
    else:
        (tmp_path / "tokenizer.json").rename(tmp_path / vocabulary)
        (tmp_path / "merges.txt").touch()
        with pytest.raises(UnreadableTokenizer) as refused:
            load_text_codec(tmp_path)
        assert "needs code of the checkpoint, which is never run" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert not ran.exists()


ESCAPES = (
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir(PATH) }}",
    "{{ lipsum.__globals__['os'].mkdir(PATH) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['jinja2'] }}",
    "{{ strftime_now.__globals__.sys.modules.os.mkdir(PATH) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{{ messages | map(attribute='__class__') | first | attr('mro') }}",
    "{{ messages | map('attr', '__class__') | first | attr('mro') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{{ ('{m.__class__}' | format(m=messages)).__class__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.mkdir(PATH) }}",
    "{% set _ = messages.append(1) %}",
    "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ f._func.__code__ }}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_a_chat_template_does_not_leave_its_sandbox(template: str, tmp_path: Path) -> None:
    ran = tmp_path / "code was run"
    save_tokenizer(tmp_path, byte_level(), chat_template="model's own")
    codec = load_text_codec(tmp_path)
    assert codec is not None
    messages = [{"role": "user", "content": "hello"}]
    text = refusal = ""
    options = TemplateOptions(
        template="{{ messages[0].content }} " + template.replace("PATH", repr(str(ran)))
    )
    try:
        text = codec.decode(codec.encode_messages(messages, options))
    except ConversationError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert not any(word in text for word in ("class", "module", "function", "object at", "root:"))
    assert not ran.exists()
    assert messages == [{"role": "user", "content": "hello"}]

import subprocess
import sys


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, builtin_model; assert builtin_model.MODEL_DIRECTORY.is_dir();"
        " sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0

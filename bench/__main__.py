"""Dispatches `python -m bench`; `python -m bench gpu` is a command of its own.

Each command is imported when it is chosen: the one for a GPU reports missing packages, which the other needs.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["gpu"]:
        from bench.gpu.command import main as gpu_main

        return gpu_main(arguments[1:])
    from bench.command import main as figures_main

    return figures_main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

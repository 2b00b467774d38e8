"""The kernels in C, of which pyproject.toml cannot say that a build leaves them out."""

import os

from setuptools import Extension, setup

kernels = os.environ.get("STAGELINE_KERNELS", "on")
if kernels not in ("on", "off"):
    raise SystemExit(f"STAGELINE_KERNELS is {kernels!r}, must be on or off")

# Left out, too, where no C compiler is found; workers then say that they compute with torch's operators.
extension = Extension(
    "stage_worker.model._cpu_kernels",
    ["stage_worker/model/_cpu_kernels.c"],
    extra_compile_args=["-O3"],
    optional=True,
)
setup(ext_modules=[extension] if kernels == "on" else [])

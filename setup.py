"""The compiled part, which is optional: without a compiler everything works, and calls on one host take longer."""

import sys

from setuptools import Extension, setup

COMPILED = Extension(
    "monarch._compiled",
    ["monarch/_compiled.c"],
    extra_compile_args=["-std=c11"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[COMPILED] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if sys.platform == "linux" else {},
)

"""Builds the compiled step path; pyproject.toml has everything else.

Where it cannot be compiled the package is installed without it, and records steps in Python.
``SGL_ASPECTS_NATIVE=off`` makes a pure-Python wheel.
"""

import os
import sysconfig
import zlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("sgl_aspects", "tracing", "record", "native")
FILES = sorted(FOLDER.glob("*.[ch]"))
CHECKSUM = zlib.crc32(b"".join(path.read_bytes() for path in FILES))  # as record/native computes it

step_path = Extension(
    "sgl_aspects.tracing.record.native._decode_path",
    [str(path) for path in FILES if path.suffix == ".c"],
    depends=[str(path) for path in FILES if path.suffix == ".h"],
    define_macros=[("CHECKSUM", str(CHECKSUM))],
    # Python's macros check the types of what they read unless NDEBUG is defined: more cold memory.
    extra_compile_args=["-O2", "-DNDEBUG", "-g0", "-fno-plt", "-fvisibility=hidden"],
    optional=True,
)
is_off = os.environ.get("SGL_ASPECTS_NATIVE", "").strip().lower() in ("0", "false", "no", "off")
has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")  # the C code relies on it

setup(ext_modules=[step_path] if has_gil and not is_off else [])

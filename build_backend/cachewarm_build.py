"""PEP 517 backend: scikit-build-core, and a C++ compiler from PyPI where the machine has none.

The package `ziglang` carries clang, libc++ and an archiver. Only when no compiler is found is it
asked for as a build requirement and put in front, so a machine with g++ downloads nothing more.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scikit_build_core import build as _skbuild

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ZIGLANG = "ziglang>=0.13"
# The names CMake itself tries on Linux.
COMPILERS = ("c++", "g++", "clang++")

build_sdist = _skbuild.build_sdist
get_requires_for_build_sdist = _skbuild.get_requires_for_build_sdist
prepare_metadata_for_build_editable = _skbuild.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = _skbuild.prepare_metadata_for_build_wheel

Settings = dict[str, Any] | None


def has_compiler() -> bool:
    """Whether CMake will find a C++ compiler by itself; a $CXX is the user's word and trusted."""
    return bool(os.environ.get("CXX")) or any(shutil.which(name) for name in COMPILERS)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    ours = [] if has_compiler() else [ZIGLANG]
    return [*_skbuild.get_requires_for_build_wheel(config_settings), *ours]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    ours = [] if has_compiler() else [ZIGLANG]
    return [*_skbuild.get_requires_for_build_editable(config_settings), *ours]


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    with _compiler():
        return _skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    with _compiler():
        return _skbuild.build_editable(wheel_directory, config_settings, metadata_directory)


@contextmanager
def _compiler() -> Iterator[None]:
    """Puts zig's compiler first in the environment for one build if there is no other."""
    if has_compiler():
        yield
        return
    if importlib.util.find_spec("ziglang") is None:
        raise SystemExit(
            "cachewarm: no C++ compiler found: install g++ or clang++, or `pip install ziglang`, "
            "or set CXX"
        )
    print("cachewarm: no C++ compiler found, building with ziglang (minutes the first time)")
    with tempfile.TemporaryDirectory(prefix="cachewarm-zig-") as folder:
        # CMake wants single programs, and looks for ar and ranlib beside the compiler.
        _write_tool(Path(folder, "c++"), "c++ -mcpu=baseline")  # zig's default is this very CPU
        _write_tool(Path(folder, "ar"), "ar")
        _write_tool(Path(folder, "ranlib"), "ranlib")
        os.environ["CXX"] = str(Path(folder, "c++"))
        try:
            yield
        finally:
            del os.environ["CXX"]


def _write_tool(path: Path, verb: str) -> None:
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {verb} "$@"\n')
    path.chmod(0o755)

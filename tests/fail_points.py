"""Fail points as tests see them: all that the code has, and tokens that let one act once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from cachewarmd.failpoints import VARIABLE
from tests.daemon import SERVICES, wait_until


def in_the_code(function: str) -> list[str]:
    """Names that calls of `hit` or `may_fail` in the daemon have, in no order; twice is twice."""
    found = []
    for path in sorted((SERVICES / "cachewarmd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id == function:
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{path}: the name must be a literal"
                found.append(name.value)
    return found


@dataclass(frozen=True)
class Tokens:
    """A directory of tokens: whoever puts one there lets that point act once."""

    folder: Path

    def environ(self, action: str, names: list[str]) -> dict[str, str]:
        """Arms every point of these, each waiting for its token."""
        items = (f"{name}:{action}:{self.folder / name}" for name in names)
        return {VARIABLE: ",".join(items)}

    def put(self, name: str) -> None:
        (self.folder / name).touch()

    def is_there(self, name: str) -> bool:
        return (self.folder / name).exists()

    def wait_taken(self, name: str) -> None:
        """Returns once the point has acted."""
        wait_until(lambda: not self.is_there(name), f"fail point {name} is hit")

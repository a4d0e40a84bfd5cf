"""What a group of verbs needs to add itself to the command line.

A group is a module with `add_verbs(add)`; `add(name, run)` gives the verb's parser, whose help is
the docstring of `run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from cachewarmd import options
from cachewarmd.ctl.outcome import Output

Verb = Callable[[argparse.Namespace, Output], int]
Add = Callable[[str, Verb], argparse.ArgumentParser]


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An options parser as argparse wants it: with its own message in the error."""

    def convert(value: str) -> Any:
        try:
            return parse(value)
        except options.OptionError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None

    return convert

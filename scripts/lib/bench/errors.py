"""What ends a benchmark early."""

from __future__ import annotations


class BenchError(Exception):
    """Nothing can be measured, or what was measured is not what was asked for."""


class UsageError(BenchError):
    """A flag does not go with the model: exit status 2."""

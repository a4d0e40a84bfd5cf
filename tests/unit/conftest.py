"""Fixtures of the unit tests."""

from tests.daemon import short_dir

__all__ = ["short_dir"]

"""Fixtures of the integration tests."""

from tests.daemon import daemon, module_daemon, short_dir

__all__ = ["daemon", "module_daemon", "short_dir"]

"""`cachewarmd`: the daemon, or with --holder the small process that keeps its memory for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# With these the program says something and ends.
_ONLY_TELL = {"--help", "-h", "--version", "--check-config", "--print-config"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Here and not in `program`: the holder must stay small, so it imports nothing of the daemon.
    if "--holder" in arguments and not _ONLY_TELL.intersection(arguments):
        from cachewarmd.holder import hold

        return hold()
    from cachewarmd.program import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""engine: the service that streams tokens."""

__version__ = "0.1.0"

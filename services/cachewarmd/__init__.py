"""cachewarmd: the daemon that owns what must outlive an engine (weights, KV blocks, prompts)."""

__version__ = "0.1.0"

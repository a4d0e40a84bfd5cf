"""The benchmark command behind scripts/bench; docs/benchmarks.md says what each mode measures."""

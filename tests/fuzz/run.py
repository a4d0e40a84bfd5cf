"""Inputs for one target, more and more of them, until one is a fault or all are done.

    python -m tests.fuzz.run TARGET --runs N [--seed S] [--planted] [--at-random]
    python -m tests.fuzz.run TARGET --replay FILE [--planted]

Coverage guides it where atheris is installed, else (or with --at-random) inputs are changed
blindly. A run prints what it saw as JSON and ends with 1 when something was wrong: an error that
is not documented, an answer that is not right, an input that takes a minute, or memory that grows
once a third of the run is over.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS, Entry

# A machine that is busy with other things may not give us a turn for many seconds.
LIMIT_S = 60
MAX_GROWTH_BYTES = 10 << 20
MAX_INPUT_BYTES = 4096
SERVICES = Path(__file__).resolve().parents[2] / "services"
HAS_ATHERIS = importlib.util.find_spec("atheris") is not None


class Run:
    """Counts inputs, watches memory; ends the process at the last one or at a fault."""

    def __init__(self, name: str, target: Target, args: argparse.Namespace) -> None:
        self._name, self._target, self._args = name, target, args
        self._started = time.monotonic()
        self._num_done = 0
        self._warm_bytes = 0

    def one(self, data: bytes) -> None:
        """Check one input."""
        try:
            self._target.check(data)
        except BaseException:
            self._fault(data, traceback.format_exc())
        self._num_done += 1
        if self._num_done == self._args.runs // 3:
            self._warm_bytes = _resident_bytes()
        if self._num_done >= self._args.runs:
            grown = _resident_bytes() - self._warm_bytes
            is_wrong = grown > MAX_GROWTH_BYTES
            self._end(int(is_wrong), fault="memory grows" if is_wrong else "", grown_bytes=grown)

    def _fault(self, data: bytes, what: str) -> NoReturn:
        self._args.crashes.mkdir(parents=True, exist_ok=True)
        path = self._args.crashes / f"{self._name}-{os.getpid()}"
        path.write_bytes(data)
        print(what, file=sys.stderr)
        self._end(1, fault=what.splitlines()[-1], input=str(path))

    def _end(self, status: int, **more: object) -> NoReturn:
        seconds = round(time.monotonic() - self._started, 2)
        report = {"target": self._name, "runs": self._num_done, "seconds": seconds, **more}
        report["cpu_seconds"] = round(time.process_time(), 2)
        print(json.dumps(report), flush=True)
        # libFuzzer would take the end of Python for a crash.
        os._exit(status)


def _resident_bytes() -> int:
    gc.collect()  # what is no longer in use may wait for that with its maps
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- where inputs come from -------------------------------------------------------------------


def guided(entry: Entry) -> Target:
    """The target with its guide instrumented."""
    from atheris.import_hook import HookManager

    # An editable install brings an import hook of its own, whose modules atheris passes over.
    hooks = [hook for hook in sys.meta_path if type(hook).__module__.startswith("_editable_")]
    for hook in hooks:
        sys.meta_path.remove(hook)
    sys.path.insert(0, str(SERVICES))
    # As instrument_imports, which has no choice about comparisons.
    with HookManager({entry.guide}, set(), False, trace_dataflow=entry.sees_comparisons):
        return entry.make()


def fuzz_guided(one: Callable[[bytes], None], seeds: Sequence[bytes], seed: int) -> NoReturn:
    """Forever, with libFuzzer, which has an alarm of its own."""
    import atheris

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(seeds):
            (Path(folder) / str(number)).write_bytes(data)
        flags = [f"-seed={seed}", f"-timeout={LIMIT_S}", f"-max_len={MAX_INPUT_BYTES}"]
        flags += [f"-artifact_prefix={folder}/", "-verbosity=0", "-reload=0", "-rss_limit_mb=0"]
        atheris.Setup(["fuzz", *flags, folder], one)
        atheris.Fuzz()
    raise AssertionError("libFuzzer ended by itself")


def fuzz_at_random(one: Callable[[bytes], None], seeds: Sequence[bytes], seed: int) -> NoReturn:
    """Forever; the seeds first, then changed ones."""
    rng = random.Random(seed)
    signal.signal(signal.SIGALRM, _late)
    for data in seeds:
        _with_alarm(one, data)
    while True:
        _with_alarm(one, _changed(rng, seeds))


def _with_alarm(one: Callable[[bytes], None], data: bytes) -> None:
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    one(data)


def _late(*_: object) -> NoReturn:
    raise TimeoutError(f"an input that takes {LIMIT_S} s")


_NUMBERS = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1)


def _changed(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, end = sorted(rng.randint(0, len(data)) for _ in range(2))
        match rng.randrange(7):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[min(at, len(data) - 1)] = rng.choice(_NUMBERS) & 0xFF
            case 2:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(_NUMBERS) & ((1 << 8 * size) - 1)
                data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 3:
                del data[at : min(end, at + 16)]
            case 4:
                data[at:at] = data[at : min(end, at + 32)]
            case 5:
                data[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4)))
            case 6:
                other = rng.choice(seeds)
                data[at:] = other[rng.randint(0, len(other)) :]
    return bytes(data[:MAX_INPUT_BYTES])


# -- the program ------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--replay", type=Path, help="only this input")
    parser.add_argument("--planted", action="store_true", help="with the target's planted bug")
    parser.add_argument("--at-random", action="store_true", help="without atheris")
    parser.add_argument(
        "--crashes", type=Path, default=Path(tempfile.gettempdir()) / "cachewarm-fuzz"
    )
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else random.randrange(1, 1 << 31)
    entry = TARGETS[args.target]
    is_guided = HAS_ATHERIS and not args.at_random and not args.replay
    target = guided(entry) if is_guided else entry.make()
    with target.plant() if args.planted else contextlib.nullcontext():
        if args.replay:
            target.check(args.replay.read_bytes())
            sys.exit(0)
        print(f"seed {seed}, {'guided by coverage' if is_guided else 'at random'}", flush=True)
        fuzz = fuzz_guided if is_guided else fuzz_at_random
        fuzz(Run(args.target, target, args).one, target.seeds, seed)


if __name__ == "__main__":
    main()

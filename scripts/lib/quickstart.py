"""The demonstration behind scripts/quickstart: real processes, a real kill -9, then a table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.client import CallError, Done, EngineClient, Text

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MAX_TOKENS = 48
MIN_SYSTEM_TOKENS = 1024
START_TIMEOUT_S = 180


class QuickstartError(Exception):
    """A step went wrong; the message says which, and where its log is."""


@dataclass
class Answer:
    """One request as the client saw it; times in seconds."""

    what: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float
    text: str


def say(text: str) -> None:
    """Progress goes to stderr, results to stdout."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def ticking(what: str) -> Iterator[None]:
    """Name a step before it runs and its duration after."""
    say(f"{what} ...")
    started = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - started:.1f} s")


class Service:
    """One of our programs, its log kept in a file."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.log = log
        self.started = time.monotonic()
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                start_new_session=True,  # Ctrl-C is ours to handle
            )

    def wait_ready(self) -> dict[str, Any]:
        """Its `ready` line. Raises QuickstartError when it ends or says nothing."""
        assert self.process.stdout is not None
        timer = time.monotonic() + START_TIMEOUT_S
        os.set_blocking(self.process.stdout.fileno(), False)
        line = b""
        while time.monotonic() < timer and not line.endswith(b"\n"):
            line += self.process.stdout.read() or b""
            if self.process.poll() is not None and not line:
                break
            time.sleep(0.01)
        if not line:
            tail = self.log.read_text(errors="replace").splitlines()[-5:]
            raise QuickstartError("\n".join(["a service did not start:", *tail]))
        ready: dict[str, Any] = json.loads(line.splitlines()[0])
        return ready

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not go."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Demo:
    """What was started, and how to end it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "control.sock"
        self.env = {**os.environ, "CACHEWARMD_SOCKET": str(self.socket)}
        self.env["XDG_RUNTIME_DIR"] = str(folder)
        self.daemon: Service | None = None
        self.engine: Service | None = None
        self.target = ""
        self.model = Path()

    def write_model(self, dest: Path | None) -> None:
        command = [str(BIN / "cachewarm-engine"), "demo-model"]
        command += [] if dest is None else ["--dest", str(dest)]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            raise QuickstartError("the demo model could not be written")
        self.model = Path(result.stdout.strip())

    def start_daemon(self) -> None:
        self.daemon = Service([str(BIN / "cachewarmd")], self.folder / "cachewarmd.log", self.env)
        self.daemon.wait_ready()

    def start_engine(self, port: int = 0) -> float:
        """Returns seconds from process start to READY."""
        command = [str(BIN / "cachewarm-engine"), "serve", "--model", str(self.model)]
        command += ["--port", str(port), "--http-port", "0"]
        self.engine = Service(command, self.folder / "engine.log", self.env)
        ready = self.engine.wait_ready()
        self.target = ready["address"]
        return time.monotonic() - self.engine.started

    def kill_engine(self) -> None:
        """kill -9 of front and workers, as a crash or an OOM kill would."""
        assert self.engine is not None
        with EngineClient(self.target) as client:
            workers = [worker.pid for worker in client.server_info().workers]
        for pid in (self.engine.process.pid, *workers):
            os.kill(pid, signal.SIGKILL)
        self.engine.process.wait()

    def warm_up(self, text: str) -> None:
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text(json.dumps({"text": text}) + "\n")
        command = [str(BIN / "cachewarmd-ctl"), "warmup", "--model", str(self.model)]
        command += ["--prompts", str(prompts)]
        if subprocess.run(command, env=self.env, stdout=sys.stderr).returncode:
            raise QuickstartError("warm-up failed")

    def ask(self, what: str, prompt: str, *, show: bool) -> Answer:
        """Stream an answer; the clock starts when the request leaves."""
        started, first, text = time.monotonic(), 0.0, ""
        with EngineClient(self.target) as client:
            for event in client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0):
                if isinstance(event, Text):
                    first = first or time.monotonic()
                    text += event.text
                    if show:
                        print(event.text, end="", file=sys.stderr, flush=True)
                elif isinstance(event, Done):
                    done = event
        if show:
            say("")
        now = time.monotonic()
        return Answer(
            what, done.prompt_tokens, done.cached_tokens, first - started, now - started, text
        )

    def stop(self) -> None:
        for service in (self.engine, self.daemon):
            if service is not None:
                service.stop()


def chat(system: str, question: str) -> str:
    """The demo model's chat format, written out."""
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def run(demo: Demo, model: Path | None) -> dict[str, Any]:
    """The whole demonstration; returns what the table shows."""
    handbook = (ROOT / "examples" / "handbook.txt").read_text()
    system = chat(handbook, "").split("<|im_end|>")[0]
    question = "Where is the lift?"
    # Differs in its first word, so nothing of it can come from the warmed prompt.
    control = chat("Good evening. " + handbook, question)
    prompt = chat(handbook, question)

    demo.write_model(model)
    with ticking("starting cachewarmd"):
        demo.start_daemon()
    with ticking("starting cachewarm-engine"):
        start_s = demo.start_engine()
    with EngineClient(demo.target) as client:
        num_system = len(client.tokenize(system))
    if num_system < MIN_SYSTEM_TOKENS:
        raise QuickstartError(f"the system prompt has {num_system} tokens only")
    with ticking("asking cold (a control prompt nobody has seen)"):
        answers = [demo.ask("cold", control, show=False)]
    with ticking(f"warming up the system prompt ({num_system} tokens)"):
        demo.warm_up(system)
    say("asking warm ...")
    answers.append(demo.ask("warm", prompt, show=True))
    say("kill -9 of the engine's front and worker ...")
    demo.kill_engine()
    with ticking("starting cachewarm-engine again"):
        restart_s = demo.start_engine()
    say("asking again ...")
    answers.append(demo.ask("after kill -9", prompt, show=True))
    if answers[1].text != answers[2].text:
        raise QuickstartError("the answer changed through the kill")
    return {
        "schema_version": 1,
        "system_prompt_tokens": num_system,
        "engine_start_s": {"first": start_s, "after_kill": restart_s},
        "answers": [asdict(answer) for answer in answers],
    }


def print_table(result: dict[str, Any]) -> None:
    """For people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="SmolLM2-135M-Instruct, native kernels (bfloat16)")
    for name in (
        "request",
        "prompt tokens",
        "cached tokens",
        "time to first token",
        "engine start",
    ):
        table.add_column(name, justify="left" if name == "request" else "right")
    starts = {"cold": "first", "after kill -9": "after_kill"}
    for answer in result["answers"]:
        start = result["engine_start_s"].get(starts.get(answer["what"], ""))
        table.add_row(
            answer["what"],
            str(answer["prompt_tokens"]),
            str(answer["cached_tokens"]),
            f"{answer['ttft_s']:.3f} s",
            "" if start is None else f"{start:.2f} s",
        )
    Console().print(table)


def print_keep(demo: Demo) -> None:
    """How to go on with what is left running."""
    assert demo.engine is not None and demo.daemon is not None
    lines = [
        "The services are up. Talk to them:",
        f"  {BIN}/cachewarm-engine generate --target {demo.target} --max-tokens 40 'Once upon'",
        f"  {BIN}/cachewarmd-ctl --socket {demo.socket} status",
        "Stop them:",
        f"  kill {demo.engine.process.pid} {demo.daemon.process.pid}",
        f"Their logs are in {demo.folder}.",
    ]
    print("\n".join(lines))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser("quickstart")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, metavar="DIR")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="cachewarm-quickstart-"))
    demo = Demo(folder)
    keep = False
    try:
        result = run(demo, flags.model)
        keep = flags.keep
        print_table(result)
        if keep:
            print_keep(demo)
        if flags.json:
            print(json.dumps(result))
    except (QuickstartError, CallError) as exc:
        say(f"quickstart: error: {exc}")
        say(f"logs: {folder}")
        return 1
    except KeyboardInterrupt:
        say("interrupted: stopping what was started")
        return 130
    finally:
        if not keep:
            demo.stop()
    if not keep:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

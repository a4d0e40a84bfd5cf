"""cachewarmd-ctl against a real daemon: answers, exit codes, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cachewarmd import __version__
from cachewarmd.client import Client
from cachewarmd.ctl.__main__ import main
from cachewarmd.errors import UnreachableError
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, environment, wait_until
from tests.worker import Worker, key

OK, FAILED, USAGE, NOT_WARM, UNKNOWN, UNREACHABLE, TIMED_OUT, INTERRUPTED = (
    0, 1, 2, 3, 4, 5, 6, 130,
)  # fmt: skip
SHA256 = r"[0-9a-f]{64}"
# What an installed engine brings: a plan for a model directory, found by entry point.
PLANNER = """
import json
from cachewarmd.v1 import control_pb2 as pb

def plan(model_dir):
    if not (model_dir / "model.safetensors").exists():
        raise ValueError(f"{model_dir}: holds no model")
    raw = (model_dir / "model.safetensors").read_bytes()
    shape = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["a"]["shape"]
    result = pb.PackPlan(description="fake plan", segment_bytes=4096)
    result.tensors.add(name="a", op=1, shape=shape, num_bytes=4 * shape[0])
    return result.SerializeToString()
"""


class Ctl:
    """Runs the program, here (fast) or as a process of its own."""

    def __init__(self, socket: Path, capsys: pytest.CaptureFixture[str], packages: Path) -> None:
        self.socket = socket
        self._capsys = capsys
        self._packages = packages

    def run(self, *args: object) -> tuple[int, str, str]:
        """(exit status, stdout, stderr)."""
        self._capsys.readouterr()
        status = main(["--socket", str(self.socket), *map(str, args)])
        out, err = self._capsys.readouterr()
        return status, out, err

    def json(self, *args: object) -> tuple[int, dict[str, Any]]:
        """(exit status, the one object on stdout)."""
        status, out, _ = self.run(*args, "-o", "json")
        data = json.loads(out)
        assert data.pop("schema_version") == 1
        return status, data

    def spawn(self, *args: object, **options: Any) -> subprocess.Popen[str]:
        """As a process."""
        env = environment()
        env["PYTHONPATH"] += os.pathsep + str(self._packages)
        command = [sys.executable, "-P", "-m", "cachewarmd.ctl", "--socket", str(self.socket)]
        return subprocess.Popen(
            [*command, *map(str, args)],
            env={**env, "PYTHONUNBUFFERED": "1", **options.pop("env", {})},
            text=True,
            **options,
        )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages with the metadata of an installed engine, on the import path."""
    folder = tmp_path / "packages"
    info = folder / "fake_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "fake_engine.py").write_text(PLANNER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cachewarm.pack_plan]\ndefault = fake_engine:plan\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def ctl(module_daemon: Daemon, capsys: pytest.CaptureFixture[str], packages: Path) -> Ctl:
    return Ctl(module_daemon.socket, capsys, packages)


@pytest.fixture
def own_ctl(daemon: Daemon, capsys: pytest.CaptureFixture[str], packages: Path) -> Ctl:
    """With a daemon that the test may end."""
    return Ctl(daemon.socket, capsys, packages)


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a model directory of that name; other names have other weights."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        data = key(name)[:8]
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        head = json.dumps({"a": entry}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
        return folder

    return make


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts, one of each form."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "one"}\n\n{"token_ids": [1, 2, 4294967295]}\n"three"\n')
    return path


class Provider:
    """An engine that computes warm-up items: answers come from `answer`, one for each item."""

    def __init__(self, daemon: Daemon, weights_sha256: str, answer: Callable[[int], Any]) -> None:
        self.seen: list[pb.WarmPrompt] = []
        self._answer = answer
        self._client = daemon.client(pb.ROLE_ENGINE, on_event=self._on_event)
        provide = pb.Provide(weights_sha256=bytes.fromhex(weights_sha256))
        self._client.call(pb.Envelope(provide=provide), PATIENCE_S)

    def _on_event(self, envelope: pb.Envelope) -> None:
        if envelope.WhichOneof("body") != "warm_item":
            return
        item = envelope.warm_item
        self.seen.append(item.prompt)
        for fields in (
            {"state": pb.ITEM_STATE_RUNNING, "num_tokens": 5},
            {"num_tokens": 5, "done_tokens": 5, **self._answer(item.index)},
        ):
            update = pb.WarmItemUpdate(job_id=item.job_id, index=item.index, **fields)
            with contextlib.suppress(UnreachableError):  # the test has ended it
                self._client.notify(pb.Envelope(warm_item_update=update))

    def __enter__(self) -> Provider:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def has_provider(daemon: Daemon) -> bool:
    return any(client.is_provider for client in daemon.status().clients)


def wait_for_line(stream: Any, text: str) -> None:
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"never said: {text}")


# -- looking --------------------------------------------------------------------------------------


def test_status_is_one_object_with_whole_numbers(ctl: Ctl, module_daemon: Daemon) -> None:
    """Everything that is in use, bytes as integers."""
    status, data = ctl.json("status")
    assert status == OK
    assert data["pid"] == module_daemon.pid
    assert data["socket"] == str(module_daemon.socket)
    assert data["pool"]["pool_bytes"] == 64 << 20
    assert sum(data["pool"]["bytes"].values()) == 64 << 20
    assert {"epoch", "uptime_s", "models", "stamps", "clients", "counters"} <= data.keys()
    assert [client["name"] for client in data["clients"]] == ["cachewarmd-ctl"]


def test_status_table_is_for_people_and_has_no_colours_in_a_pipe(
    ctl: Ctl, module_daemon: Daemon
) -> None:
    """Units, and no escape codes."""
    status, out, err = ctl.run("status")
    assert (status, err) == (OK, "")
    assert f"pid {module_daemon.pid}, epoch 1" in out
    assert "pool: 64.0 MiB, 64.0 MiB allocated" in out
    assert str(module_daemon.socket) in out
    assert "\x1b" not in out


@pytest.mark.parametrize("place", ["before", "after"])
def test_common_options_stand_on_either_side_of_the_verb(
    module_daemon: Daemon, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """Scripts written either way work."""
    common = ["-o", "json", "--socket", str(module_daemon.socket)]
    argv = [*common, "clients"] if place == "before" else ["clients", *common]
    assert main(argv) == OK
    assert len(json.loads(capsys.readouterr().out)["clients"]) == 1


def test_socket_comes_from_the_environment(
    module_daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CACHEWARMD_SOCKET means the same as for the daemon."""
    monkeypatch.setenv("CACHEWARMD_SOCKET", str(module_daemon.socket))
    assert main(["status"]) == OK
    assert str(module_daemon.pid) in capsys.readouterr().out


def test_version_needs_no_daemon(ctl: Ctl, short_dir: Path, module_daemon: Daemon) -> None:
    """It tells the daemon's if there is one."""
    status, data = ctl.json("version")
    assert (status, data["daemon"]["pid"]) == (OK, module_daemon.pid)
    assert ctl.run("version")[1] == f"cachewarmd-ctl {__version__}\ncachewarmd {__version__}\n"
    ctl.socket = short_dir / "none"
    assert ctl.json("version") == (OK, {"version": __version__, "daemon": None})


def test_json_does_not_import_rich() -> None:
    """Scripts do not pay for tables."""
    code = (
        "import sys\n"
        "from cachewarmd.ctl.__main__ import main\n"
        "assert main(['version', '-o', 'json', '--socket', '/nonexistent/s']) == 0\n"
        "print(*(name for name in sys.modules if name.split('.')[0] in ('rich', 'engine')))"
    )
    command = [sys.executable, "-P", "-c", code]
    told = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[1] == ""


# -- warming --------------------------------------------------------------------------------------


def test_warmup_of_weights_then_models_and_is_warm(
    ctl: Ctl, make_model: Callable[[str], Path]
) -> None:
    """Loaded once; again is success and says so; `models` and `is-warm` agree."""
    model = make_model("first")
    assert ctl.run("is-warm", model)[:2] == (NOT_WARM, "not warm: not loaded\n")
    assert ctl.json("is-warm", "first")[0] == UNKNOWN
    status, data = ctl.json("warmup", "--model", model)
    job = data["job"]
    assert (status, job["state"], job["model_name"]) == (OK, "done", "first")
    assert (job["weights"]["done"], job["weights"]["already_warm"]) == (True, False)
    assert job["weights"]["total_bytes"] == (model / "model.safetensors").stat().st_size
    status, out, _ = ctl.run("warmup", "--model", model, "--weights-only")
    assert status == OK
    assert "weights: already warm" in out
    (told,) = [m for m in ctl.json("models")[1]["models"] if m["model_name"] == "first"]
    assert told["version"] == told["weights_sha256"][:12]
    assert (told["segment_bytes"], told["files_present"]) == (4096, True)
    assert told["weights_sha256"] in ctl.run("models")[1]
    assert ctl.run("is-warm", model)[:2] == (OK, "warm\n")
    assert ctl.run("is-warm", "first")[0] == OK


def test_is_warm_notices_that_files_changed(ctl: Ctl, make_model: Callable[[str], Path]) -> None:
    """Loaded weights that are no longer those of the directory are not warm."""
    model = make_model("changing")
    assert ctl.run("warmup", "--model", model)[0] == OK
    os.utime(model / "model.safetensors")
    assert ctl.json("is-warm", model) == (
        NOT_WARM,
        {
            "model": str(model),
            "is_warm": False,
            "detail": "the weight files changed since they were loaded",
        },
    )


def test_name_and_version_are_the_operators(ctl: Ctl, make_model: Callable[[str], Path]) -> None:
    """Both are shown, and the name can be asked for."""
    model = make_model("named")
    args = ("--model", model, "--model-name", "prod", "--model-version", "2024-06")
    assert ctl.run("warmup", *args)[0] == OK
    (told,) = [m for m in ctl.json("models")[1]["models"] if m["model_name"] == "prod"]
    assert told["version"] == "2024-06"
    assert ctl.run("is-warm", "prod")[0] == OK


def test_prompts_are_computed_by_an_engine(
    ctl: Ctl, module_daemon: Daemon, make_model: Callable[[str], Path], prompts: Path
) -> None:
    """Each prompt reaches it as it stands in the file; the summary counts what came of them."""
    model = make_model("served")
    ctl.run("warmup", "--model", model)
    sha256 = digest(ctl, "served")

    def answer(index: int) -> dict[str, object]:
        return {"state": pb.ITEM_STATE_DONE, "already_warm": index == 1}

    with Provider(module_daemon, sha256, answer) as provider:
        status, data = ctl.json("warmup", "--model", model, "--prompts", prompts)
        assert status == OK
        counts = data["job"]["prompts"]
        assert (counts["total"], counts["done"], counts["already_warm"]) == (3, 2, 1)
        assert (counts["failed"], counts["pending"], counts["num_tokens"]) == (0, 0, 15)
        assert [prompt.text for prompt in provider.seen] == ["one", "", "three"]
        assert list(provider.seen[1].token_ids.ids) == [1, 2, 4294967295]
        status, out, _ = ctl.run("warmup", "--model", model, "--prompts", prompts)
        assert "prompts: 2 done, 1 already warm, 0 failed" in out


def digest(ctl: Ctl, name: str) -> str:
    models = ctl.json("models")[1]["models"]
    return next(str(m["weights_sha256"]) for m in models if m["model_name"] == name)


def test_failed_prompts_fail_the_job(
    ctl: Ctl, module_daemon: Daemon, make_model: Callable[[str], Path], prompts: Path
) -> None:
    """Exit 1, and it says which and why."""
    model = make_model("failing")
    ctl.run("warmup", "--model", model)

    def answer(index: int) -> dict[str, object]:
        if index == 1:
            return {"state": pb.ITEM_STATE_FAILED, "error": "too long"}
        return {"state": pb.ITEM_STATE_DONE}

    with Provider(module_daemon, digest(ctl, "failing"), answer):
        status, data = ctl.json("warmup", "--model", model, "--prompts", prompts)
    assert status == FAILED
    assert data["job"]["prompts"]["failures"] == [
        {"index": 1, "name": "", "state": "failed", "error": "too long"}
    ]
    assert data["error"]["code"] == "job_failed"
    assert "1 of 3 items failed: too long" in data["error"]["message"]


def test_prompt_that_ends_every_engine_fails_at_last(
    ctl: Ctl, module_daemon: Daemon, make_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """It is not handed to one new engine after the other for ever."""
    model = make_model("poisoned")
    (tmp_path / "one.jsonl").write_text('"poison"\n')
    args = ("--model", model, "--prompts", tmp_path / "one.jsonl", "--no-wait")
    job = ctl.json("warmup", *args)[1]["job_id"]
    assert ctl.run("wait", job, "--timeout", "10ms")[0] == TIMED_OUT
    wait_until(
        lambda: any(m.model_name == "poisoned" for m in module_daemon.status().models),
        "it is loaded",
    )
    for _ in range(3):
        with Provider(module_daemon, digest(ctl, "poisoned"), lambda _: {"state": 2}):
            pass
        wait_until(lambda: not has_provider(module_daemon), "the engine has left")
    status, _, err = ctl.run("wait", job, "--timeout", "30s")
    assert status == FAILED
    assert "3 engines left while they computed it" in err


def test_without_an_engine_prompts_are_shown_as_waiting(
    ctl: Ctl, make_model: Callable[[str], Path], prompts: Path
) -> None:
    """The wait may be bounded; the job goes on, can be listed and cancelled."""
    model = make_model("lonely")
    status, _, err = ctl.run("warmup", "--model", model, "--prompts", prompts, "--timeout", "1s")
    assert status == TIMED_OUT
    assert "prompts: 0 of 3, waiting for an engine that serves this model" in err
    assert err.splitlines()[-1].startswith("cachewarmd-ctl: error: job ")
    jobs = {job["job_id"]: job for job in ctl.json("jobs")[1]["jobs"]}
    number, job = max(jobs.items())
    assert (job["state"], job["model_name"]) == ("running", "lonely")
    assert "lonely" in ctl.run("jobs")[1]
    assert ctl.json("cancel", number) == (OK, {"job_id": number})
    status, data = ctl.json("wait", number)
    assert (status, data["job"]["state"]) == (FAILED, "cancelled")
    assert data["job"]["prompts"]["cancelled"] == 3


def test_no_wait_prints_the_job_which_can_be_waited_for(
    ctl: Ctl, make_model: Callable[[str], Path]
) -> None:
    """For scripts."""
    status, out, _ = ctl.run("warmup", "--model", make_model("later"), "--no-wait")
    assert status == OK
    assert ctl.run("wait", int(out))[0] == OK


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json", "Expecting value"),
        (b"{}", "exactly one of"),
        (b"7", "a table (an object)"),
        (b'{"text": "a", "token_ids": [1]}', "found text and token_ids"),
        (b'{"txt": "a"}', "txt is not known"),
        (b'{"token_ids": [-1]}', "whole numbers from 0"),
        (b'"\\ud800"', "surrogates"),
    ],
)
def test_bad_prompt_line_is_a_usage_error_with_file_and_line(
    ctl: Ctl, make_model: Callable[[str], Path], prompts: Path, line: bytes, reason: str
) -> None:
    """And with what is allowed."""
    prompts.write_bytes(b'"good"\n' + line + b"\n")
    status, data = ctl.json("warmup", "--model", make_model("m"), "--prompts", prompts)
    message = data["error"]["message"]
    assert (status, data["error"]["code"]) == (USAGE, "usage")
    assert message.startswith(f"{prompts}:2: ")
    assert reason in message


def test_prompts_beyond_one_frame_are_computed(
    ctl: Ctl, module_daemon: Daemon, make_model: Callable[[str], Path], prompts: Path
) -> None:
    """They go by a memfd, in their order."""
    prompts.write_text("".join(f'"{letter * (1 << 20)}"\n' for letter in "abcdefghij"))
    model = make_model("large")
    ctl.run("warmup", "--model", model)
    done = {"state": pb.ITEM_STATE_DONE}
    with Provider(module_daemon, digest(ctl, "large"), lambda _: done) as provider:
        status, data = ctl.json("warmup", "--model", model, "--prompts", prompts)
    assert (status, data["job"]["prompts"]["done"]) == (OK, 10)
    assert [prompt.text[0] for prompt in provider.seen] == list("abcdefghij")


def test_bad_model_directory_is_a_clear_failure(ctl: Ctl, tmp_path: Path) -> None:
    """Missing, without a model, or with files that the daemon refuses: exit 1."""
    status, _, err = ctl.run("warmup", "--model", tmp_path / "gone")
    assert (status, err) == (
        FAILED, f"cachewarmd-ctl: error: {tmp_path}/gone: no such model directory\n",
    )  # fmt: skip
    status, data = ctl.json("warmup", "--model", tmp_path)
    assert (status, data["error"]) == (
        FAILED, {"code": "model_files", "message": f"{tmp_path}: holds no model"},
    )  # fmt: skip


def test_weights_that_the_daemon_refuses_fail_the_job(
    ctl: Ctl, make_model: Callable[[str], Path]
) -> None:
    """The daemon's reason is told."""
    model = make_model("broken")
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"padding")
    status, _, err = ctl.run("warmup", "--model", model)
    assert status == FAILED
    assert "truncated or padded" in err


def test_without_an_engine_installed_warmup_says_so(
    ctl: Ctl, make_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan, no guess."""
    monkeypatch.setattr("cachewarmd.ctl.request.entry_points", lambda **_: [])
    status, _, err = ctl.run("warmup", "--model", make_model("m"))
    assert status == FAILED
    assert "no engine is installed here" in err


def test_names_can_not_steer_the_terminal(ctl: Ctl, make_model: Callable[[str], Path]) -> None:
    """A name with an escape sequence is shown without it."""
    ctl.run("warmup", "--model", make_model("m"), "--model-name", "evil\x1b[2J[red]")
    out = ctl.run("models")[1]
    assert "\x1b" not in out
    assert "evil\ufffd[2J[red]" in out


def test_progress_bars_on_a_terminal(
    ctl: Ctl, module_daemon: Daemon, make_model: Callable[[str], Path], prompts: Path
) -> None:
    """Drawn on stderr, gone wrong nowhere; the answer stays clean on stdout."""
    model = make_model("drawn")
    ctl.run("warmup", "--model", model)
    screen, terminal = pty.openpty()
    with Provider(module_daemon, digest(ctl, "drawn"), lambda _: {"state": 3}):
        args = ("warmup", "--model", model, "--prompts", prompts, "-o", "json")
        with ctl.spawn(
            *args, stdout=subprocess.PIPE, stderr=terminal, env={"TERM": "xterm"}
        ) as process:
            os.close(terminal)
            assert process.stdout is not None
            told = json.loads(process.stdout.read())
            assert process.wait(PATIENCE_S) == OK
    drawn = os.read(screen, 1 << 20).decode()
    os.close(screen)
    assert told["job"]["prompts"]["done"] == 3
    assert "prompts" in drawn
    assert "3 of 3, 15 tokens" in drawn


# -- waiting, and its ends ------------------------------------------------------------------------


def waiting(ctl: Ctl, model: Path, prompts: Path) -> subprocess.Popen[str]:
    """A `warmup` that waits for an engine that never comes."""
    process = ctl.spawn(
        "warmup", "--model", model, "--prompts", prompts, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    wait_for_line(process.stderr, "waiting for an engine")
    return process


def test_ctrl_c_detaches_and_the_job_goes_on(
    ctl: Ctl, make_model: Callable[[str], Path], prompts: Path
) -> None:
    """Exit 130, and it says how to come back."""
    with waiting(ctl, make_model("detached"), prompts) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (INTERRUPTED, "")
    number = max(job["job_id"] for job in ctl.json("jobs")[1]["jobs"])
    assert f"detached; job {number} goes on (see: cachewarmd-ctl wait {number})" in err
    assert ctl.json("jobs")[1]["jobs"][-1]["state"] == "running"
    ctl.run("cancel", number)


def test_daemon_that_dies_during_a_wait_is_unreachable(
    own_ctl: Ctl, daemon: Daemon, make_model: Callable[[str], Path], prompts: Path
) -> None:
    """Exit 5, no hang."""
    with waiting(own_ctl, make_model("m"), prompts) as process:
        daemon.kill()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == UNREACHABLE
    assert err.startswith("cachewarmd-ctl: error: the connection to cachewarmd is lost")


# -- changing, and errors -------------------------------------------------------------------------


def test_evict_tells_what_it_did(ctl: Ctl, module_daemon: Daemon) -> None:
    """Blocks without a lease go, others stay; an unknown model is an error."""
    with module_daemon.client(pb.ROLE_ENGINE) as client:
        Worker(client, -1)
        status, data = ctl.json("evict")
        assert status == OK
        assert data == {"num_blocks": 0, "num_bytes": 0, "num_kept": 0}
    assert ctl.json("evict", "--model", "nobody")[0] == UNKNOWN


def test_shutdown_can_spare_a_daemon_in_use(own_ctl: Ctl, daemon: Daemon) -> None:
    """With `--only-if-unused` an engine keeps it; else it is gone when the command returns."""
    with daemon.client(pb.ROLE_ENGINE):
        status, _, err = own_ctl.run("shutdown", "--only-if-unused")
        assert (status, "1 engine connections are open" in err) == (FAILED, True)
        assert daemon.is_running()
        assert own_ctl.json("shutdown") == (OK, {"pid": daemon.pid})
        assert daemon.wait() == 0


@pytest.mark.parametrize("verb", ["wait", "cancel"])
def test_unknown_job_is_exit_4(ctl: Ctl, verb: str) -> None:
    """With the number in the message."""
    status, data = ctl.json(verb, 999_999)
    assert (status, data["error"]["code"]) == (UNKNOWN, "not_found")
    assert data["error"]["message"] == "job 999999 is not known"


def test_a_kick_ends_one_connection(ctl: Ctl, module_daemon: Daemon) -> None:
    """By its number, as `clients` shows it; an unknown one is exit 4."""
    with module_daemon.client() as observer:
        number = observer.hello.client_id
        assert ctl.json("kick", number)[0] == OK
        wait_until(lambda: observer.is_lost, "it is told")
        assert ctl.json("kick", number)[0] == UNKNOWN


@pytest.mark.parametrize(
    "args",
    [
        ["status"], ["models"], ["clients"], ["jobs"], ["wait", "1"], ["cancel", "1"],
        ["is-warm", "x"], ["evict"], ["kick", "1"], ["shutdown"],
    ],
    ids=lambda args: args[0],
)  # fmt: skip
def test_without_a_daemon_every_verb_is_exit_5(
    args: Sequence[str], short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, and the error object where JSON is asked for."""
    socket = str(short_dir / "none")
    assert main([*args, "--socket", socket, "--output=json"]) == UNREACHABLE
    out, err = capsys.readouterr()
    message = f"no cachewarmd answers on {socket}: No such file or directory"
    assert err == f"cachewarmd-ctl: error: {message}\n"
    assert json.loads(out) == {
        "schema_version": 1,
        "error": {"code": "unreachable", "message": message},
    }


@pytest.mark.parametrize(
    "args",
    [
        [], ["frobnicate"], ["wait"], ["wait", "x"], ["wait", "0"], ["status", "-o", "xml"],
        ["warmup"], ["warmup", "--model", "m", "--timeout", "soon"],
        ["warmup", "--model", "m", "--weights-only", "--prompts", "f"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_command_line_is_exit_2_and_one_line(
    args: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout."""
    assert main(args) == USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cachewarmd-ctl: error: ")
    assert len(err.splitlines()) == 1


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """And the exit codes."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == OK
    out = capsys.readouterr().out
    for verb in (
        "status", "models", "clients", "jobs", "warmup", "wait", "cancel", "is-warm", "evict",
        "kick", "shutdown", "version",
    ):  # fmt: skip
        assert f"    {verb} " in out
    assert "130 interrupted" in out


def test_stopped_daemon_is_exit_6(
    own_ctl: Ctl, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that does not answer is not one that is not there."""
    connect = Client.connect.__func__

    def impatient(cls: type[Client], *args: Any, **kwargs: Any) -> Client:
        return connect(cls, *args, **{**kwargs, "timeout": 0.2})

    monkeypatch.setattr(Client, "connect", classmethod(impatient))
    daemon.sigstop()
    assert own_ctl.json("status")[0] == TIMED_OUT
    daemon.sigcont()


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's settings play no part."""
    for name in [name for name in os.environ if name.startswith("CACHEWARMD_")]:
        monkeypatch.delenv(name)

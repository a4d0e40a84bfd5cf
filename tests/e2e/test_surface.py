"""What the server offers beside Generate, and the status of everything that it refuses."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from prometheus_client.parser import text_string_to_metric_families

from engine import errors
from engine.client import CallError, call_error
from engine.status import rich_status
from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceStub
from tests.conftest import REPOSITORY
from tests.daemon import PATIENCE_S, Daemon, wait_until
from tests.engine import (
    Engine,
    Stream,
    details_of,
    make_prompt,
    num_sealed,
    serve_fails,
)
from tests.fixtures.models import VOCAB, write_m_rand
from tests.fixtures.tokenizers import write_t_bl

LONG = {"max_tokens": 900, "ignore_eos": True}
NUM_POSITIONS = 1024  # of the private pool below
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Row = tuple[str, pb.GenerateRequest]  # reason, and a request that is refused for it


@pytest.fixture(scope="module")
def bare_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M-rand with fewer tokens than the model has rows, and no chat template."""
    return write_t_bl(write_m_rand(tmp_path_factory.mktemp("m") / "bare"), None)


@pytest.fixture(scope="module")
def engine(bare_dir: Path, shared_daemon: Daemon) -> Iterator[Engine]:
    """An engine that is full soon: one seat, three requests in all, room for 1024 positions.

    Its steps are slow, so that nobody gets to the end of LONG.
    """
    extra = ["--http-port", "0", "--max-num-seqs", "1", "--max-queue", "3"]
    extra += ["--private-pool-bytes", "1MiB"]
    with Engine(bare_dir, shared_daemon.socket, extra=extra, step_s=0.03) as running:
        yield running


def health(target: str) -> int:
    """What the health check says."""
    with grpc.insecure_channel(target) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return int(reply.status)


def leave(*streams: Stream) -> None:
    """Cancel them and wait until they are over."""
    for stream in streams:
        stream.cancel()
    for stream in streams:
        stream.join()


def check_refused(error: grpc.RpcError, expected: type[errors.EngineError]) -> None:
    """Status, reason, domain and, where asking again makes sense, when."""
    assert (error.code().name, call_error(error).reason) == (expected.status, expected.reason)
    assert error.details()
    details = details_of(error)
    assert details["ErrorInfo"].domain == "cachewarm"
    told = details["RetryInfo"].retry_delay.ToMilliseconds() if "RetryInfo" in details else None
    after = expected.retry_after_s
    assert told == (None if after is None else 1000 * after)
    is_about_fields = issubclass(expected, errors.InvalidParameterError)
    assert ("BadRequest" in details) == is_about_fields


# -- errors ---------------------------------------------------------------------------------------


def request(ids: Sequence[int] = (5,), max_tokens: int = 1, **fields: object) -> pb.GenerateRequest:
    """A request of token ids."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        stopping=pb.StoppingOptions(max_tokens=max_tokens),
        **fields,
    )


# What one request alone can do wrong.
BAD: dict[type[errors.EngineError], pb.GenerateRequest] = {
    errors.InvalidParameterError: request(max_tokens=-1),
    errors.ContextTooLongError: request(make_prompt(4090, 501), 7),
    errors.RequestTooLargeError: request(make_prompt(NUM_POSITIONS, 502), 2),
    errors.ModelNotFoundError: request(model="another"),
    errors.WeightsChangedError: request(expected_weights_sha256="0" * 64),
    errors.NoChatTemplateError: pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    ),
}
# What the state of the server makes of a good request; each has a test of its own below.
OF_STATE = (
    errors.QueueFullError,
    errors.DuplicateRequestIdError,
    errors.ExpiredInQueueError,
    errors.WarmingError,
    errors.DrainingError,
    errors.NoDaemonError,
    errors.NoWorkerError,
    errors.InternalError,
)


def test_every_error_is_covered_here() -> None:
    """A new one needs a row, or a test."""
    kinds = set(errors.EngineError.__subclasses__()) | {errors.ContextTooLongError}
    assert kinds == {*BAD, *OF_STATE}
    assert len({kind.reason for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.reason)
def test_a_bad_request_has_its_status_and_reason(
    engine: Engine, kind: type[errors.EngineError]
) -> None:
    """And is counted as rejected under that reason."""
    before = rejected(engine).get(kind.reason, 0)
    with engine.stub() as stub, pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(BAD[kind]))
    check_refused(refused.value, kind)
    assert rejected(engine)[kind.reason] == before + 1
    engine.generate([5], max_tokens=1)


@pytest.mark.parametrize("kind", OF_STATE, ids=lambda kind: kind.reason)
def test_details_follow_from_the_class(kind: type[errors.EngineError]) -> None:
    """Of all errors, also of those that no call here brings about."""

    class Failed(grpc.RpcError):
        def __init__(self, status: grpc.Status) -> None:
            self._status = status

        def code(self) -> grpc.StatusCode:
            return self._status.code

        def details(self) -> str:
            return str(self._status.details)

        def trailing_metadata(self) -> Sequence[tuple[str, bytes]]:
            return self._status.trailing_metadata

    error = Failed(rich_status(kind("why")))
    assert rpc_status.from_call(error) is not None
    check_refused(error, kind)
    assert error.details() == "why"


def test_a_full_queue_refuses_and_has_room_again(engine: Engine) -> None:
    """QUEUE_FULL counts running requests too, and every sample of a request."""
    running = engine.stream(make_prompt(20, 510), **LONG)
    running.wait_for_tokens(1)
    waiting = engine.stream(make_prompt(20, 511), **LONG)
    waiting.wait_accepted()
    two = request()
    two.sampling.n = 2
    with engine.stub() as stub:
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(two))
        check_refused(refused.value, errors.QueueFullError)
        third = engine.stream(make_prompt(20, 512), **LONG)
        third.wait_accepted()
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request()))
        check_refused(refused.value, errors.QueueFullError)
    leave(waiting, third, running)
    engine.wait_idle()
    assert engine.generate([5], n=3, max_tokens=1).done.completion_tokens == 3


def test_e8_a_deadline_that_passes_in_the_queue_is_told_by_the_server(engine: Engine) -> None:
    """No token of the expired request is computed, and the one before it goes on."""
    ahead = engine.stream(make_prompt(20, 520), **LONG)
    ahead.wait_for_tokens(1)
    with engine.stub() as stub, pytest.raises(grpc.RpcError) as refused:
        # As a deadline travels, but without the client's own timer, which may be the first.
        list(stub.Generate(request(make_prompt(300, 521)), metadata=(("grpc-timeout", "300m"),)))
    check_refused(refused.value, errors.ExpiredInQueueError)
    ahead.check_running()
    before = engine.worker().num_computed_tokens
    leave(ahead)
    engine.wait_idle()
    assert engine.worker().num_computed_tokens - before < 300


def test_e9_an_id_is_taken_while_its_request_runs(engine: Engine) -> None:
    """Running or waiting; a second one is refused, and the first one's answer is its own."""
    prompt = make_prompt(20, 530)
    alone = engine.generate(prompt, max_tokens=50, ignore_eos=True)
    first = engine.stream(prompt, request_id="taken", **LONG)
    first.wait_for_tokens(1)
    waiting = engine.stream(make_prompt(20, 531), request_id="waits", **LONG)
    waiting.wait_accepted()
    with engine.stub() as stub:
        for taken in ("taken", "waits"):
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Generate(request(request_id=taken)))
            check_refused(refused.value, errors.DuplicateRequestIdError)
    first.wait_for_tokens(50)
    leave(waiting, first)
    assert first.ids[:50] == alone.ids


def test_e9_late_aborts_are_no_ops_and_ids_come_again(engine: Engine) -> None:
    """Unknown, finished and already aborted ids; a new request of an old id is not touched."""
    abort = engine.client().abort
    assert not abort("never seen")
    for _ in range(3):
        said = engine.generate([5, 6], request_id="again", max_tokens=4, ignore_eos=True)
        assert (len(said.ids), said.done.finish_reason) == (4, "length")
        assert not abort("again")
    stream = engine.stream(make_prompt(20, 532), request_id="again", **LONG)
    stream.wait_for_tokens(2)
    assert abort("again")
    cut = stream.result()
    assert cut.done.finish_reason == "cancelled"
    assert cut.done.completion_tokens == len(cut.ids)
    assert not abort("again")
    assert engine.generate([5, 6], request_id="again", max_tokens=4).ids == said.ids
    load = engine.client().load()
    assert (load.num_running, load.num_waiting) == (0, 0)


# -- views ----------------------------------------------------------------------------------------


def test_detokenize_is_the_inverse_of_tokenize(engine: Engine) -> None:
    """Special tokens show when asked for; ids that are no token give nothing."""
    client = engine.client()
    for text in ("the quick fox", "é語😀", " \n  spaces", ""):
        ids = client.tokenize(text)
        assert ids[0] == 0  # BOS
        assert client.detokenize(ids) == text
    with engine.stub() as stub:
        ids = client.tokenize("fox<|eot_id|>")
        shown = stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False))
        assert shown.text == "<|begin_of_text|>fox<|eot_id|>"
        hidden = stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))
        assert hidden.text == client.detokenize(ids) == "fox"
    assert client.detokenize([*client.tokenize("a"), VOCAB - 1]) == "a"


def test_detokenize_refuses_ids_that_the_model_has_not(engine: Engine) -> None:
    """The id and the bound are named."""
    with engine.stub() as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[5, VOCAB, 7]))
    check_refused(refused.value, errors.InvalidParameterError)
    assert refused.value.details() == f"token_ids: {VOCAB} is not allowed: ids below {VOCAB}"


def test_load_tells_who_runs_and_who_waits(engine: Engine) -> None:
    """Of one seat and three places; all falls back to nothing."""
    load = engine.client().load
    idle = load()
    assert (idle.num_running, idle.num_waiting) == (0, 0)
    assert (idle.max_running, idle.max_queue, idle.num_workers) == (1, 3, 1)
    assert (idle.serving, idle.num_spare_workers) == (True, 0)
    running = engine.stream(make_prompt(200, 540), max_tokens=700, ignore_eos=True)
    running.wait_for_tokens(1)
    waiting = engine.stream(make_prompt(20, 541), **LONG)
    waiting.wait_accepted()
    full = load()
    assert (full.num_running, full.num_waiting) == (1, 1)
    wait_until(lambda: load().kv_usage_ratio > 0, "the worker told its usage")
    leave(waiting, running)
    wait_until(lambda: load().num_running + load().num_waiting == 0, "nobody is there")
    wait_until(lambda: load().kv_usage_ratio == 0, "no block is in use")


def test_flush_makes_a_warm_prompt_cold(engine: Engine, shared_daemon: Daemon) -> None:
    """What nobody uses is dropped and counted; what a request reads stays."""
    prompt = make_prompt(100, 550)
    engine.generate(prompt, max_tokens=1)
    wait_until(lambda: engine.generate(prompt, max_tokens=1).done.cached_tokens == 99, "a full hit")
    before = num_sealed(shared_daemon)
    flushed = engine.client().flush_cache()
    assert flushed.num_blocks == before - num_sealed(shared_daemon) > 0
    assert flushed.num_bytes > 0
    assert flushed.num_kept == 0
    assert engine.client().flush_cache().num_blocks == 0
    assert engine.generate(prompt, max_tokens=1).done.cached_tokens == 0
    wait_until(lambda: engine.generate(prompt, max_tokens=1).done.cached_tokens == 99, "a full hit")
    reader = engine.stream(prompt, **LONG)
    reader.wait_for_tokens(1)
    assert engine.client().flush_cache().num_kept >= 3
    leave(reader)


# -- HTTP -----------------------------------------------------------------------------------------


def metrics(engine: Engine) -> dict[tuple[str, str], float]:
    """Values by (name, the label's value or ""); of histograms only sum and count."""
    status, headers, body = engine.http("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def rejected(engine: Engine) -> dict[str, float]:
    """Refused requests by reason."""
    name = "engine_requests_rejected_total"
    return {label: value for (own, label), value in metrics(engine).items() if own == name}


def test_metrics_are_those_of_the_document(engine: Engine) -> None:
    """Every name in docs/metrics.md is there, and none that is not documented."""
    text = (REPOSITORY / "docs" / "metrics.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `engine_")]
    documented = {re.match(r"\| `(\w+)", row).group(1) for row in rows}  # type: ignore[union-attr]
    with engine.stub() as stub, pytest.raises(grpc.RpcError):
        list(stub.Generate(request(max_tokens=-1)))  # a label of each kind
    told = {re.sub(r"_(count|sum)$", "", name) for name, _ in metrics(engine)}
    assert documented
    assert told == documented


def test_i1_metrics_are_consistent_after_cancels(engine: Engine) -> None:
    """Gauges are 0 without new traffic; every cancel is counted once, and every token."""
    engine.wait_idle()
    before = metrics(engine)
    tokens, prompts = 0, 0
    for number in range(10):
        running = engine.stream(make_prompt(20, 560 + number), **LONG)
        running.wait_for_tokens(2)
        waiting = engine.stream(make_prompt(30, 580 + number), request_id="waits", **LONG)
        waiting.wait_accepted()
        assert engine.client().abort("waits")
        waiting.join()
        leave(running)
        tokens += len(running.pieces)
        prompts += 20 + 30
    said = engine.generate(make_prompt(40, 590), max_tokens=5, ignore_eos=True)
    engine.wait_idle()
    now = metrics(engine)

    def gain(name: str, label: str = "") -> float:
        return now[name, label] - before[name, label]

    for gauge in ("engine_requests_running", "engine_requests_waiting"):
        assert now[gauge, ""] == 0
    wait_until(lambda: metrics(engine)["engine_kv_usage_ratio", ""] == 0, "no block is in use")
    assert gain("engine_requests_total", "cancelled") == 20
    assert gain("engine_requests_total", "length") == 1
    assert gain("engine_requests_total", "error") == gain("engine_requests_total", "stop") == 0
    assert gain("engine_e2e_request_latency_seconds_count") == 21
    assert gain("engine_request_decode_time_seconds_count") == 1
    assert gain("engine_time_to_first_token_seconds_count") == 11  # ten never had one
    assert gain("engine_prompt_tokens_total") == prompts + 40
    # A cancelled stream's server may be some messages ahead of its client.
    assert gain("engine_generation_tokens_total") >= tokens + len(said.ids)
    assert all(value >= 0 for value in now.values())
    info = engine.info()
    assert info.num_generated_tokens == now["engine_generation_tokens_total", ""]


def test_http_tells_health_readiness_and_version(engine: Engine) -> None:
    """As docs/metrics.md says."""
    assert engine.http("/health")[0] == 200
    status, _, body = engine.http("/ready")
    assert (status, body) == (200, '{"ready":true}')
    status, _, body = engine.http("/version")
    assert status == 200
    model = engine.client().model_info()
    for part in (model.model, model.weights_sha256, model.model_version, "cpu"):
        assert f'"{part}"' in body
    status, _, body = engine.http("/nothing")
    assert status == 404
    assert "/nothing" in body


def test_an_http_port_in_use_is_named(engine: Engine, bare_dir: Path) -> None:
    """And the engine that has it is not disturbed."""
    port = engine.ready["http_address"].rpartition(":")[2]
    flags = ("--model", str(bare_dir), "--cachewarmd", "off", "--port", "0")
    status, stderr = serve_fails(*flags, http_port=port)
    assert status == 1
    assert f"127.0.0.1:{port}" in stderr.splitlines()[-1]
    assert "--http-port" in stderr.splitlines()[-1]
    assert engine.http("/ready")[0] == 200


# -- a life on a Unix socket ----------------------------------------------------------------------


@pytest.fixture
def on_path(short_dir: Path, bare_dir: Path) -> Iterator[Engine]:
    """An engine on a Unix socket, without a daemon, that is not yet started."""
    extra = ["--listen", f"unix:{short_dir}/e", "--http-port", "0", "--drain-timeout", "300ms"]
    with contextlib.ExitStack() as stack:
        yield stack.push(Engine(bare_dir, "off", extra=extra, step_s=0.0))


def test_a_server_from_its_first_to_its_last_breath(
    on_path: Engine, short_dir: Path, bare_dir: Path
) -> None:
    """Warming, serving, draining, stopping: what every kind of client is told meanwhile."""
    path = short_dir / "e"
    target = f"unix:{path}"
    with grpc.insecure_channel(target) as channel:
        stub = EngineServiceStub(channel)
        with on_path.held():
            on_path.launch()
            wait_until(path.exists, "the socket")
            for call in (
                lambda: list(stub.Generate(request())),
                lambda: stub.GetModelInfo(pb.GetModelInfoRequest()),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                check_refused(refused.value, errors.WarmingError)
            assert not stub.GetLoad(pb.GetLoadRequest()).serving
            assert health(target) == NOT_SERVING
            assert stub.Tokenize(pb.TokenizeRequest(text="a")).token_ids[0] == 0

        on_path.wait_ready()
        assert on_path.target == target
        assert health(target) == SERVING
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert on_path.generate([5], max_tokens=2).ids
        with pytest.raises(grpc.RpcError) as refused:
            stub.FlushCache(pb.FlushCacheRequest())
        check_refused(refused.value, errors.NoDaemonError)

        status, stderr = serve_fails(
            *("--model", str(bare_dir), "--cachewarmd", "off", "--listen", target)
        )
        assert status == 1
        assert f"{path} is in use" in stderr.splitlines()[-1]
        assert on_path.generate([5], max_tokens=2).ids

        check_drain(on_path, target)
        # It stays up until it is told otherwise, and then does not wait for what never ends.
        assert on_path.process.poll() is None
        on_path.terminate()
        assert on_path.wait() == 0
    assert os.listdir(short_dir) == []


def check_drain(engine: Engine, target: str) -> None:
    """Counts down to 0; nobody new is taken, and those who are there finish."""
    with engine.slowed(0.1):
        two = [
            engine.stream(make_prompt(20, 600 + n), max_tokens=n, ignore_eos=True)
            for n in (200, 400)
        ]
        for stream in two:
            stream.wait_for_tokens(1)
        counts: list[int] = []
        draining = threading.Thread(target=lambda: counts.extend(engine.client().drain()))
        draining.start()
        wait_until(lambda: health(target) == NOT_SERVING, "the health check says so")
        with engine.stub() as stub, pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request()))
        check_refused(refused.value, errors.DrainingError)
        status, headers, body = engine.http("/ready")
        assert (status, body) == (503, '{"ready":false,"reason":"draining"}')
        assert int(headers["retry-after"]) >= 1
        assert engine.http("/health")[0] == 200
        for stream in two:
            stream.check_running()
    assert [len(stream.result().ids) for stream in two] == [200, 400]
    draining.join(PATIENCE_S)
    assert not draining.is_alive()
    assert counts[0] == 2
    assert counts[-1] == 0
    assert counts == sorted(counts, reverse=True)
    assert list(engine.client().drain()) == [0]
    assert not engine.client().load().serving


def test_a_stream_that_outlasts_the_drain_is_told_so(on_path: Engine, short_dir: Path) -> None:
    """DRAINING, so that its client tries elsewhere; the socket is gone."""
    on_path.start()
    with on_path.slowed(0.05):
        stream = on_path.stream(make_prompt(20, 610), max_tokens=4000, ignore_eos=True)
        stream.wait_for_tokens(3)
        on_path.terminate()
        with pytest.raises(CallError) as cut:
            stream.result()
    assert (cut.value.status, cut.value.reason) == ("UNAVAILABLE", "DRAINING")
    assert on_path.wait() == 0
    assert os.listdir(short_dir) == []


def test_the_path_of_a_killed_server_is_taken_over(on_path: Engine, short_dir: Path) -> None:
    """What it left behind neither blocks its successor nor stays."""
    on_path.start()
    on_path.kill_all()
    assert (short_dir / "e").exists()
    on_path.start()
    assert on_path.generate([5], max_tokens=2).ids
    assert on_path.stop() == 0
    assert os.listdir(short_dir) == []


def spoil_with_file(folder: Path) -> None:
    (folder / "e").write_text("mine")


def spoil_mode(folder: Path) -> None:
    folder.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [(spoil_with_file, "is there and no socket"), (spoil_mode, "writable by nobody else")],
)
def test_a_place_that_is_not_ours_is_left_alone(
    short_dir: Path, tmp_path: Path, bare_dir: Path, spoil: Callable[[Path], None], named: str
) -> None:
    """A regular file at the path, or a directory where others could swap the socket."""
    spoil(short_dir)
    before = sorted(os.listdir(short_dir))
    status, stderr = serve_fails(
        *("--model", str(bare_dir), "--cachewarmd", "off", "--listen", f"unix:{short_dir}/e"),
        *("--worker-socket", str(tmp_path / "w")),
    )
    assert status == 1
    assert named in stderr.splitlines()[-1]
    assert sorted(os.listdir(short_dir)) == before
    if before:
        assert (short_dir / "e").read_text() == "mine"


# -- workers that die -----------------------------------------------------------------------------


@pytest.mark.slow
def test_what_kills_workers_is_given_up_and_so_is_an_engine_without_any(
    bare_dir: Path, tmp_path: Path
) -> None:
    """INTERNAL for the request on which three died; NO_WORKER when no more can be started."""
    model = shutil.copytree(bare_dir, tmp_path / "m")
    flags = ["--prefill-chunk", "1"]
    with Engine(model, "off", extra=flags, step_s=0.05) as engine, engine.stub() as stub:
        poison = stub.Generate(request(make_prompt(4000, 620)))
        assert next(poison).HasField("accepted")
        for number in range(3):
            wait_until(lambda: engine.info().num_requests_running == 1, "it runs")
            engine.kill_worker()
            wait_until(lambda n=number: engine.log().count("worker_lost") > n, "it is noticed")
        with pytest.raises(grpc.RpcError) as given_up:
            list(poison)
        check_refused(given_up.value, errors.InternalError)
        assert "3 workers died" in given_up.value.details()

        victim = stub.Generate(request(make_prompt(20, 621), 4000))
        wait_until(lambda: engine.info().num_requests_running == 1, "it runs")
        (model / "model.safetensors").unlink()
        engine.kill_worker()
        with pytest.raises(grpc.RpcError) as lost:
            list(victim)
        check_refused(lost.value, errors.NoWorkerError)
        assert engine.wait() == 1
        assert "the worker died 3 times" in engine.log().splitlines()[-1]

"""Nonsense gets one clear answer, and hurts nobody else."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.client import CallError, call_error
from engine.v1 import engine_pb2 as pb
from tests.daemon import environment
from tests.engine import Engine, details_of, make_prompt, serve_fails
from tests.fixtures.models import EOS, FIRST_BYTE, write_m_chain, write_m_rand

INVALID = ("INVALID_ARGUMENT", "INVALID_PARAMETER")

# what is wrong -> (prompt, options, (status, reason), what the message must name)
BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], tuple[str, str], Sequence[str]]] = {
    "prompt over the context": (
        make_prompt(5000, 161),
        {"max_tokens": 1},
        ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG"),
        ["5000", "4096"],
    ),
    "prompt and output over the context": (
        make_prompt(4000, 162),
        {"max_tokens": 97},
        ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG"),
        ["4000", "97", "4096"],
    ),
    "a prompt that fills the context": (
        make_prompt(4096, 163),
        {},
        ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG"),
        ["4096"],
    ),
    "negative temperature": (
        [5],
        {"temperature": -0.1},
        INVALID,
        ["sampling.temperature", "-0.1", "0 to 100"],
    ),
    "temperature NaN": ([5], {"temperature": math.nan}, INVALID, ["temperature", "nan"]),
    "temperature infinite": ([5], {"temperature": math.inf}, INVALID, ["temperature", "inf"]),
    "top_p 0": ([5], {"top_p": 0.0}, INVALID, ["sampling.top_p", "above 0"]),
    "top_p NaN": ([5], {"top_p": math.nan}, INVALID, ["sampling.top_p", "nan"]),
    "top_p over 1": ([5], {"top_p": 1.5}, INVALID, ["sampling.top_p", "1.5"]),
    "min_p over 1": ([5], {"min_p": 1.5}, INVALID, ["sampling.min_p", "1.5"]),
    "min_p NaN": ([5], {"min_p": math.nan}, INVALID, ["sampling.min_p", "nan"]),
    "top_k -1": ([5], {"top_k": -1}, INVALID, ["sampling.top_k", "-1"]),
    "max_tokens -1": ([5], {"max_tokens": -1}, INVALID, ["stopping.max_tokens", "-1"]),
    "min_tokens -1": ([5], {"min_tokens": -1}, INVALID, ["stopping.min_tokens", "-1"]),
    "min_tokens over max_tokens": (
        [5],
        {"min_tokens": 5, "max_tokens": 4},
        INVALID,
        ["stopping.min_tokens", "5", "max_tokens", "4"],
    ),
    "a stop id out of the vocabulary": (
        [5],
        {"stop_token_ids": [7, 512]},
        INVALID,
        ["stopping.stop_token_ids", "512"],
    ),
    "too many stop ids": (
        [5],
        {"stop_token_ids": [7] * 1025},
        INVALID,
        ["stopping.stop_token_ids", "1025", "1024"],
    ),
    "too many stops": ([5], {"stop": ["x"] * 65}, INVALID, ["stopping.stop", "65", "64"]),
    "no sample": ([5], {"n": 0}, INVALID, ["sampling.n", "1 to 64"]),
    "too many samples": ([5], {"n": 65}, INVALID, ["sampling.n", "65", "1 to 64"]),
    "going on with other weights": (
        [5],
        {"continue_from": [7], "expected_weights_sha256": "0" * 64},
        ("FAILED_PRECONDITION", "WEIGHTS_CHANGED"),
        ["0" * 64],
    ),
    "several samples going on": (
        [5],
        {"n": 2, "continue_from": [7]},
        INVALID,
        ["continue_from", "n = 2"],
    ),
    "going on with weights that are not named": (
        [5],
        {"continue_from": [7]},
        INVALID,
        ["expected_weights_sha256", "unset"],
    ),
    "going on without the seed": (
        [5],
        {"continue_from": [7], "temperature": 1.0},
        INVALID,
        ["sampling.seed", "unset"],
    ),
    "going on with an id out of the vocabulary": (
        [5],
        {"continue_from": [512]},
        INVALID,
        ["continue_from", "512"],
    ),
    "two at once": ([5], {"top_k": -1, "max_tokens": -2}, INVALID, ["top_k", "max_tokens"]),
    "an id out of the vocabulary": ([5, 512], {}, INVALID, ["token_ids", "512"]),
    "no token ids": ([], {}, INVALID, ["prompt", "at least one"]),
    "empty text": ("", {}, INVALID, ["prompt", "at least one"]),
    "an overlong id": ([5], {"request_id": "x" * 129}, INVALID, ["request_id", "129", "128"]),
    "another model": ([5], {"model": "gpt-9"}, ("NOT_FOUND", "MODEL_NOT_FOUND"), ["gpt-9"]),
    "an id that is active": (
        [5],
        {"request_id": "the-good-one"},
        ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID"),
        ["the-good-one"],
    ),
}


def test_bad_requests_are_refused_by_name_and_a_good_stream_is_not_disturbed(
    shared_engine: Engine,
) -> None:
    """Every refusal has its status, reason, field and limit; nothing of it reaches the worker."""
    prompt = make_prompt(40, 160)
    options = {"max_tokens": 600, "ignore_eos": True}
    whole = shared_engine.generate(prompt, bypass_prefix_cache=True, **options).ids
    finished = shared_engine.info().num_requests_finished
    with shared_engine.slowed(0.1):
        good = shared_engine.stream(prompt, request_id="the-good-one", **options)
        good.wait_for_tokens(1)
        for name, (bad, bad_options, expected, named) in BAD_REQUESTS.items():
            with pytest.raises(CallError) as refused:
                shared_engine.generate(bad, **bad_options)
            assert (refused.value.status, refused.value.reason) == expected, name
            for part in named:
                assert part in refused.value.message, name
        with shared_engine.stub() as stub:
            for request, field in (
                (pb.GenerateRequest(), "prompt"),
                (pb.GenerateRequest(text="x", urgency=77), "urgency"),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    list(stub.Generate(request))
                error = call_error(caught.value)
                assert (error.status, error.reason) == INVALID
                assert error.message.startswith(field)
        good.check_running()
    assert good.result().ids == whole
    assert shared_engine.info().num_requests_finished == finished + 1


def test_refusals_carry_the_fields_as_details(shared_engine: Engine) -> None:
    """A program finds the bad fields without reading the text."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]))
    request.sampling.top_k = -1
    request.stopping.max_tokens = -2
    with shared_engine.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    found = details_of(caught.value)
    assert found["ErrorInfo"].domain == "cachewarm"
    fields = [violation.field for violation in found["BadRequest"].field_violations]
    assert fields == ["sampling.top_k", "stopping.max_tokens"]


def test_the_bounds_themselves_are_allowed(shared_engine: Engine) -> None:
    """What an error names as allowed is: the last position, one token, the greatest seed."""
    prompt = make_prompt(4095, 164)
    full = shared_engine.generate(prompt)
    assert (full.done.completion_tokens, full.done.finish_reason) == (1, "length")
    nothing = shared_engine.generate([5, 6], max_tokens=0)
    assert (nothing.done.completion_tokens, nothing.pieces) == (0, [])
    options = {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0, "top_k": 1 << 30}
    shared_engine.generate([5, 511], max_tokens=2, request_id="x" * 128, **options)
    greatest = [
        shared_engine.generate([5], max_tokens=12, temperature=5.0, seed=(1 << 64) - k).ids
        for k in (1, 2)
    ]
    assert greatest[0] != greatest[1]


def test_generation_stops_at_eos_unless_told_otherwise(
    tmp_path: Path, shared_engine: Engine
) -> None:
    """The stop id ends the answer and counts; ignore_eos goes on; max_tokens cuts either."""
    script = {FIRST_BYTE + b: FIRST_BYTE + b + 1 for b in range(65, 70)}
    model = write_m_chain(tmp_path / "chain", script={**script, FIRST_BYTE + 70: EOS})
    with Engine(model, "off") as engine:
        start = [FIRST_BYTE + 65]
        stopped = engine.generate(start, max_tokens=50)
        assert stopped.ids == [FIRST_BYTE + b for b in range(66, 71)] + [EOS]
        assert stopped.text == "BCDEF"
        assert (stopped.done.finish_reason, stopped.done.completion_tokens) == ("stop", 6)
        going_on = engine.generate(start, max_tokens=9, ignore_eos=True)
        assert going_on.ids[:6] == stopped.ids
        assert (going_on.done.finish_reason, going_on.done.completion_tokens) == ("length", 9)
        cut = engine.generate(start, max_tokens=1)
        assert (cut.text, cut.done.finish_reason, cut.done.completion_tokens) == ("B", "length", 1)
        assert engine.generate("A", max_tokens=50).text == "BCDEF"


# -- what can't be served -----------------------------------------------------------------------


def set_config(key: str, value: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        config[key] = value
        (model / "config.json").write_text(json.dumps(config))

    return change


def cut_short(model: Path) -> None:
    file = model / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_header(model: Path) -> None:
    file = model / "model-00001-of-00002.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])


# what is wrong -> (how it comes about, what the message must name)
BAD_MODELS: dict[str, tuple[Callable[[Path], object], Sequence[str]]] = {
    "no such directory": (shutil.rmtree, ["does not exist"]),
    "no config": (lambda m: (m / "config.json").unlink(), ["config.json is missing"]),
    "config is no JSON": (lambda m: (m / "config.json").write_text("{"), ["config.json", "JSON"]),
    "gelu": (set_config("hidden_act", "gelu"), ["hidden_act", "gelu", "silu"]),
    "yarn": (
        set_config("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ["rope_scaling", "yarn", "default"],
    ),
    "another architecture": (
        set_config("architectures", ["GPT2LMHeadModel"]),
        ["architectures", "GPT2LMHeadModel", "LlamaForCausalLM"],
    ),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), ["tokenizer.json"]),
    "truncated weights": (cut_short, ["model-00002-of-00002.safetensors"]),
    "malformed header": (spoil_header, ["model-00001-of-00002.safetensors"]),
    "missing shard": (
        lambda m: (m / "model-00002-of-00002.safetensors").unlink(),
        ["model-00002-of-00002.safetensors"],
    ),
}


def last_line(stderr: str) -> str:
    """The one line that tells the reason."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("cachewarm-engine: error: ")]
    assert line == stderr.splitlines()[-1]
    return line


@pytest.mark.parametrize("what", BAD_MODELS)
def test_a_model_that_cannot_be_served_is_refused_by_name(tmp_path: Path, what: str) -> None:
    """`serve` ends with one line that names the file, or the key, its value and what is allowed."""
    change, named = BAD_MODELS[what]
    model = write_m_rand(tmp_path / "m", shards=2)
    change(model)
    status, stderr = serve_fails("--model", str(model), "--cachewarmd", "off", "--port", "0")
    assert status == 1
    for part in named:
        assert part in last_line(stderr)


def test_a_daemon_that_refuses_the_files_gives_the_same_reason(
    tmp_path: Path, shared_engine: Engine
) -> None:
    """Whether daemon or engine reads the weights, the file is named."""
    model = write_m_rand(tmp_path / "m", shards=2)
    cut_short(model)
    socket = shared_engine.info().cachewarmd_socket
    status, stderr = serve_fails("--model", str(model), "--cachewarmd", socket, "--port", "0")
    assert status == 1
    assert "model-00002-of-00002.safetensors" in last_line(stderr)
    shared_engine.generate([5, 6], max_tokens=1)


@pytest.mark.parametrize(
    ("flags", "env", "named"),
    [
        (["--block-size", "33"], {}, ["--block-size", "33", "multiple of 8"]),
        (["--prefill-chunk", "0"], {}, ["--prefill-chunk", "'0'", "1 to 8192"]),
        (["--private-pool-bytes", "lots"], {}, ["--private-pool-bytes", "lots", "MiB"]),
        (["--host", "0.0.0.0"], {}, ["--host", "0.0.0.0", "--insecure"]),
        ([], {"CACHEWARM_ENGINE_FOO": "1"}, ["CACHEWARM_ENGINE_FOO", "CACHEWARM_ENGINE_PORT"]),
    ],
)
def test_a_bad_setting_is_refused_by_name(
    m_rand_dir: Path, flags: list[str], env: dict[str, str], named: list[str]
) -> None:
    """One line names the setting, its value and what is allowed; the exit status is 2."""
    settings = ["--model", str(m_rand_dir), "--cachewarmd", "off", "--port", "0", *flags]
    status, stderr = serve_fails(*settings, env=env)
    assert status == 2
    assert len(stderr.splitlines()) == 1
    for part in named:
        assert part in last_line(stderr)


def test_a_private_pool_below_one_block_is_refused(m_rand_dir: Path) -> None:
    """The message names what was given and the bytes of a block."""
    status, stderr = serve_fails(
        *("--model", str(m_rand_dir), "--cachewarmd", "off", "--port", "0"),
        *("--private-pool-bytes", "32767"),
    )
    assert status == 1
    assert "private-pool-bytes 32767" in last_line(stderr)
    assert "32768" in last_line(stderr)


def test_without_torch_the_engine_names_what_to_install(m_rand_dir: Path, tmp_path: Path) -> None:
    """A base install can't run the reference backend: one line says how to get it."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')\n")
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    settings = ("--model", str(m_rand_dir), "--cachewarmd", "off", "--port", "0")
    status, stderr = serve_fails(*settings, "--backend", "reference", env={"PYTHONPATH": paths})
    assert status == 1
    assert "needs torch: pip install 'cachewarm[torch]'" in last_line(stderr)

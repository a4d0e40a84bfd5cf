"""`doctor`: what an operator gets wrong first, and how to right it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from cachewarmd.budget import DEFAULT_CGROUP_ROOT, RESERVE_BYTES, available_bytes
from cachewarmd.client import Client
from cachewarmd.ctl import checks, views
from cachewarmd.ctl.arguments import Add
from cachewarmd.ctl.checks import Finding
from cachewarmd.ctl.outcome import EXIT_FAILED, EXIT_NOT_WARM, EXIT_OK, Output, error_text
from cachewarmd.ctl.verbs import CALL_TIMEOUT_S, connect
from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb


def add_verbs(add: Add) -> None:
    add("doctor", doctor)


def doctor(args: argparse.Namespace, output: Output) -> int:
    """Check daemon and host; 3 if there are warnings, 1 if something is broken."""
    findings = list(_all(args))
    levels = {finding.level for finding in findings}
    rows = [(f.level, f.check, f.text, f.fix) for f in findings]
    data = {"findings": [asdict(finding) for finding in findings]}
    output.answer(data, views.table("doctor", ("", "check", "found", "what to do"), rows))
    if "fail" in levels:
        return EXIT_FAILED
    return EXIT_NOT_WARM if "warn" in levels else EXIT_OK


def _all(args: argparse.Namespace) -> Iterator[Finding]:
    yield checks.socket_file(args.socket)
    yield from checks.host(Path("/"), available_bytes(DEFAULT_CGROUP_ROOT), RESERVE_BYTES)
    try:
        with connect(args, pb.ROLE_OBSERVER) as client:
            told = _ask(client)
    except CachewarmError as exc:
        yield Finding("fail", "daemon", error_text(exc), "start it, or name its --socket")
        return
    yield Finding("ok", "daemon", f"pid {told.pid}, up {views.human_seconds(told.uptime_s)}")
    yield checks.version(told)
    yield from checks.pool(told.pool)
    yield checks.durability(told)
    yield checks.integrity(told)
    yield checks.engines(told)
    yield from checks.models(told)


def _ask(client: Client) -> pb.StatusReply:
    return client.call(pb.Envelope(status=pb.Status()), CALL_TIMEOUT_S)[0].status_reply

"""`cachewarmd-ctl serve`: the daemon's numbers over HTTP."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachewarmd.ctl.__main__ import main
from tests.daemon import PATIENCE_S, Daemon, environment
from tests.integration.test_jobs import ended, start
from tests.integration.test_weight_service import write_model
from tests.worker import connect_worker

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def url(daemon: Daemon) -> Iterator[str]:
    """Of an exporter for the daemon; it has to end well."""
    command = [sys.executable, "-P", "-m", "cachewarmd.ctl", "--socket", str(daemon.socket)]
    with subprocess.Popen(
        [*command, "serve", "-o", "json"], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers=headers)
    with _DIRECT.open(request, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def answer_to(url: str, path: str) -> tuple[http.client.HTTPResponse, str]:
    """Of a request for exactly this path, whatever it is."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def test_metrics_are_what_status_tells(daemon: Daemon, url: str) -> None:
    """Bytes, epoch and lookups are the daemon's; when it is gone, that is what is told."""
    pool = daemon.status().pool
    lines = dict(
        line.rsplit(" ", 1) for line in get(f"{url}/metrics").splitlines() if line[0] != "#"
    )
    assert float(lines["cachewarmd_up"]) == 1
    free = lines['cachewarmd_pool_bytes{numa_node="",pool="kv",state="free"}']
    assert float(free) == pool.bytes["free"]
    assert float(lines['cachewarmd_lookups_total{result="hit"}']) == 0
    assert float(lines["cachewarmd_epoch"]) == daemon.status().epoch
    told = json.loads(get(f"{url}/status.json"))
    assert told["pool"]["bytes"] == dict(pool.bytes)
    assert told["pid"] == daemon.pid
    daemon.stop()
    gone = [line for line in get(f"{url}/metrics").splitlines() if line[0] != "#"]
    assert gone == ["cachewarmd_up 0.0"]


def test_latencies_are_histograms(daemon: Daemon, url: str) -> None:
    """Of as many calls as there were; no bucket is below the one before."""
    with connect_worker(daemon.socket) as worker:
        for _ in range(5):
            worker.release(worker.lookup("a").lease)
    families = {f.name: f for f in text_string_to_metric_families(get(f"{url}/metrics"))}
    samples = families["cachewarmd_lookup_seconds"].samples
    buckets = [sample.value for sample in samples if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    (count,) = [sample.value for sample in samples if sample.name.endswith("_count")]
    assert count == buckets[-1] == 5
    assert all(sample.value > 0 for sample in samples if sample.name.endswith("_sum"))


def test_other_host_names_are_refused(url: str) -> None:
    """A page whose name was made to lead here reads nothing."""
    for path in ("/metrics", "/status.json", "/", "/page.js"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(url + path, Host="evil.example")
        with caught.value as answer:
            assert answer.code == 400


class Tags(HTMLParser):
    """What a page loads, and what of it a strict policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads |= {given[name] or "" for name in ("src", "href") if given.get(name)}
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)
        self.inline += [name for name in given if name == "style" or name.startswith("on")]


def test_the_page_and_what_it_loads_are_served(url: str) -> None:
    """Each with its type and the policy; nothing is inline, nothing comes from elsewhere."""
    _, text = answer_to(url, "/")
    tags = Tags()
    tags.feed(text)
    assert tags.inline == []
    loads = {f"/{name}" for name in tags.loads if not name.startswith("data:")}
    assert {"/page.js", "/page.css", "/uPlot.iife.min.js", "/uPlot.min.css"} <= loads
    types = {".js": "text/javascript", "css": "text/css", "son": "application/json"}
    for path in ["/", *loads]:
        answer, text = answer_to(url, path)
        assert (answer.status, bool(text)) == (200, True), path
        kind = str(answer.headers["content-type"]).split(";")[0]
        assert kind == types.get(path[-3:], "text/html")
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"].split("; ")
        assert {
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "frame-ancestors 'none'",
            "base-uri 'none'",
        } <= set(policy)
        assert "unsafe" not in str(policy)


def test_the_script_makes_no_markup() -> None:
    """Names come from clients, so nothing in it parses HTML or code."""
    script = resources.files("cachewarmd.ctl.page").joinpath("page.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script


def test_nothing_else_is_served(url: str) -> None:
    """No address is a file's name, however it is written."""
    for path in (
        "/index.html",
        "/page",
        "/page/",
        "/__init__.py",
        "/uPlot.LICENSE",
        "/../exporter.py",
        "/..%2fexporter.py",
        "/%2e%2e/exporter.py",
        "//etc/passwd",
        "/page.js/../__init__.py",
        "/page.js%00",
    ):
        answer, text = answer_to(url, path)
        assert (answer.status, text) == (404, "Not Found"), path


def told_by_ctl(daemon: Daemon, capsys: pytest.CaptureFixture[str], verb: str) -> Any:
    assert main(["--socket", str(daemon.socket), verb, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def without_the_asking(status: Any) -> Any:
    """What stays the same from one question to the next."""
    status.pop("uptime_s")
    status["counters"].pop("frames")
    (asker,) = (client for client in status["clients"] if client["name"] == "cachewarmd-ctl")
    for name in ("client_id", "pid"):
        asker.pop(name)
    return status


def test_status_json_is_what_the_verbs_tell(
    daemon: Daemon, url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All that `status -o json` has, and the jobs of `jobs -o json`; 503 when it is gone."""
    assert ended(daemon, start(daemon, write_model(tmp_path / "m", 1, 2.0))).state == "done"
    with connect_worker(daemon.socket) as worker:
        worker.release(worker.lookup("a").lease)
        told = json.loads(get(f"{url}/status.json"))
        jobs = told.pop("jobs")
        assert [job["state"] for job in jobs] == ["done"]
        assert jobs == told_by_ctl(daemon, capsys, "jobs")["jobs"]
        status = told_by_ctl(daemon, capsys, "status")
        assert without_the_asking(told) == without_the_asking(status)
    daemon.stop()
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{url}/status.json")
    with caught.value as answer:
        assert answer.code == 503
        assert json.loads(answer.read())["error"]["code"] == "unreachable"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost"])
def test_addresses_that_others_reach_need_insecure(host: str) -> None:
    """Exit 2 before anything listens; names are no addresses."""
    assert main(["serve", "--host", host]) == 2

"""Weights whose files change while they are served."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachewarmd.client import Client
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, private_pool, wait_until
from tests.integration.test_weight_service import attach, digest_of, plan_of, write_model
from tests.worker import BLOCK_BYTES, Worker

OFTEN = "import cachewarmd.server as s; s.FILES_CHECK_S = 0.1"
BEFORE, AFTER = struct.pack("<2f", 1, 2), struct.pack("<2f", 3, 4)


class Scene:
    """A daemon, a model whose weights are loaded, and a worker with blocks of them."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path, on_change: str) -> None:
        self._stack = stack
        self.model = model
        flags = ["--on-change", on_change]
        self.daemon = stack.enter_context(Daemon(folder / "s", "64MiB", flags, prelude=OFTEN))
        self.first = digest_of(model)
        self.worker = self.connect(self.first)
        assert attach(self.worker.client, model, plan_of(2))[:2] == (self.first, BEFORE)
        self.lease = self.worker.lookup().lease
        self.worker.publish(self.lease, "held1", "held2")
        lease = self.worker.lookup().lease
        self.worker.publish(lease, "held1", "free")
        self.worker.release(lease)

    def connect(self, weights_sha256: bytes) -> Worker:
        fd = self._stack.enter_context(private_pool(8 * BLOCK_BYTES))
        client = self._stack.enter_context(
            Client.connect(
                self.daemon.socket,
                pb.ROLE_ENGINE,
                "worker",
                private_pool=(fd, 8 * BLOCK_BYTES),
                timeout=PATIENCE_S,
            )
        )
        return Worker(client, fd, weights_sha256)

    def num_blocks(self) -> int:
        return sum(stamp.num_blocks for stamp in self.daemon.status().stamps)

    def wait_noticed(self, count: int = 1) -> None:
        wait_until(
            lambda: self.daemon.log().count("weights_changed_on_disk") >= count, "it is noticed"
        )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_changed_files_are_noticed_and_told_once(
    short_dir: Path, tmp_path: Path, stack: ExitStack
) -> None:
    """By itself: nobody attaches. Blocks stay; a file that is only cut is no crash either."""
    scene = Scene(stack, short_dir, write_model(tmp_path / "m", 1, 2), "keep")
    (model,) = scene.daemon.status().models
    assert not model.files_changed
    os.truncate(tmp_path / "m" / "model.safetensors", 3)
    scene.wait_noticed()
    (model,) = scene.daemon.status().models
    assert (model.files_changed, model.files_present) == (True, True)
    write_model(tmp_path / "m", 3, 4)
    scene.wait_noticed(2)
    assert scene.num_blocks() == 3
    assert len(scene.worker.lookup("held1", "held2").blocks) == 2
    assert scene.worker.publish(scene.worker.lookup().lease, "new").refused == ""
    later = scene.connect(digest_of(scene.model))
    assert attach(later.client, scene.model, plan_of(2))[1] == AFTER
    assert not scene.daemon.status().models[0].files_changed
    assert scene.daemon.log().count("weights_changed_on_disk") == 2


def test_clear_takes_the_old_blocks_out_of_the_index_at_once(
    short_dir: Path, tmp_path: Path, stack: ExitStack
) -> None:
    """What is leased stays readable and goes when it is released; nobody finds it any more."""
    scene = Scene(stack, short_dir, write_model(tmp_path / "m", 1, 2), "clear")
    worker = scene.worker
    held = worker.lookup("held1", "held2")
    write_model(tmp_path / "m", 3, 4)
    wait_until(lambda: scene.num_blocks() == 2, "what no lease keeps is gone")
    assert not worker.lookup("held1", "held2").blocks
    assert worker.publish(worker.lookup().lease, "new").refused == "RETIRED"
    assert [worker.read(block)[:5] for block in held.blocks] == [b"held1", b"held2"]
    worker.release(held.lease)
    assert scene.num_blocks() == 2, "the publisher's own lease still keeps them"
    worker.release(scene.lease)
    assert scene.num_blocks() == 0


def test_cleared_weights_that_come_back_are_served_again(
    short_dir: Path, tmp_path: Path, stack: ExitStack
) -> None:
    """A file that was only touched, or put back, has the same bytes: its next attach ends it."""
    scene = Scene(stack, short_dir, write_model(tmp_path / "m", 1, 2), "clear")
    lease = scene.worker.lookup("held1").lease
    write_model(tmp_path / "m", 1, 2)
    wait_until(lambda: scene.num_blocks() == 2, "what no lease keeps is gone")
    assert not scene.worker.lookup("held1").blocks
    again = scene.connect(scene.first)
    assert attach(again.client, scene.model, plan_of(2))[:2] == (scene.first, BEFORE)
    assert len(again.lookup("held1", "held2").blocks) == 2
    assert scene.worker.publish(lease, "held1", "new").refused == ""


def test_weights_that_another_directory_still_has_are_not_cleared(
    short_dir: Path, tmp_path: Path, stack: ExitStack
) -> None:
    """The same bytes in two directories are one version: it has changed when both have."""
    scene = Scene(stack, short_dir, write_model(tmp_path / "m", 1, 2), "clear")
    twin = write_model(tmp_path / "twin", 1, 2)
    assert attach(scene.worker.client, twin, plan_of(2))[0] == scene.first
    write_model(tmp_path / "m", 3, 4)
    scene.wait_noticed()
    assert len(scene.worker.lookup("held1", "held2").blocks) == 2
    write_model(twin, 3, 4)
    wait_until(lambda: scene.num_blocks() == 2, "now they are cleared")

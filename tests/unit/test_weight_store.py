"""Which weights stay in memory when there is not enough for all of them."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from cachewarmd.budget import DEFAULT_CGROUP_ROOT, Budget
from cachewarmd.errors import NoSpaceError
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_store import Model, WeightStore
from tests.daemon import open_fds
from tests.fixtures.models import write_safetensors

MIB = 1 << 20


class SmallHost(Budget):
    """Has room for `num_segments` of one MiB."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_CGROUP_ROOT)
        self.num_segments = 2
        self.store: WeightStore | None = None

    def available_bytes(self) -> int:
        assert self.store is not None
        taken = sum(segment.size for segment in self.store._segments.values())
        return max(0, self.num_segments * MIB - taken)


class Host:
    """A store on such a host, models to load, and what clients use."""

    def __init__(self, folder: Path) -> None:
        self.budget = SmallHost()
        self.used: set[bytes] = set()
        self.superseded: list[frozenset[bytes]] = []
        self.store = WeightStore(self.budget, self.used.__contains__, self.superseded.append)
        self.budget.store = self.store
        self._folder = folder

    def directory(self, name: str, seed: int | None = None) -> Path:
        """Of a model whose weights follow from `seed` (default: from its name)."""
        folder = self._folder / name
        if not folder.exists():
            folder.mkdir()
            values = np.array([zlib.crc32(name.encode()) if seed is None else seed, 0], "f4")
            write_safetensors(folder / "model.safetensors", {"a": values})
        return folder

    async def load(self, folder: Path, name: str, size: int = MIB) -> tuple[Model, bool]:
        """As a warm-up does; True = nothing had to be read."""
        plan = pb.PackPlan(description="test", segment_bytes=size)
        plan.tensors.add(name="a", op=pb.PACK_OP_COPY, shape=[2], num_bytes=8)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            model, _, already = await self.store.attach(
                fd, plan, name, "", lambda *_: None, follow_links=False
            )
        finally:
            os.close(fd)
        return model, already

    async def serve(self, version: str, name: str) -> bytes:
        """As an engine does, from the directory `version`; the digest."""
        model, _ = await self.load(self.directory(version), name)
        assert model.segment is not None
        self.store.serve(name, model.segment.weights_sha256)
        return model.segment.weights_sha256

    def loaded(self) -> list[str]:
        """Names of the directories whose weights are in memory."""
        return sorted(
            os.path.basename(os.readlink(f"/proc/self/fd/{model.dir_fd}"))
            for model in self.store.models
        )


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """Room for two; every descriptor is accounted for at the end."""
    before = open_fds()
    made = Host(tmp_path)
    yield made
    await made.store.close()
    for segment in made.store._segments.values():
        os.close(segment.fd)
    for model in made.store._models.values():
        os.close(model.dir_fd)
    assert open_fds() == before


async def test_superseded_weights_make_room_for_new_ones(host: Host) -> None:
    """Loaded weights stay as long as there is room, then the version nobody wants goes."""
    await host.serve("v1", "m")
    await host.serve("v2", "m")
    assert host.loaded() == ["v1", "v2"]
    await host.serve("v3", "m")
    assert host.loaded() == ["v2", "v3"]
    await host.serve("v4", "m")
    assert host.loaded() == ["v3", "v4"]


async def test_dropped_weights_are_read_again_for_a_rollback(host: Host) -> None:
    """Only memory was given up."""
    first = await host.serve("v1", "m")
    for version in ("v2", "v3"):
        await host.serve(version, "m")
    model, already = await host.load(host.directory("v1"), "m")
    assert not already
    assert model.segment is not None
    assert model.segment.weights_sha256 == first
    assert host.loaded() == ["v1", "v3"]


async def test_weights_that_a_client_uses_never_go(host: Host) -> None:
    """The older engine drains: its weights stay, and the load is refused with numbers."""
    host.used.add(await host.serve("v1", "m"))
    host.used.add(await host.serve("v2", "m"))
    with pytest.raises(NoSpaceError, match=f"needs {MIB} bytes, 0 are available"):
        await host.serve("v3", "m")
    assert host.loaded() == ["v1", "v2"]
    host.used.clear()
    await host.serve("v3", "m")
    assert host.loaded() == ["v2", "v3"]


async def test_current_weights_never_go(host: Host) -> None:
    """What a name stands for is kept without an engine too: the next one shall start warm."""
    await host.serve("a1", "a")
    await host.serve("b1", "b")
    with pytest.raises(NoSpaceError):
        await host.serve("c1", "c")
    assert host.loaded() == ["a1", "b1"]


async def test_current_weights_of_any_name_never_go(host: Host) -> None:
    """Prod has moved on, the canary still means the old ones."""
    await host.serve("v1", "canary")
    await host.serve("v1", "prod")
    await host.serve("v2", "prod")
    with pytest.raises(NoSpaceError):
        await host.serve("v3", "prod")
    assert host.loaded() == ["v1", "v2"]


async def test_superseded_weights_go_before_warmed_ones(host: Host) -> None:
    """The next version, loaded ahead of its engine, is worth more than the last one."""
    host.budget.num_segments = 3
    await host.serve("v1", "m")
    await host.load(host.directory("v3"), "m")
    for version in ("v1", "v2"):
        await host.serve(version, "m")
    await host.load(host.directory("v4"), "m")
    assert host.loaded() == ["v2", "v3", "v4"]
    await host.load(host.directory("v5"), "m")
    assert host.loaded() == ["v2", "v4", "v5"]


async def test_least_recently_attached_goes_first(host: Host) -> None:
    """A rollback counts as a use."""
    host.budget.num_segments = 3
    for version in ("v1", "v2", "v1", "v3"):
        await host.serve(version, "m")
    await host.serve("v4", "m")
    assert host.loaded() == ["v1", "v3", "v4"]


async def test_hopeless_load_drops_nothing(host: Host) -> None:
    """When all that may go would not be enough, it stays."""
    await host.serve("v1", "m")
    await host.serve("v2", "m")
    with pytest.raises(NoSpaceError, match=f"needs {2 * MIB} bytes, 0 are available"):
        await host.load(host.directory("v3"), "m", 2 * MIB)
    assert host.loaded() == ["v1", "v2"]


async def test_weights_that_are_being_asked_for_do_not_go(host: Host) -> None:
    """Between the end of a load and its reply nothing else may close what is handed out."""
    await host.serve("v1", "m")
    await host.serve("v2", "m")
    first, _ = host.store.models
    async with first.lock:
        again = asyncio.create_task(host.load(host.directory("v1"), "m"))
        await asyncio.sleep(0)  # it has begun, and waits for the lock
        with pytest.raises(NoSpaceError):
            await host.serve("v3", "m")
    assert (await again)[1]
    assert host.loaded() == ["v1", "v2"]


async def test_one_segment_of_two_directories_goes_as_a_whole(host: Host) -> None:
    """The same bytes in two places are one copy, and neither place keeps a closed one."""
    for version in ("v1", "copy"):
        host.directory(version, seed=1)
        await host.serve(version, "m")
    await host.serve("v2", "m")
    assert host.loaded() == ["copy", "v1", "v2"]
    await host.serve("v3", "m")
    assert host.loaded() == ["v2", "v3"]


async def test_only_changes_of_what_is_superseded_are_told(host: Host) -> None:
    """Attaching the same weights again, or warming others, changes nothing."""
    first = await host.serve("v1", "m")
    await host.serve("v1", "m")
    await host.load(host.directory("v2"), "m")
    assert host.superseded == []
    second = await host.serve("v2", "m")
    await host.serve("v1", "m")
    assert host.superseded == [{first}, {second}]


async def test_warming_under_a_new_name_makes_it_stand_for_these_weights(host: Host) -> None:
    """They are what its first engine will ask for, so they stay."""
    await host.load(host.directory("a1"), "a")
    await host.load(host.directory("b1"), "b")
    with pytest.raises(NoSpaceError):
        await host.load(host.directory("c1"), "c")
    assert host.loaded() == ["a1", "b1"]

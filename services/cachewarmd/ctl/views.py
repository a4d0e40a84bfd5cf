"""What the daemon tells, as JSON-ready data and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from cachewarmd.ctl.outcome import shown
from cachewarmd.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rich.console import Console

Draw = Callable[["Console"], None]


def plain(value: Any) -> Any:
    """A message as dicts, lists and numbers; bytes as hex. (protobuf's own makes integers text.)"""
    if isinstance(value, Message):
        return {f.name: plain(getattr(value, f.name)) for f in value.DESCRIPTOR.fields}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def human_bytes(count: float) -> str:
    """As 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """As 2 h 5 m, its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m")]
    parts.append((whole % 60, "s"))
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Draw:
    """A titled table, or `title: none` when it has no rows."""

    def draw(console: Console) -> None:
        from rich.table import Table

        drawn = Table(*columns, box=None, pad_edge=False)
        for column in drawn.columns:
            column.overflow = "fold"  # a digest cut short is of no use
        for row in rows:
            drawn.add_row(*map(shown, row))
        # The title is a line of its own: as the table's it would be wrapped to its width.
        console.print(title if drawn.row_count else f"{title}: none", style="bold")
        if drawn.row_count:
            console.print(drawn)

    return draw


def _files(model: pb.ModelStatus) -> str:
    if not model.files_present:
        return "missing"
    return "changed" if model.files_changed else "present"


def models(status: pb.StatusReply) -> Draw:
    """Weights in memory."""
    columns = (
        "name",
        "version",
        "sha256",
        "size",
        "huge",
        "files",
        "clients",
        "superseded",
        "plan",
    )
    rows = [
        (
            model.model_name,
            model.version,
            model.weights_sha256,
            human_bytes(model.segment_bytes),
            human_bytes(model.huge_bytes),
            _files(model),
            model.num_clients,
            "yes" if model.superseded else "",
            model.plan,
        )
        for model in status.models
    ]
    return table("models", columns, rows)


def clients(status: pb.StatusReply) -> Draw:
    """Connections."""
    columns = ("client", "name", "role", "pid", "uid", "leases", "holds", "provides")
    rows = [
        (
            client.client_id,
            client.name,
            client.role,
            client.pid,
            client.uid,
            client.num_leases,
            human_bytes(client.held_bytes),
            "yes" if client.is_provider else "no",
        )
        for client in status.clients
    ]
    return table("clients", columns, rows)


def _stamps(status: pb.StatusReply) -> Draw:
    columns = ("stamp", "description", "slot", "tokens", "blocks", "superseded")
    rows = [
        (
            stamp.stamp[:12],
            stamp.description,
            human_bytes(stamp.slot_bytes),
            stamp.block_size,
            stamp.num_blocks,
            "yes" if stamp.superseded else "",
        )
        for stamp in status.stamps
    ]
    return table("stamps", columns, rows)


def _pool(status: pb.StatusReply) -> Draw:
    pool = status.pool
    rows = [
        (state, pool.blocks[state], human_bytes(pool.bytes[state]))
        for state in sorted(pool.bytes)
        if pool.bytes[state] or state in ("free", "sealed")
    ]
    locked = "locked" if pool.locked else "not locked"
    title = (
        f"pool: {human_bytes(pool.pool_bytes)}, {human_bytes(pool.committed_bytes)} allocated "
        f"({human_bytes(pool.huge_bytes)} on huge pages, {locked}), "
        f"{pool.num_extents_free} of {pool.num_extents} extents unused"
    )
    return table(title, ("state", "blocks", "size"), rows)


def status(told: pb.StatusReply) -> Draw:
    """All of it."""

    def draw(console: Console) -> None:
        console.print(
            f"cachewarmd {told.version}, pid {told.pid}, epoch {told.epoch}, "
            f"up {human_seconds(told.uptime_s)}, {told.num_jobs_active} jobs active",
            shown(told.socket),
            sep="\n",
        )
        counters = sorted(told.counters.items())
        for part in (
            _pool(told),
            models(told),
            _stamps(told),
            clients(told),
            table("counters", ("name", "count"), counters),
        ):
            console.print()
            part(console)

    return draw


def job_data(job: pb.JobProgress) -> dict[str, Any]:
    """A job without its items."""
    return {
        "job_id": job.job_id,
        "model_name": job.model_name,
        "state": job.state,
        "error": job.error,
        "prompts": {"total": job.num_items, "ended": job.num_items_done},
        "weights": {
            "done": job.weights_done,
            "already_warm": job.weights_already_warm,
            "phase": job.weights.phase,
            "done_bytes": job.weights.done_bytes,
            "total_bytes": job.weights.total_bytes,
        },
    }


def weights_text(job: pb.JobProgress) -> str:
    """How far the weights of a job are."""
    if job.weights_already_warm:
        return "already warm"
    told = job.weights
    if job.weights_done:
        return f"loaded {human_bytes(told.total_bytes)}"
    if not told.phase:
        return "waiting"
    return f"{told.phase} {human_bytes(told.done_bytes)} of {human_bytes(told.total_bytes)}"


def jobs(told: Sequence[pb.JobProgress]) -> Draw:
    """Warm-up jobs, old ones too."""
    rows = [
        (
            j.job_id,
            j.model_name,
            j.state,
            weights_text(j),
            f"{j.num_items_done} of {j.num_items}",
            j.error,
        )
        for j in told
    ]
    return table("jobs", ("job", "model", "state", "weights", "prompts", "error"), rows)

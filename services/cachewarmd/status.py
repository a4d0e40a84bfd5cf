"""What is really in use, as `cachewarmd-ctl status` shows it."""

from __future__ import annotations

import os
import time

from cachewarmd import __version__, layout
from cachewarmd.state import State
from cachewarmd.v1 import control_pb2 as pb


def status_now(state: State) -> pb.StatusReply:
    blocks, sizes = state.pool.usage()
    committed = len(state.pool.extents)
    pool = pb.PoolStatus(
        pool_bytes=state.pool.pool_bytes,
        committed_bytes=committed * layout.EXTENT_BYTES,
        num_extents=state.pool.num_extents,
        num_extents_free=sum(1 for e in state.pool.extents if not e.slot_bytes),
        blocks=blocks,
        bytes=sizes,
        page_bytes=layout.PAGE_BYTES,
        huge_bytes=state.pool.huge.num_bytes,
        locked=0 < committed == state.pool.num_locked,
        small_pages_because=state.pool.huge.refusal,
    )
    superseded = state.weights.versions.superseded
    files_now = {model: model.files_now() for model in state.weights.models}
    models = [
        pb.ModelStatus(
            model_name=model.name,
            version=model.shown_version,
            weights_sha256=model.segment.weights_sha256.hex(),
            layout=model.segment.layout_id,
            segment_bytes=model.segment.size,
            huge_bytes=model.segment.huge.num_bytes,
            files_present=files_now[model] is not None,
            files_changed=files_now[model] not in (None, model.identities),
            loaded_unix_ms=model.loaded_unix_ms,
            plan=model.plan.description,
            num_clients=state.num_users(model.segment.weights_sha256),
            superseded=model.segment.weights_sha256 in superseded,
        )
        for model in state.weights.models
        if model.segment is not None
    ]
    stamps = [
        pb.StampStatus(
            stamp=info.stamp.hex(),
            description=info.description,
            slot_bytes=info.slot_bytes,
            block_size=info.block_size,
            num_blocks=state.kv.num_blocks(info),
            superseded=state.kv.is_superseded(info),
        )
        for info in state.kv.stamps
    ]
    clients = [
        pb.ClientStatus(
            client_id=client.client_id,
            name=client.name,
            role=pb.Role.Name(client.role).removeprefix("ROLE_").lower(),
            pid=client.pid,
            uid=client.connection.uid,
            num_leases=len(client.leases),
            is_provider=client.provider is not None,
            held_bytes=client.holding.num_bytes,
            max_held_bytes=state.max_held_bytes(client) or 0,
        )
        for client in state.clients
    ]
    return pb.StatusReply(
        version=__version__,
        pid=os.getpid(),
        epoch=state.epoch,
        uptime_s=time.monotonic() - state.started,
        socket=str(state.config.socket),
        pool=pool,
        models=models,
        stamps=stamps,
        clients=clients,
        counters={
            **state.counters,
            **state.kv.counters,
            "leases": state.kv.num_leases - len(state.pins),
            "fds_stored": state.num_fds_kept,
            "fds_not_stored": state.num_fds_not_kept,
            "prompt_pieces": len(state.prompts),
            "prompt_hits": state.prompts.num_hits,
            "prompt_misses": state.prompts.num_misses,
            "prompt_doubtful": state.prompts.num_doubtful,
            "quarantined": state.quarantine.num_leases,
        },
        num_jobs_active=sum(1 for job in state.warmer.jobs if not job.is_ended),
        num_pins=len(state.pins),
        pinned_bytes=state.pins.num_bytes,
        max_pinned_bytes=state.pins.max_bytes,
    )

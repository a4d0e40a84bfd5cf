"""Records of jobs in the fd store: made for new ones, found again by a later daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator

from cachewarmd.fdstore import JOBS, FdStore
from cachewarmd.job import Job
from cachewarmd.job_record import JobRecord, Told
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_catalog import path_of, reopen

_log = get_logger()

MAX_KEPT = 16  # of the fd store's places


def name_of(job: Job) -> str:
    return f"{JOBS}{job.job_id}"


def create(job: Job, prompts: list[pb.WarmPrompt], dir_fd: int, follow_links: bool) -> JobRecord:
    """Runs in a thread: a plan may have megabytes. Raises OSError."""
    info = os.fstat(dir_fd)
    told = Told(
        job_id=job.job_id,
        began=job.began,
        request=job.request.SerializeToString(),
        path=path_of(dir_fd),
        dir_key=(info.st_dev, info.st_ino),
        follow_links=follow_links,
    )
    return JobRecord.create(told, prompts)


def adopt(kept: FdStore) -> Iterator[JobRecord]:
    """Of the daemon before, oldest first; what is no record is forgotten."""
    numbered = [name for name in kept.names if name.removeprefix(JOBS).isdigit()]
    for name in sorted(numbered, key=lambda name: int(name.removeprefix(JOBS))):
        fd = kept.take(name)
        if fd is None:
            continue
        try:
            record = JobRecord(fd)
            record.told.warmup()
            if f"{JOBS}{record.told.job_id}" != name:
                raise ValueError("it is another job's")
        except (ValueError, OSError) as exc:
            _log.warning("job_not_adopted", name=name, reason=str(exc))
            os.close(fd)
            kept.forget(name)
            continue
        yield record


def reopen_directory(record: JobRecord) -> int:
    """The model's directory again, the caller's; -1 = it is not there."""
    return reopen(record.told.path, record.told.dir_key)

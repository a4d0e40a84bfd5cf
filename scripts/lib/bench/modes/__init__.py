"""The modes, in the order in which help lists them. A new one is a file here and a name below."""

from __future__ import annotations

from scripts.lib.bench.modes import (
    agreement,
    attention,
    daemon,
    daemon_kill,
    decode,
    kernels,
    prefill,
    profile,
    pss,
    restart,
    throughput,
    warmup_load,
)
from scripts.lib.bench.modes.mode import Mode

MODES: tuple[Mode, ...] = (
    *(decode.MODE, prefill.MODE, throughput.MODE, restart.MODE, pss.MODE),
    daemon.MODE,
    daemon_kill.MODE,
    warmup_load.MODE,
    *(kernels.MODE, attention.MODE, profile.MODE, agreement.MODE),
)

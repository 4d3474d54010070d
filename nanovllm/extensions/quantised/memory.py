"""Whether a CPU may keep weights twice: as they are stored, and in floats, as its library multiplies them."""

import contextlib
import os
from pathlib import Path

from nanovllm.distributed.group import get_group

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
OWN_PAGES = Path("/proc/self/statm")


def host_memory() -> int:
    """Bytes that the system, or the container, has in all; 0 if it does not say."""
    if not hasattr(os, "sysconf"):
        return 0
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
        total = min(total, int(CONTAINER_LIMIT.read_text()))
    return total


def has_room(size: int) -> bool:
    """Whether all ranks together have half of the memory left when each takes so many bytes more."""
    try:
        _, resident, *_ = map(int, OWN_PAGES.read_text().split())
    except OSError:  # not Linux
        return False
    return get_group().size * (resident * os.sysconf("SC_PAGE_SIZE") + size) <= host_memory() // 2

"""Memory: how much this process may have, and the C library's allocator told to keep what is freed."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# From malloc.h of the GNU C library, whose manual describes both under mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 1 << 25  # the most that every version of the library accepts
_KEPT_IN_ALL = 1 << 30

_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limit() -> int:
    """Bytes: the machine's memory, or the share of it that a container or a cluster's job is limited to."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """The limits of this process's control group and of all above it: cgroups(7), version 2 and 1."""
    try:
        lines = _OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError):  # no such file, or "max"
                yield int((folder / name).read_text(encoding="ascii"))
            if folder == root:
                break


@functools.cache
def keep_freed_memory() -> bool:
    """Serve requests of up to 32 MB from memory that this process has freed; returns whether that was arranged.

    By default such a block comes from the system and goes back when it is freed, and each of its pages costs a fault
    at the next use: a training step, which frees what it allocated, spends a quarter to a half of its time on that.
    The price is that up to 1 GB stays with the process once it was used. Nothing computed changes. Elsewhere than
    with the GNU C library nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_M_TRIM_THRESHOLD, _KEPT_IN_ALL))

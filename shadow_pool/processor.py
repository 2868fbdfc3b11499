"""What the system tells of the processor."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpuinfo() -> str:
    """Linux's description of the processors, one block each; empty on other systems."""
    try:
        return CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return ""

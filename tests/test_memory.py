"""Memory: what a process frees it uses again (counted in page faults, not in seconds); what does not fit is refused."""

import os
import subprocess
import sys

import pytest

from mia_audit.evidence import load_evidence
from shadow_pool.errors import UserError
from shadow_pool.memory import memory_limit

PROGRAM = """
import resource, sys
import numpy as np
from shadow_pool.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (2**18, 2**20, 2**21):
        for _ in range(20):
            np.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual, kept = faults(), keep_freed_memory()
faults()
print(kept, usual, faults())
"""


def test_blocks_of_a_training_step_are_faulted_in_once() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert found[0] == str(sys.platform.startswith("linux"))  # elsewhere the system's allocator is left alone
    usual, kept = map(int, found[1:])
    assert kept < usual / 10 or found[0] == "False"


def test_the_memory_limit_is_the_machines_or_the_containers(tmp_path, monkeypatch) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, limit in (("1048576\n", 1048576), ("max\n", machine), (None, machine), (str(2 * machine), machine)):
        path = tmp_path / "memory.max"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr("shadow_pool.memory._CGROUP_LIMIT", path)
        assert memory_limit() == limit


def test_a_pool_beyond_memory_is_refused_before_it_is_read(pool, monkeypatch) -> None:
    monkeypatch.setattr("mia_audit.evidence.memory_limit", lambda: 10_000)
    monkeypatch.setattr(type(pool), "signals", None)
    with pytest.raises(UserError, match=r"takes .* GB of memory, this machine has .*scores_from_disk"):
        load_evidence(pool, "batch")

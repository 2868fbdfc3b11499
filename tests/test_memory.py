"""Memory: what a process frees it uses again (counted in page faults, not in seconds); what does not fit is refused."""

import os
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from mia_audit.attacks import ATTACKS
from mia_audit.evidence import judging_bytes, load_evidence
from mia_audit.metrics import jackknife_pool
from shadow_pool.errors import UserError
from shadow_pool.membership import draw_membership
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


MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
JOB = "slurm/uid_0/job_7"


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "1048576\n"}, 1048576),  # a container with a namespace of its own
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"memory.max": str(2 * MACHINE)}, MACHINE),
        (f"0::/{JOB}/step\n", {f"{JOB}/memory.max": "4096", f"{JOB}/step/memory.max": "max"}, 4096),
        (f"0::/{JOB}\n", {f"{JOB}/memory.max": "8192", "slurm/memory.max": "4096", "memory.max": "max"}, 4096),
        ("0::/../elsewhere\n", {"memory.max": "4096"}, 4096),
        (f"5:cpu:/\n4:memory,hugetlb:/{JOB}\n", {f"memory/{JOB}/memory.limit_in_bytes": "4096"}, 4096),
        ("4:memory:/docker/abc\n0::/\n", {"memory/memory.limit_in_bytes": "4096"}, 4096),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
        ("4:cpu:/x\n", {"x/memory.max": "4096", "memory.max": "4096"}, MACHINE),
        ("", {"memory.max": "4096"}, MACHINE),
        ("nonsense\n\n::::\n\xff", {"memory.max": "m\xff"}, MACHINE),
        (None, {}, MACHINE),
    ],
)
def test_the_memory_limit_is_the_least_of_the_machines_and_those_of_its_groups(
    tmp_path, monkeypatch, own, limits, expected
) -> None:
    monkeypatch.setattr("shadow_pool.memory._CGROUPS", tmp_path / "fs")
    monkeypatch.setattr("shadow_pool.memory._OWN_CGROUP", tmp_path / "own")
    if own is not None:
        (tmp_path / "own").write_text(own, encoding="latin-1")
    for name, text in limits.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text, encoding="latin-1")
    assert memory_limit() == expected


def test_a_pool_beyond_memory_is_refused_before_it_is_read(pool, monkeypatch) -> None:
    monkeypatch.setattr("mia_audit.evidence.memory_limit", lambda: 10_000)
    monkeypatch.setattr(type(pool), "signals", None)
    with pytest.raises(UserError, match=r"takes about .* GB of memory, this machine has .*scores_from_disk"):
        load_evidence(pool, "batch")


def test_every_arm_counts_towards_memory(pool, monkeypatch) -> None:
    one = judging_bytes([8], pool.membership.shape[1], len(pool.manifest.views))
    monkeypatch.setattr("mia_audit.evidence.memory_limit", lambda: one)
    with pytest.raises(UserError, match=r"judging the 24 models of batch, none, none\+fit takes"):
        load_evidence(pool, "batch")


@pytest.mark.parametrize(("arms", "queries"), [(1, 1), (2, 1), (1, 4)])
def test_what_judging_takes_is_known_within_a_third(arms, queries) -> None:
    """Against what Python and numpy allocate in the costly part of an audit, arm after arm."""
    models, records = 8, 30_000
    membership = draw_membership(0, models, records)
    everyone = {"all": np.ones(records, bool)}
    tracemalloc.start()
    try:
        held: list[Any] = [np.zeros((models, records)) for _ in ATTACKS]  # a target's audit keeps its pool's scores
        for _ in range(arms):
            phi = np.random.default_rng(0).standard_normal((models, records, queries))
            rest = [np.zeros((models, records), kind) for kind in (np.int64, np.float32, np.float32, bool)]
            held.append((phi, rest, jackknife_pool("lira-online", phi, membership, everyone)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / 1.33 < judging_bytes([models] * arms, records, queries) < peak * 1.33

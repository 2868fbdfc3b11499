"""What a process frees it uses again: counted in page faults, not in seconds."""

import subprocess
import sys

PROGRAM = """
import resource, sys
import numpy as np
from shadow_pool.allocator import keep_freed_memory

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

"""Independent random streams from (root seed, purpose, index). Nothing here touches a global generator.

Two streams of different purpose or index never share state, so adding a model, an arm or an outlier
leaves every other draw as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def _sequence(seed: int, purpose: str, index: tuple[int, ...]) -> np.random.SeedSequence:
    if seed < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed}")
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    # The length of the index belongs to the key: NumPy pads entropy with zeros, so (1,) and (1, 0) would be one.
    return np.random.SeedSequence([seed, word, len(index), *index])


def stream(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """A NumPy generator for one purpose, e.g. ``stream(0, "membership", 3)`` for pair 3."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, index)))


def integer(seed: int, purpose: str, *index: int) -> int:
    """A 63-bit integer for generators that are not NumPy's (``torch.Generator.manual_seed``)."""
    return int(_sequence(seed, purpose, index).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def torch_stream(value: int) -> Iterator[None]:
    """Run a block under torch's default CPU generator seeded with ``value``, then restore it.

    Layer constructors and dropout draw from torch's default generator and take no other; this keeps
    their draws reproducible and leaves the caller's stream untouched.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(value)
        yield

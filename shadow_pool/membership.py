"""Who trains what: complementary pairs of random halves, pure in (seed, pair, records).

Models 2j and 2j+1 train on the two halves of one random split. Every record is then in exactly half of
the models at any n, a pool grows by pairs without touching older rows, and a target can be judged without
the bias that plain leave-one-out has on a balanced design.
"""

from __future__ import annotations

import numpy as np

from shadow_pool import seeds


def draw_membership(seed: int, n: int, records: int, group: np.ndarray | None = None) -> np.ndarray:
    """Membership of ``n`` models on ``records`` records.

    Args:
        seed: root seed.
        n: number of models, even.
        records: number of records.
        group: [records] labels; records of one group always share a half (None: every record on its own).

    Returns:
        bool [n, records], True where the record trains the model; row 2j+1 is the complement of row 2j.

    Raises:
        ValueError: n is odd, or group is not one label per record.
    """
    if n % 2:
        raise ValueError(f"n must be even, got {n}")
    if group is not None and group.shape != (records,):
        raise ValueError(f"group must have shape ({records},), got {group.shape}")
    rows = np.empty((n, records), dtype=bool)
    codes = None if group is None else np.unique(group.astype(str), return_inverse=True)[1]
    for pair in range(n // 2):
        half = _random_half(seeds.stream(seed, "membership", pair), records, codes)
        rows[2 * pair], rows[2 * pair + 1] = half, ~half
    return rows


def draw_coins(seed: int, records: int) -> np.ndarray:
    """bool [records]: members drawn by independent fair coins, as a target audited by one run needs."""
    return seeds.stream(seed, "target-members").random(records) < 0.5


def _random_half(rng: np.random.Generator, records: int, codes: np.ndarray | None) -> np.ndarray:
    if codes is None:
        half = np.zeros(records, dtype=bool)
        half[rng.permutation(records)[: records // 2]] = True
    else:
        sizes = np.bincount(codes)
        side = np.zeros(len(sizes), dtype=bool)
        filled = [0, 0]
        for unit in rng.permutation(len(sizes)):
            side[unit] = filled[1] < filled[0]
            filled[int(side[unit])] += int(sizes[unit])
        half = side[codes]
    # Which of the two halves is row 2j is a coin too, so that an odd record count favours neither.
    return half if rng.random() < 0.5 else ~half

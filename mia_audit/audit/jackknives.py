"""The jackknife of a pool in audits: each of its results computed once, the costly part of it kept with the pool."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mia_audit.attacks import NEEDS_POPULATION
from mia_audit.attacks.registry import SPREAD
from mia_audit.audit.scoring import HEADLINE
from mia_audit.evidence import ArmEvidence
from mia_audit.metrics.jackknife import METRICS, Jackknife, jackknife_pool
from shadow_pool.errors import UserError
from shadow_pool.store.files import read_sealed, write_sealed

BAND_FPRS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Where the report's bands around a ROC curve are computed."""

Measure = Callable[[str, ArmEvidence, Mapping[str, np.ndarray]], Jackknife]


def remembering_jackknife(pool: Path) -> Measure:
    """A jackknife that remembers: one arm's evidence serves its rows and every effect it takes part in.

    Replicates, nearly all of the cost, depend on the pool and not on a target: they stay in its folder as
    ``jackknife/KEY.json`` for audits to come. The key is the sha256 of all that goes into them, the code included.
    Where such a file is damaged they are computed again, where it cannot be written, every time.
    """
    known: dict[tuple[str, str, tuple[int, ...], tuple[str, ...]], Jackknife] = {}

    def measure(attack: str, evidence: ArmEvidence, masks: Mapping[str, np.ndarray]) -> Jackknife:
        key = (attack, evidence.arm, tuple(evidence.indices.tolist()), tuple(masks))
        if key not in known:
            known[key] = _measure(pool / "jackknife", attack, evidence, masks)
        return known[key]

    return measure


def _measure(folder: Path, attack: str, evidence: ArmEvidence, masks: Mapping[str, np.ndarray]) -> Jackknife:
    bands = tuple(f"tpr@{fpr:g}" for fpr in BAND_FPRS if f"tpr@{fpr:g}" not in METRICS)
    metrics = METRICS + bands if attack == HEADLINE else METRICS
    population = evidence.population_phi if attack in NEEDS_POPULATION else None
    arrays = [evidence.phi, evidence.membership, *masks.values(), *([] if population is None else [population])]
    path = folder / f"{_digest([attack, SPREAD, *metrics, *masks], arrays)}.json"
    replicates = _kept(path, (len(evidence.phi) // 2, len(masks), len(metrics)))
    found = jackknife_pool(
        attack,
        evidence.phi,
        evidence.membership,
        masks,
        population_phi=population,
        metrics=metrics,
        replicates=replicates,
    )
    if replicates is None:
        with suppress(OSError):  # the pool may be read-only
            folder.mkdir(exist_ok=True)
            write_sealed(path, {"replicates": found.replicates.tolist()})
    return found


def _kept(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The replicates in a file; None where there are none of that shape."""
    try:
        found = np.array(read_sealed(path, advice="it is made anew")["replicates"], dtype=np.float64)
    except (UserError, KeyError, TypeError, ValueError):
        return None
    return found if found.shape == shape else None


def _digest(words: Sequence[str], arrays: Sequence[np.ndarray]) -> str:
    """sha256 (hex) of words, of arrays with their shapes, and of the code that makes replicates of them."""
    digest = hashlib.sha256(_code())
    for word in words:
        digest.update(f"{word}\n".encode())
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@functools.cache
def _code() -> bytes:
    folder = Path(__file__).parents[1]
    files = sorted([*(folder / "attacks").glob("*.py"), *(folder / "metrics").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()

"""load_data: from a DataSpec and a seed to the records of a pool and the population held out of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from shadow_pool import seeds
from shadow_pool.data.arrays import Source
from shadow_pool.data.labels import encode_labels
from shadow_pool.data.outliers import add_outliers
from shadow_pool.data.preprocess import measured_normalize
from shadow_pool.data.records import PoolData, Records, content_hashes
from shadow_pool.data.sources import open_source
from shadow_pool.errors import UserError
from shadow_pool.spec import DataSpec

_INTEGER = re.compile(r"-?[0-9]+")


def load_data(spec: DataSpec, *, seed: int, data_root: Path | None = None, download: bool = False) -> PoolData:
    """Read the source, hold out a population, make outliers among the records, count exact duplicates.

    The population is the source's own test split, or a random share ``spec.holdout`` of it (none where 0). Rows
    of one group are never in both. Records with ids stand in the order of their ids (as numbers where all are
    integers), so the order of rows in the file does not matter; without ids the file's order is kept and the
    row number is the id.

    Raises:
        UserError: what :func:`~shadow_pool.data.sources.open_source`, the labels or the outliers refuse.
    """
    source = open_source(spec, data_root=data_root, download=download)
    label, classes = encode_labels(spec.source, source.label, source.classes, spec.classes)
    rows = _as_records(source, label, classes)
    ours, theirs, warnings = _split(source, _canonical_order(source), spec, seed)
    records = add_outliers(rows.take(ours), spec, seed=seed, data_root=data_root, download=download)
    population = rows.take(theirs)
    return PoolData(records, population, (*source.warnings, *warnings, *_duplicates(records, population)))


def resolve_data_spec(spec: DataSpec, data: PoolData) -> DataSpec:
    """The spec with what was found in the data made explicit, so that it loads and scales the same ever after.

    ``classes`` become those found; ``normalize="auto"`` becomes the mean and standard deviation of the records,
    population excluded (see :func:`~shadow_pool.data.preprocess.measured_normalize`).
    """
    normalize = measured_normalize(data.records.x) if spec.normalize == "auto" else spec.normalize
    return replace(spec, classes=data.records.classes, normalize=normalize)


def _as_records(source: Source, label: np.ndarray, classes: tuple[str, ...]) -> Records:
    n = len(source)
    given = source.subset is not None
    return Records(
        x=source.x,
        label=label,
        id=source.row_ids() if source.id is None else source.id,
        original_label=label,
        subset=source.subset if source.subset is not None else np.full(n, "clean", dtype=object),
        subset_source=np.full(n, "given" if given else None, dtype=object),
        source_index=source.source_index,
        group=source.group,
        classes=classes,
    )


def _canonical_order(source: Source) -> np.ndarray:
    """int64 [N]: the rows by id, or as they stand where the source has no ids."""
    if source.id is None:
        return np.arange(len(source))
    ids = list(source.id)
    if all(_INTEGER.fullmatch(name) for name in ids):
        keys: list = [(int(name), name) for name in ids]
    else:
        keys = ids
    return np.array(sorted(range(len(ids)), key=keys.__getitem__), dtype=np.int64)


def _split(
    source: Source, order: np.ndarray, spec: DataSpec, seed: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """The source's rows that become records and population, each in canonical order, and warnings."""
    warnings: tuple[str, ...] = ()
    test = source.test if source.test is not None else _drawn_holdout(source, order, spec.holdout, seed)
    ours, theirs = order[~test[order]], order[test[order]]
    if source.group is not None and source.test is not None:
        straddling = np.isin(source.group[theirs].astype(str), source.group[ours].astype(str))
        if straddling.any():
            theirs = theirs[~straddling]
            warnings = (
                f"{int(straddling.sum())} rows of the test split were left out: their group is also in training",
            )
    if len(ours) < 2:
        raise UserError(f"{spec.source} leaves {len(ours)} records; expected at least 2")
    return ours, theirs, warnings


def _drawn_holdout(source: Source, order: np.ndarray, share: float, seed: int) -> np.ndarray:
    """bool [N] over the source's rows: a random share of them, groups whole, the same for any order of rows."""
    test = np.zeros(len(source), dtype=bool)
    wanted = round(share * len(source))
    rng = seeds.stream(seed, "holdout")
    if source.group is None:
        test[order[rng.permutation(len(source))[:wanted]]] = True
    elif wanted:
        names, group = np.unique(source.group.astype(str), return_inverse=True)
        drawn = rng.permutation(len(names))
        filled = np.cumsum(np.bincount(group)[drawn])
        # Whole groups until the share is as near to what was asked as it gets; one group at least stays.
        count = min(int(np.argmin(np.abs(filled - wanted))) + 1, len(names) - 1)
        test = np.isin(group, drawn[:count])
    return test


def _duplicates(records: Records, population: Records) -> tuple[str, ...]:
    ours, theirs = content_hashes(records.x), content_hashes(population.x)
    warnings = []
    copies = len(ours) - len(set(ours))
    if copies:
        warnings.append(
            f"{copies} of {len(records)} records are exact copies of another record: one copy can be a member while "
            "the other counts as a non-member, which hides leaks"
        )
    known = set(ours)
    shared = sum(digest in known for digest in theirs)
    if shared:
        warnings.append(
            f"{shared} of {len(population)} held-out records are exact copies of a record, so they are not truly "
            "held out: accuracies on them are too high"
        )
    return tuple(warnings)

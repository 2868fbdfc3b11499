"""Attacks in blocks of records on phi that lies on disk: the scores of arrays in memory, wherever blocks are run."""

from __future__ import annotations

import pickle

import joblib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import tiny_pool, train_here

from mia_audit.attacks import ATTACKS, pool_scores, shadows, target_scores
from mia_audit.audit.scoring import scores_from_disk
from mia_audit.metrics import vulnerability
from shadow_pool.errors import UserError
from shadow_pool.membership import draw_membership
from shadow_pool.signals import Signals
from shadow_pool.store import entry
from shadow_pool.store.phi import StoredPhi, stored_phi

MODELS, RECORDS, QUERIES = 6, 75, 2


def write(folder, values, rows_at_once):
    """The handle of phi [M, N, Q], written as a pool keeps it, in parts of so many rows."""
    paths = [folder / f"{index}.parquet" for index in range(len(values))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "ROWS_AT_ONCE", rows_at_once)
        for path, phi in zip(paths, values, strict=True):
            n = len(phi)
            entry.write_signals(
                path, Signals(phi, np.zeros(n, np.int64), np.ones(n, np.float32), np.ones(n, np.float32))
            )
    return stored_phi(paths)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """phi [M, N, Q] of shadows, the same on disk, membership, and a target's phi; blocks of 8 records, read by two."""
    rng = np.random.default_rng(0)
    membership = draw_membership(0, MODELS, RECORDS)
    phi = rng.normal(0, 3, (RECORDS, 1)) + rng.standard_normal((MODELS, RECORDS, QUERIES)) + 2 * membership[..., None]
    stored = write(tmp_path_factory.mktemp("phi"), phi, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadows, "_BLOCK_CELLS", 8 * MODELS * QUERIES)
        patch.setattr(shadows, "_READ_CELLS", 16 * MODELS * QUERIES)
        yield phi, stored, membership, rng.standard_normal((RECORDS, QUERIES))


def all_scores(phi, membership, target):
    """Of every attack on the target, of every attack on the pool, and the records' vulnerability."""
    part = phi[:, :20]
    ask = {"population_target_phi": target[:20], "population_shadow_phi": part}
    of_target = [target_scores(name, target, phi, membership, **ask) for name in ATTACKS]
    of_pool = [pool_scores(name, phi, membership, population_phi=part) for name in ATTACKS]
    return [*of_target, *of_pool, vulnerability(phi, membership)]


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


SLICES = st.slices(RECORDS) | st.lists(st.integers(-RECORDS, RECORDS - 1)).map(lambda rows: np.array(rows, dtype=int))
INDICES = SLICES | st.lists(st.booleans(), min_size=RECORDS, max_size=RECORDS).map(np.array)


@given(first=INDICES, second=st.slices(20), models=st.slices(MODELS))
def test_stored_phi_slices_as_the_array_does(made, first, second, models):
    phi, stored, *_ = made
    expected, found = phi[models, first][:, second], stored[models, first][:, second]
    assert isinstance(found, StoredPhi)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_stored_phi_is_read_from_files_of_any_parts_and_names_the_one_that_differs(tmp_path):
    phi = np.random.default_rng(0).standard_normal((3, 40, 1))
    for rows_at_once in (1, 7, 40, 100):
        np.testing.assert_array_equal(write(tmp_path, phi, rows_at_once), phi)
    write(tmp_path, phi[:1, :39], 7)
    with pytest.raises(UserError, match=r"1\.parquet holds \(records, queries\) = \(40, 1\), .*0\.parquet \(39, 1\)"):
        stored_phi([tmp_path / "0.parquet", tmp_path / "1.parquet"])


def test_scores_from_disk_are_those_of_arrays(made):
    phi, stored, membership, target = made
    for found, expected in zip(
        all_scores(stored, membership, target), all_scores(phi, membership, target), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_only_blocks_are_read_whole(made, monkeypatch):
    phi, stored, membership, target = made
    read = []
    monkeypatch.setattr(
        StoredPhi, "__array__", lambda self, dtype=None, copy=None: read.append(self.shape) or phi[:, self.records]
    )
    target_scores("lira-online", target, stored, membership)
    assert read == [(MODELS, 16, QUERIES)] * 4 + [(MODELS, 11, QUERIES)]


def test_two_processes_give_the_bits_of_one(made):
    phi, stored, membership, target = made
    with joblib.parallel_config(backend="loky", n_jobs=2, inner_max_num_threads=1):
        found = all_scores(stored, membership, target)
        of_array = target_scores("lira-online", target, phi, membership)
        bad = phi.copy()
        bad[1, 60] = np.nan
        with pytest.raises(ValueError, match="phi must be finite, got 2 NaN or infinite values"):
            target_scores("lira-online", target, bad, membership)
    same(found, all_scores(phi, membership, target))
    np.testing.assert_array_equal(of_array, found[ATTACKS.index("lira-online")])


def test_what_is_sent_of_stored_phi_is_small(made):
    _, stored, *_ = made
    assert len(pickle.dumps(stored[:, :50])) < 200 * MODELS


def test_a_file_damaged_after_it_was_checked_is_named_when_read(tmp_path):
    phi = np.random.default_rng(0).standard_normal((3, 4000, 1))
    stored = write(tmp_path, phi, 1000)
    path = tmp_path / "1.parquet"
    content = bytearray(path.read_bytes())
    content[4000] ^= 1
    path.write_bytes(content)
    np.testing.assert_array_equal(stored[:, 2000:], phi[:, 2000:])
    for damage in (lambda: None, lambda: path.write_bytes(b"PAR1"), path.unlink):
        damage()
        with pytest.raises(UserError, match=r"1\.parquet is not readable .*verify --repair"):
            np.asarray(stored[:, :2000])


def test_a_pool_scores_a_target_from_disk(tmp_path):
    pool, data = tiny_pool(tmp_path / "pool", {"arch": "mlp", "n": 6, "arms": ["batch"], "recipe": {"epochs": 3}})
    train_here(pool, data)
    target, population = pool.signals("batch", 5), pool.signals("batch", 5, population=True)
    found = scores_from_disk(ATTACKS, target.phi, pool, "batch", population_target_phi=population.phi)
    assert tuple(found) == ATTACKS
    for attack, scores in found.items():
        expected = target_scores(
            attack,
            target.phi,
            np.asarray(pool.phi("batch", range(6))),
            pool.membership,
            population_target_phi=population.phi,
            population_shadow_phi=np.asarray(pool.phi("batch", range(6), population=True)),
        )
        np.testing.assert_array_equal(scores, expected)
    with pytest.raises(UserError, match="has no arm none"):
        scores_from_disk(["loss"], target.phi, pool, "none")

"""load_data: order, holdout, groups, labels, duplicates, and specs that load the same again."""

from dataclasses import replace

import numpy as np
import pytest

from shadow_pool.data.labels import encode_labels, read_classes
from shadow_pool.data.load import load_data, resolve_data_spec
from shadow_pool.errors import UserError
from shadow_pool.spec import DataSpec

RNG = np.random.default_rng(0)
N = 60
ARRAYS = {
    "x": RNG.integers(0, 256, (N, 4, 4)).astype(np.uint8),
    "y": np.arange(N) % 3,
    "id": RNG.permutation(1000)[:N],
    "group": np.repeat(np.arange(N // 3), 3),
}


def saved(path, rows=slice(None), **changes):
    arrays = {k: v for k, v in (ARRAYS | changes).items() if v is not None}
    np.savez(path, **{key: value[rows] for key, value in arrays.items()})
    return DataSpec(str(path), holdout=0.3, mislabeled=0.1, ood=0.1)


@pytest.mark.parametrize("group", [None, ARRAYS["group"]])
def test_the_order_of_rows_in_the_file_does_not_matter(tmp_path, group):
    a = load_data(saved(tmp_path / "a.npz", group=group), seed=3)
    b = load_data(saved(tmp_path / "b.npz", RNG.permutation(N), group=group), seed=3)
    assert a.fingerprint() == b.fingerprint()
    assert [int(name) for name in a.records.id] == sorted(int(name) for name in a.records.id)


def test_source_index_points_into_the_file(tmp_path):
    data = load_data(saved(tmp_path / "a.npz"), seed=0)
    for part in (data.records, data.population):
        assert list(part.id) == list(ARRAYS["id"][part.source_index].astype(str))
        np.testing.assert_array_equal(part.original_label, ARRAYS["y"][part.source_index])


def test_rows_without_ids_keep_their_order_and_are_numbered(tmp_path):
    data = load_data(saved(tmp_path / "a.npz", id=None, group=None), seed=0)
    assert (np.diff(data.records.source_index) > 0).all()
    assert list(data.records.id) == list(data.records.source_index.astype(str))
    assert len(data.population) == round(0.3 * N)
    assert not set(data.records.id) & set(data.population.id)


@pytest.mark.parametrize("seed", range(5))
def test_groups_never_straddle(tmp_path, seed):
    data = load_data(saved(tmp_path / "a.npz"), seed=seed)
    assert not set(data.records.group) & set(data.population.group)
    assert abs(len(data.population) - 0.3 * N) <= 3


def test_no_holdout_gives_an_empty_population(tmp_path):
    np.savez(tmp_path / "a.npz", **ARRAYS)
    data = load_data(DataSpec(str(tmp_path / "a.npz"), holdout=0), seed=0)
    assert len(data.records) == N
    assert data.population.x.shape == (0, 1, 4, 4)


def test_given_subsets_are_kept_and_marked(tmp_path):
    subset = np.array(["clean", "ood", "mislabeled"] * (N // 3))
    data = load_data(saved(tmp_path / "a.npz", subset=subset), seed=0)
    injected = data.records.subset_source == "injected"
    assert injected.sum() == 2 * round(0.1 * len(data.records))
    given = subset[data.records.source_index]
    assert (given[injected] == "clean").all()
    assert (data.records.subset[~injected] == given[~injected]).all()
    assert set(data.records.subset_source) == {"injected", "given"}


def test_duplicates_are_counted_within_and_across(tmp_path):
    spec = replace(saved(tmp_path / "a.npz", x=ARRAYS["x"][np.arange(N) // 4], group=None), mislabeled=0, ood=0)
    data = load_data(spec, seed=0)
    ours = [picture.tobytes() for picture in data.records.x]
    theirs = [picture.tobytes() for picture in data.population.x]
    within, across = data.warnings
    assert within.startswith(f"{len(ours) - len(set(ours))} of 42 records are exact copies")
    assert across.startswith(f"{sum(picture in ours for picture in theirs)} of 18 held-out records are exact copies")
    assert load_data(replace(saved(tmp_path / "b.npz"), mislabeled=0, ood=0), seed=0).warnings == ()


@pytest.mark.parametrize("spec", [DataSpec(), DataSpec(mislabeled=0.05, ood=0.05)])
def test_a_resolved_spec_loads_the_same(spec):
    data = load_data(spec, seed=1)
    resolved = resolve_data_spec(spec, data)
    assert resolved.normalize.count("/") == 1
    assert len(resolved.classes) == 10
    again = load_data(resolved, seed=1)
    assert again.fingerprint() == data.fingerprint()
    assert resolve_data_spec(resolved, again) == resolved
    assert load_data(spec, seed=2).fingerprint() != data.fingerprint()


def test_strings_and_class_orders():
    label = np.array(["b", "a", "b"], dtype=object)
    assert encode_labels("d", label, None, ())[0].tolist() == [1, 0, 1]
    assert encode_labels("d", label, None, ("b", "x", "a"))[0].tolist() == [0, 2, 0]
    numbers = np.array([1, 0, 1])
    assert encode_labels("d", numbers, None, ())[1] == ("0", "1")
    assert encode_labels("d", numbers, None, ("zero", "one"))[0].tolist() == [1, 0, 1]
    assert encode_labels("d", numbers, None, ("1", "0"))[0].tolist() == [0, 1, 0]
    assert encode_labels("d", numbers, ("cat", "dog"), ("dog", "cat"))[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("label", "names", "order", "words"),
    [
        ([1, 2, 3], None, (), "0..C-1"),
        ([-1, 0, 1], None, (), "0..C-1"),
        ([0, 1, 3], None, (), "found 0, 1, 3"),
        ([0, 0, 0], None, (), "at least two classes"),
        ([0, 5], None, ("a", "b"), "0..1"),
        ([0, 2], ("a", "b"), (), "0..1"),
        ([0, 1], ("a", "b"), ("a", "c"), "first 'b'"),
        ([0, 1], None, ("a", "a"), "must differ"),
    ],
)
def test_labels_that_do_not_fit(label, names, order, words):
    with pytest.raises(UserError) as caught:
        encode_labels("d", np.array(label), names, order)
    assert words in str(caught.value)


def test_classes_file():
    assert read_classes("cat\n\n dog \n") == ("cat", "dog")
    with pytest.raises(UserError, match="found none"):
        read_classes("\n")

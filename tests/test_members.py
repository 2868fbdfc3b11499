"""Files of members against the pool's records."""

import numpy as np
import pandas as pd
import pytest

from mia_audit.members import find_sidecar, read_members
from shadow_pool.data.load import load_data
from shadow_pool.errors import UserError
from shadow_pool.spec import DataSpec

# Ten rows of a source, ids in another order than its rows; four of them held out.
RECORDS = pd.DataFrame(
    {
        "id": ["a", "b", "c", "d", "e", "f", "u", "v", "w", "x"],
        "source_index": [9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
        "role": ["record"] * 6 + ["population"] * 4,
    }
)
EXPECTED = [False, True, False, True, False, False]


def write_csv(path, **columns):
    pd.DataFrame(columns).to_csv(path, index=False)


BY_SOURCE = np.zeros(10, dtype=bool)
BY_SOURCE[[8, 6, 3]] = True

FORMS = {
    "bool.npy": lambda path: np.save(path, np.array(EXPECTED)),
    "source.npy": lambda path: np.save(path, BY_SOURCE),
    "indices.npy": lambda path: np.save(path, np.array([3, 1])),
    "ids.csv": lambda path: write_csv(path, id=["d", "b"]),
    "with-population.csv": lambda path: write_csv(path, id=["d", "b", "u"]),
    "numbers.csv": lambda path: write_csv(path, id=list("dba"), member=[1, 1, 0]),
    "words.csv": lambda path: write_csv(path, id=list("dba"), member=[True, "true", "False"]),
    "all.parquet": lambda path: pd.DataFrame({"id": list("abcdef"), "member": EXPECTED}).to_parquet(path),
    "ids.parquet": lambda path: pd.DataFrame({"id": ["b", "d"]}).to_parquet(path),
    "ids.txt": lambda path: path.write_text("\nb\n  d \n"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_names_the_same_members(tmp_path, name):
    FORMS[name](tmp_path / name)
    member = read_members(tmp_path / name, RECORDS)
    assert member.dtype == bool
    assert member.tolist() == EXPECTED


@pytest.mark.parametrize(("name", "ids"), [("m.csv", [7, 10]), ("m.parquet", [7, 10]), ("m.txt", "7\n10\n")])
def test_integer_ids_are_compared_as_text(tmp_path, name, ids):
    records = RECORDS.assign(id=[str(number) for number in range(5, 15)])
    path = tmp_path / name
    if name.endswith("txt"):
        path.write_text(ids)
    else:
        frame = pd.DataFrame({"id": ids})
        frame.to_csv(path, index=False) if name.endswith("csv") else frame.to_parquet(path)
    assert np.flatnonzero(read_members(path, records)).tolist() == [2, 5]


def test_leading_zeros_survive_a_csv(tmp_path):
    write_csv(tmp_path / "m.csv", id=["007"])
    records = RECORDS.assign(id=["7", "007", *RECORDS["id"][2:]])
    assert np.flatnonzero(read_members(tmp_path / "m.csv", records)).tolist() == [1]


def test_one_bool_per_row_of_the_training_split(tmp_path):
    split = RECORDS.assign(source_index=[5, 4, 3, 2, 1, 0, 0, 1, 2, 3], role=["record"] * 5 + ["population"] * 5)
    split = split[split.index != 5]
    np.save(tmp_path / "m.npy", np.array([True, False, False, False, True, False]))
    assert read_members(tmp_path / "m.npy", split).tolist() == [False, True, False, False, False]


REFUSED = {
    "missing.npy": (lambda path: None, "does not exist"),
    "m.json": (lambda path: path.write_text("{}"), "must end in .npy"),
    "short.npy": (
        lambda path: np.save(path, np.ones(5, dtype=bool)),
        "6 records or of the 10 rows of their source, got 5",
    ),
    "float.npy": (lambda path: np.save(path, np.ones(6)), "float64"),
    "square.npy": (lambda path: np.save(path, np.ones((6, 1), dtype=bool)), "(6, 1)"),
    "object.npy": (lambda path: np.save(path, np.array([{}]), allow_pickle=True), "not a readable .npy"),
    "broken.npy": (lambda path: path.write_bytes(b"\x93NUMPY"), "not a readable .npy"),
    "far.npy": (lambda path: np.save(path, np.array([1, 6])), "0..5"),
    "ones.npy": (lambda path: np.save(path, np.array([0, 1, 0, 1, 0, 0])), "save one bool per record"),
    "nobody.npy": (lambda path: np.save(path, np.zeros(6, dtype=bool)), "none of the 6 records"),
    "empty.npy": (lambda path: np.save(path, np.array([], dtype=int)), "none of the 6 records"),
    "empty.csv": (lambda path: path.touch(), "is empty"),
    "header.csv": (lambda path: path.write_text("id\n"), "is empty"),
    "empty.txt": (lambda path: path.write_text("\n\n"), "is empty"),
    "columns.csv": (lambda path: write_csv(path, name=["a"]), "column id, found name"),
    "unknown.csv": (
        lambda path: write_csv(path, id=["a", "z", "y"]),
        "2 of 3 ids that the pool's records do not have (z, y)",
    ),
    "twice.txt": (lambda path: path.write_text("a\nb\na\n"), "repeats 1 ids (a)"),
    "odd.csv": (lambda path: write_csv(path, id=["a"], member=["perhaps"]), "found 'perhaps'"),
    "gap.csv": (lambda path: write_csv(path, id=["a", None, "b"], member=[1, 1, 1]), "1 rows without an id"),
    "held-out.csv": (lambda path: write_csv(path, id=["u", "v"]), "none of the 6 records"),
    "garbage.parquet": (lambda path: path.write_bytes(b"PAR1nothing"), "not a readable .parquet"),
    "garbage.csv": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not a readable .csv"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_take_one_line(tmp_path, name):
    make, words = REFUSED[name]
    make(tmp_path / name)
    with pytest.raises(UserError) as caught:
        read_members(tmp_path / name, RECORDS)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_sidecar_stands_beside_the_model(tmp_path):
    assert find_sidecar(tmp_path / "net.best.pt") is None
    (tmp_path / "net.best.members.parquet").touch()
    assert find_sidecar(tmp_path / "net.best.pt") == tmp_path / "net.best.members.parquet"


def test_against_real_records(tmp_path):
    data = load_data(DataSpec(), seed=0)
    table = pd.concat([data.records.to_frame("record"), data.population.to_frame("population")], ignore_index=True)
    by_source = np.zeros(1797, dtype=bool)
    by_source[:900] = True
    np.save(tmp_path / "m.npy", by_source)
    assert (read_members(tmp_path / "m.npy", table) == (data.records.source_index < 900)).all()

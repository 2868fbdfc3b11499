"""Records from CSV and parquet of features."""

import numpy as np
import pandas as pd
import pytest

from shadow_pool.data.load import load_data, resolve_data_spec
from shadow_pool.data.sources import open_source
from shadow_pool.errors import UserError
from shadow_pool.spec import DataSpec

FRAME = pd.DataFrame(
    {
        "age": [30, 40, None, 50],
        "sex": ["m", "f", "f", None],
        "smoker": [True, False, True, True],
        "scan": ["007", "08", "9", "10"],
        "patient": ["p", "p", "q", "r"],
        "diagnosis": ["ill", "well", "well", "ill"],
    }
)
OPTIONS = {"label": "diagnosis", "id": "scan", "group": "patient"}


@pytest.fixture(params=["csv", "parquet"])
def table(request, tmp_path):
    path = tmp_path / f"t.{request.param}"
    FRAME.to_csv(path, index=False) if request.param == "csv" else FRAME.to_parquet(path)
    return str(path)


def test_columns_become_features(table):
    source = open_source(DataSpec(table, **OPTIONS))
    # age, age missing, sex f, sex m, sex missing, smoker
    expected = [[30, 0, 0, 1, 0, 1], [40, 0, 1, 0, 0, 0], [40, 1, 1, 0, 0, 1], [50, 0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(source.x, np.array(expected, dtype=np.float32))
    assert source.x.dtype == np.float32
    assert list(source.id) == ["007", "08", "9", "10"]
    assert list(source.group) == ["p", "p", "q", "r"]
    assert list(source.label) == ["ill", "well", "well", "ill"]


def test_numbers_are_standardized_and_flags_are_not(table):
    spec = DataSpec(table, holdout=0, **OPTIONS)
    resolved = resolve_data_spec(spec, load_data(spec, seed=0))
    mean, std = (side.split(",") for side in resolved.normalize.split("/"))
    assert mean == ["40", "0", "0", "0", "0", "0"]
    assert std == ["7.07107", "1", "1", "1", "1", "1"]
    assert resolved.classes == ("ill", "well")


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"label": None}, "--label"),
        ({}, {"label": "diagnose"}, "did you mean 'diagnosis'"),
        ({}, {"id": "patient"}, "first 'p'"),
        ({"diagnosis": ["ill", None, "well", "ill"]}, {}, "1 records have no label"),
        ({"scan": ["1", None, "3", "4"]}, {}, "1 missing values"),
        ({"age": [1, 2, np.inf, 3]}, {}, "must be finite"),
        ({"diagnosis": [0.5, 1, 0, 1]}, {}, "labels must be integers"),
        ({"sep": ";"}, {}, "one column, 'age;sex;smoker;scan;patient;diagnosis;sep'"),
    ],
)
def test_refusals(tmp_path, changes, options, words):
    path = tmp_path / "t.csv"
    FRAME.assign(**changes).to_csv(path, index=False, sep=changes.get("sep", ","))
    with pytest.raises(UserError) as caught:
        open_source(DataSpec(str(path), **(OPTIONS | options)))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dates_and_free_text_are_refused(tmp_path):
    path = tmp_path / "t.parquet"
    pd.DataFrame({"y": [0, 1], "when": pd.to_datetime(["2020-01-01", "2021-01-01"])}).to_parquet(path)
    with pytest.raises(UserError, match="'when' must hold numbers or text"):
        open_source(DataSpec(str(path), label="y"))
    pd.DataFrame({"y": [0, 1] * 600, "note": [f"note {i}" for i in range(1200)]}).to_parquet(path)
    with pytest.raises(UserError, match="'note' holds 1200 different values"):
        open_source(DataSpec(str(path), label="y"))
    pd.DataFrame({"y": [0, 1] * 60, "name": [f"name {i // 2}" for i in range(120)], "f": 1.0}).to_parquet(path)
    assert open_source(DataSpec(str(path), label="y")).x.shape == (120, 61)
    assert open_source(DataSpec(str(path), label="y", group="name")).x.shape == (120, 1)
    pd.DataFrame({"y": [0, 1] * 60, "name": [f"name {i}" for i in range(120)], "f": 1.0}).to_parquet(path)
    with pytest.raises(UserError, match=r"'name' holds 120 different values in 120 rows.* --id"):
        open_source(DataSpec(str(path), label="y"))


def test_columns_that_cannot_be_meant_as_features_are_said(tmp_path):
    path = tmp_path / "t.csv"
    frame = pd.DataFrame({"number": np.arange(40) + 900, "f": 0.5, "y": [0, 1] * 20, "Unnamed: 3": np.nan})
    frame.to_csv(path)  # with the index, as pandas does unless told
    source = open_source(DataSpec(str(path), label="y"))
    assert source.x.shape == (40, 3)
    empty, numbers = source.warnings
    assert "Unnamed: 3 hold no value" in empty
    assert "columns Unnamed: 0, number differ in every record" in numbers
    assert open_source(DataSpec(str(path), label="y", id="number")).x.shape == (40, 2)


def test_tags_in_a_table_are_kept(table):
    frame = FRAME.assign(subset=["clean", "mislabeled", "ood", "clean"])
    frame.to_csv(table, index=False) if table.endswith("csv") else frame.to_parquet(table)
    source = open_source(DataSpec(table, **OPTIONS))
    assert list(source.subset) == ["clean", "mislabeled", "ood", "clean"]
    assert source.x.shape == (4, 6)
    frame = FRAME.assign(subset=["clean", "odd", "odd", "clean"])
    frame.to_csv(table, index=False) if table.endswith("csv") else frame.to_parquet(table)
    source = open_source(DataSpec(table, **OPTIONS))
    assert (source.subset, source.x.shape) == (None, (4, 8))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00bad", b"a,b\n1,2\n3,4,5,6\n"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_unreadable_tables_take_one_line(tmp_path, content, suffix):
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_source(DataSpec(str(path), label="y"))
    assert "\n" not in str(caught.value)


def test_parquet_folder_has_its_own_split(tmp_path):
    for name, rows in (("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("validation", 5), ("test", 4)):
        pd.DataFrame({"f": np.arange(rows) + rows, "y": np.arange(rows) % 2}).to_parquet(tmp_path / f"{name}.parquet")
    source = open_source(DataSpec(str(tmp_path), label="y"))
    assert int((~source.test).sum()) == 5
    np.testing.assert_array_equal(source.x[source.test, 0], [4, 5, 6, 7])


def test_integer_labels_of_a_table_keep_their_order(tmp_path):
    path = tmp_path / "t.csv"
    pd.DataFrame({"f": [1.0, 2, 3, 4], "y": [2, 4, 2, 4]}).to_csv(path, index=False)
    with pytest.raises(UserError, match=r"0..C-1 .* found 2, 4"):
        load_data(DataSpec(str(path), label="y", holdout=0), seed=0)
    data = load_data(DataSpec(str(path), label="y", holdout=0, classes=("4", "2")), seed=0)
    assert list(data.records.label) == [1, 0, 1, 0]

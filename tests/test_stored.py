"""Reading an audit back: what was written returns, and no file of a stranger gets past the checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import examples
import jsonschema
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mia_audit.audit import audit_target
from mia_audit.report.figures import canvas, plot_roc, to_svg
from mia_audit.results import AuditResult
from mia_audit.schemas import load_schema
from mia_audit.stored import read_audit
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.store.pool import Pool
from shadow_pool.train.target import train_target

FIXTURES = Path(__file__).parent / "fixtures" / "protocol-1"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    examples.target_audit(examples.digits(160), n=8).write(folder)
    return folder


@pytest.fixture
def audit(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "audit"))


def test_a_targets_curves_are_drawn_again_from_its_records(pool: Pool, pool_data: PoolData, tmp_path: Path) -> None:
    trained = train_target(pool, pool_data, out=tmp_path / "model.pt")
    made = audit_target(trained.model, pool, pool_data, attacks=("loss", "lira-online"))
    made.write(tmp_path)
    back = read_audit(tmp_path)
    assert set(back.curves) == set(made.curves) >= {("batch", "all")}
    for key, (fpr, tpr) in made.curves.items():
        np.testing.assert_array_equal(back.curves[key][0], fpr)
        np.testing.assert_array_equal(back.curves[key][1], tpr)
    np.testing.assert_array_equal(back.cells["batch"], made.cells["batch"])
    figure, axes = canvas()
    plot_roc(axes, back, [("batch", "all")])
    assert "<path" in to_svg(figure, name="roc", alt="ROC")


def test_of_a_pool_no_curves_are_stored(tmp_path: Path) -> None:
    examples.pool_audit(examples.digits(160)).write(tmp_path)
    back = read_audit(tmp_path)
    assert back.curves == {}
    _, axes = canvas()
    with pytest.raises(ValueError, match="among the result's curves"):
        plot_roc(axes, back, [("batch", "all")])


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


@pytest.mark.parametrize("kind", ["target", "pool", "unknown"])
def test_what_was_written_is_read_back(kind: str, tmp_path: Path) -> None:
    records = examples.digits(160)
    made: AuditResult = {
        "target": lambda: examples.target_audit(records),
        "pool": lambda: examples.pool_audit(records),
        "unknown": lambda: examples.target_audit(records, members_known=False, bn=False),
    }[kind]()
    made.write(tmp_path)
    back = read_audit(tmp_path)
    assert back.to_dict() == made.to_dict()
    assert back.attacks == made.attacks
    pd.testing.assert_frame_equal(back.records, made.records, check_dtype=False)


@pytest.mark.parametrize("folder", ["target", "target-members-unknown", "pool"])
def test_audits_of_protocol_1_are_read(folder: str) -> None:
    result = read_audit(FIXTURES / folder)
    assert result.pool.records == len(result.records) == 120
    assert bool(result.attacks) == (folder != "target-members-unknown")


def test_a_key_of_a_later_version_is_ignored(audit: Path) -> None:
    body = json.loads((audit / "audit.json").read_text())
    body["later"] = body["attacks"][0]["later"] = {"any": "thing"}
    (audit / "audit.json").write_text(json.dumps(body))
    assert read_audit(audit).attacks


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not readable JSON"),
        (b"\xff\xfe{}", "not readable JSON"),
        (b"[" * 200_000, "not readable JSON"),
        (b"9" * 10_000, "protocol must be 1|not readable JSON"),
        (b"[]", "protocol must be 1, got 'list'"),
        (b"{}", "protocol must be 1, got None"),
        (b'{"protocol": true}', "protocol must be 1, got True"),
        (b'{"protocol": 2}', "protocol must be 1, got 2"),
        (b'{"protocol": 1, "kind": "study"}', "kind must be target or pool"),
        (b'{"protocol": 1, "kind": NaN}', "NaN is not JSON"),
    ],
)
def test_files_that_are_no_audit_are_refused_in_one_line(audit: Path, content: bytes, words: str) -> None:
    (audit / "audit.json").write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        read_audit(audit)
    one_line(error)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("attacks", 0, "auc"), "high", r"attacks\[0\].auc must be float, got 'high'"),
        (("attacks", 0, "auc"), 1.5, "must be between 0 and 1"),
        (("attacks", 0, "auc"), 1e400, "must be float"),
        (("attacks", 0, "auc_ci"), [0.9, 0.1], r"must be an interval \[low, high\]"),
        (("attacks", 0, "auc_ci"), [0.9], "must have 2 entries, got 1"),
        (("attacks", 0, "subset"), "<b>", "must be one of all, clean, mislabeled, ood"),
        (("attacks", 0, "members"), -3, "must be a number from 0"),
        (("attacks", 0, "members"), True, "must be int"),
        (("attacks", 1, "subset"), "all", "one row for each attack, arm and subset"),
        (("attacks", 1, "arm"), "none", "must be of one arm"),
        (("target",), None, "target must be null for a pool and only then"),
        (("warnings",), "none", "must be list"),
        (("software", "numpy"), 2, "must be str"),
    ],
)
def test_values_that_an_audit_cannot_hold_are_named(audit: Path, path: tuple[Any, ...], value: Any, words: str) -> None:
    body = json.loads((audit / "audit.json").read_text())
    at: Any = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    (audit / "audit.json").write_text(json.dumps(body).replace("Infinity", "1e400"))
    with pytest.raises(UserError, match=words) as error:
        read_audit(audit)
    one_line(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in places(item, (*path, key)))][bool(not path) :]


BODY = json.loads((FIXTURES / "target" / "audit.json").read_text(encoding="utf-8"))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(places(BODY)), value=json_values)
def test_a_changed_file_is_refused_or_still_an_audit(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    body = json.loads(json.dumps(BODY))
    at: Any = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    shutil.copy(FIXTURES / "target" / "records.parquet", tmp_path / "records.parquet")
    (tmp_path / "audit.json").write_text(json.dumps(body), encoding="utf-8")
    try:
        result = read_audit(tmp_path)
    except UserError:
        return
    jsonschema.validate(result.to_dict(), load_schema("audit"))


def test_missing_files_are_named(audit: Path) -> None:
    (audit / "records.parquet").unlink()
    with pytest.raises(UserError, match=r"records\.parquet is missing"):
        read_audit(audit)
    (audit / "audit.json").unlink()
    with pytest.raises(UserError, match=r"audit\.json is missing"):
        read_audit(audit)
    with pytest.raises(UserError, match="no audit in"):
        read_audit(audit / "nowhere")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"id": "same"}, "ids must be unique"),
        ({"id": np.arange(160)}, "column id must hold text, got int64"),
        ({"member": 1.0}, "column member must hold true, false or empty, got double"),
        ({"lira-online": "x"}, "column lira-online must hold numbers"),
        ({"subset": [["a"]] * 160}, "column subset must hold text"),
    ],
)
def test_tables_of_another_shape_are_refused(audit: Path, columns: dict[str, Any], words: str) -> None:
    table = pd.read_parquet(audit / "records.parquet").assign(**columns)
    table.to_parquet(audit / "records.parquet", index=False)
    with pytest.raises(UserError, match=words) as error:
        read_audit(audit)
    one_line(error)


def test_missing_and_doubled_columns_are_refused(audit: Path) -> None:
    path = audit / "records.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["member"]), path)
    with pytest.raises(UserError, match="must have a column 'member'"):
        read_audit(audit)
    pq.write_table(table.append_column("id", pa.array(["a"] * len(table))), path)
    with pytest.raises(UserError, match="different names"):
        read_audit(audit)


def test_damaged_tables_never_raise_anything_else(audit: Path) -> None:
    path = audit / "records.parquet"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(60):
        damaged = bytearray(whole)
        if trial % 3 == 0:
            damaged = damaged[: rng.integers(len(whole))]
        else:
            for at in rng.integers(len(whole), size=8):
                damaged[at] = rng.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            read_audit(audit)
        except UserError:
            refused += 1
    assert refused >= 20

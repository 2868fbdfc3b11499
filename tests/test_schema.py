"""The published JSON Schemas hold for what is written, and say no to what is not an audit."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import examples
import jsonschema
import pandas as pd
import pytest

from mia_audit.audit import audit_pool, audit_target
from mia_audit.results import AuditResult
from mia_audit.schemas import SCHEMAS, load_schema
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.store.pool import Pool
from shadow_pool.train.target import train_target

FIXTURES = Path(__file__).parent / "fixtures" / "protocol-1"


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = load_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def keys(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Every key of an object that the schema lists keys for is one of them."""
    for branch in schema.get("anyOf", [schema]):
        while "$ref" in branch:
            branch = root["$defs"][branch["$ref"].rsplit("/", 1)[1]]
        if isinstance(value, dict) and "properties" in branch:
            assert set(value) == set(branch["properties"])
            for key, item in value.items():
                keys(item, branch["properties"][key], root)
        if isinstance(value, list) and "items" in branch:
            for item in value:
                keys(item, branch["items"], root) if branch["items"] else None


@pytest.fixture(scope="module")
def audits() -> dict[str, AuditResult]:
    records = examples.digits(200)
    return {
        "target": examples.target_audit(records),
        "null": examples.target_audit(records, leak=0),
        "members unknown": examples.target_audit(records, members_known=False, bn=False),
        "pool": examples.pool_audit(records),
    }


@pytest.mark.parametrize("name", ["target", "null", "members unknown", "pool"])
def test_audits_are_written_as_published(audits: dict[str, AuditResult], name: str) -> None:
    body = json.loads(json.dumps(audits[name].to_dict(), allow_nan=False))
    validator("audit").validate(body)
    keys(body, load_schema("audit"), load_schema("audit"))


def test_real_audits_are_written_as_published(pool: Pool, pool_data: PoolData, tmp_path: Path) -> None:
    trained = train_target(pool, pool_data, out=tmp_path / "model.pt")
    unknown = Path(shutil.copy(trained.model, tmp_path / "unknown.pt"))
    ids = pool_data.records.id
    for name, members in (("few", ids[5:]), ("all", ids)):
        pd.DataFrame({"id": members}).to_csv(tmp_path / f"{name}.csv", index=False)
    for result in (
        audit_target(trained.model, pool, pool_data, twins=2, workers=1),
        audit_target(trained.model, pool, pool_data, subsets="none", attacks=("rmia",)),
        audit_target(trained.model, pool, pool_data, members=tmp_path / "few.csv", query_mode="batch"),
        audit_target(trained.model, pool, pool_data, members=tmp_path / "all.csv"),
        audit_target(unknown, pool, pool_data),
        audit_pool(pool),
    ):
        result.write(tmp_path)
        body = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
        validator("audit").validate(body)
        keys(body, load_schema("audit"), load_schema("audit"))


def test_studies_are_written_as_published() -> None:
    body = json.loads(json.dumps(examples.study().to_dict(), allow_nan=False))
    validator("study").validate(body)
    keys(body, load_schema("study"), load_schema("study"))


@pytest.mark.parametrize("folder", ["target", "target-members-unknown", "pool"])
def test_audits_of_protocol_1_stay_valid(folder: str) -> None:
    validator("audit").validate(json.loads((FIXTURES / folder / "audit.json").read_text(encoding="utf-8")))


def test_a_study_of_protocol_1_stays_valid() -> None:
    validator("study").validate(json.loads((FIXTURES / "study" / "study.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("protocol",), 2),
        (("kind",), "study"),
        (("target",), None),
        (("attacks", 0, "attack"), "lira"),
        (("attacks", 0, "auc"), 1.5),
        (("attacks", 0, "auc_ci"), [0.1]),
        (("attacks", 0, "auc_ci"), [0.1, 0.2, 0.3]),
        (("attacks", 0, "tpr_at_fpr", 0, "resolved"), "yes"),
        (("headline", "fpr"), 0.5),
        (("batchnorm", "effect", 0, "matched"), "loss"),
        (("pool", "records"), -1),
    ],
)
def test_what_is_no_audit_is_refused(audits: dict[str, AuditResult], path: tuple[Any, ...], value: Any) -> None:
    body = copy.deepcopy(audits["target"].to_dict())
    at: Any = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    assert not validator("audit").is_valid(body)


def test_a_missing_key_is_refused(audits: dict[str, AuditResult]) -> None:
    body = audits["target"].to_dict()
    for key in body:
        assert not validator("audit").is_valid({name: value for name, value in body.items() if name != key})


def test_schemas_are_asked_for_by_name() -> None:
    assert [load_schema(name)["title"] for name in SCHEMAS] == ["audit.json, protocol 1", "study.json, protocol 1"]
    with pytest.raises(UserError, match="known: audit, study"):
        load_schema("adit")

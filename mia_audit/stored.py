"""Read a written audit back: audit.json and records.parquet, checked as files of unknown origin.

Protocol 1. Bump :data:`mia_audit.results.PROTOCOL` when a reader of the old layout would misread the new one; an
added key is no bump, so unknown keys are ignored. Another protocol is refused by name, never guessed at.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mia_audit.metrics.roc import roc
from mia_audit.report.words import headline_attack, headline_rows
from mia_audit.results import (
    ATTACKS,
    FPRS,
    METRICS,
    PROTOCOL,
    SUBSET_ROWS,
    AttackRow,
    AuditResult,
    EffectRow,
    Headline,
    LayerRatio,
    PoolInfo,
    TargetInfo,
)
from shadow_pool.errors import UserError

MAX_JSON_BYTES = 1 << 26
MAX_TABLE_BYTES = 1 << 30
_NAMES: dict[str, tuple[object, ...]] = {
    "attack": ATTACKS,
    "subset": SUBSET_ROWS,
    "scope": ("recipe", "checkpoint"),
    "matched": ("epochs", "fit"),
    "query_mode": ("eval", "batch"),
    "metric": METRICS,
    "fpr": FPRS,
}
_SHARES = (
    *("auc", "auc_ci", "tpr", "balanced_accuracy", "member_accuracy", "nonmember_accuracy"),
    *("shadow_accuracy_percentile", "fraction_above_one"),
)


def read_audit(folder: Path) -> AuditResult:
    """The audit in ``folder``; a target's ``curves`` and ``cells`` are computed from its records.

    The rest of what only reports draw is not stored (``bands``, ``arms``; of a pool ``curves`` and ``cells`` as well).

    Raises:
        UserError: a file is missing, too large or not readable, is of another protocol, or holds a value that an
            audit cannot hold; the message names it.
    """
    path = folder / "audit.json"
    body = _read_json(path)
    if not isinstance(body, dict) or body.get("protocol") != PROTOCOL or isinstance(body["protocol"], bool):
        found = body.get("protocol") if isinstance(body, dict) else type(body).__name__
        raise UserError(f"{path}: protocol must be {PROTOCOL}, got {_short(found)}; use the mia-audit that wrote it")
    kind = _field(body, "kind", str, f"{path}: audit")
    if kind not in ("target", "pool"):
        raise UserError(f"{path}: kind must be target or pool, got {_short(kind)}; give the folder of an audit")
    batchnorm = _field(body, "batchnorm", dict, f"{path}: audit")

    def part(values: dict[str, Any], name: str, annotation: Any) -> Any:
        return _field(values, name, annotation, f"{path}: audit")

    target, attacks = part(body, "target", TargetInfo | None), part(body, "attacks", tuple[AttackRow, ...])
    if (target is None) != (kind == "pool"):
        raise UserError(f"{path}: target must be null for a pool and only then; run the audit again")
    _check_rows(attacks, kind, path)
    result = AuditResult(
        kind=kind,
        created=part(body, "created", str),
        software=part(body, "software", dict[str, str]),
        headline=part(body, "headline", Headline | None),
        target=target,
        pool=part(body, "pool", PoolInfo),
        attacks=attacks,
        layers=part(batchnorm, "layers", tuple[LayerRatio, ...]),
        effect=part(batchnorm, "effect", tuple[EffectRow, ...]),
        warnings=part(body, "warnings", tuple[str, ...]),
        records=_read_records(folder / "records.parquet"),
    )
    return _drawn(result)


def _drawn(result: AuditResult) -> AuditResult:
    """With the ROC curves of the headline attack, and membership and scores under it, where the records hold them."""
    chosen, records = headline_attack(result), result.records
    if result.target is None or chosen is None or chosen[0] not in records or records["member"].isna().any():
        return result
    member, score = records["member"].to_numpy(bool), records[chosen[0]].to_numpy(float)
    curves = {}
    for row in headline_rows(result):
        kept = ~np.isnan(score) & ((records["subset"] == row.subset).to_numpy() | (row.subset == "all"))
        if row.auc is not None and len(np.unique(member[kept])) == 2:
            curve = roc(member[kept], score[kept])
            curves[row.arm, row.subset] = (curve.fpr, curve.tpr)
    return dataclasses.replace(result, curves=curves, cells={chosen[1]: (member, score)})


def _check_rows(rows: tuple[AttackRow, ...], kind: str, path: Path) -> None:
    names = [(row.attack, row.arm, row.subset) for row in rows]
    fprs = [[point.fpr for point in row.tpr_at_fpr] for row in rows]
    if len(set(names)) != len(names) or any(len(set(values)) != len(values) for values in fprs):
        raise UserError(f"{path}: attacks must hold one row for each attack, arm and subset; run the audit again")
    if kind == "target" and len({row.arm for row in rows}) > 1:
        raise UserError(f"{path}: the attacks on a target must be of one arm; run the audit again")


def _read_json(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise UserError(f"{path} must be at most {MAX_JSON_BYTES >> 20} MiB, got {size >> 20} MiB; is it an audit?")
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except FileNotFoundError:
        raise UserError(f"no audit in {path.parent}: audit.json is missing; give a folder that --out wrote") from None
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {_short(error)}; run the audit again") from None


def _read_records(path: Path) -> pd.DataFrame:
    try:
        file = pq.ParquetFile(path)
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        if size > MAX_TABLE_BYTES:
            raise UserError(f"{path} must unpack to at most {MAX_TABLE_BYTES >> 20} MiB, got {size >> 20} MiB")
        table = file.read()
        table.validate(full=True)  # text that is not UTF-8 would raise only when it is read
        _check_columns(table.schema, path)
        # The writer's notes on pandas types are not needed, and nothing may hang on what a stranger put there.
        frame = table.to_pandas(ignore_metadata=True)
    except FileNotFoundError:
        raise UserError(f"no records in {path.parent}: records.parquet is missing; run the audit again") from None
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError, MemoryError, OverflowError, pa.ArrowException) as error:
        raise UserError(f"{path} is not readable parquet: {_short(error)}; run the audit again") from None
    if frame["id"].isna().any() or frame["id"].duplicated().any():
        raise UserError(f"{path}: ids must be unique and none empty; run the audit again")
    return frame.assign(member=frame["member"].astype("boolean"))


def _check_columns(schema: pa.Schema, path: Path) -> None:
    if len(set(schema.names)) != len(schema.names):
        raise UserError(f"{path} must have columns of different names, got {_short(schema.names)}; run the audit again")
    for name, fits, expected in (
        ("id", _is_text, "text"),
        ("subset", _is_text, "text"),
        ("member", lambda kind: pa.types.is_boolean(kind) or pa.types.is_null(kind), "true, false or empty"),
        *((attack, pa.types.is_floating, "numbers") for attack in ATTACKS if attack in schema.names),
    ):
        if name not in schema.names:
            raise UserError(f"{path} must have a column {name!r}, got {_short(schema.names)}; run the audit again")
        if not fits(schema.field(name).type):
            raise UserError(
                f"{path}: column {name} must hold {expected}, got {schema.field(name).type}; run the audit again"
            )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _field(values: dict[str, Any], name: str, annotation: Any, where: str) -> Any:
    if name not in values:
        raise UserError(f"{where} must have a key {name!r}, and has none; run the audit again")
    return _check_value(_build(annotation, values[name], f"{where}.{name}"), name, f"{where}.{name}")


def _build(annotation: Any, value: Any, where: str) -> Any:
    """``value`` as the type that a result's field is annotated with."""
    if isinstance(annotation, types.UnionType):
        return None if value is None else _build(typing.get_args(annotation)[0], value, where)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        values = _typed(dict, value, where)
        hints = typing.get_type_hints(annotation)
        return annotation(
            **{f.name: _field(values, f.name, hints[f.name], where) for f in dataclasses.fields(annotation)}
        )
    if origin is tuple:
        items = _typed(list, value, where)
        if arguments[-1] is Ellipsis:
            return tuple(_build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(items))
        if len(items) != len(arguments):
            raise UserError(f"{where} must have {len(arguments)} entries, got {len(items)}; run the audit again")
        return tuple(
            _build(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(arguments, items, strict=True))
        )
    if origin is dict:
        return {
            key: _build(arguments[1], item, f"{where}.{_short(key)}")
            for key, item in _typed(dict, value, where).items()
        }
    return _typed(annotation, value, where)


def _typed(kind: type, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or kind is float:
        raise UserError(f"{where} must be {kind.__name__}, got {_short(value)}; run the audit again")
    return value


def _check_value(value: Any, name: str, where: str) -> Any:
    """What a type cannot say: known names, shares between 0 and 1, intervals in order, counts from 0."""
    good, expected = True, ""
    if name in _NAMES:
        good, expected = value in _NAMES[name], f"one of {', '.join(map(str, _NAMES[name]))}"
    elif name in _SHARES and value is not None:
        ends = value if isinstance(value, tuple) else (value,)
        good, expected = all(0 <= end <= 1 for end in ends), "between 0 and 1"
    elif name == "epsilon_lower" or (isinstance(value, int) and not isinstance(value, bool)):
        good, expected = value is None or 0 <= value < 1 << 53, "a number from 0"
    if good and name in ("ci", "auc_ci") and value is not None:
        good, expected = value[0] <= value[1], "an interval [low, high]"
    if not good:
        raise UserError(f"{where} must be {expected}, got {_short(value)}; run the audit again")
    return value


def _short(value: object) -> str:
    text = " ".join(str(value).split()) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""Who trained the target: a file of members, in any of the usual forms, against the pool's records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from shadow_pool.errors import UserError, few, one_line

SUFFIXES = (".npy", ".csv", ".parquet", ".txt")
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


def find_sidecar(model_path: Path) -> Path | None:
    """MODEL-without-suffix``.members.parquet`` beside the model, or None."""
    path = Path(model_path).with_suffix(".members.parquet")
    return path if path.is_file() else None


def read_members(path: Path, records: pd.DataFrame) -> np.ndarray:
    """Which records trained the target.

    Args:
        path: .npy: one bool per record in the order of records.parquet, or per row of the source, or indices of
            records; .csv or .parquet: a column ``id`` and optionally ``member`` (true/false or 1/0; without it every
            id listed is a member, and ids not listed are none); .txt: the ids of members, one a line.
        records: the rows of records.parquet, columns id, role and source_index. Members among the
            population are known but not returned.

    Returns:
        bool [rows of role ``record``].

    Raises:
        UserError: another form, unknown or repeated ids or indices, or no member among the records.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"members file {path} does not exist; give a {', '.join(SUFFIXES)} file")
    is_record = (records["role"] == "record").to_numpy()
    if path.suffix == ".npy":
        member = _from_array(path, records, is_record)
    elif path.suffix in SUFFIXES:
        ids = _listed_members(path, records["id"].astype(str))
        member = records["id"].astype(str).isin(ids).to_numpy()[is_record]
    else:
        raise UserError(f"members file {path} must end in {', '.join(SUFFIXES)}")
    if not member.any():
        raise UserError(
            f"members file {path} names none of the {int(is_record.sum())} records; an audit needs at least one member"
        )
    return member


def population_members(path: Path, records: pd.DataFrame) -> np.ndarray:
    """Which of the pool's held-out records trained the target, where the file (as :func:`read_members`) can say so.

    Returns:
        bool [rows of role ``population``]; all False for an .npy, which names records alone.
    """
    population = records.loc[records["role"] == "population", "id"].astype(str)
    if path.suffix == ".npy":
        return np.zeros(len(population), dtype=bool)
    return population.isin(_listed_members(path, records["id"].astype(str))).to_numpy()


def _from_array(path: Path, records: pd.DataFrame, is_record: np.ndarray) -> np.ndarray:
    try:
        given = np.load(path, allow_pickle=False)
    except Exception as error:  # a damaged header raises whatever Python's parser does
        raise UserError(f"members file {path} is not a readable .npy: {one_line(error)}") from None
    count = int(is_record.sum())
    if not isinstance(given, np.ndarray) or given.ndim != 1 or given.dtype.kind not in "biu":
        found = f"{given.dtype} {given.shape}" if isinstance(given, np.ndarray) else "an .npz"
        raise UserError(f"members file {path} must hold one bool per record or indices of records, got {found}")
    if given.dtype != bool:
        return _from_indices(path, given, count)
    row = records["source_index"].to_numpy()
    split = len(np.unique(row)) < len(row)  # train and test splits count their rows apart
    rows = int((row[is_record] if split else row).max()) + 1
    if len(given) == count == rows and not np.array_equal(given, given[row[is_record]]):
        raise UserError(
            f"members file {path}: {count} bools fit both the order of the records and that of the source's rows, "
            "which differ; give ids in a .csv instead"
        )
    if len(given) == count:
        return given
    if len(given) == rows:
        return given[row[is_record]]
    raise UserError(
        f"members file {path} must hold one bool for each of the {count} records or of the {rows} rows of their "
        f"source, got {len(given)}"
    )


def _from_indices(path: Path, given: np.ndarray, count: int) -> np.ndarray:
    if len(given) and (given.min() < 0 or given.max() >= count):
        raise UserError(
            f"members file {path} must hold indices 0..{count - 1} into the pool's records, as records.parquet lists "
            f"them, got {given.min()}..{given.max()}; rows of your source are another order: list ids in a .csv instead"
        )
    if len(np.unique(given)) < len(given):
        raise UserError(
            f"members file {path} repeats {len(given) - len(np.unique(given))} indices; list each once, or save one "
            "bool per record"
        )
    member = np.zeros(count, dtype=bool)
    member[given] = True
    return member


def _listed_members(path: Path, known: pd.Series) -> set[str]:
    """The ids of members that the file lists, each checked to be one of the pool's."""
    ids, member = _read_listed(path)
    if not len(ids):
        raise UserError(f"members file {path} is empty; list the ids of the target's training records")
    repeated = ids[ids.duplicated()].unique()
    if len(repeated):
        raise UserError(f"members file {path} repeats {len(repeated)} ids ({few(repeated)}); list each once")
    unknown = ids[~ids.isin(known)]
    if len(unknown):
        raise UserError(
            f"members file {path} lists {len(unknown)} of {len(ids)} ids that the pool's records do not have "
            f"({few(unknown)}); their ids look like {few(known)}"
        )
    return set(ids[member])


def _read_listed(path: Path) -> tuple[pd.Series, np.ndarray]:
    try:
        if path.suffix == ".txt":
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            frame = pd.DataFrame({"id": [line for line in lines if line]}, dtype=object)
        elif path.suffix == ".csv":
            frame = pd.read_csv(path, dtype=str, skipinitialspace=True)
        else:
            table = pq.ParquetFile(path).read()
            table.validate(full=True)  # text that is not UTF-8 would raise only when it is read
            frame = table.to_pandas(ignore_metadata=True)
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame({"id": []}, dtype=object)
    except Exception as error:  # of a damaged file Arrow and its codecs raise many kinds
        raise UserError(f"members file {path} is not a readable {path.suffix}: {one_line(error)}") from None
    if list(frame.columns).count("id") != 1 or list(frame.columns).count("member") > 1:
        raise UserError(f"members file {path} must have a column id, found {few(map(str, frame.columns))}")
    if frame["id"].isna().any():
        raise UserError(f"members file {path} has {int(frame['id'].isna().sum())} rows without an id; drop them")
    ids = frame["id"].astype(str)
    if "member" not in frame.columns:
        return ids, np.ones(len(ids), dtype=bool)
    word = frame["member"].astype(str).str.lower().str.strip()
    odd = word[~word.isin(_TRUE + _FALSE)]
    if len(odd):
        raise UserError(f"members file {path}: member must be true/false or 1/0, found {odd.iloc[0]!r}")
    return ids, word.isin(_TRUE).to_numpy()

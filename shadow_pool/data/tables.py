"""Sources that are tables: CSV and parquet of features, parquet of pictures as Hugging Face writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shadow_pool.data.arrays import Source, as_labels, as_strings, checked
from shadow_pool.data.images import Picture, decode_pictures
from shadow_pool.data.records import SUBSETS
from shadow_pool.errors import UserError, few, one_line, unknown_name

_MAX_VALUES, _FEW_VALUES = 1000, 50
_FEW_ROWS = 20
_SPLITS = {"train": "train", "test": "test", "validation": "test", "valid": "test", "val": "test"}


def read_csv(path: Path, *, label: str | None, id: str | None, group: str | None) -> Source:
    """A CSV (.tsv: tab separated) of features; see :func:`features_from_frame`."""
    if label is None:
        raise UserError(f"{path}: say which column holds the label with --label COLUMN")
    try:
        # Ids and groups stay the text that stands in the file: 007 is not 7.
        text = {name: str for name in (id, group) if name is not None}
        frame = pd.read_csv(path, sep="\t" if ".tsv" in path.suffixes else ",", dtype=text, low_memory=False)
    except Exception as error:  # gzip, the parser and the codecs each raise their own
        raise UserError(f"{path} is not a readable CSV: {one_line(error)}") from None
    if frame.shape[1] == 1:
        raise UserError(
            f"{path} has one column, {few(map(str, frame.columns))[:60]!r}; separate columns by commas (tabs in .tsv)"
        )
    return features_from_frame(str(path), frame, label=label, id=id, group=group)


def read_parquet(path: Path, *, label: str | None, id: str | None, group: str | None, image_size: int | None) -> Source:
    """A parquet file, or a folder of them named after their splits (``train-00000-of-00002.parquet``).

    A column of structs with ``bytes`` holds pictures, as Hugging Face writes them; its label column is
    ``label`` unless named, its class names are read from the file, other columns are passed over. Without
    such a column the table is one of features; see :func:`features_from_frame`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files, test = _split_files(path)
    try:
        tables = [pq.read_table(file) for file in files]
        table = pa.concat_tables(tables, promote_options="default")
        table.validate(full=True)  # text that is not UTF-8 would raise only when it is read
    except Exception as error:  # of a damaged file Arrow and its codecs raise many kinds
        raise UserError(f"{path} is not readable parquet: {one_line(error)}") from None
    held_out = None if test is None else np.repeat(test, [len(part) for part in tables])
    pictures = [field.name for field in table.schema if _holds_pictures(field.type)]
    if pictures:
        options = {"label": label or "label", "id": id, "group": group}
        return _pictures_from_table(str(path), table, pictures, options, held_out, image_size)
    if label is None:
        raise UserError(f"{path}: say which column holds the label with --label COLUMN")
    frame = _to_frame(str(path), table)
    return features_from_frame(str(path), frame, label=label, id=id, group=group, test=held_out)


def features_from_frame(
    where: str,
    frame: pd.DataFrame,
    *,
    label: str,
    id: str | None,
    group: str | None,
    test: np.ndarray | None = None,
) -> Source:
    """Features float32 [N, D] from every column that is not the label, the id, the group or the subset.

    Numbers stay as they are (missing ones become the column's mean), text becomes one column per value in
    sorted order, and a column with missing values is followed by a column that flags them. A column ``subset`` of
    nothing but the subsets' names tags the records. Columns without any value are passed over, and columns of
    integers that all differ are kept, both with a warning.

    Raises:
        UserError: a named column that is missing, missing labels or ids, a column that is neither numbers nor
            text, infinite numbers, or a text column of so many values (1000, or half the rows) that it names records.
    """
    if not frame.columns.is_unique:
        raise UserError(f"{where} has columns of the same name ({few(frame.columns[frame.columns.duplicated()])})")
    for name in (label, id, group):
        if name is not None and name not in frame.columns:
            raise unknown_name(f"column in {where}", name, map(str, frame.columns))
    subset = _tags(frame)
    used = (label, id, group, None if subset is None else "subset")
    empty = [name for name in frame.columns if frame[name].isna().all()]
    features = [name for name in frame.columns if name not in used and name not in empty]
    blocks = [_encode_column(where, str(name), frame[name]) for name in features]
    if not blocks or not len(frame):
        raise UserError(
            f"{where} must hold records with features besides the label, got {frame.shape[0]} rows "
            f"and {len(blocks)} columns of features"
        )
    source = Source(
        np.concatenate(blocks, axis=1, dtype=np.float32),
        _labels(where, frame[label]),
        id=_strings(where, "id", frame, id),
        group=_strings(where, "group", frame, group),
        subset=subset,
        test=test,
        warnings=(
            *_said(where, [name for name in empty if name not in used], "hold no value and are passed over"),
            *_said(
                where,
                [name for name in features if _numbers_rows(frame[name])],
                "differ in every record and are taken as features: name an id with --id, or drop it",
            ),
        ),
    )
    return checked(where, source)


def _tags(frame: pd.DataFrame) -> np.ndarray | None:
    """The column ``subset``, where it holds the names of subsets and nothing else."""
    known = "subset" in frame.columns and len(frame) and frame["subset"].isin(SUBSETS).all()
    return frame["subset"].astype(str).to_numpy(dtype=object) if known else None


def _numbers_rows(column: pd.Series) -> bool:
    return len(column) >= _FEW_ROWS and pd.api.types.is_integer_dtype(column.dtype) and column.is_unique


def _said(where: str, columns: list[str], what: str) -> tuple[str, ...]:
    return (f"{where}: columns {few(map(str, columns))} {what}",) if columns else ()


def _encode_column(where: str, name: str, column: pd.Series) -> np.ndarray:
    """float32 [N, k]: the features that one column makes."""
    missing = column.isna().to_numpy()
    flag = [missing.astype(np.float32)[:, None]] if missing.any() else []
    if pd.api.types.is_bool_dtype(column.dtype) or pd.api.types.is_numeric_dtype(column.dtype):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        if np.isinf(values).any():
            raise UserError(f"{where}: column {name!r} must be finite, found {int(np.isinf(values).sum())} infinities")
        values[missing] = 0.0 if missing.all() else values[~missing].mean()
        return np.concatenate([values[:, None], *flag], axis=1, dtype=np.float32)
    present = column[~missing]
    if not all(isinstance(value, (str, bool)) for value in present):
        raise UserError(f"{where}: column {name!r} must hold numbers or text, found {column.dtype}; drop or convert it")
    values_found = sorted({str(value) for value in present})
    if len(values_found) > min(_MAX_VALUES, max(_FEW_VALUES, len(column) // 2)):
        raise UserError(
            f"{where}: text column {name!r} holds {len(values_found)} different values in {len(column)} rows, too many "
            "to be categories; drop it, or name it with --id or --group"
        )
    position = {value: index for index, value in enumerate(values_found)}
    one_hot = np.zeros((len(column), len(values_found)), dtype=np.float32)
    one_hot[np.flatnonzero(~missing), [position[str(value)] for value in present]] = 1
    return np.concatenate([one_hot, *flag], axis=1)


def _labels(where: str, column: pd.Series) -> np.ndarray:
    if column.isna().any():
        raise UserError(f"{where}: {int(column.isna().sum())} records have no label; drop or label them")
    return as_labels(where, _integers_or_text(column))


def _strings(where: str, role: str, frame: pd.DataFrame, name: str | None) -> np.ndarray | None:
    if name is None:
        return None
    column = frame[name]
    if column.isna().any():
        raise UserError(f"{where}: {role} column {name!r} has {int(column.isna().sum())} missing values; fill them")
    return as_strings(where, role, _integers_or_text(column), len(frame))


def _integers_or_text(column: pd.Series) -> np.ndarray:
    if pd.api.types.is_integer_dtype(column.dtype) or pd.api.types.is_bool_dtype(column.dtype):
        return column.to_numpy(dtype=np.int64)
    if pd.api.types.is_float_dtype(column.dtype):
        return column.to_numpy()
    return column.astype(str).to_numpy(dtype=object)


def _split_files(path: Path) -> tuple[list[Path], np.ndarray | None]:
    """The parquet files of a source, and which of them are the test split (None: no splits)."""
    if path.is_file():
        return [path], None
    files = sorted(file for file in path.rglob("*.parquet") if not file.name.startswith("."))
    splits = [_SPLITS.get(file.name.split("-")[0].split(".")[0], "train") for file in files]
    names = {file.name.split("-")[0].split(".")[0] for file in files}
    if "test" in names:
        # With a test split at hand, a validation split is neither records nor population.
        kept = [i for i, file in enumerate(files) if not file.name.startswith("val")]
        files, splits = [files[i] for i in kept], [splits[i] for i in kept]
    test = np.array([split == "test" for split in splits])
    return files, test if test.any() and not test.all() else None


def _holds_pictures(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0


def _pictures_from_table(
    where: str,
    table: Any,
    columns: list[str],
    options: dict[str, str | None],
    test: np.ndarray | None,
    image_size: int | None,
) -> Source:
    if len(columns) > 1:
        raise UserError(f"{where} has several columns of pictures ({', '.join(columns)}); keep one")
    for name in options.values():
        if name is not None and name not in table.column_names:
            raise unknown_name(f"column in {where}", name, table.column_names)
    frame = _to_frame(where, table.drop_columns(columns))
    cells = table.column(columns[0]).combine_chunks()
    content = cells.field("bytes")

    def reader(row: int) -> Callable[[], bytes]:
        return lambda: content[row].as_py() or b""

    id_ = _strings(where, "id", frame, options["id"])
    pictures: list[Picture] = [(f"in row {row} of {where}", reader(row)) for row in range(len(frame))]
    if not pictures:
        raise UserError(f"{where} holds no records; expected at least one row")
    x, warnings = decode_pictures(where, pictures, image_size)
    label = options["label"]
    assert label is not None
    source = Source(
        x,
        _labels(where, frame[label]),
        classes=_class_names(table.schema.metadata, label),
        id=id_,
        group=_strings(where, "group", frame, options["group"]),
        subset=_tags(frame),
        test=test,
        warnings=warnings,
    )
    return checked(where, source)


def _to_frame(where: str, table: Any) -> pd.DataFrame:
    try:
        return table.to_pandas()
    except Exception as error:  # notes of pandas that are damaged
        raise UserError(f"{where} is not readable parquet: {one_line(error)}") from None


def _class_names(metadata: dict[bytes, bytes] | None, label: str) -> tuple[str, ...] | None:
    """The names that Hugging Face's ``datasets`` stores for a ClassLabel column, or None."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"])
    except (KeyError, TypeError, ValueError):
        return None

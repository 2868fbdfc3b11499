"""From the text of ``--data`` to a Source: a name, a factory, a folder or a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shadow_pool.data import factory, files, named, tables
from shadow_pool.data.arrays import Source
from shadow_pool.data.images import resize
from shadow_pool.errors import UserError, unknown_name
from shadow_pool.spec import DataSpec
from shadow_pool.usercode import is_reference

SUFFIXES = (".npz", ".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")


def open_source(spec: DataSpec, *, data_root: Path | None = None, download: bool = False) -> Source:
    """All rows of ``spec.source``, resized to ``spec.image_size`` where given.

    Names are those of :data:`~shadow_pool.data.named.NAMES`. A relative path that does not exist in the working
    folder is looked for in ``data_root``.

    Raises:
        UserError: the source is unknown, missing or not in the form its kind needs.
    """
    source = _read(spec, data_root, download)
    if spec.image_size is None:
        return source
    if source.x.ndim != 4:
        raise UserError(f"{spec.source} holds features, which --image-size cannot resize; leave it out")
    return replace(source, x=resize(source.x, spec.image_size, spec.image_size))


def _read(spec: DataSpec, data_root: Path | None, download: bool) -> Source:
    text = spec.source
    columns = {"label": spec.label, "id": spec.id, "group": spec.group}
    if text in named.NAMES:
        _without_columns(spec)
        return named.read_named(text, data_root=data_root, download=download)
    if is_reference(text):
        _without_columns(spec)
        return factory.read_factory(text)
    path = Path(text).expanduser()
    if not path.exists() and data_root is not None:
        path = data_root / text
    if path.is_dir() and any(path.rglob("*.parquet")):
        return tables.read_parquet(path, **columns, image_size=spec.image_size)
    if path.is_dir():
        _without_columns(spec)
        return files.read_folder(path, image_size=spec.image_size)
    if not path.exists() and "/" not in text and "." not in text:
        raise unknown_name("data source", text, named.NAMES)
    if not path.exists():
        raise UserError(f"data {text} does not exist; give a file or folder, or one of {', '.join(named.NAMES)}")
    if path.suffix == ".npz":
        return files.read_npz(path, **columns)
    if path.suffix == ".parquet":
        return tables.read_parquet(path, **columns, image_size=spec.image_size)
    if path.name.endswith((".csv", ".csv.gz", ".tsv", ".tsv.gz")):
        return tables.read_csv(path, **columns)
    raise UserError(f"data {text} has an unknown suffix; known: {', '.join(SUFFIXES)}")


def _without_columns(spec: DataSpec) -> None:
    given = [f"--{name}" for name in ("label", "id", "group") if getattr(spec, name) is not None]
    if given:
        raise UserError(f"data {spec.source} has no columns; {', '.join(given)} is for tables and .npz files")

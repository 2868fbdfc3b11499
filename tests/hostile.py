"""Making files that mean harm, for tests of everything that opens files."""

import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd

VALUES = (None, True, -1, 0, 10**30, 1e308, float("nan"), "", "../../etc/passwd", "\0", "é" * 50, [], {}, [[]])
INSERTED = (b"\xff" * 8, b"\0" * 64, b"9" * 400, b"[" * 2000, b'"', b"\n", b",,,", b"1e999")


class Payload:
    """Unpickling this with anything that calls what a pickle names writes ``path``."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.system, (f"echo ran > '{self.path}'",))


def edit_zip(source, target, edit, compression=zipfile.ZIP_STORED):
    """Copy a zip file, each entry's content as ``edit(name, content)`` gives it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, edit(entry.filename, old.read(entry)))


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(mutated) + 1)
        kind = rng.randrange(6)
        if kind == 0 and mutated:
            mutated[min(at, len(mutated) - 1)] = rng.randrange(256)
        elif kind == 1:
            del mutated[at:]
        elif kind == 2:
            mutated[at:at] = rng.choice(INSERTED)
        elif kind == 3:
            other = rng.randrange(len(mutated) + 1)
            mutated[at:at] = mutated[min(at, other) : max(at, other)][:4096]
        elif kind == 4:
            del mutated[at : at + rng.choice((1, 4, 100))]
        else:
            mutated[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\x80\0\0\0"))
    return bytes(mutated)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with one of its parts replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.1:
            return {name: part for name, part in value.items() if name != key}
        if kind < 0.2:
            return {**value, key + "x": value[key]}
        return {**value, key: mutate_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_value(value[at], rng), *value[at + 1 :]]
    return rng.choice(VALUES)


def mutate_table(content: Path, rng: random.Random) -> bytes:
    """A sound parquet file of another shape than its readers expect."""
    frame = pd.read_parquet(content)
    kind = rng.randrange(5)
    column = rng.choice(list(frame.columns))
    if kind == 0:
        frame = frame.drop(columns=column)
    elif kind == 1:
        frame = frame.iloc[: rng.randrange(len(frame))]
    elif kind == 2:
        frame[column] = pd.Series([rng.choice((None, 1e308, float("nan"), float("inf")))] * len(frame), dtype="float64")
    elif kind == 3:
        frame[column] = [rng.choice(("", "x", "é" * 300))] * len(frame)
    else:
        frame = pd.concat([frame, frame.iloc[: rng.randrange(1, 5)]])
    return bytes(frame.to_parquet(None))

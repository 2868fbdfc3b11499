"""Hostile files for every reader: each is read or refused in one line of UserError, and nothing in it runs.

Seeds are real files of every kind that is read: specs, data, pools with all of their files, members and sidecars,
checkpoints, audits. A case changes, cuts, repeats or splices their bytes, or their parts: values of JSON and TOML,
columns and rows of parquet, bytes within an archive; where a hash covers them it is made right again, as a stranger
would. An option's text and a spec's values come from Hypothesis.

The marked run, ``pytest -m slow tests/test_fuzz.py``, on 2026-11-30, two busy cores: 20,000 files in 375 s and 1,000
commands (train-shadows, study, score, report, inspect, compare, pool) in 331 s, all read or refused in one line, none
slow, nothing run, nothing written elsewhere. Runs while it was built found over 20 kinds of error that got past the
readers, since mended: most in files of a pool whose hashes are right.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from hostile import Payload, edit_zip, mutate_bytes, mutate_table, mutate_value
from hypothesis import given
from hypothesis import strategies as st
from pools import TINY, tiny_pool, train_here

from mia_audit.checkpoints import open_checkpoint
from mia_audit.checkpoints.inspection import inspect_checkpoint
from mia_audit.compare import compare
from mia_audit.evidence import load_evidence
from mia_audit.members import read_members
from mia_audit.rules import parse_rule
from mia_audit_cli.main import app
from shadow_pool.arms import parse_arm
from shadow_pool.data.preprocess import parse_normalize
from shadow_pool.data.sources import open_source
from shadow_pool.errors import UserError
from shadow_pool.models.resolve import parse_arch
from shadow_pool.spec import DataSpec, from_dict, read_toml, to_dict, to_toml
from shadow_pool.store.drift import drift_warnings
from shadow_pool.store.entry import weights_bytes
from shadow_pool.store.files import file_sha256, write_sealed
from shadow_pool.store.pool import open_pool
from shadow_pool.store.repair import verify_pool
from shadow_pool.store.trust import named_code
from shadow_pool.train.requery import stored_model
from shadow_pool.train.target import read_facts, train_target
from shadow_pool.usercode import is_reference

SLOWEST = 10.0
"""Seconds a reader may take."""
LARGEST = 512
"""MiB by which reading may raise this process's peak memory."""
FIXTURES = Path(__file__).parent / "fixtures" / "protocol-1"
NOISY = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::pandas.errors.DtypeWarning"
)


Commands = Callable[[Path], list[list[object]]]


@dataclass(frozen=True)
class Kind:
    """A kind of file: a sound one ``inside`` a tree of its own; what reads it; commands that do.

    ``resealed``: the hashes that cover it are made right again.
    """

    tree: Path
    inside: str
    read: Callable[[Path], object]
    commands: Commands
    resealed: bool

    @property
    def path(self) -> Path:
        return self.tree / self.inside


def read_source(path: Path) -> object:
    return open_source(DataSpec(source=str(path), label=None if path.suffix == ".npz" else "y"))


def read_pool(path: Path) -> object:
    """What ``pool info`` and ``pool verify`` do, and the readers of every command."""
    pool = open_pool(path.parent)
    named_code(to_dict(pool.spec))
    return pool.membership, pool.table, drift_warnings(pool, here=True), verify_pool(pool)


def read_entry(path: Path) -> object:
    pool = open_pool(path.parents[3])
    load_evidence(pool, "batch")
    return pool.history("batch", 1), stored_model(pool, "batch", 1)


def read_checkpoint(path: Path) -> object:
    return open_checkpoint(path), inspect_checkpoint(path)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """One sound file of each kind, in a folder of its own with all that it needs beside it."""
    folder = tmp_path_factory.mktemp("seeds")
    found: dict[str, Kind] = {}

    def add(
        name: str,
        read: Callable[[Path], object],
        commands: Commands,
        *,
        within: Path | None = None,
        resealed: bool = False,
    ) -> Path:
        """``name`` is where the file stands in a folder; its tree is a copy of ``within``."""
        tree = folder / str(len(found))
        shutil.copytree(within, tree) if within is not None else tree.mkdir()
        label = f"{len(found)} {name}{', resealed' if resealed else ''}"
        found[label] = Kind(tree, name, read, commands, resealed)
        return tree / name

    pool, data = tiny_pool(folder / "pool", {"n": 6, "arms": ["batch"], "recipe": {"epochs": 10}})
    train_here(pool, data)
    target = train_target(pool, data, out=folder / "model.pt")
    small = ["--n", 4, "--arch", "mlp", "--epochs", 1, "--workers", 1, "--pool", "out/pool"]

    def planned(path: Path) -> list[list[object]]:
        return [["train-shadows", "--plan", "--spec", path, *small[-2:]]]

    def trained(path: Path) -> list[list[object]]:
        data = ["--data", path, *([] if path.suffix == ".npz" else ["--label", "y"])]
        return [["train-shadows", *data, *small], ["study", "memorization", *data, *small[:-2], "--out", "out"]]

    def judged(path: Path) -> list[list[object]]:
        at = next(parent for parent in path.parents if (parent / "arms").exists())
        pools: list[list[object]] = [["pool", "info", at], ["pool", "verify", at], ["report", "--pool", at]]
        return [*pools, ["train-shadows", "--pool", at], ["score", target.model, "--pool", at]]

    def scored(path: Path) -> list[list[object]]:
        return [["score", target.model, "--pool", pool.path, "--members", path]]

    def opened(path: Path) -> list[list[object]]:
        return [["inspect", path], ["score", path, "--pool", pool.path, "--members", target.members]]

    def compared(path: Path) -> list[list[object]]:
        return [["compare", path.parent, path.parent]]

    rng = np.random.default_rng(0)
    x, y = rng.random((12, 3)).round(3), np.arange(12) % 3
    ids = np.array([f"r{i}" for i in range(12)])
    add("spec.toml", lambda path: named_code(read_toml(path)), planned).write_text(to_toml(from_dict(TINY)))
    np.savez(add("a.npz", read_source, trained), x=x, y=y, id=ids)
    np.savez_compressed(add("b.npz", read_source, trained), x=(x * 255).astype(np.uint8), y=y)
    frame = pd.DataFrame({"a": x[:, 0], "b": ["u", "v", "w"] * 4, "y": y, "id": ids})
    frame.to_csv(add("c.csv", read_source, trained), index=False)
    frame.to_parquet(add("d.parquet", read_source, trained))

    add("pool.json", read_pool, judged, within=pool.path)
    add("pool.json", read_pool, judged, within=pool.path, resealed=True)
    add("membership.npy", read_pool, judged, within=pool.path)
    add("records.parquet", read_pool, judged, within=pool.path, resealed=True)
    for name in ("model.json", "phi.parquet", "population.parquet", "history.parquet", "weights.safetensors"):
        add(f"arms/batch/0001/{name}", read_entry, judged, within=pool.path, resealed=True)

    table, chosen = pool.table, data.records.id[::3]
    member = np.isin(data.records.id, chosen)

    def read_listed(path: Path) -> object:
        return read_members(path, table), read_facts(path)

    np.save(add("m.npy", read_listed, scored), member)
    np.save(add("i.npy", read_listed, scored), np.flatnonzero(member))
    pd.DataFrame({"id": data.records.id, "member": member}).to_csv(add("m.csv", read_listed, scored), index=False)
    add("m.txt", read_listed, scored).write_text("\n".join(chosen))
    shutil.copy(target.members, add("m.members.parquet", read_listed, scored))

    state = torch.load(target.model, weights_only=True)
    torch.save({"state_dict": state, "beside": Payload(folder / "fuzzed")}, add("model.pt", read_checkpoint, opened))
    torch.save(state, add("legacy.pt", read_checkpoint, opened), _use_new_zipfile_serialization=False)
    add("model.safetensors", read_checkpoint, opened).write_bytes(weights_bytes(state))

    for audit in ("target", "pool"):
        for name in ("audit.json", "records.parquet"):
            add(name, lambda path: compare(path.parent, path.parent), compared, within=FIXTURES / audit)
    return found


def mutate(kind: Kind, path: Path, rng: random.Random) -> None:
    """Write to ``path`` the sound file changed by bytes, or by its parts.

    These are values of JSON and TOML, columns and rows of parquet, and bytes within an archive of sound checksums.
    """
    content, by_value = kind.path.read_bytes(), rng.random() < 0.6
    if path.suffix == ".json" and by_value:
        body = json.loads(content)
        sealed = body.pop("sha256", None) is not None
        body = mutate_value(body, rng)
        if sealed and isinstance(body, dict):
            write_sealed(path, body)
        else:
            path.write_text(json.dumps(body))
    elif path.suffix == ".toml" and by_value:
        try:
            path.write_text(tomli_w.dumps(mutate_value(to_dict(from_dict(TINY)), rng)))
        except (TypeError, AttributeError):  # TOML has no null
            path.write_bytes(mutate_bytes(content, rng))
    elif zipfile.is_zipfile(kind.path) and by_value:
        with zipfile.ZipFile(kind.path) as archive:
            chosen = rng.choice([name for name in archive.namelist() if name.endswith((".pkl", ".npy"))])
        edit_zip(kind.path, path, lambda name, inside: mutate_bytes(inside, rng) if name == chosen else inside)
    elif path.suffix == ".parquet" and by_value:
        path.write_bytes(mutate_table(kind.path, rng))
    else:
        path.write_bytes(mutate_bytes(content, rng))
    if kind.resealed:
        reseal(path)


def reseal(path: Path) -> None:
    """Make the hashes of a file right again, as a stranger would."""
    holder = path.with_name("pool.json" if path.name == "records.parquet" else "model.json")
    if path.suffix == ".json":
        holder = path
    try:
        body = json.loads(holder.read_bytes())
        body.pop("sha256", None)
        if holder != path:
            body["files"][path.name] = file_sha256(path)
        write_sealed(holder, body)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return  # no JSON object any more


class Fuzz:
    """Sound files of every kind in a folder of their own, one of them changed at a time."""

    def __init__(self, kinds: dict[str, Kind], folder: Path, seed: int) -> None:
        self.kinds, self.folder, self.seed = kinds, folder, seed
        for name, kind in kinds.items():
            kind.read(kind.path)
            shutil.copytree(kind.tree, folder / name.split()[0])

    @contextmanager
    def case(self, number: int) -> Iterator[tuple[random.Random, str, Kind, Path]]:
        """Its stream, what to call it, its kind, and the file that was changed, which is mended at the end."""
        rng = random.Random(f"{self.seed} {number}")
        name = rng.choice(list(self.kinds))
        kind = self.kinds[name]
        path = self.folder / name.split()[0] / kind.inside
        mutate(kind, path, rng)
        where, started = f"case {self.seed} {number}, {name}", time.monotonic()
        yield rng, where, kind, path
        assert time.monotonic() - started < SLOWEST, f"{where}: slow"
        for changed in (path, path.with_name("model.json"), path.with_name("pool.json")):
            sound = kind.path.with_name(changed.name)
            if sound.exists():
                shutil.copy(sound, changed)


@contextmanager
def bounded() -> Iterator[None]:
    """Peak memory does not grow beyond :data:`LARGEST` in the block."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < LARGEST, f"peak memory grew by {grown:.0f} MiB"


def read_all(kinds: dict[str, Kind], folder: Path, cases: int, seed: int) -> int:
    """How many cases were refused; raises where a reader does anything but read or refuse in time."""
    fuzz, refused = Fuzz(kinds, folder, seed), 0
    with bounded():
        for number in range(cases):
            with fuzz.case(number) as (_, where, kind, path):
                try:
                    kind.read(path)
                    text = ""
                except UserError as error:
                    text = str(error)
                except Exception as error:
                    raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            refused += bool(text)
            assert "\n" not in text, where
            assert len(text) <= 2000, where
    assert not list(folder.parents[0].rglob("fuzzed"))
    return refused


def run_all(kinds: dict[str, Kind], folder: Path, capsys: pytest.CaptureFixture[str], cases: int, seed: int) -> int:
    """The same by commands: how many ended in an error of one line; raises where one does anything else."""
    fuzz, refused = Fuzz(kinds, folder / "files", seed), 0
    for number in range(cases):
        before = set(folder.rglob("*"))
        with fuzz.case(number) as (rng, where, kind, path):
            command = rng.choice(kind.commands(path))
            out = [] if command[0] in ("inspect", "compare", "pool", "train-shadows", "study") else ["--out", "out"]
            with pytest.raises(SystemExit) as exit_:
                app(list(map(str, [*command, *out])))
        text = capsys.readouterr().err
        errors = [line for line in text.splitlines() if line.startswith("error:")]
        assert (exit_.value.code, len(errors)) in ((0, 0), (1, 1)), f"{where}: {command}: {text}"
        assert "Traceback" not in text, where
        assert "error: unexpected" not in text, f"{where}: {command}: {text}"
        written = [path for path in set(folder.rglob("*")) - before if kind.tree.name not in path.parts]
        assert all(folder / "out" in (path, *path.parents) for path in written), f"{where}: {command}: {written}"
        shutil.rmtree(folder / "out", ignore_errors=True)
        refused += bool(errors)
    return refused


TEXTS = st.text(max_size=300) | st.text("0123456789.,/:()='\"\\-+e_anbtchpyfl \n\0", max_size=60)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS | st.sampled_from(list(TINY)), inner, max_size=4),
)
SPECS = st.dictionaries(st.sampled_from([*to_dict(from_dict({"arms": ["batch"]})), "init", "train"]), PLAIN | TEXTS)


@given(text=TEXTS)
def test_any_text_of_an_option_is_taken_or_refused_in_one_line(text: str) -> None:
    def read_images_scale(text: str) -> object:
        return None if is_reference(text) else parse_normalize(text, (3, 8, 8))

    for parse in (parse_arch, parse_arm, parse_rule, read_images_scale, lambda text: named_code({"arch": text})):
        taken_or_refused(parse, text)


@given(values=SPECS | PLAIN)
def test_any_plain_values_of_a_spec_are_taken_or_refused_in_one_line(values: Any) -> None:
    taken_or_refused(lambda values: named_code(to_dict(from_dict(values))), values)


def taken_or_refused(read: Callable[[Any], object], value: Any) -> None:
    try:
        read(value)
    except UserError as error:
        text = str(error)
    else:
        text = ""
    assert "\n" not in text
    assert len(text) < 3000


@NOISY
def test_mutated_files_are_read_or_refused_in_one_line(kinds: dict[str, Kind], tmp_path: Path) -> None:
    assert 75 < read_all(kinds, tmp_path, 250, 0) < 250


@NOISY
def test_commands_given_mutated_files_end_in_one_line(
    kinds: dict[str, Kind], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert 5 < run_all(kinds, tmp_path, capsys, 25, 0) < 25


@pytest.mark.slow
@NOISY
def test_20_000_mutated_files_are_read_or_refused_in_one_line(kinds: dict[str, Kind], tmp_path: Path) -> None:
    assert 5_000 < read_all(kinds, tmp_path, 20_000, 1) < 20_000


@pytest.mark.slow
@NOISY
def test_1_000_commands_given_mutated_files_end_in_one_line(
    kinds: dict[str, Kind], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert 300 < run_all(kinds, tmp_path, capsys, 1_000, 1) < 1_000

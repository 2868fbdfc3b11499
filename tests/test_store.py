import dataclasses
import json
import shutil
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from pools import contents, tiny_pool, train_here

from shadow_pool.errors import UserError
from shadow_pool.signals import Signals
from shadow_pool.store import entry as entries
from shadow_pool.store.entry import commit_entry, entry_lock, read_info, read_signals, workspace, write_signals
from shadow_pool.store.files import file_lock, read_sealed, write_atomically, write_sealed
from shadow_pool.store.manifest import read_manifest
from shadow_pool.store.pool import open_pool
from shadow_pool.store.repair import discard_damaged, verify_pool
from shadow_pool.store.twins import twin_pool


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trained pool of one arm and its data; copy it before changing it."""
    pool, data = tiny_pool(tmp_path_factory.mktemp("store") / "pool", {"arms": ["batch"]})
    train_here(pool, data)
    return pool, data


@pytest.fixture
def copy(made, tmp_path):
    pool, _ = made
    shutil.copytree(pool.path, tmp_path / "pool")
    return open_pool(tmp_path / "pool")


def some_signals(n=5, queries=2):
    rng = np.random.default_rng(0)
    return Signals(
        phi=rng.normal(size=(n, queries)),
        predicted=rng.integers(0, 10, n),
        predicted_probability=rng.random(n).astype(np.float32),
        energy=rng.normal(size=n).astype(np.float32),
    )


def flip_byte(path, where=0.5):
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 0x40
    path.write_bytes(bytes(content))


# ------------------------------------------------------------------ files


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.PosixPath.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"old"


def test_a_sealed_file_reads_back_and_refuses_any_change(tmp_path):
    path = tmp_path / "facts.json"
    body = {"b": [1, 2.5, None], "a": {"x": "é"}}
    write_sealed(path, body)
    assert read_sealed(path, advice="do") == body
    text = path.read_text()
    path.write_text(json.dumps(dict(reversed(json.loads(text).items()))))
    assert read_sealed(path, advice="do") == body
    for changed in (text.replace("2.5", "2.6"), text.replace('"sha256"', '"sha"'), text[:-9], "[]", "", "{", "null"):
        path.write_text(changed)
        with pytest.raises(UserError, match=r"do$"):
            read_sealed(path, advice="do")
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not readable"):
        read_sealed(path, advice="do")
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="not readable"):
        read_sealed(path, advice="do")
    path.unlink()
    with pytest.raises(UserError, match="missing; do"):
        read_sealed(path, advice="do")


def test_a_lock_is_held_by_one_at_a_time(tmp_path):
    with file_lock(tmp_path / "l", wait=False) as first, file_lock(tmp_path / "l", wait=False) as second:
        assert (first, second) == (True, False)
    waited = threading.Event()

    def wait():
        with file_lock(tmp_path / "l", wait=True) as held:
            assert held
            waited.set()

    with file_lock(tmp_path / "l", wait=False) as held:
        assert held
        thread = threading.Thread(target=wait)
        thread.start()
        assert not waited.wait(0.2)
    assert waited.wait(20)
    thread.join()


# ------------------------------------------------------------------ one model


@pytest.mark.parametrize("n", [0, 7, 8, 23])
def test_signals_read_back_and_equal_arrays_give_equal_bytes(tmp_path, monkeypatch, n):
    monkeypatch.setattr(entries, "ROWS_AT_ONCE", 8)
    signals = some_signals(n, 3)
    write_signals(tmp_path / "a", signals)
    write_signals(tmp_path / "b", signals)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found = read_signals((tmp_path / "a").read_bytes())
    for name in ("phi", "predicted", "predicted_probability", "energy"):
        assert np.array_equal(getattr(found, name), getattr(signals, name))
        assert getattr(found, name).dtype == getattr(signals, name).dtype


def test_the_first_rename_wins_where_locks_do_not_reach(made, tmp_path):
    pool, _ = made
    info = dataclasses.replace(pool.info("batch", 0), files={})
    entry = tmp_path / "arms" / "batch" / "0000"
    entry.parent.mkdir(parents=True)
    tied = torch.nn.Linear(2, 2)
    state = {"a.weight": tied.weight, "b.weight": tied.weight}
    for seconds in (1.0, 2.0):
        with workspace(entry):
            kept = commit_entry(
                entry,
                dataclasses.replace(info, seconds=seconds),
                state=state,
                records=some_signals(),
                population=some_signals(0),
                history=pa.table({"epoch": [1]}),
            )
        assert kept.seconds == read_info(entry).seconds == 1.0
    assert [path.name for path in entry.parent.iterdir()] == ["0000"]


def test_a_workspace_is_removed_when_training_fails(tmp_path):
    entry = tmp_path / "0000"

    def fail():
        with workspace(entry) as folder:
            (folder / "half").write_text("x")
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ corruption

MODEL_FILES = ("weights.safetensors", "phi.parquet", "population.parquet", "history.parquet", "model.json")


@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "swap"])
def test_a_damaged_model_is_named_never_read_and_trained_again(copy, made, name, damage):
    path = copy.entry("batch", 1) / name
    if damage == "flip":
        flip_byte(path)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "remove":
        path.unlink()
    else:
        other = copy.entry("batch", 2) / name
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)
    reason = str(copy.verify("batch", 1))
    assert str(path) in reason
    assert "pool verify --repair" in reason
    if name in ("phi.parquet", "model.json"):
        for read in (lambda: copy.signals("batch", 1), lambda: copy.phi("batch", range(4))):
            with pytest.raises(UserError, match="0001"):
                read()
    found = verify_pool(copy)
    assert not found.sound
    assert any(str(path) in text for text in found.models)
    repaired = verify_pool(copy, repair=True)
    assert repaired.sound
    assert copy.missing("batch") == ([1, 2] if damage == "swap" else [1])
    train_here(copy, made[1])
    assert verify_pool(copy).models == ()
    assert contents(copy.path) == contents(made[0].path)


@pytest.mark.parametrize("where", np.linspace(0, 1, 23).tolist())
def test_no_flipped_byte_of_phi_or_model_json_passes(copy, where):
    for name in ("phi.parquet", "model.json"):
        path = copy.entry("batch", 0) / name
        before = path.read_bytes()
        flip_byte(path, where)
        for read in (lambda: copy.signals("batch", 0), lambda: copy.phi("batch", range(4))):
            with pytest.raises(UserError, match="0000"):
                read()
        path.write_bytes(before)
    assert copy.signals("batch", 0).phi.shape[1] == 1


def test_swapped_directories_and_arms_are_misplaced(copy):
    first, second = copy.entry("batch", 0), copy.entry("batch", 3)
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)
    good, bad = copy.scan("batch")
    assert set(good) == {1, 2}
    assert "belongs to arm batch, model 3" in str(bad[0])
    assert copy.missing("batch") == []
    assert [str(error) for error in discard_damaged(copy)] == [str(bad[0]), str(bad[3])]
    assert copy.missing("batch") == [0, 3]


def test_a_model_of_another_pool_is_refused(copy, tmp_path):
    other, data = tiny_pool(tmp_path / "other", {"arms": ["batch"], "seed": 5})
    train_here(other, data)
    shutil.rmtree(copy.entry("batch", 2))
    shutil.copytree(other.entry("batch", 2), copy.entry("batch", 2))
    assert "another spec or on other records" in str(copy.scan("batch")[1][2])


def test_the_digest_tells_records_apart_that_share_a_spec(made, tmp_path):
    manifest = made[0].manifest
    assert dataclasses.replace(manifest, fingerprint="0" * 64).digest != manifest.digest
    larger = dataclasses.replace(manifest, spec=dataclasses.replace(manifest.spec, n=64, arms=("none",)))
    assert larger.digest == manifest.digest


def test_damaged_tables_are_named_and_membership_is_drawn_again(copy, made):
    pool, _ = made
    for damage in (lambda path: flip_byte(path, 0.9), lambda path: path.unlink(), lambda path: path.write_bytes(b"")):
        damage(copy.path / "membership.npy")
        with pytest.raises(UserError, match=r"membership\.npy"):
            _ = open_pool(copy.path).membership
        found = verify_pool(open_pool(copy.path))
        assert not found.sound
        assert "membership.npy" in found.tables[0]
        assert verify_pool(open_pool(copy.path), repair=True).sound
        assert contents(copy.path) == contents(pool.path)
    flip_byte(copy.path / "records.parquet")
    with pytest.raises(UserError, match=r"records\.parquet does not match"):
        _ = open_pool(copy.path).table
    assert not verify_pool(open_pool(copy.path), repair=True).sound
    tiny_pool_again = tiny_pool(copy.path, {"arms": ["batch"], "data": {"source": pool.spec.data.source}})[0]
    assert verify_pool(tiny_pool_again).sound
    assert contents(copy.path) == contents(pool.path)


def test_a_membership_file_that_promises_more_than_it_holds_allocates_nothing(copy):
    path = copy.path / "membership.npy"
    content = path.read_bytes()
    shape = str(made_shape := np.load(path).shape).encode()
    assert shape in content
    huge = f"({made_shape[0]}, {10**12})".encode()
    start = content.index(shape)
    header = content[:start] + huge + content[start + len(shape) :]
    path.write_bytes(header.replace(b" " * (len(huge) - len(shape)) + b"\n", b"\n", 1))
    with pytest.raises(UserError, match=r"membership\.npy"):
        _ = open_pool(copy.path).membership


def test_an_edited_or_foreign_pool_json_is_refused(copy):
    path = copy.path / "pool.json"
    text = path.read_text()
    path.write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(UserError, match="was changed after it was written"):
        open_pool(copy.path)
    body = json.loads(text)
    body.pop("sha256")
    write_sealed(path, {**body, "protocol": 2})
    with pytest.raises(UserError, match="protocol must be 1, got 2"):
        open_pool(copy.path)
    write_sealed(path, {**body, "later": "a key of a later version"})
    assert open_pool(copy.path).manifest == read_manifest(path)
    for key, value, says in (
        ("spec", {"n": 5}, "n must be even"),
        ("spec", {"nn": 4}, "did you mean 'n'"),
        ("views", [{"dy": "x"}], "dy must be int"),
        ("files", {"membership.npy": 3}, "must be str, got 3"),
        ("input_shape", 8, "must be a list of int"),
        ("input_shape", [], "input_shape must be that of an input of 1 to"),
        ("model_shape", [1, 10**6, 10**6], "model_shape must be that of an input of 1 to"),
        ("model_shape", [1, 0, 8], "model_shape must be that of an input of 1 to"),
        ("views", [], "1 in all as spec.queries says"),
        ("views", [{"dy": 1}], "views must be the plain one"),
        ("views", [{"dy": 0}, {"dy": 10**30}], "shifts by at most 64 pixels"),
    ):
        write_sealed(path, {**body, key: value})
        with pytest.raises(UserError, match=says):
            open_pool(copy.path)
    del body["fingerprint"]
    write_sealed(path, body)
    with pytest.raises(UserError, match="must have a key 'fingerprint'"):
        open_pool(copy.path)
    path.unlink()
    with pytest.raises(UserError, match="no pool in"):
        open_pool(copy.path)


def test_a_lost_pool_json_is_made_again_by_the_same_options_and_no_others(copy, made):
    source = {"arms": ["batch"], "data": {"source": made[0].spec.data.source}}
    (copy.path / "pool.json").unlink()
    with pytest.raises(UserError, match="holds models of another spec or other records"):
        tiny_pool(copy.path, {**source, "seed": 1})
    assert len(list(copy.path.glob("arms/batch/[0-9]*"))) == 4
    again, _ = tiny_pool(copy.path, source)
    assert verify_pool(again).sound
    assert again.missing("batch") == []


# ------------------------------------------------------------------ leftovers


def test_leftovers_of_dead_processes_are_counted_and_cleared_those_of_living_ones_are_not(copy):
    dead, living = copy.entry("batch", 0), copy.entry("batch", 1)
    for entry in (dead, living):
        entries.temporary_path(entry).mkdir()
    (copy.path / ".pool.json.77.tmp").write_text("half")
    (copy.entry("batch", 2) / ".phi-batch.parquet.77.tmp").write_text("half")
    with entry_lock(living, wait=False) as held:
        assert held
        assert verify_pool(copy).leftovers == 3
        assert verify_pool(copy, repair=True).leftovers == 3
        assert entries.temporary_path(living).exists()
        assert not entries.temporary_path(dead).exists()
    assert verify_pool(copy, repair=True).leftovers == 1
    assert verify_pool(copy).leftovers == 0
    assert not list(copy.path.rglob("*.tmp"))


def test_a_model_that_another_process_has_replaced_meanwhile_is_not_removed(copy, made, monkeypatch):
    path = copy.entry("batch", 0) / "phi.parquet"
    sound = path.read_bytes()
    path.write_bytes(b"damaged")
    real = entries.file_lock

    def replaced_while_waiting(*arguments, **options):
        path.write_bytes(sound)
        return real(*arguments, **options)

    monkeypatch.setattr(entries, "file_lock", replaced_while_waiting)
    assert discard_damaged(copy) == []
    assert copy.missing("batch") == []


def test_verify_reads_the_twins_of_targets_too(copy):
    member = np.arange(len(copy.records)) % 2 == 0
    twins = twin_pool(copy, member, count=2, arms=("batch",))
    assert np.array_equal(twins.membership, np.tile(member, (4, 1)))
    grown = twin_pool(copy, member, count=5, arms=("none",))
    assert (grown.spec.n, grown.spec.arms) == (6, ("batch", "none"))
    assert verify_pool(copy).sound
    flip_byte(twins.path / "records.parquet")
    assert "twins" in verify_pool(copy).tables[0]
    assert verify_pool(twin_pool(copy, member, count=2, arms=("batch",))).sound

"""Pools that name code: a stranger's is never run without ``--trust``; the user's own needs none."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pools import TINY, write_digits

from mia_audit.studies.setup import StudySetup, study_pool
from shadow_pool.errors import UserError
from shadow_pool.prepare import pool_data, prepare_pool
from shadow_pool.spec import from_dict, merge, to_dict
from shadow_pool.store.drift import drift_warnings
from shadow_pool.store.files import write_sealed
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.store.repair import verify_pool
from shadow_pool.store.trust import FIELDS, check_code, named_code
from shadow_pool.train.schedule import train_pool
from shadow_pool.train.target import train_target
from shadow_pool.usercode import code_version, load_object

NET = """
import os
import numpy as np
import torch
from torch import nn

if "MARK" in os.environ:
    with open(os.environ["MARK"], "a") as file:
        file.write("ran\\n")

class Net(nn.Sequential):
    def __init__(self, classes, width=16):
        norm = nn.BatchNorm1d(width)
        super().__init__(nn.Flatten(), nn.Linear(64, width), norm, nn.ReLU(), nn.Linear(width, classes))

def scaled(x):
    return x.float() / 255

def train(model, dataset, seed, device):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs, labels = zip(*dataset.__getitems__(range(len(dataset))))
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.stack(inputs)), torch.tensor(labels)).backward()
        optimizer.step()

def digits():
    from sklearn.datasets import load_digits
    found = load_digits()
    return (found.images[:120] * 15.9).astype(np.uint8)[:, None], found.target[:120]
"""
NAMING = {
    "arch": {"arch": "net.py:Net(width=8)"},
    "train": {"train": "net.py:train"},
    "data.normalize": {"data": {"normalize": "net.py:scaled"}},
    "data.source": {"data": {"source": "net.py:digits"}},
    "data.ood_from": {"data": {"ood": 0.1, "ood_from": "net.py:digits"}},
}
"""Settings that name code in each field."""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command in this process, files of code forgotten: (exit status, standard error)."""
    from mia_audit_cli.main import app

    def call(*arguments: object) -> tuple[int, str]:
        forget_code()
        with pytest.raises(SystemExit) as exit_:
            app(list(map(str, arguments)))
        return int(exit_.value.code or 0), capsys.readouterr().err

    return call


def forget_code() -> None:
    for name in [name for name in sys.modules if name.startswith("mia_audit_user_")]:
        del sys.modules[name]


def in_a_process(*arguments: object) -> tuple[int, str]:
    """``mia-audit ...`` as a shell runs it: (exit status, standard error)."""
    code = "import sys; from mia_audit_cli.main import main; sys.argv[0] = 'mia-audit'; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stderr


def made_by(home: Path, folder: Path, changes: dict, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A trained pool in the working folder, made by whoever lives in ``home``."""
    with monkeypatch.context() as theirs:
        theirs.setenv("XDG_STATE_HOME", str(home))
        Path("net.py").write_text(NET)
        source = str(write_digits(Path("digits.npz"), 120))
        own = {"n": 6, "arch": "mlp", "arms": ["batch"], "data": {"source": source}, "recipe": {"epochs": 12}}
        spec = merge(merge(TINY, own), changes)
        pool, data = prepare_pool(folder, spec)
        train_pool(pool, data, workers=1)
    return open_pool(folder)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home; the working folder is an empty one, and code that runs says so in ``ran``."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    return tmp_path / "mine"


def mark(monkeypatch: pytest.MonkeyPatch) -> Path:
    ran = Path("ran").absolute()
    monkeypatch.setenv("MARK", str(ran))
    return ran


COMMANDS = (["score", "model.pt"], ["report"], ["train-target", "--out", "other.pt"], ["train-shadows", "--workers", 1])
CALLED = {
    "arch": "Net",
    "train": "train",
    "data.normalize": "scaled",
    "data.source": "digits",
    "data.ood_from": "digits",
}
RUNS = {
    "arch": ("score", "report", "train-target", "train-shadows"),
    "train": ("train-target", "train-shadows"),
    "data.normalize": ("score", "train-target", "train-shadows"),
    "data.source": ("score", "report", "train-target", "train-shadows"),
    "data.ood_from": ("score", "report", "train-target", "train-shadows"),
}
"""The commands that need the code of each field; a report without its data goes without pictures."""


@pytest.mark.parametrize("field", FIELDS)
def test_a_strangers_pool_runs_nothing_until_it_is_trusted(
    field: str, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    made_by(tmp_path / "theirs", Path("pool"), NAMING[field], monkeypatch)
    assert run("train-target", "--trust")[0] == 0
    ran = mark(monkeypatch)
    for command in COMMANDS:
        status, text = run(*command, "--quiet")
        assert not ran.exists(), command
        refused = status == 1 and text.count("\n") == 1
        if command[0] in RUNS[field] and not (command[0] == "report" and field.startswith("data.")):
            assert refused, text
        if refused:
            for words in ("net.py:", "names code to run", "--trust"):
                assert words in text
    for command in (["pool", "info", "pool"], ["pool", "verify", "pool", "--repair"]):
        assert run(*command)[0] == 0
        assert not ran.exists()
    for command in COMMANDS if field == "arch" else COMMANDS[2:]:
        ran.unlink(missing_ok=True)
        status, text = run(*command, "--trust")
        assert status == 0, text
        assert ran.exists() is (command[0] in RUNS[field]), command
        assert f"trusted: the pool pool runs 'net.py:{CALLED[field]}'" in text


def test_a_shell_command_in_pool_json_does_not_run(mine: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    pool = made_by(mine, Path("pool"), {}, monkeypatch)
    train_target(pool, pool_data(pool), out=Path("model.pt"))
    edit_spec(pool, arch="os:system(command='touch pwned')")
    status, text = in_a_process("train-shadows", "--workers", 2, "--quiet")
    assert (status, text.count("\n")) == (1, 1), text
    assert "names code to run, 'os:system'" in text
    status, text = run("score", "model.pt")
    assert "names code to run, 'os:system'" in text
    with pytest.raises(UserError, match="names code to run, 'os:system'"):
        study_pool(StudySetup(out=Path()), {}, "pool")
    assert not Path("pwned").exists()
    status, text = in_a_process("train-shadows", "--trust")
    assert "must return a torch.nn.Module, got int" in text
    assert Path("pwned").exists()


def edit_spec(pool: Pool, **changes: object) -> None:
    """As a stranger would: everything that depends on the spec is changed with it."""
    files = [pool.path / "pool.json", *pool.path.glob("arms/*/*/model.json")]
    for path in files:
        body = json.loads(path.read_text())
        body.pop("sha256")
        if path.name == "pool.json":
            body["spec"] |= changes
        else:
            body["digest"] = open_pool(pool.path).manifest.digest
        write_sealed(path, body)


def test_the_users_own_pool_needs_no_trust_in_workers_twins_or_another_folder(
    mine: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """As a user works, in processes of their own."""
    Path("net.py").write_text(NET)
    write_digits(Path("digits.npz"), 120)
    Path("spec.toml").write_text('[recipe]\noptimizer = "adamw"\nlr = 0.005\nbatch_size = 16\nepochs = 12\n')
    options = ["--n", 6, "--spec", "spec.toml", "--data", "digits.npz", "--normalize", "net.py:scaled"]
    assert in_a_process("train-shadows", "--arch", "net.py:Net", *options, "--workers", 2, "--quiet") == (0, "")
    train_target(pool := open_pool(Path("pool")), pool_data(pool), out=Path("model.pt"))
    status, text = in_a_process("score", "model.pt", "--twins", 1, "--workers", 1)
    assert status == 0, text
    Path("pool").rename("moved")
    assert run("train-shadows", "--pool", "moved", "--n", 8, "--indices", "6-7", "--workers", 1)[0] == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(mine / "another"))
    status, text = run("report", "--pool", "moved", "--quiet")
    assert (status, "names code to run" in text) == (1, True)
    assert sorted(path.name for path in mine.iterdir()) == ["mia-audit"]


def test_a_changed_file_of_code_is_refused_named_and_with_trust_warned_about(
    mine: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    pool = made_by(mine, Path("pool"), NAMING["arch"], monkeypatch)
    assert run("train-target")[0] == 0
    assert run("score", "model.pt")[0] == 0
    assert drift_warnings(pool, here=True) == ()
    Path("net.py").write_text(NET.replace("nn.ReLU()", "nn.Tanh()"))
    ran = mark(monkeypatch)
    for command in COMMANDS:
        status, text = run(*command)
        assert status == 1
        assert "'net.py:Net' has changed since" in text
    assert not ran.exists()
    for command in COMMANDS:
        if command[0] != "report":
            status, text = run(*command, "--trust")
            assert status == 0, text
            assert "trained with net.py:Net" in text
    status, text = run("train-shadows", "--n", 8, "--arch", "net.py:Net(width=8)", "--workers", 1)
    assert (status, "would not be of one kind" in text) == (1, True)
    assert run("train-shadows", "--n", 8, "--workers", 1, "--trust")[0] == 0
    (text,) = drift_warnings(open_pool(pool.path), here=False)
    assert "different net.py:Net" in text
    Path("net.py").write_text(NET)
    assert run("score", "model.pt")[0] == 0


def test_without_a_home_that_can_be_written_a_pool_is_made_and_needs_trust(
    mine: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    made_by(Path("/proc/nowhere"), Path("pool"), NAMING["arch"], monkeypatch)
    status, text = run("train-target")
    assert status == 1
    assert "nothing in /proc/nowhere/mia-audit/pools says that you made it" in text
    assert run("train-target", "--trust")[0] == 0


def test_what_the_command_itself_names_needs_no_trust(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    made_by(tmp_path / "theirs", Path("pool"), merge(NAMING["arch"], NAMING["data.normalize"]), monkeypatch)
    named = ("--arch", "net.py:Net(width=8)")
    status, text = run("train-shadows", *named)
    assert (status, "net.py:scaled" in text) == (1, True)
    assert run("train-shadows", *named, "--normalize", "net.py:scaled")[0] == 0
    assert run("train-target")[0] == 1
    assert run("train-target", "--trust")[0] == 0
    status, text = run("score", "model.pt", *named)
    assert (status, "net.py:scaled" in text) == (1, True)


def test_a_spec_file_is_no_ones_word(mine: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    Path("net.py").write_text(NET)
    write_digits(Path("digits.npz"), 120)
    Path("spec.toml").write_text('n = 4\narch = "net.py:Net"\n[data]\nsource = "digits.npz"\n[recipe]\nepochs = 1\n')
    ran = mark(monkeypatch)
    command = ("train-shadows", "--spec", "spec.toml", "--workers", 1)
    status, text = run(*command)
    assert (status, "spec.toml names code to run, 'net.py:Net'" in text) == (1, True)
    assert not ran.exists()
    assert not Path("pool").exists()
    assert run(*command, "--arch", "net.py:Net", "--plan")[0] == 0
    assert run(*command, "--trust")[0] == 0
    assert run(*command, "--arch", "net.py:Net")[0] == 0
    assert run("train-shadows")[0] == 0


def test_a_note_is_of_one_pool_and_one_state_of_the_code(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = made_by(mine, Path("pool"), NAMING["arch"], monkeypatch)
    check_code(pool)
    edit_spec(pool, seed=1)
    with pytest.raises(UserError, match="names code to run"):
        check_code(open_pool(pool.path))
    edit_spec(pool, seed=0, arch="net.py:Net")
    with pytest.raises(UserError, match="names code to run"):
        check_code(open_pool(pool.path))
    edit_spec(pool, seed=0, arch="net.py:Net(width=8)", n=64)
    check_code(open_pool(pool.path))
    assert verify_pool(pool).sound
    Path("net.py").unlink()
    with pytest.raises(UserError, match=r"'net\.py:Net' has changed since"):
        check_code(pool)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"arch": "lenet"}, {}),
        ({"arch": "mlp(width=8)"}, {}),
        ({"arch": "torchvision:resnet18"}, {}),
        ({"arch": "timm:vit_tiny_patch16_224.augreg_in21k"}, {}),
        ({"arch": "timm:resnet18(checkpoint_path='evil.pth')"}, {"arch": "timm:resnet18"}),
        ({"arch": " os:system(command='touch x') "}, {"arch": "os:system"}),
        ({"arch": "a/b (1).py:Net(width=2)"}, {"arch": "a/b (1).py:Net"}),
        ({"arch": "os:system\n(command='touch x')"}, {"arch": "os:system\n"}),
        ({"train": "own.py:train"}, {"train": "own.py:train"}),
        ({"data": {"source": "digits.npz", "normalize": "0.1,0.2/0.3,0.4"}}, {}),
        ({"data": {"source": "a.b:c", "ood_from": "d.py:e"}}, {"data.source": "a.b:c", "data.ood_from": "d.py:e"}),
    ],
)
def test_what_of_a_spec_is_code(values: dict, code: dict) -> None:
    assert named_code(values) == code
    assert named_code(to_dict(from_dict(values))) == code


def test_a_version_is_of_the_file_that_would_be_imported_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [code_version(text) for text in ("os:system", "torchvision.models:resnet18", "nowhere:x")] == [
        "installed"
    ] * 3
    assert code_version("absent.py:x") == "missing"
    Path("lib").mkdir()
    Path("lib/__init__.py").write_text("open('ran', 'w')")
    assert code_version("lib.net:Net") == "missing"
    Path("lib/net.py").write_text("a = 1")
    Path("torchvision.py").write_text("a = 1")
    before = [code_version(text) for text in ("lib.net:Net", "lib/net.py:Net", "torchvision:Net", "lib:Net")]
    assert len(set(before)) == 2
    assert all(len(version) == 64 for version in before)
    Path("lib/net.py").write_text("a = 2")
    assert code_version("lib.net:Net") == code_version("lib/net.py:Net") != before[0]
    assert not Path("ran").exists()


def test_a_compiled_copy_beside_a_file_of_code_is_not_what_runs(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("a = 2\n")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    py_compile.compile(str(file))
    file.write_text("a = 1\n")
    os.utime(file, ns=times)
    assert load_object(f"{file}:a", what="arch") == 1

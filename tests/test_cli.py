"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import examples
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Run
from pools import tiny_pool

from mia_audit.studies.registry import STUDIES
from mia_audit.studies.result import StudyRow
from mia_audit_cli.console import TrainingProgress, stdout, table
from mia_audit_cli.main import app
from shadow_pool.data.records import PoolData
from shadow_pool.store.pool import Pool
from shadow_pool.train.schedule import Progress
from shadow_pool.train.target import train_target
from shadow_pool.train.unit import Receipt, Unit

COMMANDS = (
    ["demo"],
    ["train-shadows"],
    ["train-target"],
    ["score"],
    ["report"],
    ["inspect"],
    ["compare"],
    ["study"],
    ["pool", "info"],
    ["pool", "verify"],
)


@pytest.fixture(scope="module")
def model(pool: Pool, pool_data: PoolData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "model.pt"
    return train_target(pool, pool_data, out=out).model


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(run: Run, command: list[str]) -> None:
    status, out, _ = run(*command, "--help")
    assert status == 0
    assert f"Example: mia-audit {' '.join(command)}" in out
    for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.M):
        assert re.search(rf"{option}\b[^\n]*\n?[^\n]*\w", out)


def test_no_command_is_left_out_of_these_tests() -> None:
    names = {command.name for command in app.registered_commands}
    groups = {group.name for group in app.registered_groups}
    assert names | groups == {command[0] for command in COMMANDS}


def test_help_does_not_import_torch() -> None:
    code = "import sys, mia_audit_cli.main; sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_train_score_report_compare_in_one_folder(run: Run) -> None:
    """The main job as a user runs it: no option that the defaults do not need."""
    recipe = Path("spec.toml")
    recipe.write_text('[recipe]\noptimizer = "adamw"\nlr = 0.005\nbatch_size = 16\nepochs = 2\n')
    np.savez("data.npz", **_digits(300))
    status, out, err = run("train-shadows", "--n", 8, "--spec", recipe, "--data", "data.npz", "--workers", 1)
    assert (status, "8/8" in out) == (0, True), err
    assert "next: mia-audit report" in err
    assert run("train-shadows")[0] == 0  # the stored spec, nothing to train
    assert run("train-target")[0] == 0
    status, out, err = run("score", "model.pt")
    assert status == 0, err
    assert "lira-online" in out
    assert Path("audit/report.html").stat().st_size > 10_000
    body = json.loads(Path("audit/audit.json").read_text())
    assert body["target"]["path"] == "model.pt"
    status, out, _ = run("report", "--out", "self", "--json")
    assert status == 0
    assert json.loads(out)["kind"] == "pool"
    assert run("score", "model.pt", "--out", "again")[0] == 0
    status, out, _ = run("compare", "audit", "again", "--json")
    assert status == 0
    differences = json.loads(out)["differences"]
    assert differences
    assert all(row["difference"] == 0 for row in differences)


def test_json_is_alone_on_standard_output(run: Run, pool_folder: Path, model: Path) -> None:
    status, out, _ = run("score", model, "--pool", pool_folder, "--json")
    assert status == 0
    assert json.loads(out) == json.loads(Path("audit/audit.json").read_text())
    for command in (["pool", "info", pool_folder], ["pool", "verify", pool_folder], ["inspect", model]):
        status, out, _ = run(*command, "--json")
        assert status == 0
        json.loads(out)


def test_what_is_printed_fits_80_columns_and_ends_with_what_to_do_next(
    run: Run, pool_folder: Path, model: Path
) -> None:
    for command in (
        ["inspect", model],
        ["score", model, "--pool", pool_folder],
        ["report", "--pool", pool_folder, "--out", "self"],
        ["pool", "info", pool_folder],
        ["pool", "verify", pool_folder],
        ["train-shadows", "--pool", pool_folder],
        ["train-target", "--pool", pool_folder],
    ):
        status, out, err = run(*command)
        assert status == 0, err
        named = out.replace(str(pool_folder.parent), "").replace(str(model.parent), "")
        assert [line for line in named.splitlines() if len(line) > 80] == []
        assert "…" not in out
        assert err.splitlines()[-1].startswith("next: ")


def test_a_pool_that_lacks_models_is_to_be_trained_next(run: Run, tmp_path: Path) -> None:
    tiny_pool(tmp_path / "pool")
    for command in ("info", "verify"):
        status, _, err = run("pool", command, "pool")
        assert (status, err) == (0, "next: mia-audit train-shadows --pool pool trains what is missing\n")


def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stdout().print(table("Title", ["name", "number"], [["[red]all", "1"]]))
    assert "\x1b" not in capsys.readouterr().out
    for no_color, expected in ((None, True), ("1", False)):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color:
            monkeypatch.setenv("NO_COLOR", no_color)
        stdout().print("[red]all")
        assert ("\x1b[31m" in capsys.readouterr().out) == expected


def test_progress_starts_anew_with_every_pool_and_says_little_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("mia_audit_cli.console.time.monotonic", lambda: now)
    progress = TrainingProgress(quiet=False)
    for seconds in (4, 9):
        for done in range(1, 5):
            now += seconds
            outcome = "chance" if (seconds, done) == (9, 1) else "trained"
            progress(Progress(Receipt(Unit(Path("pool"), "none", done), outcome, images=90), done, 4))
    assert capsys.readouterr().err.splitlines() == [
        "trained 3/4 models, 22 images/s, 0:12 elapsed, 0:04 left",
        "trained 4/4 models, 22 images/s, 0:16 elapsed, 0:00 left",
        "warning: model none/0001 is no better than naming the largest class; it is left out of audits with its pair",
        "trained 2/4 models, 10 images/s, 0:18 elapsed, 0:18 left",
        "trained 4/4 models, 10 images/s, 0:36 elapsed, 0:00 left",
    ]


def test_a_studys_verdicts_fit_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = "through the batch's own statistics a step grows the margin as fixed statistics predict"
    places = [("batch+penalty(0.3) - batch", "mislabeled"), ("group+dp(8) - batch", "out of distribution")]
    rows = [
        StudyRow(claim, arm, subset, "tpr@0.001", at, -0.123456, (-0.234567, -0.012345), "does not hold")
        for arm, subset in places
        for at in (1, "features.norm1")
    ]
    rows += [StudyRow("it is large", "batch", "all", "a number", at, 1e-12, None, "holds") for at in range(99)]
    rows += [StudyRow("it is large", "batch", "all", "another", None, 77.0)]
    found = replace(examples.study(), rows=tuple(rows), summary="Holds: it is large. Recommended: sleep, at once.")
    monkeypatch.setitem(STUDIES, "theory", lambda setup: found)
    status, out, err = run("study", "theory")
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    words = " ".join(out.split())
    assert claim in words
    assert words.count("-0.123 [-0.235, -0.0123] does not hold") == 4
    assert "it is large (batch, all, a number) 99 of 99 verdicts hold." in words
    assert "99 of 103 verdicts hold, 4 do not. Recommended: sleep, at once." in words
    assert "77" not in words
    assert "next: open audit/report.html" in err
    assert sorted(path.name for path in Path("audit").iterdir()) == [
        "report.html",
        "study.json",
        "study.parquet",
    ]


def test_quiet_prints_nothing(run: Run, pool_folder: Path, model: Path) -> None:
    status, out, err = run("score", model, "--pool", pool_folder, "--quiet")
    assert (status, out, err) == (0, "", "")


def test_fail_above_exits_3_and_says_why(run: Run, pool_folder: Path, model: Path) -> None:
    status, _, err = run("score", model, "--pool", pool_folder, "--fail-above", "lira-online:all:auc=0.1")
    assert status == 3
    assert "exceeds the limit 0.1" in err
    assert run("score", model, "--pool", pool_folder, "--fail-above", "lira-online:all:auc=0.999")[0] == 0


BAD_INPUT = [
    (["train-shadows", "--data", "digitz"], "unknown data"),
    (["train-shadows", "--arms", "batch,nune"], "unknown arm 'nune': did you mean 'none'?"),
    (["train-shadows", "--arch", "lennet"], "lenet"),
    (["train-shadows", "--n", "5"], "use --n 6"),
    (["train-shadows", "--n", "2"], "n must be at least 4"),
    (["train-shadows", "--spec", "absent.toml"], "absent.toml"),
    (["train-shadows", "--data", "nan.npz"], "nan.npz"),
    (["train-shadows", "--data", "labels.npz"], "labels.npz"),
    (["train-shadows", "--data", "truncated.npz"], "truncated.npz"),
    (["train-shadows", "--classes", "absent.txt"], "absent.txt"),
    (["score", "model.pt"], "no pool in pool"),
    (["score", "absent.pt", "--pool", "POOL"], "absent.pt"),
    (["score", "empty.pt", "--pool", "POOL"], "empty.pt"),
    (["score", "page.pt", "--pool", "POOL"], "page.pt"),
    (["score", "MODEL", "--pool", "POOL", "--attack", "lyra"], "unknown attack 'lyra'"),
    (["score", "MODEL", "--pool", "POOL", "--arm", "group"], "has no arm group"),
    (["score", "MODEL", "--pool", "POOL", "--arm", "none"], "as arm batch it may fit"),
    (["score", "MODEL", "--pool", "POOL", "--device", "cuda:99"], "device cuda:99 must be one of the"),
    (["score", "MODEL", "--pool", "POOL", "--device", "gpu"], "device must be cpu, cuda or cuda:N"),
    (["train-shadows", "--device", "cuda:99"], "device cuda:99 must be one of the"),
    (["score", "MODEL", "--pool", "POOL", "--out", "empty.pt"], "--out must be a folder, empty.pt is a file"),
    (["report", "--pool", "POOL", "--out", "empty.pt"], "--out must be a folder, empty.pt is a file"),
    (["study", "theory", "--out", "empty.pt"], "--out must be a folder, empty.pt is a file"),
    (["score", "MODEL", "--pool", "POOL", "--fail-above", "loss:all:auc=5"], "a share from 0 to 1, got 5"),
    (["score", "MODEL", "--pool", "POOL", "--fail-above", "lira:all:auc=1"], "lira-online"),
    (["score", "MODEL", "--pool", "POOL", "--members", "absent.csv"], "absent.csv"),
    (["score", "other.pt", "--pool", "POOL"], "head.weight"),
    (["report", "--pool", "absent"], "no pool in absent"),
    (["compare", "absent", "absent"], "absent"),
    (["study", "theories"], "unknown study 'theories': did you mean 'theory'?"),
    (["pool", "info", "absent"], "no pool in absent"),
    (["inspect", "absent.pt"], "absent.pt"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(case[0][:4]) for case in BAD_INPUT])
def test_bad_input_is_one_line_and_status_1(
    run: Run, pool_folder: Path, model: Path, arguments: list[str], message: str
) -> None:
    _write_bad_files(model)
    named = {"POOL": str(pool_folder), "MODEL": str(model)}
    status, out, err = run(*(named.get(argument, argument) for argument in arguments))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (status, out) == (1, "")
    assert len(errors) == 1, err
    assert message in errors[0]
    assert "Traceback" not in err
    assert not Path("pool").exists()
    assert not Path("audit").exists()


@pytest.mark.parametrize("arguments", [["score"], ["train-shadows", "--n", "many"], ["fly"], ["pool", "info"]])
def test_usage_errors_are_status_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


def test_an_interrupt_is_one_line_and_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    statuses: list[int] = []

    def leave(status: int) -> None:
        statuses.append(status)
        raise SystemExit(status)

    monkeypatch.setattr("shadow_pool.prepare.prepare_pool", interrupted)
    monkeypatch.setattr("os._exit", leave)
    status, _, err = run("train-shadows")
    assert (status, statuses) == (130, [130])
    assert err.strip().splitlines() == ["interrupted: what was finished is kept; run the same command again to go on"]


def _digits(count: int) -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return {"x": (digits.images[:count] * 15.9).astype(np.uint8), "y": digits.target[:count].astype(np.int64)}


def _write_bad_files(model: Path) -> None:
    digits = _digits(60)
    nan = digits["x"].astype(np.float32)
    nan[3] = np.nan
    np.savez("nan.npz", x=nan, y=digits["y"])
    np.savez("labels.npz", x=digits["x"], y=digits["y"] * 2)
    np.savez("whole.npz", **digits)
    Path("truncated.npz").write_bytes(Path("whole.npz").read_bytes()[:2000])
    Path("empty.pt").write_bytes(b"")
    Path("page.pt").write_text("<!DOCTYPE html><html><body>404</body></html>")
    shutil.copy(model, "copy.pt")
    state = torch.load("copy.pt", weights_only=True)
    torch.save({k: v[:7] if k.startswith("head") else v for k, v in state.items()}, "other.pt")


def test_members_of_a_csv_reach_the_table(run: Run, pool_folder: Path, model: Path, pool_data: PoolData) -> None:
    chosen = pool_data.records.id[::2]
    pd.DataFrame({"id": chosen}).to_csv("train_ids.csv", index=False)
    status, _, err = run("score", model, "--pool", pool_folder, "--members", "train_ids.csv", "--subsets", "none")
    assert status == 0, err
    table = pd.read_parquet("audit/records.parquet")
    assert set(table.loc[table["member"], "id"]) == set(chosen)
    assert set(table["subset"]) == {"clean"}


def test_names_of_a_stranger_do_not_drive_the_terminal(run: Run, pool_folder: Path) -> None:
    wiped = "\x1b[2J\x1b[1;1H\x07all is well"
    torch.save({f"{wiped}.weight": torch.ones(3, 4), "b\x1b]0;title\x07.bias": torch.ones(3)}, "model.pt")
    for command in (["inspect", "model.pt"], ["score", "model.pt", "--pool", pool_folder]):
        _, out, err = run(*command)
        assert "all is well" in out + err
        assert not set(out + err) & {"\x1b", "\x07"}

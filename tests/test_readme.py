"""Every command and every line of Python that the README shows, run for real on small real data.

What trains gets fewer models and a small recipe. The commands for a stranger's model are in test_strangers.py.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Run
from distributed import LocalCluster
from pools import write_digits
from torch import nn

from mia_audit.schemas import load_schema
from mia_audit_cli import training
from shadow_pool.data.records import PoolData
from shadow_pool.models.norms import ratios
from shadow_pool.store.pool import Pool, open_pool

ROOT = Path(__file__).parent.parent
SECTIONS = dict(
    re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
)
RUN_ELSEWHERE = {
    "A stranger's model on odd data": "tests/test_strangers.py",
    "To set up and run the tests": ".ci/run",
}
RECIPE = {"optimizer": "adamw", "lr": 0.01, "batch_size": 16, "epochs": 4}
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(96, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10),
        )
"""


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[section], re.M | re.S)


def commands(section: str, language: str = "sh") -> list[str]:
    """The mia-audit lines of a section's blocks; of a line with several commands the last."""
    lines = [line.strip().removeprefix("- run: ") for block in blocks(section, language) for line in block.splitlines()]
    return [line[line.index("mia-audit ") :] for line in lines if re.search(r"(^|&& )mia-audit ", line)]


def words(command: str, **environment: str) -> list[str]:
    """The arguments of a command as a shell makes them."""
    script = f'for word in {command.removeprefix("mia-audit ")}; do echo "$word"; done'
    return subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()


def small(arguments: list[str]) -> list[str]:
    """Six models an arm by a small recipe, in this process, where the command trains a pool."""
    if arguments[0] not in ("train-shadows", "study"):
        return arguments
    if "--n" in arguments:
        arguments = [*arguments[: arguments.index("--n")], *arguments[arguments.index("--n") + 2 :]]
    return [*arguments, "--n", "6", "--spec", "small.toml", "--workers", "1"]


def valid(path: Path) -> dict[str, Any]:
    """An audit.json or a study.json, valid by the schema of its name."""
    body = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(load_schema(path.stem)).validate(body)
    return body


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has: records.npz, net.py, model.pt trained on half of the records, and train_ids.csv."""
    folder = tmp_path_factory.mktemp("user")
    source = np.load(write_digits(folder / "records.npz", 400))
    (folder / "net.py").write_text(NET)
    (folder / "small.toml").write_text("[recipe]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in RECIPE.items()))
    space: dict[str, Any] = {}
    exec(NET, space)
    torch.manual_seed(0)
    model: nn.Module = space["Net"]()
    rows = np.random.default_rng(0).permutation(400)[:200]
    x, y = torch.from_numpy(source["x"][rows, None] / np.float32(255)), torch.from_numpy(source["y"][rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        for batch in torch.randperm(200).split(16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    torch.save(model.state_dict(), folder / "model.pt")
    pd.DataFrame({"id": rows}).to_csv(folder / "train_ids.csv", index=False)
    return folder


@pytest.fixture
def user(run: Run, prepared: Path, tmp_path: Path) -> Callable[[str], tuple[int, str, str]]:
    """Run one of the README's commands, made small, where the user's files are."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return lambda command: run(*small(words(command)))


def test_nothing_that_the_readme_shows_is_left_out() -> None:
    shown = {name for name in SECTIONS for language in ("sh", "yaml", "python") if blocks(name, language)}
    here = {"A five-minute tour", "Audit your own model", "What BatchNorm did here", "Commands"}
    assert shown == here | set(RUN_ELSEWHERE)
    languages = set(re.findall(r"^```(\w+)", "".join(SECTIONS.values()), re.M))
    assert languages == {"sh", "yaml", "python"}


def test_pictures_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r'!\[[^]]+\]\(([^)]+)\)|<img src="([^"]+)"[^>]* alt="[^"]+"', text)
    assert len(pictures) == 3
    for names in pictures:
        assert (ROOT / "".join(names)).stat().st_size < 100_000


def test_the_tour(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = copy.deepcopy(training.DEMO_SPEC) | {"n": 6, "recipe": {**RECIPE, "batch_size": 64, "epochs": 2}}
    monkeypatch.setattr(training, "DEMO_SPEC", spec)
    demo, report, train, score, compare = (words(command) for command in commands("A five-minute tour"))
    assert demo == ["demo"]
    status, out, err = run(*demo, "--workers", "1")
    assert status == 0, err
    assert "At a false-positive rate of" in out
    assert {"report.html", "audit.json", "records.parquet", "pool", "model.pt"} <= {
        path.name for path in (tmp_path / "audit").iterdir()
    }
    assert valid(Path("audit/audit.json"))["pool"]["subsets"] == {"clean": 1375, "mislabeled": 76, "ood": 76}
    assert run(*report)[0] == 0
    assert valid(Path("recipe/audit.json"))["kind"] == "pool"
    assert run(*train)[0] == 0
    assert run(*score)[0] == 0
    assert valid(Path("plain/audit.json"))["target"]["norm_layers"] == {}
    ids = [pd.read_parquet(f"{folder}/records.parquet").set_index("id")["member"] for folder in ("audit", "plain")]
    pd.testing.assert_series_equal(*ids)
    status, out, _ = run(*compare)
    assert status == 0
    assert "1527 records in both" in out


def test_a_users_own_model_from_the_shell_and_from_python(user: Callable[..., Any], capsys: Any) -> None:
    for command in commands("Audit your own model"):
        status, _, err = user(command)
        assert status == 0, (command, err)
    body = valid(Path("audit/audit.json"))
    assert body["pool"]["arms"] == ["batch", "none", "none+fit"]
    assert Path("audit/report.html").exists()

    space: dict[str, Any] = {}
    for block in blocks("Audit your own model", "python"):
        exec(block, space)
    printed = capsys.readouterr().out
    assert "Headline(attack='lira-online'" in printed
    assert "tpr_low" in printed
    assert space["result"].to_dict()["attacks"] == body["attacks"]
    pd.testing.assert_frame_equal(space["audit"].to_frame(), space["result"].to_frame())
    labels = [line.get_label() for line in space["axes"].get_lines()]
    assert [label for label in labels if not label.startswith("_")] == ["chance", "all", "clean"]
    (call,) = re.findall(r'`mia_audit.schemas.(load_schema\("audit"\))`', SECTIONS["Audit your own model"])
    assert eval(call, {"load_schema": load_schema})["title"].startswith("audit.json")


def test_a_study(user: Callable[..., Any]) -> None:
    (command,) = commands("What BatchNorm did here")
    status, out, err = user(f"{command} --json")
    assert status == 0, err
    assert json.loads(out) == valid(Path("memorization/study.json"))
    assert (Path("memorization") / "report.html").exists()
    offered = re.findall(r"`(\w+)`", SECTIONS["What BatchNorm did here"].split("The others are")[1].split(".")[0])
    assert offered == ["gradients", "leakage", "theory", "mitigation"]


def test_the_penalty_in_a_loop_of_ones_own() -> None:
    (block,) = blocks("What BatchNorm did here", "python")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    nn.init.constant_(model[1].weight, 9.0)
    space: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "cross_entropy": nn.functional.cross_entropy,
        "batches": [(torch.randn(16, 4), torch.randint(0, 3, (16,)))] * 3,
    }
    exec(block, space)
    assert space["loss"].item() < 9.0  # before the first projection the penalty alone was above 60
    assert ratios(model)["1"].max() <= 1 + 1e-5


def test_the_gate_in_ci(user: Callable[..., Any]) -> None:
    train, score = commands("Commands", "yaml")
    assert user(train)[0] == 0
    status, _, err = user(score)
    assert status == 3 if "exceeded: " in err else status == 0
    assert user(re.sub(r"=[\d.]+$", "=1", score))[0] == 0
    status, out, err = user(re.sub(r"tpr@[\d.=]+$", "auc=0.1 --json", score))
    assert status == 3
    assert "exceeded: " in err
    assert json.loads(out) == valid(Path("audit/audit.json"))


def test_many_machines(run: Run, prepared: Path, pool: Pool, pool_data: PoolData, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    array, cluster = (command.replace("/shared/pool", "pool") for command in commands("Commands")[:2])
    (first,) = re.findall(r"`(train-shadows --indices [^`]*)`", SECTIONS["Commands"])
    created = [*small(words(f"{first} --data records.npz")), "--arms", "batch"]
    status, _, err = run(*created)
    assert status == 0, err
    assert [len(open_pool(Path("pool")).missing("batch"))] == [5]
    status, _, err = run(*words(array, SLURM_ARRAY_TASK_ID="0"), "--workers", "1")
    assert status == 0, err
    assert open_pool(Path("pool")).missing("batch") == [4, 5]

    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as local:
        status, _, err = run(*words(cluster.replace("tcp://head:8786", local.scheduler_address)))
        assert status == 0, err
        assert open_pool(Path("pool")).missing("batch") == []
        (block,) = blocks("Commands", "python")
        target = pool.signals("batch", 0).phi
        space: dict[str, Any] = {"pool": pool, "target_phi": target}
        exec(block.replace("tcp://head:8786", local.scheduler_address), space)
    assert {name: len(values) for name, values in space["scores"].items()} == {
        "lira-online": len(target),
        "reference": len(target),
    }

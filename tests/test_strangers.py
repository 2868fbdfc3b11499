"""Two strangers' checkpoints on their own data, from their authors' scripts to audit.json, by real commands.

The scans go by the README's commands word for word, but for fewer models and epochs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Run

README = Path(__file__).parent.parent / "README.md"

NET = """
import torch
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Net(nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = BasicBlock(width, width)
        self.layer2 = BasicBlock(width, 2 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def preprocess(batch):
    return (batch.float() / 255 - 0.3) / 0.37
"""

TRAIN = """
import io

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import nn

from net import Net, preprocess

torch.manual_seed(0)
torch.set_num_threads(1)
table = pd.read_parquet("records.parquet")
images = [np.array(Image.open(io.BytesIO(cell["bytes"]))) for cell in table["scan"]]
x = preprocess(torch.from_numpy(np.stack(images))[:, None])
names = sorted(table["diagnosis"].unique())
y = torch.tensor([names.index(name) for name in table["diagnosis"]])
patients = np.random.default_rng(2).permutation(sorted(table["patient"].unique()))
rows = np.flatnonzero(table["patient"].isin(patients[: len(patients) // 2]))

model = nn.DataParallel(Net(len(names)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(25):
    for batch in torch.from_numpy(np.random.default_rng(epoch).permutation(rows)).split(16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()

torch.save(
    {"epoch": 25, "loss": loss, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt"
)
table.iloc[rows]["patient_scan"].rename("id").to_csv("train_ids.csv", index=False)
"""

RECIPE = '[recipe]\noptimizer = "adamw"\nlr = 0.01\nbatch_size = 16\n'


def run_script(name: str, text: str) -> None:
    Path(name).write_text(text)
    subprocess.run([sys.executable, name], check=True)


def write_scans(count: int = 300) -> np.ndarray:
    """records.parquet: grey pictures of 16 x 16 pixels, three scans a patient, a seventh of the diagnoses wrong.

    Returns bool [count], by the order of ``patient_scan``: whose diagnosis is wrong.
    """
    import io

    from PIL import Image
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.default_rng(0)
    chosen = np.flatnonzero(digits.target < 3)[:count]
    truth = np.array(["benign", "healthy", "malignant"])[digits.target[chosen]]
    wrong = rng.random(count) < 1 / 7
    diagnosis = truth.copy()
    diagnosis[wrong] = rng.permutation(diagnosis[wrong])
    cells = []
    for image in digits.images[chosen]:
        content = io.BytesIO()
        Image.fromarray((image * 15.9).astype(np.uint8)).resize((16, 16)).save(content, "PNG")
        cells.append({"bytes": content.getvalue(), "path": None})
    patient = [f"p{row // 3:03}" for row in range(count)]
    table = pd.DataFrame({"scan": cells, "diagnosis": diagnosis, "patient": patient, "hospital": "north"})
    table["patient_scan"] = [f"{name}-{row % 3}" for row, name in enumerate(patient)]
    table.sample(frac=1, random_state=1).to_parquet("records.parquet")
    return diagnosis != truth


def commands_of_the_readme() -> list[list[str]]:
    section = README.read_text(encoding="utf-8").partition("## A stranger's model on odd data")[2]
    block = re.search(r"```sh\n(.*?)```", section, re.S)
    assert block is not None
    return [line.split()[1:] for line in block[1].splitlines()]


def swap(command: list[str], option: str, value: str) -> list[str]:
    """The command with another value of an option that it has."""
    place = command.index(option) + 1
    return [*command[:place], value, *command[place + 1 :]]


def read_audit(folder: str = "audit") -> dict[str, Any]:
    return json.loads((Path(folder) / "audit.json").read_text())


def test_scans_of_patients_by_a_resnet_of_ones_own(run: Run) -> None:
    wrong = write_scans()
    Path("net.py").write_text(NET)
    run_script("train.py", TRAIN)
    Path("small.toml").write_text(RECIPE)
    inspect, train, score = commands_of_the_readme()

    status, out, err = run(*inspect)
    assert status == 0, err
    assert "5,003 parameters" in out
    assert "layer2.downsample.1" in out
    assert "BatchNorm channels have gamma/sigma above 1" in " ".join(out.split())

    train = [*swap(train, "--n", "4"), "--epochs", "6", "--spec", "small.toml", "--workers", "1"]
    status, _, err = run(*train)
    assert status == 0, err

    status, _, err = run(*swap(score, "--twins", "2"), "--workers", "1")
    assert status == 0, err
    body = read_audit()
    records = pd.read_parquet("audit/records.parquet").set_index("id")
    given = set(pd.read_csv("train_ids.csv")["id"])
    assert body["target"]["arch"] == "net.py:Net"
    assert body["target"]["parameters"] == 5003
    assert body["target"]["norm_layers"] == {"BatchNorm2d": 6}
    assert [row["channels"] for row in body["batchnorm"]["layers"]] == [8, 8, 8, 16, 16, 16]
    assert body["target"]["member_accuracy"] > 0.9
    assert body["pool"]["arms"] == ["batch", "none", "none+fit"]

    members = set(records.index[records["member"]])
    assert members == given & set(records.index)
    row = next(r for r in body["attacks"] if (r["attack"], r["subset"]) == ("lira-online", "all"))
    assert (row["members"], row["nonmembers"]) == (len(members), len(records) - len(members))
    assert row["auc_ci"][0] > 0.5  # wrong diagnoses are learned by heart
    assert row["auc"] < 0.95

    groups = pd.read_parquet("pool/records.parquet").groupby("group")
    assert groups["role"].nunique().max() == 1  # a patient's scans stay together
    membership = np.load("pool/membership.npy")
    patients = pd.Series(records.index).str.split("-").str[0]
    assert (pd.DataFrame(membership.T).groupby(patients.to_numpy()).nunique() == 1).all(axis=None)

    suspected = records.index[records["subset_source"] == "suspected"]
    ids = np.array([f"p{row // 3:03}-{row % 3}" for row in range(len(wrong))])
    assert np.isin(suspected, ids[wrong]).mean() > 0.5

    effect = [r for r in body["batchnorm"]["effect"] if r["scope"] == "checkpoint"]
    assert {(r["reference"], r["matched"]) for r in effect} == {
        ("none", "epochs"),
        ("none+fit", "fit"),
        ("batch", "epochs"),
    }
    for r in effect:
        assert r["difference"] == pytest.approx(r["with_bn"] - r["without_bn"])
        assert r["ci"][0] <= r["difference"] <= r["ci"][1]
        if (r["subset"], r["metric"]) == ("all", "auc"):
            assert r["with_bn"] == pytest.approx(row["auc"])
            assert 0.4 < r["without_bn"] < 0.9


TABULAR_NET = """
from pathlib import Path

import numpy as np
import torch
from torch import nn

MEAN, STD = np.load(Path(__file__).with_name("scaler.npy"))


class Classifier(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(30, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Linear(hidden, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(),
        )
        self.head = nn.Linear(hidden, 2)

    def forward(self, x):
        features = self.body(x)
        return {"logits": self.head(features), "features": features}


def standardize(batch):
    return (batch - torch.from_numpy(MEAN).float()) / torch.from_numpy(STD).float()
"""

TABULAR_TRAIN = """
import numpy as np
import pandas as pd
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
table = pd.read_csv("records.csv", dtype={"case": str}).sort_values("case")
rows = np.sort(np.random.default_rng(5).permutation(len(table))[: len(table) // 2])
features = table.drop(columns=["case", "diagnosis"]).to_numpy()
np.save("scaler.npy", np.stack([features[rows].mean(0), features[rows].std(0)]))

from net import Classifier, standardize

x = standardize(torch.from_numpy(features).float())
y = torch.from_numpy((table["diagnosis"] == "benign").to_numpy().astype(int))  # malignant 0, as in scikit-learn
net = Classifier()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for epoch in range(40):
    for batch in torch.from_numpy(np.random.default_rng(epoch).permutation(rows)).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch])["logits"], y[batch]).backward()
        optimizer.step()
torch.save({"net": net.half().state_dict(), "acc": 99.1}, "model.pt")
table.iloc[rows]["case"].to_csv("members.txt", index=False, header=False)
"""


def test_a_table_of_breast_cancer_by_an_mlp_of_ones_own(run: Run) -> None:
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True)
    table = data.frame.drop(columns="target")
    table["diagnosis"] = data.target_names[data.target]
    flipped = np.random.default_rng(0).random(len(table)) < 0.1  # as annotators err
    table.loc[flipped, "diagnosis"] = np.where(table["diagnosis"][flipped] == "benign", "malignant", "benign")
    table["case"] = [f"{row:05}" for row in range(len(table))]
    table.sample(frac=1, random_state=3).to_csv("records.csv", index=False)
    Path("net.py").write_text(TABULAR_NET)
    run_script("train.py", TABULAR_TRAIN)
    Path("small.toml").write_text(RECIPE)
    Path("classes.txt").write_text("malignant\nbenign\n")
    shared = ["--data", "records.csv", "--label", "diagnosis", "--id", "case", "--arch", "net.py:Classifier(hidden=24)"]
    shared += ["--normalize", "net.py:standardize", "--spec", "small.toml", "--workers", "1", "--n", "4"]

    status, _, err = run("train-shadows", *shared, "--classes", "classes.txt", "--epochs", "28", "--arms", "batch,none")
    assert status == 0, err
    status, _, err = run("score", "model.pt", "--members", "members.txt", "--workers", "1")
    assert status == 0, err
    body = read_audit()
    assert "weights in float16 were cast to float32" in body["warnings"]
    assert body["target"]["norm_layers"] == {"BatchNorm1d": 2}
    assert body["target"]["member_accuracy"] > 0.9
    assert not any("they do not imitate it" in text for text in body["warnings"])
    row = next(r for r in body["attacks"] if (r["attack"], r["subset"]) == ("lira-online", "all"))
    listed = Path("members.txt").read_text().split()
    records = pd.read_parquet("audit/records.parquet")
    assert row["members"] == records["id"].isin(listed).sum()
    assert row["members"] + row["nonmembers"] == len(records) == 484
    assert row["auc_ci"][0] > 0.5
    assert row["auc"] < 0.9

    # Without the model's class order the two classes are exchanged, and the audit says what to look at.
    status, _, err = run("train-shadows", *shared, "--pool", "exchanged", "--epochs", "2", "--arms", "batch")
    assert status == 0, err
    assert run("score", "model.pt", "--pool", "exchanged", "--members", "members.txt", "--out", "doubtful")[0] == 0
    doubtful = read_audit("doubtful")
    assert doubtful["target"]["member_accuracy"] < 0.1
    assert any("they do not imitate it" in text and "--classes" in text for text in doubtful["warnings"])

"""The study of gradients on tables written by hand: pairs stay pairs, and every row has its value."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mia_audit.studies import gradient_units
from mia_audit.studies import gradients as study
from mia_audit.studies.judge import pair_mean
from mia_audit.studies.result import StudyRow
from shadow_pool.store.pool import Pool
from shadow_pool.train.job import TrainingOutcome
from shadow_pool.train.shadows import Shadow, starting_model
from shadow_pool.train.unit import Unit

SUBSETS = ("clean", "mislabeled", "ood")
MODELS = np.arange(8)
LOG_10 = float(np.log(10))


def table(**arms: np.ndarray) -> pd.DataFrame:
    """Cells at epoch 1 of 12 records a subset, loss log 10 of it; ``arms`` are norms [models, subsets], halved in
    the definition ``batch``."""
    rows = [
        {
            "arm": arm,
            "index": index,
            "epoch": 1,
            "definition": definition,
            "subset": subset,
            "record": 100 * place + record,
            "loss": 0.7 * LOG_10,
            # Records differ, their mean does not.
            "norm": norms[index, place] * (1 if definition == "eval" else 0.5) * (1 + (record - 5.5) / 100),
            "push:norm1": norms[index, place],
            "push:norm2": 3 * norms[index, place],
        }
        for (arm, norms), definition in product(arms.items(), ("eval", "batch"))
        for index, (place, subset), record in product(MODELS, enumerate(SUBSETS), range(12))
    ]
    return pd.DataFrame(rows)


def norms(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1, 4, (8, 3))


def drop(cells: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    return cells.drop(study._where(cells, **wanted).index)


def only(rows: list[StudyRow], **wanted: Any) -> StudyRow:
    (row,) = (row for row in rows if all(getattr(row, key) == value for key, value in wanted.items()))
    return row


def judged(cells: pd.DataFrame) -> list[StudyRow]:
    return [
        *study._course_rows(cells, SUBSETS),
        *study._early_rows(cells, "none", SUBSETS, 1),
        *study._equal_loss_rows(cells, "none", SUBSETS, classes=10),
        *study._loss_rows(cells, SUBSETS, classes=10),
        *study._push_rows(cells, SUBSETS, (1,)),
    ]


def test_rows_are_geometric_ratios_and_differences_of_pairs():
    ours, theirs = norms(0), norms(1)
    rows = judged(table(batch=ours, none=theirs))
    logs = np.log(ours / theirs)
    for claim in (study.LARGER, study.AT_EQUAL_LOSS):
        for definition, (place, subset) in product(("eval", "batch"), enumerate(SUBSETS)):
            mean, ci = pair_mean(logs[:, place])
            row = only(rows, claim=claim, subset=subset, metric=f"{definition} norm ratio")
            assert row.value == pytest.approx(np.exp(mean))
            assert row.ci == pytest.approx(np.exp(ci))
            assert (row.verdict is None) == (subset == "clean")
    more = only(rows, claim=study.MORE_THAN_CLEAN, subset="ood", metric="eval norm ratio over clean's")
    assert more.value == pytest.approx(np.exp((logs[:, 2] - logs[:, 0]).mean()))
    level = only(rows, claim=study.COURSE, arm="none", subset="ood", metric="eval norm")
    assert (level.value, level.ci) == (pytest.approx(theirs[:, 2].mean()), pytest.approx(pair_mean(theirs[:, 2])[1]))
    at_loss = only(rows, arm="batch", subset="ood", metric=f"batch norm at loss {LOG_10 / 2:.2f} to {LOG_10:.2f}")
    assert at_loss.value == pytest.approx(ours[:, 2].mean() / 2)
    assert not [row for row in rows if "at loss 0.58" in row.metric]  # nothing lies in that bin
    push = only(rows, claim=study.LOOP, subset="mislabeled")
    assert push.value == pytest.approx(2 * (ours[:, 1] - ours[:, 0]).mean())
    layer = only(rows, claim=study.COURSE, subset="clean", metric="eval push on gamma of norm2")
    assert layer.value == pytest.approx(3 * ours[:, 0].mean())


@pytest.mark.parametrize("lacking", [{"index": 2}, {"index": 5}], ids=["first", "second"])
@pytest.mark.parametrize("arm", ["batch", "none"])
def test_a_model_without_outliers_in_a_sample_drops_its_pair_alone(lacking: dict[str, int], arm: str):
    ours, theirs = norms(2), norms(3)
    cells = table(batch=ours, none=theirs)
    rows = judged(drop(cells, arm=arm, subset="ood", **lacking))
    left = np.arange(8)[np.arange(8) // 2 != lacking["index"] // 2]
    for claim in (study.LARGER, study.AT_EQUAL_LOSS):
        row = only(rows, claim=claim, subset="ood", metric="eval norm ratio")
        assert row.value == pytest.approx(np.exp(np.log(ours / theirs)[left, 2].mean()))
        whole = only(rows, claim=claim, subset="mislabeled", metric="eval norm ratio")
        assert whole.value == pytest.approx(np.exp(np.log(ours / theirs)[:, 1].mean()))
    push = only(rows, claim=study.LOOP, subset="ood")
    used = left if arm == "batch" else MODELS
    assert push.value == pytest.approx(2 * (ours[used, 2] - ours[used, 0]).mean())


def test_one_model_of_two_pairs_without_outliers_mixes_no_pairs():
    ours, theirs = norms(4), norms(5)
    cells = table(batch=ours, none=theirs)
    for index in (1, 2):
        cells = drop(cells, index=index, subset="ood")
    row = only(judged(cells), claim=study.LARGER, subset="ood", metric="batch norm ratio")
    assert row.value == pytest.approx(np.exp(np.log(ours / theirs)[4:, 2].mean()))


def test_a_subset_that_no_sample_holds_is_not_resolved():
    cells = drop(table(batch=norms(6), none=norms(7)), definition="batch", subset="ood")
    rows = judged(cells)
    row = only(rows, claim=study.LARGER, subset="ood", metric="batch norm ratio")
    assert math.isnan(row.value or 0)
    assert (row.ci, row.verdict) == (None, "not resolved")
    assert not [
        row for row in rows if row.claim == study.AT_EQUAL_LOSS and (row.subset, row.metric[:5]) == ("ood", "batch")
    ]
    for definition in ("eval", "batch"):
        study._course_figure(cells, SUBSETS, definition)
    study._loss_figure(cells, SUBSETS, 10)
    study._push_figure(drop(cells, subset="ood", index=2), SUBSETS)


def test_without_a_gamma_there_is_no_push():
    cells = table(batch=norms(8), none=norms(9)).drop(columns=["push:norm1", "push:norm2"])
    assert study._push_rows(cells, SUBSETS, (1,)) == []


def test_vulnerability_is_correlated_by_definition_and_subset_where_records_are_enough():
    rng = np.random.default_rng(10)
    sizes = {"clean": 30, "mislabeled": 25, "ood": study.FEWEST_RECORDS - 1}
    subset = np.repeat(list(sizes), list(sizes.values()))
    records = np.arange(len(subset))
    cells = pd.DataFrame(
        {
            "arm": "batch",
            "index": np.repeat([0, 1], len(subset)),
            "epoch": 3,
            "definition": "eval",
            "subset": np.tile(subset, 2),
            "record": np.tile(records, 2),
            "norm": rng.uniform(size=2 * len(subset)),
        }
    )
    few = cells[(cells["index"] == 0) & (cells["subset"] == "clean")].head(10).assign(definition="batch")
    exposed = rng.uniform(size=len(subset))
    rows = study._vulnerability_rows(exposed, pd.concat([cells, few]), "batch", 3)
    assert [(row.subset, row.metric.split()[3]) for row in rows] == [
        ("all", "eval"),
        ("clean", "eval"),
        ("mislabeled", "eval"),
    ]
    norm = cells["norm"].to_numpy().reshape(2, -1).mean(axis=0)
    for row in rows:
        keep = (subset == row.subset) | (row.subset == "all")
        assert row.value == pytest.approx(stats.spearmanr(norm[keep], exposed[keep]).statistic)


def test_every_arm_has_a_dash_of_its_own():
    arms = {name: norms(k) for k, name in enumerate(("batch", "none", "affine", "group", "none+fit", "layer"))}
    styles = [style for _, style in study._parts(table(**arms), SUBSETS)]
    assert len({(str(style["linestyle"]), style["color"]) for style in styles}) == len(styles) == 18


def test_a_fit_arm_is_trained_to_its_loss_again(pool, pool_data, tmp_path, monkeypatch):
    asked = {}

    def train(opened: Pool, arm: str, shadows: list[Shadow], **_: Any) -> Any:
        for shadow in shadows:
            asked[arm, shadow.index] = shadow.fit_loss
            assert shadow.on_epoch is not None
            shadow.on_epoch(1, starting_model(opened, arm), 0.0)
        return [(None, TrainingOutcome(epochs=7, loss=0.1, diverged=False))] * len(shadows)

    monkeypatch.setattr(gradient_units, "train_shadows", train)
    for arm in ("batch", "none+fit"):
        units = [Unit(pool.path, arm, index) for index in (1, 2)]
        receipts = gradient_units._measure_units(units, pool_data.records, [1, 9], tmp_path)
        assert [receipt.images for receipt in receipts] == [7 * pool.membership[index].sum() for index in (1, 2)]
    losses = {("none+fit", index): pool.info("batch", index).loss for index in (1, 2)}
    assert asked == {("batch", 1): None, ("batch", 2): None} | losses
    _, path = sorted((tmp_path / "none+fit").iterdir())
    found = pd.read_parquet(path)
    assert set(found["epoch"]) == {1}
    assert set(found[found["definition"] == "eval"]["record"]) == set(np.flatnonzero(pool.membership[2]))

"""The study of memorization on courses written by hand: models that lack a subset, arms that stop apart."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from mia_audit.studies import memorization as study
from mia_audit.studies.judge import pair_mean
from mia_audit.studies.memorization import Course
from mia_audit.studies.result import StudyRow


def course(accuracy: dict[int, dict[int, float]], *, lacking: tuple[int, ...] = ()) -> Course:
    """``accuracy``: index -> epoch -> on ood members; clean members 0.1 better. ``lacking``: models without ood."""
    rows = [
        (metric, subset, index, epoch, value if metric == "accuracy" else 1 - value)
        for index, values in accuracy.items()
        for epoch, level in values.items()
        for subset, value in (("clean", level + 0.1), ("ood", level))
        for metric in ("accuracy", "loss")
        if subset == "clean" or index not in lacking
    ]
    table = pd.DataFrame(rows, columns=["metric", "subset", "index", "epoch", "value"])
    return Course(np.array(sorted(accuracy)), table, table.groupby("index")["epoch"].max())


def straight(seed: int, epochs: tuple[int, ...] = (1, 2, 3), models: int = 8) -> dict[int, dict[int, float]]:
    rng = np.random.default_rng(seed)
    return {index: dict(zip(epochs, np.sort(rng.uniform(0, 0.9, len(epochs))), strict=True)) for index in range(models)}


def find(rows: list[StudyRow], metric: str, at: float | None = None) -> StudyRow:
    (row,) = (row for row in rows if row.metric.startswith(metric) and row.at == at)
    return row


def test_every_evaluated_epoch_has_a_row():
    values = straight(0)
    rows = study._arm_rows(course(values), "batch", "ood")
    for epoch in (1, 2, 3):
        expected = np.array([values[index][epoch] for index in range(8)])
        mean, ci = pair_mean(expected, within=(0, 1))
        row = find(rows, "accuracy", epoch)
        assert (row.value, row.ci) == (pytest.approx(mean), pytest.approx(ci))
        assert find(rows, "loss", epoch).value == pytest.approx(1 - mean)
    assert not [row for row in rows if "each model ends" in row.metric]


def test_models_without_a_subset_drop_their_pairs_alone():
    ours, theirs = straight(1), straight(2)
    courses = {"batch": course(ours, lacking=(2,)), "none": course(theirs, lacking=(5,))}
    rows = study._difference_rows(np.arange(8), courses, "none", ("ood",), {study.FURTHER: 3})
    left = [0, 1, 6, 7]
    gain = np.array([ours[index][3] - theirs[index][3] for index in left])
    row = next(row for row in rows if row.claim == study.FURTHER)
    assert (row.value, row.ci) == (pytest.approx(gain.mean()), pytest.approx(pair_mean(gain)[1]))
    clean = next(row for row in rows if row.subset == "clean")
    assert clean.value == pytest.approx(np.mean([ours[i][3] - theirs[i][3] for i in range(8)]))
    level = find(study._arm_rows(courses["batch"], "batch", "ood"), "accuracy", 3)
    assert level.value == pytest.approx(np.mean([ours[i][3] for i in (0, 1, 4, 5, 6, 7)]))
    assert study._figure(courses, "ood", "accuracy").caption.count("ends at") == 2


def test_a_subset_that_no_model_has_is_not_resolved():
    courses = {arm: course(straight(3), lacking=tuple(range(8))) for arm in ("batch", "none")}
    rows = study._arm_rows(courses["batch"], "batch", "ood")
    assert all(math.isnan(row.value or 0) and row.ci is None for row in rows)
    assert not [row for row in rows if "to fit" in row.metric]
    (row, *_) = (
        row
        for row in study._difference_rows(np.arange(8), courses, "none", ("ood",), {study.FURTHER: 3})
        if row.verdict
    )
    assert row.verdict == "not resolved"


def test_an_arm_whose_models_stop_apart_is_told_to_where_all_reach_and_where_each_ends():
    values = straight(4, (1, 2, 4)) | {1: {1: 0.2, 2: 0.5, 3: 0.8}, 6: {1: 0.1, 2: 0.6}}
    found = course(values)
    assert (found.epochs, found.end) == ([1, 2], None)
    rows = study._arm_rows(found, "none+fit", "ood")
    assert [row.at for row in rows if row.metric == "accuracy"] == [1, 2]
    last = np.array([list(values[index].values())[-1] for index in range(8)])
    end = find(rows, "accuracy where each model ends")
    assert (end.value, end.ci) == (pytest.approx(last.mean()), pytest.approx(pair_mean(last)[1]))
    assert find(rows, "epochs to fit 50 %, median of models (at most; empty: never)")
    caption = study._figure({"none+fit": found}, "ood", "accuracy").caption
    assert f"none+fit ends at {last.mean():.2f} (its models stop at epochs 2 to 4; drawn to 2, which all" in caption


def test_models_that_stop_at_once_share_no_epoch():
    found = course({0: {1: 0.2, 2: 0.3}, 1: {1: 0.1}, 2: {5: 0.3}, 3: {5: 0.4}})
    assert found.epochs == []
    assert "not drawn" in study._figure({"none+fit": found}, "ood", "loss").caption


@pytest.mark.parametrize(
    ("first", "median", "share"),
    [
        ((1, 1, 2, 3), 1.5, 1.0),
        ((1, 2, 3, None), 2.5, 0.75),
        ((1, 2, None, None), None, 0.5),
        ((None, None, None, None), None, 0.0),
    ],
)
def test_epochs_to_fit_are_the_median_over_models(first: tuple[int | None, ...], median: float | None, share: float):
    values = {
        index: {epoch: 0.6 if reached is not None and epoch >= reached else 0.3 for epoch in (1, 2, 3)}
        for index, reached in enumerate(first)
    }
    rows = study._arm_rows(course(values), "batch", "ood")
    row = find(rows, "epochs to fit 50 %, median")
    assert row.value == median
    assert find(rows, "share of models that fit 50 %").value == share

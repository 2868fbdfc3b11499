"""Suspected outliers from non-member predictions."""

from dataclasses import replace

import examples
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from mia_audit.report.methods import limits
from mia_audit.subsets import suspect_subsets
from shadow_pool.membership import draw_membership

CLASSES, N, M = 5, 1000, 8


def predictions(seed=0, *, outliers=True, signal=6.0):
    """Logits of M models: members are fitted perfectly; non-members show the true class, outliers aside."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, CLASSES, N)
    label = true.copy()
    subset = np.full(N, "clean", dtype=object)
    if outliers:
        subset[:50], subset[50:100] = "mislabeled", "ood"
        label[:50] = (true[:50] + rng.integers(1, CLASSES, 50)) % CLASSES
        label[50:100] = rng.integers(0, CLASSES, 50)
    membership = draw_membership(seed, M, N)
    logits = rng.standard_normal((M, N, CLASSES))
    ease = np.where(subset == "ood", 0.0, signal * rng.uniform(0.6, 1.2, N))
    logits[:, np.arange(N), true] += ease
    fitted = rng.standard_normal((M, N, CLASSES))
    fitted[:, np.arange(N), label] += 10
    logits = np.where(membership[..., None], fitted, logits)
    at_label = np.take_along_axis(logits, np.broadcast_to(label[None, :, None], (M, N, 1)), 2)[..., 0]
    others = np.where(np.arange(CLASSES) == label[:, None], -np.inf, logits)
    probability = softmax(logits, axis=2)
    arrays = {
        "label": label,
        "predicted": logits.argmax(2),
        "predicted_probability": probability.max(2).astype(np.float32),
        "phi": at_label - logsumexp(others, axis=2),
        "energy": -logsumexp(logits, axis=2).astype(np.float32),
        "membership": membership,
    }
    return arrays, subset, true


def share(found, truth, subset):
    hits = ((found == subset) & (truth == subset)).sum()
    return hits / (found == subset).sum(), hits / (truth == subset).sum()


def test_injected_outliers_are_found_with_their_true_class():
    arrays, subset, true = predictions()
    suspects = suspect_subsets(**arrays)
    for kind in ("mislabeled", "ood"):
        precision, recall = share(suspects.subset, subset, kind)
        assert precision > 0.8
        assert recall > 0.7
    found = suspects.subset == "mislabeled"
    assert (suspects.label[found & (subset == "mislabeled")] == true[found & (subset == "mislabeled")]).all()
    assert (suspects.label[~found] == -1).all()


def test_without_outliers_hardly_anything_is_suspected():
    arrays, _, _ = predictions(outliers=False)
    assert (suspect_subsets(**arrays).subset != "clean").mean() < 0.01


def test_members_predictions_do_not_count():
    arrays, _, _ = predictions()
    suspects = suspect_subsets(**arrays)
    rng = np.random.default_rng(1)
    member = arrays["membership"]
    for name in ("predicted_probability", "phi", "energy"):
        arrays[name] = np.where(member, rng.uniform(-5, 5, member.shape), arrays[name])
    arrays["predicted"] = np.where(member, rng.integers(0, CLASSES, member.shape), arrays["predicted"])
    again = suspect_subsets(**arrays)
    assert (again.subset == suspects.subset).all()


def test_models_of_other_scale_weigh_the_same():
    arrays, _, _ = predictions()
    suspects = suspect_subsets(**arrays)
    scale, shift = np.linspace(0.1, 9, M)[:, None], np.linspace(-50, 50, M)[:, None]
    arrays["energy"] = arrays["energy"] * scale + shift
    again = suspect_subsets(**arrays)
    assert (again.subset == suspects.subset).mean() > 0.999


def test_records_in_every_model_are_never_suspected():
    arrays, subset, _ = predictions()
    arrays["membership"][:, subset != "clean"] = True
    found = suspect_subsets(**arrays).subset
    assert (found[subset != "clean"] == "clean").all()


def test_models_that_know_nothing_suspect_next_to_nothing():
    arrays, _, _ = predictions(signal=0.0)
    assert (suspect_subsets(**arrays).subset == "ood").mean() < 0.05


@pytest.mark.parametrize(("last", "suspected"), [(0.3, False), (0.2, True)])
def test_the_confident_joint_by_hand(last, suspected):
    # Two classes, one model that trained on nothing. Class 0 is believed from (.9 + .8 + .55) / 3 = .75 on; the last
    # record's other class has .7 or .8.
    own = np.array([0.9, 0.8, 0.55, 0.9, 0.6, last])
    label = np.array([0, 0, 0, 1, 1, 1])
    predicted = np.where(own > 0.5, label, 1 - label)
    phi, nowhere = np.log(own / (1 - own)), np.zeros((1, 6), dtype=bool)
    found = suspect_subsets(
        label, predicted[None], np.maximum(own, 1 - own)[None], phi[None], np.zeros((1, 6)), nowhere
    )
    assert found.subset.tolist() == ["clean"] * 5 + ["mislabeled" if suspected else "clean"]
    assert found.label.tolist() == [-1] * 5 + [0 if suspected else -1]


def test_shapes_are_checked():
    arrays, _, _ = predictions()
    with pytest.raises(ValueError, match="phi must have shape"):
        suspect_subsets(**{**arrays, "phi": arrays["phi"][:, :-1]})


def test_a_report_with_suspects_says_how_often_they_were_right():
    records = examples.digits(200)
    given = examples.target_audit(records)
    suspected = given.records.assign(subset_source=given.records["subset_source"].replace("injected", "suspected"))
    says = [" ".join(limits(result)) for result in (given, replace(given, records=suspected))]
    assert ["benchmarks/subsets.py" in text for text in says] == [False, True]

"""LiRA against its formula, its goldens and its edge cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import lira_reference, shrunk_densities, without
from scipy import integrate, stats

from mia_audit.attacks import lira, lira_pool
from mia_audit.attacks.spreads import SPREADS, Density
from mia_audit.metrics import roc
from shadow_pool.errors import UserError
from shadow_pool.membership import draw_membership

# ``shrunk`` has its own formula, and its own tests below.
PLAIN = sorted(set(SPREADS) - {"shrunk"})
VARIANTS = [("online", "upper"), ("offline", "upper"), ("offline", "two-sided")]
CENTRES = ["mean", "median"]
SMALL = settings(max_examples=25, deadline=None)


def draw(seed: int, models: int, records: int, queries: int, *, paired: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """phi [M, N, Q] whose level, spread and in-shift differ by record, and membership."""
    rng = np.random.default_rng(seed)
    membership = draw_membership(seed, models, records) if paired else rng.random((models, records)) < 0.5
    level, spread, shift = rng.normal(0, 3, records), rng.gamma(2, 1, records), rng.gamma(1, 2, records)
    phi = level + shift * membership + spread * rng.standard_normal((models, records))
    return phi[..., None] + 0.3 * rng.standard_normal((models, records, queries)), membership


@pytest.mark.parametrize("spread", PLAIN)
@pytest.mark.parametrize("centre", CENTRES)
@pytest.mark.parametrize(("mode", "tail"), VARIANTS)
@given(
    seed=st.integers(0, 10_000), models=st.integers(2, 9), queries=st.integers(1, 3), offset=st.sampled_from([0, -1e3])
)
@settings(max_examples=8, deadline=None)
def test_a_target_agrees_with_the_formula(spread, centre, mode, tail, seed, models, queries, offset):
    phi, membership = draw(seed, models + 1, 7, queries, paired=False)
    phi += offset
    options = {"mode": mode, "spread": spread, "centre": centre, "tail": tail}
    found = lira(phi[0], phi[1:], membership[1:], **options)
    np.testing.assert_allclose(found, lira_reference(phi[0], phi[1:], membership[1:], **options), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("spread", PLAIN)
@pytest.mark.parametrize("centre", CENTRES)
@pytest.mark.parametrize(("mode", "tail"), VARIANTS)
@pytest.mark.parametrize("leave_out", ["pair", "one"])
@given(seed=st.integers(0, 10_000), pairs=st.integers(2, 5), queries=st.integers(1, 2))
@settings(max_examples=3, deadline=None)
def test_a_pool_is_every_model_in_turn_as_target(spread, centre, mode, tail, leave_out, seed, pairs, queries):
    phi, membership = draw(seed, 2 * pairs, 6, queries, paired=leave_out == "pair")
    options = {"mode": mode, "spread": spread, "centre": centre, "tail": tail}
    found = lira_pool(phi, membership, leave_out=leave_out, **options)
    for i in range(2 * pairs):
        gone = [i, i ^ 1] if leave_out == "pair" else [i]
        expected = lira_reference(phi[i], without(phi, gone), without(membership, gone), **options)
        np.testing.assert_allclose(found[i], expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("centre", CENTRES)
@given(seed=st.integers(0, 10_000), pairs=st.integers(3, 5), queries=st.integers(1, 2))
@settings(max_examples=8, deadline=None)
def test_shrunk_agrees_with_the_posterior_solved_for(centre, seed, pairs, queries):
    phi, rows = draw(seed, 2 * pairs, 90, queries)
    target, shadows, rows = phi[0], phi[1:], rows[1:]  # a record has one value more on one side than on the other
    cells = [(r, q) for r in range(90) for q in range(queries)]
    inside, outside = ([shadows[side[:, r], r, q] for r, q in cells] for side in (rows, ~rows))
    expected = np.empty((90, queries))
    for (r, q), (density_in, density_out) in zip(cells, shrunk_densities(inside, outside, centre), strict=True):
        expected[r, q] = stats.t.logpdf(target[r, q], *density_in) - stats.t.logpdf(target[r, q], *density_out)
    found = lira(target, shadows, rows, spread="shrunk", centre=centre)
    np.testing.assert_allclose(found, expected.mean(axis=1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("leave_out", ["pair", "one"])
def test_a_shrunk_pool_is_every_model_in_turn_as_target(leave_out):
    phi, membership = draw(1, 10, 120, 2, paired=leave_out == "pair")
    found = lira_pool(phi, membership, leave_out=leave_out, spread="shrunk")
    for i in range(10):
        gone = [i, i ^ 1] if leave_out == "pair" else [i]
        expected = lira(phi[i], without(phi, gone), without(membership, gone), spread="shrunk")
        np.testing.assert_allclose(found[i], expected, rtol=1e-7, atol=1e-9)


def test_shrinking_finds_more_members_where_models_are_few():
    rng = np.random.default_rng(0)
    level = rng.normal(0, 3, 2000)
    aucs = {spread: [] for spread in ("moderated", "shrunk")}
    for seed in range(4):
        membership = draw_membership(seed, 8, 2000)
        shift = np.exp(-level / 3) * rng.gamma(4, 0.25, 2000)
        phi = level + shift * membership + 1.5 * rng.standard_normal((8, 2000))
        for spread, values in aucs.items():
            values.append(roc(membership, lira_pool(phi, membership, spread=spread)).auc)
    assert (np.array(aucs["shrunk"]) > np.array(aucs["moderated"]) + 0.01).all()


def test_shrunk_offline_is_moderated_offline():
    phi, membership = draw(4, 8, 60, 1)
    shrunk = lira_pool(phi, membership, mode="offline", spread="shrunk")
    np.testing.assert_array_equal(shrunk, lira_pool(phi, membership, mode="offline"))


@pytest.mark.parametrize(
    ("spread", "expected"),
    [("record", [1.41893853, 1.41893853, 3.72152363]), ("pooled", [2.69682468, 2.69682468, 4.15270703])],
)
def test_published_values(spread, expected):
    shadows = np.array([[1.0, 0.0, 0.0], [-1.0, -2.0, -20.0]])
    out = np.zeros((2, 3), dtype=bool)
    found = lira(np.array([1.0, 0.0, 0.0]), shadows, out, mode="offline", tail="two-sided", spread=spread)
    np.testing.assert_allclose(found, expected, atol=5e-9)


def test_the_one_sided_tail_neither_saturates_nor_turns_round():
    shadows = np.random.default_rng(0).standard_normal((40, 200))
    out = np.zeros((40, 200), dtype=bool)
    for spread in SPREADS:
        scores = [
            lira(np.full(200, x), shadows, out, mode="offline", spread=spread) for x in (-1e6, -5, 0, 5, 50, 1e6, 1e12)
        ]
        assert (np.diff(scores, axis=0) > 0).all(), spread
        assert np.isfinite(scores).all(), spread
    low, high = (lira(np.full(200, x), shadows, out, mode="offline", tail="two-sided") for x in (-50.0, 1.0))
    assert (low > high).all()


@given(freedom=st.floats(0.5, 1e7), z=st.floats(0.1, 1e6))
@settings(max_examples=200, deadline=None)
def test_student_tail_is_exact_however_deep(freedom, z):
    density = Density(np.zeros((1, 1)), np.ones((1, 1)), np.array(freedom))
    # With u = z exp(w) the tail is f(z) z times the integral over w > 0 of exp(w) f(u) / f(z).
    log_f = lambda u: -(freedom + 1) / 2 * np.log1p(u * u / freedom)  # noqa: E731
    scale = max(1 / freedom, min(1 / z**2, 1.0))
    area, _ = integrate.quad(lambda s: np.exp(s * scale + log_f(z * np.exp(s * scale)) - log_f(z)), 0, 100, limit=500)
    expected = stats.t.logpdf(z, freedom) + np.log(z * scale * area)
    assert density.log_sf(np.array([[z]]))[0, 0] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("spread", SPREADS)
def test_offline_needs_no_in_shadows(spread):
    phi, _ = draw(0, 10, 30, 1)
    out = np.zeros((9, 30), dtype=bool)
    assert np.isfinite(lira(phi[0], phi[1:], out, mode="offline", spread=spread)).all()
    assert np.isnan(lira(phi[0], phi[1:], out, mode="online", spread=spread)).all()


@pytest.mark.parametrize("spread", SPREADS)
def test_too_few_values_on_a_needed_side_score_nan(spread):
    phi, _ = draw(1, 10, 4, 1)
    membership = np.ones((9, 4), dtype=bool)
    membership[:4, 0] = False  # 5 in, 4 out
    membership[1:, 1] = False  # 1 in
    membership[:1, 2] = False  # 1 out; record 3 is in everywhere
    online = lira(phi[0], phi[1:], membership, spread=spread)
    offline = lira(phi[0], phi[1:], membership, spread=spread, mode="offline")
    assert np.isnan(online).tolist() == [False, True, True, True]
    assert np.isnan(offline).tolist() == [False, False, True, True]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_constant_sides_score_zero(spread, mode):
    membership = draw_membership(0, 8, 5)
    phi = np.where(membership, 2.7, 0.1) * np.arange(1, 6)
    if spread == "pooled-in":
        phi = np.where(membership, 2.7, 0.1) * np.ones(5)  # its std is over records too
    assert (lira_pool(phi, membership, spread=spread, mode=mode) == 0).all()


def test_one_constant_record_scores_zero_by_its_own_spread_and_not_by_a_shared_one():
    phi, membership = draw(2, 16, 40, 1)
    phi[:, 3] = np.where(membership[:, 3, None], 5.0, 0.1)
    assert (lira_pool(phi, membership, spread="record")[:, 3] == 0).all()
    shared = lira_pool(phi, membership)[:, 3]
    assert np.isfinite(shared).all()
    assert (shared[membership[:, 3]] > 0).all()


def test_one_outlying_value_left_out_leaves_no_trace():
    phi, membership = draw(3, 12, 20, 1)
    phi[4, 7] = 1e12
    found = lira_pool(phi, membership, spread="record")
    expected = lira_reference(phi[4], without(phi, [4, 5]), without(membership, [4, 5]), spread="record")
    np.testing.assert_allclose(found[4], expected, rtol=1e-7)
    phi[:, 7] = np.where(membership[:, 7], 1.0, 0.0)[:, None]
    phi[4, 7] = 1e12
    assert (lira_pool(phi, membership, spread="record")[[4, 5], 7] == 0).all()


@pytest.mark.parametrize("spread", ["record", "pooled", "moderated", "shrunk"])
@pytest.mark.parametrize("centre", CENTRES)
@given(seed=st.integers(0, 1000), exponent=st.integers(0, 9))
@SMALL
def test_a_constant_added_to_all_phi_changes_nothing(spread, centre, seed, exponent):
    phi, membership = draw(seed, 8, 9, 1)
    # On a grid the shifted values are exact, so what is left is the arithmetic of the attack.
    phi = np.round(phi * 64) / 64
    shifted = phi + 10.0**exponent
    assert ((shifted - 10.0**exponent) == phi).all()
    plain = lira_pool(phi, membership, spread=spread, centre=centre)
    np.testing.assert_allclose(
        lira_pool(shifted, membership, spread=spread, centre=centre), plain, rtol=1e-6, atol=1e-6
    )


@given(seed=st.integers(0, 1000))
@SMALL
def test_order_of_records_pairs_and_sides(seed):
    phi, membership = draw(seed, 8, 11, 2)
    rng = np.random.default_rng(seed)
    scores = lira_pool(phi, membership)
    records = rng.permutation(11)
    np.testing.assert_allclose(lira_pool(phi[:, records], membership[:, records]), scores[:, records], rtol=1e-9)
    models = (2 * rng.permutation(4)[:, None] + np.arange(2)).ravel()
    np.testing.assert_allclose(lira_pool(phi[models], membership[models]), scores[models], rtol=1e-9)
    by_record = lira_pool(phi, membership, spread="record")
    np.testing.assert_allclose(lira_pool(phi, ~membership, spread="record"), -by_record, rtol=1e-9, atol=1e-12)


def test_blocks_of_records_do_not_show(monkeypatch):
    phi, membership = draw(5, 8, 50, 2)
    whole = lira_pool(phi, membership, centre="median")
    target = lira(phi[0], phi[2:], membership[2:])
    monkeypatch.setattr("mia_audit.attacks.shadows._BLOCK_CELLS", 8 * 2 * 7)
    np.testing.assert_array_equal(lira_pool(phi, membership, centre="median"), whole)
    np.testing.assert_array_equal(lira(phi[0], phi[2:], membership[2:]), target)


def test_float32_and_lists_and_memory_maps_are_read_as_float64(tmp_path):
    phi, membership = draw(6, 8, 20, 1)
    single = phi[..., 0].astype(np.float32)
    expected = lira_pool(single.astype(np.float64), membership)
    assert expected.dtype == np.float64
    np.testing.assert_array_equal(lira_pool(single, membership), expected)
    np.testing.assert_array_equal(lira_pool(single.tolist(), membership), expected)
    np.save(tmp_path / "phi.npy", single)
    mapped = np.load(tmp_path / "phi.npy", mmap_mode="r", allow_pickle=False)
    np.testing.assert_array_equal(lira_pool(mapped, membership), expected)


def test_unpaired_membership_is_refused_under_pair_and_taken_under_one():
    phi, membership = draw(7, 8, 30, 1, paired=False)
    with pytest.raises(ValueError, match=r'complementary pairs .* leave_out="pair".*leave_out="one"'):
        lira_pool(phi, membership)
    assert np.isfinite(lira_pool(phi, membership, leave_out="one")).any()
    with pytest.raises(ValueError, match="complementary pairs"):
        lira_pool(phi[:7], draw_membership(0, 8, 30)[:7])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_phi_that_is_not_finite_is_refused(bad):
    phi, membership = draw(8, 8, 5, 1)
    phi[3, 2] = bad
    with pytest.raises(ValueError, match="phi must be finite, got 1 NaN or infinite"):
        lira_pool(phi, membership)
    with pytest.raises(ValueError, match="target_phi must be finite"):
        lira(phi[3], phi[:2], membership[:2])


def test_shapes_and_names_are_checked():
    phi, membership = draw(9, 8, 5, 2)
    with pytest.raises(ValueError, match="membership must be bool"):
        lira_pool(phi, membership.astype(int))
    with pytest.raises(ValueError, match=r"membership must have shape \(8, 5\) as phi, got \(8, 4\)"):
        lira_pool(phi, membership[:, :4])
    with pytest.raises(ValueError, match="target_phi must have"):
        lira(phi[0, :, 0], phi[1:], membership[1:])
    with pytest.raises(ValueError, match="target_phi must have shape"):
        lira(phi, phi[1:], membership[1:])
    with pytest.raises(ValueError, match="phi must have shape"):
        lira_pool(phi[0, :, 0], membership)
    for option in ("mode", "spread", "centre", "tail", "leave_out"):
        with pytest.raises(UserError, match=f"unknown {option} 'nothing'"):
            lira_pool(phi, membership, **{option: "nothing"})

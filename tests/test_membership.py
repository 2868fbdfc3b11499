import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadow_pool.membership import draw_coins, draw_membership


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 6), st.integers(1, 60))
def test_every_record_is_in_exactly_half_the_models_and_rows_come_in_complements(seed, pairs, records):
    rows = draw_membership(seed, 2 * pairs, records)
    assert rows.shape == (2 * pairs, records)
    assert rows.dtype == bool
    assert np.array_equal(rows[1::2], ~rows[0::2])
    assert (rows.sum(axis=0) == pairs).all()
    assert set(rows.sum(axis=1)) <= {records // 2, records - records // 2}


def test_growing_by_pairs_leaves_older_rows_as_they_were():
    assert np.array_equal(draw_membership(4, 12, 33)[:6], draw_membership(4, 6, 33))


def test_seeds_and_pairs_draw_apart():
    rows = draw_membership(0, 8, 400)
    agreement = (rows[0] == rows[2]).mean()
    assert 0.35 < agreement < 0.65
    assert not np.array_equal(rows, draw_membership(1, 8, 400))


def test_with_an_odd_record_count_neither_half_is_favoured():
    sizes = draw_membership(0, 400, 5)[0::2].sum(axis=1)
    assert 70 < (sizes == 3).sum() < 130


def test_groups_move_whole_and_halves_stay_near_equal():
    group = np.array([f"patient {i // 3}" for i in range(60)], dtype=object)
    rows = draw_membership(2, 20, 60, group)
    assert np.array_equal(rows[1::2], ~rows[0::2])
    for start in range(0, 60, 3):
        assert (rows[:, start : start + 3] == rows[:, start : start + 1]).all()
    assert (abs(rows.sum(axis=1) - 30) <= 3).all()


def test_odd_n_and_misshapen_groups_are_refused():
    with pytest.raises(ValueError, match="even, got 3"):
        draw_membership(0, 3, 10)
    with pytest.raises(ValueError, match=r"shape \(10,\)"):
        draw_membership(0, 4, 10, np.array(["a"] * 9, dtype=object))


def test_coins_are_fair_independent_of_the_halves_and_pure_in_the_seed():
    member = draw_coins(3, 10_000)
    assert np.array_equal(member, draw_coins(3, 10_000))
    assert abs(member.mean() - 0.5) < 0.02
    assert abs((member == draw_membership(3, 2, 10_000)[0]).mean() - 0.5) < 0.02
    assert len({int(draw_coins(seed, 101).sum()) for seed in range(30)}) > 5

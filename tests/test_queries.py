import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadow_pool.errors import UserError
from shadow_pool.queries import PLAIN, View, apply_view, query_views, shift_images


def test_the_plain_record_comes_first_then_the_nearest_shifts():
    views = query_views(9, (1, 8, 8))
    assert views[0] == PLAIN
    distance = [view.dy**2 + view.dx**2 for view in views]
    assert distance == sorted(distance) == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert len(set(query_views(25, (1, 8, 8)))) == 25
    assert not any(view.flip for view in query_views(25, (1, 8, 8)))


def test_colour_images_are_also_mirrored():
    assert query_views(2, (3, 32, 32)) == (PLAIN, View(flip=True))
    assert len(set(query_views(50, (3, 32, 32)))) == 50


def test_more_views_than_there_are_is_an_error_that_names_the_most():
    with pytest.raises(UserError, match=r"at most 25.*got 26.*--queries 25"):
        query_views(26, (1, 8, 8))
    with pytest.raises(UserError, match="at most 1 "):
        query_views(2, (30,))


@given(st.integers(-2, 2), st.integers(-2, 2))
def test_shifts_agree_with_padding_by_edges(dy, dx):
    x = np.arange(2 * 3 * 5 * 6, dtype=np.float32).reshape(2, 3, 5, 6)
    padded = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)), mode="edge")
    expected = padded[:, :, 2 - dy : 7 - dy, 2 - dx : 8 - dx]
    assert np.array_equal(shift_images(torch.from_numpy(x), dy, dx).numpy(), expected)


def test_a_view_mirrors_first_and_leaves_the_batch_as_it_was():
    x = torch.arange(12, dtype=torch.uint8).reshape(1, 1, 3, 4)
    kept = x.clone()
    assert torch.equal(apply_view(x, View(dx=1, flip=True)), shift_images(x.flip(-1), 0, 1))
    assert apply_view(x, PLAIN) is x
    assert torch.equal(x, kept)

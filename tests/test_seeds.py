import numpy as np
import pytest
import torch

from shadow_pool import seeds


def test_equal_arguments_give_equal_streams():
    assert np.array_equal(seeds.stream(3, "batches", 1, 2).random(8), seeds.stream(3, "batches", 1, 2).random(8))
    assert seeds.integer(3, "weights", 1) == seeds.integer(3, "weights", 1)


def test_seed_purpose_and_index_each_change_the_stream():
    keys = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 0)]
    draws = {tuple(seeds.stream(*key).integers(0, 2**62, 4)) for key in keys}
    assert len(draws) == len(keys)
    assert len({seeds.integer(*key) for key in keys}) == len(keys)


def test_known_values_never_change():
    # A pool on disk is redrawn from these: a change here is a change of protocol.
    assert seeds.stream(0, "membership", 0).integers(0, 1000, 4).tolist() == [900, 43, 82, 402]
    assert seeds.integer(0, "weights", 0) == 6788185722372399961


def test_integers_fit_torchs_generators():
    values = [seeds.integer(7, "x", index) for index in range(200)]
    assert all(0 <= value < 2**63 for value in values)
    torch.Generator().manual_seed(max(values))


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="non-negative"):
        seeds.stream(-1, "a")


def test_torch_stream_seeds_the_block_and_restores_the_callers_stream():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeds.torch_stream(9):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeds.torch_stream(9):
        assert torch.equal(torch.rand(3), first)


def test_numpys_global_generator_is_untouched():
    state = np.random.get_state()[1].copy()  # noqa: NPY002 (the global generator is what is tested)
    seeds.stream(0, "a").random(10)
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002

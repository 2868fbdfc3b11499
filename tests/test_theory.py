"""The one-channel theory: every closed form against autograd in float64, and the simulations built on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_audit.batchnorm import simulate, theory
from mia_audit.batchnorm.theory import Batch, Channel, Statistics

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def problem(seed: int, *, draws: int = 5, batch_size: int = 8, side: int = 5, strength: float = 3.0):
    """A random problem whose statistics belong to no batch."""
    channel, batch = simulate.draw_problem(
        draws=draws, batch_size=batch_size, image_side=side, strength=strength, seed=seed
    )
    rng = np.random.default_rng(seed)
    uniform = lambda low, high: torch.from_numpy(rng.uniform(low, high, draws))  # noqa: E731
    channel = replace(channel, gamma=uniform(0.3, 3), offset=uniform(-1, 1))
    return channel, batch, Statistics(uniform(-1, 1), uniform(0.3, 3))


def test_the_channel_is_a_convolution():
    images = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 7, 6, 6)))
    channel, _, _ = problem(0, draws=2, side=6)
    channel = replace(channel, offset=torch.zeros(2, dtype=torch.float64))
    batch = Batch(theory.unfold(images, 3), torch.ones(2, 7, dtype=torch.float64))
    for draw in range(2):
        z = torch.nn.functional.conv2d(images[draw][:, None], channel.kernel[draw].reshape(1, 1, 3, 3))
        expected = z.flatten(1) @ channel.classifier[draw]
        torch.testing.assert_close(theory.margin(channel, batch, None)[draw], expected, **EXACT)


def test_live_margin_is_torch_batch_norm():
    channel, batch, _ = problem(1)
    live = theory.margin(channel, batch, theory.live_statistics(channel, batch))
    for draw in range(5):
        z = batch.patches[draw] @ channel.kernel[draw]
        gamma = channel.gamma[draw].reshape(1)
        y = torch.nn.functional.batch_norm(z[:, None], None, None, gamma, training=True, eps=1e-14)[:, 0]
        expected = batch.sign[draw] * (y @ channel.classifier[draw] + channel.offset[draw])
        torch.testing.assert_close(live[draw], expected, **EXACT)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), lr=st.floats(1e-3, 1.0))
def test_growth_is_what_a_step_does(seed: int, lr: float):
    channel, batch, statistics = problem(seed)
    for used in (None, statistics):
        predicted = theory.growth(channel, batch, used, lr=lr)
        torch.testing.assert_close(theory.measured_growth(channel, batch, used, lr=lr), predicted, **EXACT)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_growth_ratio_is_the_amplification_at_equal_margins(seed: int):
    channel, batch, statistics = problem(seed)
    with_bn = theory.measured_growth(channel, batch, statistics, lr=0.1)
    without = theory.measured_growth(channel, batch, None, lr=0.1)
    # Multiplied out: a saturated record's growth is a difference of margins down at their rounding error.
    torch.testing.assert_close(with_bn, theory.growth_ratio(channel, batch, statistics) * without, **EXACT)

    matched = theory.equal_margin(channel, batch, statistics)
    own = theory.margin(matched, batch, statistics)[:, 0]
    torch.testing.assert_close(own, theory.margin(channel, batch, None)[:, 0], **EXACT)
    with_bn = theory.measured_growth(matched, batch, statistics, lr=0.1)
    torch.testing.assert_close(with_bn, (channel.gamma / statistics.std) ** 2 * without, **EXACT)


def test_gamma_push_is_autograd():
    channel, batch, statistics = problem(2)
    gamma = channel.gamma.clone().requires_grad_()
    own = theory.margin(replace(channel, gamma=gamma), batch, statistics)[:, 0]
    (expected,) = torch.autograd.grad(own.sum(), gamma)
    torch.testing.assert_close(theory.gamma_push(channel, batch, statistics), expected, **EXACT)


def test_live_slope_is_autograd_and_ignores_the_scale_of_the_kernel():
    channel, batch, _ = problem(3)
    kernel = channel.kernel.clone().requires_grad_()
    trial = replace(channel, kernel=kernel)
    own = theory.margin(trial, batch, theory.live_statistics(trial, batch))[:, 0]
    (expected,) = torch.autograd.grad(own.sum(), kernel)
    slope = theory.live_slope(channel, batch)
    torch.testing.assert_close(slope, expected, **EXACT)
    torch.testing.assert_close((slope * channel.kernel).sum(-1), torch.zeros(5, dtype=torch.float64), **EXACT)


def test_scaling_the_kernel_divides_the_ratio_and_leaves_the_function():
    channel, batch, _ = problem(4)
    half = replace(channel, kernel=channel.kernel / 2)
    before, after = (theory.live_statistics(c, batch) for c in (channel, half))
    torch.testing.assert_close(theory.margin(half, batch, after), theory.margin(channel, batch, before), **EXACT)
    torch.testing.assert_close(theory.amplification(half, after), 4 * theory.amplification(channel, before), **EXACT)


def test_decay_alone_raises_the_ratio_by_its_inverse():
    channel, batch, _ = problem(5)
    ratio = simulate.decay_alone(channel, batch, steps=7, lr=0.1, weight_decay=0.5)
    np.testing.assert_allclose(ratio[-1] / ratio[0], 0.95**-7, rtol=1e-9)


def test_a_strong_record_alone_at_its_position_is_normalized_away_in_small_batches():
    small, large = (
        np.median(
            simulate.live_share(
                *simulate.draw_problem(draws=40, batch_size=size, image_side=3, strength=10.0, seed=0), lr=1e-4
            )[0]
        )
        for size in (4, 1024)
    )
    assert small < 0.01
    assert large > 0.6


def test_live_share_of_a_small_step_is_its_first_order():
    channel, batch = simulate.draw_problem(draws=20, batch_size=16, image_side=6, strength=3.0, seed=1)
    first_order, measured = simulate.live_share(channel, batch, lr=1e-6)
    np.testing.assert_allclose(measured, first_order, rtol=1e-3)


def test_training_one_step_by_hand():
    channel, batch = simulate.draw_problem(draws=3, batch_size=8, image_side=3, strength=2.0, seed=2)
    course = simulate.train(channel, batch, batchnorm=True, learn_gamma=True, steps=1, lr=0.3, weight_decay=0.1)
    leaves = [getattr(channel, name).clone().requires_grad_() for name in ("kernel", "classifier", "offset", "gamma")]
    model = Channel(*leaves)
    loss = torch.nn.functional.softplus(-theory.margin(model, batch, theory.live_statistics(model, batch)))
    loss.mean(-1).sum().backward()
    after = Channel(*(leaf.detach() - 0.3 * (leaf.grad + 0.1 * leaf.detach()) for leaf in leaves))
    statistics = theory.live_statistics(after, batch)
    np.testing.assert_allclose(course.gamma[1], after.gamma, rtol=1e-9)
    np.testing.assert_allclose(course.ratio[1], after.gamma / statistics.std, rtol=1e-9)
    np.testing.assert_allclose(course.margin[1], theory.margin(after, batch, statistics)[:, 0], rtol=1e-9)
    np.testing.assert_allclose(course.loss, np.logaddexp(0, -course.margin), rtol=1e-9)


def test_a_fixed_gamma_stays_and_no_batchnorm_has_none():
    channel, batch = simulate.draw_problem(draws=3, batch_size=8, image_side=3, strength=2.0, seed=2)
    fixed = simulate.train(channel, batch, batchnorm=True, learn_gamma=False, steps=3, lr=0.3, weight_decay=0.1)
    assert (fixed.gamma == 1).all()
    without = simulate.train(channel, batch, batchnorm=False, learn_gamma=False, steps=3, lr=0.3, weight_decay=0.1)
    assert np.isnan(without.gamma).all()
    assert np.isnan(without.ratio).all()


def test_problems_are_paired_over_strengths_and_labels():
    weak, strong = (
        simulate.draw_problem(draws=2, batch_size=4, image_side=3, strength=s, seed=0, mislabeled=m)
        for s, m in ((1.0, False), (5.0, True))
    )
    torch.testing.assert_close(strong[1].patches[:, 0], 5 * weak[1].patches[:, 0])
    torch.testing.assert_close(strong[1].patches[:, 1:], weak[1].patches[:, 1:])
    assert (strong[1].sign[:, 0] == -weak[1].sign[:, 0]).all()


def test_a_batch_of_float32_or_wrong_signs_is_refused():
    with pytest.raises(ValueError, match="float64"):
        Batch(torch.zeros(2, 3, 4, 5), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"sign must be \(2, 3\)"):
        Batch(torch.zeros(2, 3, 4, 5, dtype=torch.float64), torch.ones(3))

r"""What BatchNorm does to one gradient step on an outlier: one convolution channel, one linear classifier.

The setting is that of arXiv 2605.24420. A record is its patches U [P, K] (P output positions, K kernel
weights), so the channel's output is z = U w. A linear classifier with weights a [P] and offset b reads it;
with the sign t = +1 or -1 of the label the margin and the logistic loss are

    without BatchNorm   m0 = t (a.z + b)                          loss = softplus(-m)
    with BatchNorm      m1 = t (gamma a.(z - mu)/sigma + b)       loss'(m) = -s(-m), s the logistic function

(BatchNorm's own shift adds beta sum(a) to the offset, so b holds both.) Write v = U^T a and r = gamma/sigma.

**One step at fixed statistics.** Both margins are linear in w, with dm0/dw = t v and dm1/dw = r t v. A step
of size lr on the record's own loss, on w alone, moves w by lr s(-m) dm/dw and therefore the margin by exactly

    growth0 = lr s(-m0) |v|^2                 growth1 = lr s(-m1) r^2 |v|^2

    growth1 / growth0 = r^2 s(-m1)/s(-m0)                                                             (1)

At equal margins the loss derivatives are equal and the ratio is r^2 = (gamma/sigma)^2, the amplification.
When they differ, s(-m1)/s(-m0) multiplies it: a record that BatchNorm has already fitted (m1 > m0) grows less.

**The push on gamma.** dm1/dgamma = t a.(z - mu)/sigma = (m1 - t b)/gamma.                            (2)
A step on the loss moves gamma by lr s(-m1) times (2): in proportion to how many sigma the record lies from
the mean, up once the record is on its right side, down while it is on the wrong one. A larger gamma enlarges
r^2 in (1), so from there on the loop closes until s(-m1) has vanished.

**What fixed statistics hide.** In training mu and sigma are those of the batch, N = B P values whose mean
patch is u, and move with w. With h = (z - mu)/sigma and c the mean over the batch of h times its patch,

    dm1/dw = r t (v - sum(a) u - (a.h) c)                                                             (3)

The record's own part of c shrinks (3): alone in its batch it would be normalized away. By w.c = sigma, (3)
is orthogonal to w: BatchNorm ignores the kernel's scale. In a large batch of white inputs c is w/|w|, and what (3)
lacks of r t v is its component along w, on average 1/K of |v|^2.

**The kernel's scale.** w -> k w leaves m1 as it is and turns r into r/k, while growth0 does not change: weight
decay on w alone raises the amplification of the same function step by step.                          (4)

All tensors are float64. Leading axes (written D: independent draws) are free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Channel:
    """The parameters of the model, each with the leading axes of the draws.

    Attributes:
        kernel: [D, K] convolution weights w.
        classifier: [D, P] weights a over the output positions.
        offset: [D] classifier offset b (BatchNorm's shift included).
        gamma: [D] BatchNorm's scale.
    """

    kernel: Tensor
    classifier: Tensor
    offset: Tensor
    gamma: Tensor


@dataclass(frozen=True)
class Batch:
    """A batch of records; record 0 is the one whose margin is followed.

    Attributes:
        patches: [D, B, P, K] unfolded inputs U.
        sign: [D, B] labels t, +1 or -1.
    """

    patches: Tensor
    sign: Tensor

    def __post_init__(self) -> None:
        if self.patches.dtype != torch.float64 or self.patches.ndim < 3:
            raise ValueError(
                f"patches must be float64 [..., B, P, K], got {self.patches.dtype} {tuple(self.patches.shape)}"
            )
        if self.sign.shape != self.patches.shape[:-2]:
            raise ValueError(f"sign must be {tuple(self.patches.shape[:-2])}, got {tuple(self.sign.shape)}")


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of the channel's output, each [D]."""

    mean: Tensor
    std: Tensor


def unfold(images: Tensor, side: int) -> Tensor:
    """The patches [..., P, side * side] that a ``side`` x ``side`` kernel sees in images [..., H, W]."""
    windows = images.unfold(-2, side, 1).unfold(-2, side, 1)
    return windows.flatten(-2).flatten(-3, -2)


def live_statistics(channel: Channel, batch: Batch) -> Statistics:
    """The statistics BatchNorm takes from this batch in training (biased variance, no epsilon)."""
    values = _output(channel, batch).flatten(-2)
    return Statistics(values.mean(-1), values.std(-1, unbiased=False))


def margin(channel: Channel, batch: Batch, statistics: Statistics | None) -> Tensor:
    """Margins [D, B]; ``statistics`` None is the model without BatchNorm."""
    z = _output(channel, batch)
    if statistics is not None:
        z = _per_draw(channel.gamma) * (z - _per_draw(statistics.mean)) / _per_draw(statistics.std)
    reading = (z * channel.classifier[..., None, :]).sum(-1)
    return batch.sign * (reading + channel.offset[..., None])


def growth(channel: Channel, batch: Batch, statistics: Statistics | None, *, lr: float) -> Tensor:
    """Closed-form growth [D] of record 0's margin by one step on its own loss, the kernel alone: equation (1)."""
    scale = 1.0 if statistics is None else amplification(channel, statistics)
    direction = _direction(channel, batch)
    pull = torch.sigmoid(-margin(channel, batch, statistics)[..., 0])
    return lr * pull * scale * direction.square().sum(-1)


def growth_ratio(channel: Channel, batch: Batch, statistics: Statistics) -> Tensor:
    """growth with BatchNorm over growth without [D]: the right side of equation (1)."""
    with_bn = torch.sigmoid(-margin(channel, batch, statistics)[..., 0])
    without_bn = torch.sigmoid(-margin(channel, batch, None)[..., 0])
    return amplification(channel, statistics) * with_bn / without_bn


def amplification(channel: Channel, statistics: Statistics) -> Tensor:
    """(gamma/sigma)^2, [D]."""
    return (channel.gamma / statistics.std).square()


def gamma_push(channel: Channel, batch: Batch, statistics: Statistics) -> Tensor:
    """d(margin of record 0)/d(gamma) at fixed statistics [D]: equation (2)."""
    own_margin = margin(channel, batch, statistics)[..., 0]
    return (own_margin - batch.sign[..., 0] * channel.offset) / channel.gamma


def live_slope(channel: Channel, batch: Batch) -> Tensor:
    """d(margin of record 0)/d(kernel) [D, K] through the batch's own statistics: equation (3)."""
    statistics = live_statistics(channel, batch)
    h = (_output(channel, batch) - _per_draw(statistics.mean)) / _per_draw(statistics.std)
    mean_patch = batch.patches.mean((-3, -2))
    weighted = (h[..., None] * batch.patches).mean((-3, -2))
    reading = (h[..., 0, :] * channel.classifier).sum(-1, keepdim=True)
    total = channel.classifier.sum(-1, keepdim=True)
    ratio = (channel.gamma / statistics.std)[..., None]
    return ratio * batch.sign[..., :1] * (_direction(channel, batch) - total * mean_patch - reading * weighted)


def equal_margin(channel: Channel, batch: Batch, statistics: Statistics) -> Channel:
    """The same kernel and classifier with the offset at which BatchNorm leaves record 0's margin where it was.

    This is the offset of the model with BatchNorm; the one without keeps its own, so that both see the same
    loss derivative.
    """
    gap = margin(channel, batch, None)[..., 0] - margin(channel, batch, statistics)[..., 0]
    return replace(channel, offset=channel.offset + batch.sign[..., 0] * gap)


def stepped(channel: Channel, batch: Batch, statistics: Statistics | None, *, lr: float, live: bool = False) -> Channel:
    """One step of gradient descent (autograd) on record 0's own loss, the kernel alone.

    ``live`` takes the statistics from the batch, with their gradient, in place of ``statistics``.
    """
    kernel = channel.kernel.detach().requires_grad_()
    trial = replace(channel, kernel=kernel)
    used = live_statistics(trial, batch) if live else statistics
    # softplus is linear beyond 20 in torch, which costs 2e-9 of the derivative.
    loss = -torch.nn.functional.logsigmoid(margin(trial, batch, used)[..., 0]).sum()
    (slope,) = torch.autograd.grad(loss, kernel)
    return replace(channel, kernel=kernel.detach() - lr * slope)


def measured_growth(
    channel: Channel, batch: Batch, statistics: Statistics | None, *, lr: float, live: bool = False
) -> Tensor:
    """What :func:`growth` predicts, measured [D]: record 0's margin after :func:`stepped` minus before."""
    after = stepped(channel, batch, statistics, lr=lr, live=live)
    before_statistics = live_statistics(channel, batch) if live else statistics
    after_statistics = live_statistics(after, batch) if live else statistics
    grown = margin(after, batch, after_statistics) - margin(channel, batch, before_statistics)
    return grown[..., 0]


def _output(channel: Channel, batch: Batch) -> Tensor:
    return (batch.patches @ channel.kernel[..., None, :, None])[..., 0]


def _direction(channel: Channel, batch: Batch) -> Tensor:
    """v = U^T a of record 0, [D, K]."""
    return (batch.patches[..., 0, :, :] * channel.classifier[..., :, None]).sum(-2)


def _per_draw(value: Tensor) -> Tensor:
    return value[..., None, None]

"""Study: the theory. Is a step's margin growth amplified by (gamma/sigma)^2, and what does that leave out?

Three parts: the closed forms of :mod:`mia_audit.batchnorm.theory` against autograd; the same model set in motion
(:mod:`mia_audit.batchnorm.simulate`), where statistics are the batch's, weights decay and gamma is learned; and
gamma/sigma of real networks over training (:mod:`mia_audit.studies.networks`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from mia_audit.batchnorm import simulate
from mia_audit.batchnorm import theory as one_channel
from mia_audit.batchnorm.simulate import Course
from mia_audit.report.figures import MUTED, canvas
from mia_audit.studies.draw import log_scale
from mia_audit.studies.judge import DOES_NOT_HOLD, HOLDS, sample_mean, verdict_above, verdict_within
from mia_audit.studies.networks import network_figures, network_rows
from mia_audit.studies.result import StudyFigure, StudyResult, StudyRow
from mia_audit.studies.setup import StudySetup, evaluation_epochs, finish, study_pool
from shadow_pool import seeds
from shadow_pool.train.shadows import one_thread

DEFAULTS = {"n": 8, "arms": ["batch"], "data": {"mislabeled": 0.05, "ood": 0.05}, "recipe": {"epochs": 30}}
EXACT = 1e-9
"""What a closed form may differ from autograd by: relative to its value where that is above 1, absolutely below.

Below 1 the difference of two margins of order 1 is known to their rounding, not to its own.
"""
ERROR = "largest error, relative above 1, absolute below"
MODELS = {"one position": 3, "16 positions": 6}
"""Image side for a 3x3 kernel: a dense layer's one output per channel, and a convolution's map."""
BATCH_SIZES = (4, 16, 64, 256, 1024)
STRENGTHS = (1.0, 3.0, 10.0, 30.0)
LIVE_DRAWS = 100
CLOSE = (0.9, 1.1)
"""The prediction counts as good where the measured growth is within a tenth of it."""
STEP_LR = 0.02
COURSE = {"steps": 500, "lr": 0.1, "weight_decay": 5e-4}
COURSE_DRAWS, COURSE_BATCH = 40, 64
COURSE_STRENGTHS = (1.0, 3.0, 10.0)
SOON = 50
"""The step at which speed is judged: a tenth of the course, when half of the outliers are fitted."""
CLOSED_FORM = "the closed form is what autograd gives"
LIVE = "through the batch's own statistics a step grows the margin as fixed statistics predict"
DECAY = "weight decay on the kernel alone raises gamma/sigma as predicted"
LOOP = "learning gamma raises gamma/sigma"
OUTLIER_RAISES = "an outlier raises gamma/sigma more than a clean record in its place"
SOONER = "with BatchNorm and a learned gamma the outlier is fitted sooner than without BatchNorm"


def theory(setup: StudySetup) -> StudyResult:
    """The closed forms checked, the simplifications measured, and real networks' gamma/sigma over training.

    The first two parts need no pool and use ``seed`` alone of the settings; intervals there are over independent
    draws of the problem. Raises :class:`UserError` where the arm ``batch`` does not train.
    """
    values = setup.values(DEFAULTS, follows=True)
    values["recipe"] |= {"evaluate_epochs": evaluation_epochs(values["recipe"]["epochs"])}
    trained = study_pool(setup, values, "theory-pool")
    seed = trained.pool.spec.seed
    with one_thread():
        rows = _closed_form_rows(seed) + _live_rows(seed) + [_decay_row(seed)] + _course_rows(seed)
        figures = [_prediction_figure(seed), *(_live_figure(rows, model) for model in MODELS)]
        figures += [_course_figure(seed, what) for what in ("ratio", "margin", "loss")]
    rows += network_rows(trained)
    figures += network_figures(trained)
    settings = {
        "one channel": {"live draws": LIVE_DRAWS, "course draws": COURSE_DRAWS, "course batch": COURSE_BATCH, **COURSE}
    }
    return finish("theory", rows, figures, [trained], settings)


def _fixed_problem(seed: int) -> tuple[one_channel.Channel, one_channel.Batch, one_channel.Statistics]:
    """Draws whose statistics are arbitrary numbers, as running statistics are to a batch."""
    channel, batch = simulate.draw_problem(draws=200, batch_size=8, image_side=6, strength=3.0, seed=seed)
    rng = seeds.stream(seed, "fixed-statistics")
    draw = lambda low, high: torch.from_numpy(rng.uniform(low, high, len(channel.gamma)))  # noqa: E731
    return (
        replace(channel, gamma=draw(0.3, 3), offset=draw(-1, 1)),
        batch,
        one_channel.Statistics(draw(-1, 1), draw(0.3, 3)),
    )


def _closed_form_rows(seed: int) -> list[StudyRow]:
    channel, batch, statistics = _fixed_problem(seed)
    without, with_bn = (one_channel.measured_growth(channel, batch, used, lr=0.1) for used in (None, statistics))
    matched = one_channel.equal_margin(channel, batch, statistics)
    at_equal_margin = one_channel.measured_growth(matched, batch, statistics, lr=0.1)
    gamma, kernel = channel.gamma.clone().requires_grad_(), channel.kernel.clone().requires_grad_()
    own = one_channel.margin(replace(channel, gamma=gamma), batch, statistics)[:, 0]
    (gamma_slope,) = torch.autograd.grad(own.sum(), gamma)
    moving = replace(channel, kernel=kernel)
    live = one_channel.margin(moving, batch, one_channel.live_statistics(moving, batch))[:, 0]
    (live_slope,) = torch.autograd.grad(live.sum(), kernel)
    pairs = {
        "growth without BatchNorm": (without, one_channel.growth(channel, batch, None, lr=0.1)),
        "growth with BatchNorm": (with_bn, one_channel.growth(channel, batch, statistics, lr=0.1)),
        "growth ratio, equal margins": (at_equal_margin, one_channel.amplification(channel, statistics) * without),
        "growth ratio, margins that differ": (with_bn, one_channel.growth_ratio(channel, batch, statistics) * without),
        "d(margin)/d(gamma)": (gamma_slope, one_channel.gamma_push(channel, batch, statistics)),
        "d(margin)/d(kernel), live statistics": (live_slope, one_channel.live_slope(channel, batch)),
    }
    rows = []
    for what, (measured, predicted) in pairs.items():
        scale = torch.maximum(predicted.abs(), torch.ones_like(predicted))
        error = float(((measured - predicted).abs() / scale).max())
        verdict = HOLDS if error < EXACT else DOES_NOT_HOLD
        rows.append(StudyRow(CLOSED_FORM, "one channel", what, ERROR, None, error, None, verdict))
    return rows


def _live_rows(seed: int) -> list[StudyRow]:
    rows = []
    for model, side in MODELS.items():
        for strength in STRENGTHS:
            for size in BATCH_SIZES:
                problem = simulate.draw_problem(
                    draws=LIVE_DRAWS, batch_size=size, image_side=side, strength=strength, seed=seed
                )
                first_order, one_step = simulate.live_share(*problem, lr=STEP_LR)
                mean, ci = sample_mean(first_order)
                name = f"strength {strength:g}"
                metric = "share of the predicted growth, small step"
                rows.append(StudyRow(LIVE, model, name, metric, size, mean, ci, verdict_within(ci, *CLOSE)))
                metric = f"share of the predicted growth, median, step {STEP_LR:g}"
                rows.append(StudyRow(LIVE, model, name, metric, size, float(np.median(one_step))))
    return rows


def _decay_row(seed: int) -> StudyRow:
    channel, batch = simulate.draw_problem(draws=10, batch_size=64, image_side=6, strength=3.0, seed=seed)
    steps, lr, decay = (COURSE[name] for name in ("steps", "lr", "weight_decay"))
    ratio = simulate.decay_alone(channel, batch, steps=int(steps), lr=lr, weight_decay=decay)
    rise = ratio[-1] / ratio[0]
    error = float(np.abs(rise * (1 - lr * decay) ** steps - 1).max())
    verdict = HOLDS if error < EXACT else DOES_NOT_HOLD
    return StudyRow(DECAY, "one channel", "all", "factor of gamma/sigma", int(steps), float(rise.mean()), None, verdict)


@cache
def _course(seed: int, side: int, strength: float, mislabeled: bool, batchnorm: bool, learn_gamma: bool) -> Course:
    channel, batch = simulate.draw_problem(
        draws=COURSE_DRAWS,
        batch_size=COURSE_BATCH,
        image_side=side,
        strength=strength,
        seed=seed,
        mislabeled=mislabeled,
    )
    return simulate.train(
        channel,
        batch,
        batchnorm=batchnorm,
        learn_gamma=learn_gamma,
        steps=int(COURSE["steps"]),
        lr=COURSE["lr"],
        weight_decay=COURSE["weight_decay"],
    )


def _course_rows(seed: int) -> list[StudyRow]:
    rows, last = [], int(COURSE["steps"])
    for model, side in MODELS.items():
        clean = _course(seed, side, 1.0, False, True, True)
        for strength in COURSE_STRENGTHS:
            learned, fixed, without = (
                _course(seed, side, strength, True, batchnorm, learn)
                for batchnorm, learn in ((True, True), (True, False), (False, False))
            )
            comparisons = [
                (LOOP, "gamma/sigma, learned minus fixed gamma", last, learned.ratio - fixed.ratio),
                (OUTLIER_RAISES, "gamma/sigma, outlier minus clean", last, learned.ratio - clean.ratio),
                (SOONER, "outlier's margin, with minus without", SOON, learned.margin - without.margin),
            ]
            for claim, metric, step, difference in comparisons:
                mean, ci = sample_mean(difference[step])
                name = f"strength {strength:g}"
                rows.append(StudyRow(claim, model, name, metric, step, mean, ci, verdict_above(ci, 0)))
    return rows


def _prediction_figure(seed: int) -> StudyFigure:
    channel, batch, statistics = _fixed_problem(seed)
    matched = one_channel.equal_margin(channel, batch, statistics)
    without = one_channel.measured_growth(channel, batch, None, lr=0.1)
    measured = (one_channel.measured_growth(matched, batch, statistics, lr=0.1) / without).numpy()
    predicted = one_channel.amplification(channel, statistics).numpy()
    # Growth below this is a difference of margins down at their rounding error.
    keep = without.numpy() > 1e-6
    figure, axes = canvas()
    ends = [predicted.min(), predicted.max()]
    axes.plot(ends, ends, color=MUTED, linewidth=1, label="equal")
    axes.plot(predicted[keep], measured[keep], linestyle="none", marker="o", markersize=3, label="draws")
    log_scale(axes, "xy")
    axes.set(xlabel="(gamma/sigma)^2", ylabel="growth with over without BatchNorm")
    axes.legend()
    off = np.abs(measured / predicted - 1)[keep].max()
    return StudyFigure(
        "One step at fixed statistics and equal margins",
        "Growth of a record's margin by one autograd step with BatchNorm over that without, against the prediction, "
        f"one point per draw: the furthest lies {off:.1g} of its value off the line. {(~keep).sum()} of {len(keep)} "
        "draws are left out, whose margins grow by less than a millionth: there growth is lost in rounding.",
        figure,
    )


def _live_figure(rows: list[StudyRow], model: str) -> StudyFigure:
    figure, axes = canvas()
    for strength in STRENGTHS:
        chosen = [
            row
            for row in rows
            if row.claim == LIVE and row.arm == model and row.subset == f"strength {strength:g}" and row.ci
        ]
        low, high = np.array([row.ci for row in chosen]).T
        (line,) = axes.plot(
            BATCH_SIZES, np.array([row.value for row in chosen], dtype=float), marker="o", label=f"{strength:g}"
        )
        axes.fill_between(BATCH_SIZES, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.axhline(1, color=MUTED, linewidth=1)
    log_scale(axes, "x")
    axes.set_xticks(BATCH_SIZES, [str(size) for size in BATCH_SIZES])
    axes.set(xlabel="batch size", ylabel="share of the predicted growth", ylim=(0, 1.1))
    axes.legend(title="strength")
    return StudyFigure(
        f"Live statistics: {model}",
        "Growth of an outlier's margin through the batch's own statistics (small step) as a share of the prediction at "
        f"fixed statistics, by batch size and strength of the outlier; {model}, mean over draws with its 95 % "
        "interval.",
        figure,
    )


def _course_figure(seed: int, what: str) -> StudyFigure:
    figure, axes = canvas()
    side, strength = MODELS["16 positions"], 3.0
    for label, batchnorm, learn in (
        ("learned gamma", True, True),
        ("fixed gamma", True, False),
        ("no BatchNorm", False, False),
    ):
        if what == "ratio" and not batchnorm:
            continue
        values = getattr(_course(seed, side, strength, True, batchnorm, learn), what)
        low, high = np.quantile(values, [0.25, 0.75], axis=1)
        (line,) = axes.plot(np.median(values, axis=1), label=label)
        axes.fill_between(np.arange(len(low)), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="step", ylabel={"ratio": "gamma/sigma"}.get(what, f"outlier's {what}"))
    axes.legend()
    return StudyFigure(
        f"The loop: {'gamma/sigma' if what == 'ratio' else what} of an outlier over steps",
        f"A mislabeled record of strength {strength:g} in a batch of {COURSE_BATCH}, 16 positions: median over draws "
        "with its quartiles, with a learned gamma, a fixed gamma, and without BatchNorm.",
        figure,
    )

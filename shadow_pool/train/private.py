"""Arms with +dp(epsilon): DP-SGD (Abadi et al. 2016, arXiv 1607.00133).

Every step draws its batch by Poisson sampling, clips each record's gradient to an l2 norm and adds Gaussian noise
to their sum. Clipping, noise and the RDP accountant (Mironov 2017, arXiv 1702.07476) are Opacus's; the records'
gradients come from torch.func, faster here than Opacus's hooks and at ease with layers that work in place.
Batches and noise come from the pool's seed, so a run can be repeated. The guarantee holds against whoever does
not know the seed: it is for measuring what DP costs and saves, a model to be released needs a secret one.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from shadow_pool import seeds
from shadow_pool.errors import UserError
from shadow_pool.models.norms import coupling_layer
from shadow_pool.models.resolve import logits_of
from shadow_pool.train.job import TrainingJob
from shadow_pool.train.recipe import augment_epoch, cross_entropy, learning_rate, make_optimizer
from shadow_pool.usercode import describe

DELTA = 1e-5
"""The delta of every guarantee here."""
_CLIP = 1.0
_PROBE = 8
_GRADIENT_VALUES = 50_000_000
"""At most this many values of records' gradients are held at once."""


def private_epochs(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    job: TrainingJob,
    preprocess: Callable[[Tensor], Tensor],
) -> Iterator[float]:
    """Train ``model`` in place with (job.arm.dp, :data:`DELTA`) differential privacy, epoch by epoch.

    An epoch is ceil(N / batch_size) steps, each on a batch that holds every record with probability
    batch_size / N. Gradients are clipped to the recipe's ``gradient_clip``, 1 where that is off. float32.

    Yields:
        The mean training loss over the records that an epoch drew.

    Raises:
        UserError: the model couples the records of a batch, or keeps statistics of them, whatever its layers
            are called; or no noise is large enough for so small an epsilon.
    """
    from opacus.optimizers import DPOptimizer

    recipe = job.recipe
    refuse_unprivate(model, preprocess(inputs[:_PROBE]), arm=job.arm.name)
    noise, rate, per_epoch = _plan(job, len(labels))
    optimizer = DPOptimizer(
        make_optimizer(model, recipe),
        noise_multiplier=noise,
        max_grad_norm=recipe.gradient_clip or _CLIP,
        expected_batch_size=rate * len(labels),
        generator=torch.Generator(job.device).manual_seed(seeds.integer(job.seed, "dp-noise", job.index)),
    )
    # What the records' gradients are computed for at once, to bound their memory.
    part = max(1, _GRADIENT_VALUES // sum(parameter.numel() for parameter in model.parameters()))
    for epoch in range(recipe.epochs):
        rng = seeds.stream(job.seed, "poisson-batches", job.index, epoch)
        x = augment_epoch(inputs, recipe, rng)
        model.train()
        total, drawn = torch.zeros((), device=inputs.device), 0
        for step in range(per_epoch):
            rows = torch.from_numpy(np.flatnonzero(rng.random(len(labels)) < rate)).to(inputs.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, epoch * per_epoch + step, recipe.epochs * per_epoch)
            parts = rows.split(part)
            for count, some in enumerate(parts, start=1):
                total += _put_record_gradients(model, preprocess(x[some]), labels[some], recipe.label_smoothing)
                optimizer.signal_skip_step(count < len(parts))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            drawn += len(rows)
        yield float(total) / max(drawn, 1)


@lru_cache
def noise_multiplier(epsilon: float, rate: float, steps: int) -> float:
    """The noise's standard deviation, in clipping norms, that spends at most ``epsilon`` in ``steps`` steps.

    Args:
        epsilon: above 0, at :data:`DELTA`.
        rate: the probability that a record is in a batch.
        steps: number of optimizer steps.
    """
    from opacus.accountants.utils import get_noise_multiplier

    try:
        with _quiet():
            return float(
                get_noise_multiplier(target_epsilon=epsilon, target_delta=DELTA, sample_rate=rate, steps=steps)
            )
    except ValueError:
        raise UserError(
            f"+dp({epsilon:g}): no noise keeps {steps} steps at sampling rate {rate:.3g} within that epsilon; "
            "use a larger epsilon or fewer epochs"
        ) from None


def spent(job: TrainingJob, records: int, epochs: int) -> float:
    """The epsilon that ``epochs`` epochs of the job on so many records have spent, by the accountant."""
    noise, rate, per_epoch = _plan(job, records)
    return epsilon_spent(noise, rate, epochs * per_epoch)


def epsilon_spent(noise: float, rate: float, steps: int) -> float:
    """The epsilon at :data:`DELTA` of ``steps`` steps with this noise multiplier and sampling rate."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    with _quiet():
        return float(accountant.get_epsilon(delta=DELTA))


def refuse_unprivate(model: nn.Module, x: Tensor, *, arm: str) -> None:
    """Refuse a model for which clipping one record's gradient does not bound its influence.

    Tested on inputs ``x`` [N, ...], N >= 2, not told by names of layers: its output for a record must not depend on
    the others of the batch, and no buffer may depend on the records (running statistics are released with the model
    but get no noise).

    Raises:
        UserError: naming the layer or the buffer.
    """
    layer = coupling_layer(model, x)
    if layer is not None:
        raise UserError(
            f"arm {arm}: {layer} mixes the records of a batch, so DP-SGD gives no guarantee; use group+dp or none+dp"
        )
    after = []
    for records in (x.cpu(), 3 * x.cpu() + 1):
        probe = copy.deepcopy(model).cpu().train()
        with torch.no_grad(), seeds.torch_stream(0):
            probe(records)
        after.append(dict(probe.named_buffers()))
    for name, buffer in after[0].items():
        if not torch.equal(buffer, after[1][name]):
            raise UserError(
                f"arm {arm}: buffer {name} is computed from the records without noise, so DP-SGD gives no guarantee; "
                "use a layer without running statistics"
            )


def _put_record_gradients(model: nn.Module, x: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Each record's gradient into ``grad_sample`` [N, ...] of the parameters, for Opacus; returns the summed loss."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def loss_of(values: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        logits = logits_of(functional_call(model, values, (record[None],)))
        return cross_entropy(logits, label[None], label_smoothing)

    if not len(labels):  # Poisson sampling may draw nobody: a step of noise alone
        for parameter in trained.values():
            parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))  # type: ignore[attr-defined]
        return x.new_zeros(())
    values = {name: parameter.detach() for name, parameter in trained.items()}
    try:
        gradients, losses = vmap(grad_and_value(loss_of), (None, 0, 0), randomness="different")(values, x, labels)
    except RuntimeError as error:
        raise UserError(
            f"+dp needs the gradient of each record, which torch.func cannot take through {type(model).__name__}: "
            f"{describe(error)}; a forward must not branch on its input's values"
        ) from error
    for name, parameter in trained.items():
        parameter.grad_sample = gradients[name]  # type: ignore[attr-defined]
    return losses.sum()


def _plan(job: TrainingJob, records: int) -> tuple[float, float, int]:
    """(noise multiplier, probability that a record is in a batch, steps of an epoch)."""
    assert job.arm.dp is not None
    rate, per_epoch = min(1.0, job.recipe.batch_size / records), math.ceil(records / job.recipe.batch_size)
    return noise_multiplier(job.arm.dp, rate, job.recipe.epochs * per_epoch), rate, per_epoch


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Opacus's and torch's warnings on the orders of the accountant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield

"""Training their way: a user's own function in place of our loop, for every arm alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shadow_pool import seeds
from shadow_pool.errors import UserError, one_line
from shadow_pool.queries import PLAIN
from shadow_pool.signals import compute_signals
from shadow_pool.train.job import TrainingJob, TrainingOutcome
from shadow_pool.usercode import describe, load_object

Trainer = Callable[..., "nn.Module | None"]


class HalfDataset(Dataset[tuple[Tensor, int]]):
    """The members of one model: item i is (preprocessed input, label)."""

    def __init__(self, x: np.ndarray, label: np.ndarray, preprocess: Callable[[Tensor], Tensor]) -> None:
        self._x, self._label, self._preprocess = x, label, preprocess

    def __len__(self) -> int:
        return len(self._label)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # Negative and out-of-range indices behave as a list's; a loop over the dataset ends by IndexError.
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Several items at once: a DataLoader asks for whole batches, which is many times faster."""
        rows = np.asarray(indices, dtype=np.int64)
        inputs = self._preprocess(torch.from_numpy(self._x[rows]))
        return list(zip(inputs, self._label[rows].tolist(), strict=True))


def load_trainer(reference: str) -> Trainer:
    """The function that ``--train FILE.py:FUNC`` names, called with (model, dataset, seed, device).

    Raises:
        UserError: it is missing, or cannot be called so.
    """
    function = load_object(reference, what="train")
    if not callable(function):
        raise UserError(
            f"train {reference} must be a function of (model, dataset, seed, device), got a {type(function).__name__}"
        )
    try:
        inspect.signature(function).bind(None, None, 0, "cpu")
    except TypeError as error:
        raise UserError(f"train {reference} must take (model, dataset, seed, device): {error}") from None
    except ValueError:  # a callable without a signature to look at
        pass
    return function


def train_by_user(
    reference: str,
    model: nn.Module,
    x: np.ndarray,
    label: np.ndarray,
    job: TrainingJob,
    *,
    preprocess: Callable[[Tensor], Tensor],
) -> TrainingOutcome:
    """Train ``model`` on inputs [N, ...] and labels int64 [N] by the user's function; the result ends up in it.

    The function is given the model on the job's device, a map-style Dataset of (preprocessed input, label), a seed
    below 2**32 and the device. It trains the model in place, or returns a trained one of the same state dict. Torch's
    default generator is seeded from the same seed while it runs. The outcome's loss is the mean over the members in
    eval mode; what the user's epochs are is not known, so all of them count as one.

    Raises:
        UserError: the function fails (with its file and line), or returns something else.
    """
    function = load_trainer(reference)
    seed = seeds.integer(job.seed, "train", job.index) % 2**32
    model.to(job.device)
    with seeds.torch_stream(seed):
        try:
            trained = function(model, HalfDataset(x, label, preprocess), seed, job.device)
        except (Exception, SystemExit) as error:
            raise UserError(f"train {reference} failed: {describe(error, within=_source(function))}") from error
    if trained is not None and trained is not model:
        _take_over(reference, model, trained)
    model.to(torch.float32)
    signals = compute_signals(model, x, label, preprocess=preprocess, views=(PLAIN,), device=job.device)
    with np.errstate(invalid="ignore"):  # phi of a model that diverged is NaN
        loss = float(np.logaddexp(0.0, -signals.phi[:, 0]).mean())
    return TrainingOutcome(epochs=1, loss=loss, diverged=not np.isfinite(loss))


def _take_over(reference: str, model: nn.Module, trained: Any) -> None:
    if not isinstance(trained, nn.Module):
        raise UserError(
            f"train {reference} must return the trained torch.nn.Module, or None where it trained the one it was "
            f"given, got {type(trained).__name__}"
        )
    try:
        model.load_state_dict(_unwrapped(trained, model.state_dict().keys()).state_dict())
    except RuntimeError as error:
        raise UserError(
            f"train {reference} must return a model with the state dict of the one it was given: {one_line(error)}"
        ) from None


def _unwrapped(trained: nn.Module, names: Collection[str]) -> nn.Module:
    """The module of these tensors inside wrappers: DataParallel and averages hold it as ``module``, torch.compile as
    ``_orig_mod``. Where there is none, the module itself.
    """
    inner: nn.Module | None = trained
    while inner is not None and inner.state_dict().keys() != names:
        held = (getattr(inner, name, None) for name in ("module", "_orig_mod", "_module"))
        inner = next((module for module in held if isinstance(module, nn.Module)), None)
    return trained if inner is None else inner


def _source(function: Any) -> Path | None:
    try:
        return Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
    except TypeError:
        return None

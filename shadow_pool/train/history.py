"""What is recorded while a model trains: loss and accuracy by subset and membership, ratios by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor, nn

from shadow_pool.data.records import SUBSETS
from shadow_pool.models.norms import ratios
from shadow_pool.queries import PLAIN
from shadow_pool.signals import Signals, compute_signals
from shadow_pool.train.job import TrainingData

_SCHEMA = pa.schema(
    {
        "epoch": pa.int64(),
        "metric": pa.string(),
        "subset": pa.string(),
        "member": pa.bool_(),
        "layer": pa.string(),
        "value": pa.float64(),
    }
)


class History:
    """Collects history.parquet; called after every epoch by the training loop.

    Rows: ``training_loss`` of every epoch; at the evaluated epochs ``loss`` and ``accuracy`` in eval mode per
    subset (``all`` and each that occurs) and membership, on the population (subset ``population``), and per
    BatchNorm layer, over its channels: ``ratio_mean``, ``ratio_median``, ``ratio_max``, ``ratio_low`` and
    ``ratio_high`` (10th and 90th percentile) and ``fraction_above_one`` of gamma/sigma, and ``amplification_median``,
    the median of its square.
    """

    def __init__(
        self,
        data: TrainingData,
        member: np.ndarray,
        preprocess: Callable[[Tensor], Tensor],
        device: str,
        epochs: tuple[int, ...],
    ) -> None:
        self._data, self._member, self._epochs = data, member, frozenset(epochs)
        self._ask: dict[str, Any] = {"preprocess": preprocess, "views": (PLAIN,), "device": device}
        self._rows: list[tuple[int, str, str | None, bool | None, str | None, float]] = []
        self._recorded: set[int] = set()

    def __call__(self, epoch: int, model: nn.Module, loss: float) -> None:
        self._rows.append((epoch, "training_loss", "all", True, None, loss))
        if epoch in self._epochs:
            self.record(epoch, model)

    def record(
        self, epoch: int, model: nn.Module, records: Signals | None = None, population: Signals | None = None
    ) -> None:
        """Write down how the model stands, once per epoch; its signals on records and population where they are known.

        Otherwise the model is asked now.
        """
        if epoch in self._recorded:
            return
        self._recorded.add(epoch)
        data = self._data
        signals = records or compute_signals(model, data.x, data.label, **self._ask)
        loss, correct = _losses(signals), signals.predicted == data.label
        for subset in ("all", *SUBSETS):
            rows = np.ones(len(correct), bool) if subset == "all" else data.subset == subset
            for member in (True, False):
                self._add(epoch, subset, member, loss, correct, rows & (self._member == member))
        if len(data.population_label):
            signals = population or compute_signals(model, data.population_x, data.population_label, **self._ask)
            loss, correct = _losses(signals), signals.predicted == data.population_label
            self._add(epoch, "population", False, loss, correct, np.ones(len(correct), bool))
        for layer, values in ratios(model).items():
            for metric, value in (
                ("ratio_mean", values.mean()),
                ("ratio_median", np.median(values)),
                ("ratio_max", values.max()),
                ("ratio_low", np.quantile(values, 0.1)),
                ("ratio_high", np.quantile(values, 0.9)),
                ("fraction_above_one", (values > 1).mean()),
                ("amplification_median", np.median(values**2)),
            ):
                self._rows.append((epoch, metric, None, None, layer, float(value)))

    def _add(
        self, epoch: int, subset: str, member: bool, loss: np.ndarray, correct: np.ndarray, rows: np.ndarray
    ) -> None:
        if rows.any():
            self._rows.append((epoch, "loss", subset, member, None, float(loss[rows].mean())))
            self._rows.append((epoch, "accuracy", subset, member, None, float(correct[rows].mean())))

    def table(self) -> pa.Table:
        """history.parquet's columns: epoch, metric, subset, member, layer, value."""
        columns = list(zip(*self._rows, strict=True)) or [()] * len(_SCHEMA)
        return pa.table([pa.array(c, f.type) for c, f in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA)


def _losses(signals: Signals) -> np.ndarray:
    """Cross-entropy of the plain records; NaN, without a warning, where the model has diverged."""
    with np.errstate(invalid="ignore"):
        return np.logaddexp(0.0, -signals.phi[:, 0])


def at_chance(correct: np.ndarray, label: np.ndarray) -> bool:
    """Whether accuracy on a model's members is within three standard errors of naming the largest class always."""
    if not len(label):
        return True
    share = np.bincount(label).max() / len(label)
    return bool(correct.mean() <= share + 3 * np.sqrt(share * (1 - share) / len(label)))

"""PoolSpec: everything that decides what a pool's models are. Frozen; TOML in and out; unknown keys refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from shadow_pool.arms import parse_arm
from shadow_pool.errors import UserError, unknown_name
from shadow_pool.plain import build, short

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("cosine", "step", "constant")
AUGMENTATIONS = ("none", "shift", "flip-shift")
PRECISIONS = ("auto", "fp32", "bf16")
MAX_MODELS = 100_000


def _between(name: str, value: float, low: float, high: float = float("inf"), *, open_low: bool = False) -> None:
    if not (low < value if open_low else low <= value) or not value <= high:
        edge = "above" if open_low else "at least"
        above = "" if high == float("inf") else f" and at most {high:g}"
        raise UserError(f"{name} must be {edge} {low:g}{above}, got {short(value)}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise unknown_name(name, value, known)


@dataclass(frozen=True)
class DataSpec:
    """Which records, and what a model sees of them.

    ``source`` is a name (``digits``, ``cifar10``), a folder, a file (.npz, .parquet, .csv) or ``module:factory``.
    ``normalize`` is ``auto`` (per-channel mean and standard deviation of the records, made explicit when the
    pool is created), ``MEAN/STD`` with one number or one per channel separated by commas, ``none`` or
    ``FILE.py:FUNCTION``. ``mislabeled`` and ``ood`` are the shares of the records that become outliers.
    """

    source: str = "digits"
    label: str | None = None
    id: str | None = None
    group: str | None = None
    classes: tuple[str, ...] = ()
    holdout: float = 0.15
    image_size: int | None = None
    normalize: str = "auto"
    mislabeled: float = 0.0
    ood: float = 0.0
    ood_from: str | None = None

    def __post_init__(self) -> None:
        _between("holdout", self.holdout, 0, 0.9)
        _between("mislabeled", self.mislabeled, 0, 1)
        _between("ood", self.ood, 0, 1)
        if self.mislabeled + self.ood > 1:
            raise UserError(
                f"mislabeled + ood must be at most 1, got {self.mislabeled:g} + {self.ood:g}; lower one of them"
            )
        if self.image_size is not None:
            _between("image_size", self.image_size, 1, 4096)


@dataclass(frozen=True)
class Recipe:
    """How one model is trained.

    ``schedule``: ``cosine`` falls from ``lr`` to 0 over the run, ``step`` divides by ten at half and at three
    quarters, ``constant`` stays; arms with ``+fit`` repeat the schedule until they reach their loss.
    ``augmentation``: ``shift`` moves an image by up to an eighth of its side, ``flip-shift`` also mirrors it.
    ``gradient_clip`` bounds the l2 norm of the batch gradient (0: off). ``evaluate_epochs``: epochs at which
    history is recorded, besides the last one.
    """

    optimizer: str = "sgd"
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    batch_size: int = 64
    epochs: int = 30
    augmentation: str = "none"
    label_smoothing: float = 0.0
    gradient_clip: float = 0.0
    evaluate_epochs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("augmentation", self.augmentation, AUGMENTATIONS)
        _between("lr", self.lr, 0, 1e6, open_low=True)
        _between("momentum", self.momentum, 0, 1)
        _between("weight_decay", self.weight_decay, 0, 1e6)
        # BatchNorm cannot take the variance of a single record.
        _between("batch_size", self.batch_size, 2)
        _between("epochs", self.epochs, 1, 1_000_000)
        _between("label_smoothing", self.label_smoothing, 0, 1)
        _between("gradient_clip", self.gradient_clip, 0)
        if any(epoch < 1 for epoch in self.evaluate_epochs):
            raise UserError(f"evaluate_epochs must count from 1, got {short(list(self.evaluate_epochs))}")


@dataclass(frozen=True)
class PoolSpec:
    """A pool of ``n`` shadow models in each of ``arms``, in complementary pairs.

    ``arch`` is a name of the zoo, ``torchvision:NAME``, ``timm:NAME``, ``module:factory`` or
    ``FILE.py:factory``; ``init`` a file of weights every model starts from; ``queries`` the number of views of
    a record that signals are computed for; ``train`` a user's own ``FILE.py:FUNCTION`` in place of our loop.
    """

    n: int = 64
    seed: int = 0
    arch: str = "lenet"
    arms: tuple[str, ...] = ("batch", "none")
    queries: int = 1
    precision: str = "auto"
    init: str | None = None
    train: str | None = None
    data: DataSpec = field(default_factory=DataSpec)
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.n < 4:
            raise UserError(
                f"n must be at least 4, got {short(self.n)}: with the target's pair left out nothing would remain to "
                "compare it with; use --n 4 or more (a pool's own report needs 6)"
            )
        _between("n", self.n, 4, MAX_MODELS)
        if self.n % 2:
            raise UserError(
                f"n must be even, got {self.n}: models are trained in pairs on the two halves of one random split, "
                f"so that every record is in exactly half of them; use --n {self.n + 1}"
            )
        _between("seed", self.seed, 0, 2**63 - 1)
        _between("queries", self.queries, 1, 64)
        _one_of("precision", self.precision, PRECISIONS)
        if not self.arms:
            raise UserError("arms must name at least one arm, got none; use --arms batch,none")
        names = tuple(parse_arm(arm).name for arm in self.arms)
        if len(set(names)) != len(names):
            raise UserError(f"arms must differ, got {', '.join(names)}; name each arm once")
        object.__setattr__(self, "arms", names)
        if any(parse_arm(arm).fit for arm in names) and "batch" not in names:
            raise UserError(
                f"arms {', '.join(names)}: +fit matches the training loss of the batch arm, which is missing; add batch"
            )
        ours = [arm for arm in names if "+" in arm]
        if self.train is not None and ours:
            raise UserError(
                f"arms {', '.join(ours)}: +fit, +penalty and +dp belong to our training loop, whose place train = "
                f"{self.train} takes; leave these arms out, or leave out --train"
            )

    @property
    def pairs(self) -> int:
        """Number of complementary pairs of models, n / 2."""
        return self.n // 2


_TABLES: dict[str, type] = {"data": DataSpec, "recipe": Recipe}


def to_dict(spec: PoolSpec) -> dict[str, Any]:
    """The spec as nested plain values; None and empty tuples are left out (TOML has no null)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            return {name: plain(item) for name, item in pairs if item is not None and item != ()}
        return list(value) if isinstance(value, tuple) else value

    return dict(plain(spec))


def from_dict(values: Mapping[str, Any], *, where: str = "spec") -> PoolSpec:
    """Build a spec from nested plain values. Unknown keys and wrong types raise :class:`UserError`."""
    return build(PoolSpec, values, where)


def to_toml(spec: PoolSpec) -> str:
    """The spec as TOML text, readable back by :func:`read_toml`."""
    return tomli_w.dumps(to_dict(spec))


def read_toml(path: Path) -> dict[str, Any]:
    """Read the keys that a TOML spec sets, checked by building a spec from them, as a nested dict."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"spec file {path} does not exist; give the path of a TOML file") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: TOML, UTF-8, and integers too long to read
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"spec file {path} is not readable TOML: {reason}; mend it") from None
    from_dict(values, where=str(path))
    return values


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the keys of ``changes`` in their place, table by table."""
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = merge(merged.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged


def differences(ours: PoolSpec, theirs: PoolSpec) -> list[tuple[str, Any, Any]]:
    """The fields whose values differ, as (dotted name, ours, theirs)."""
    found = []
    for f in dataclasses.fields(ours):
        a, b = getattr(ours, f.name), getattr(theirs, f.name)
        if f.name in _TABLES:
            found += [
                (f"{f.name}.{g.name}", getattr(a, g.name), getattr(b, g.name))
                for g in dataclasses.fields(a)
                if getattr(a, g.name) != getattr(b, g.name)
            ]
        elif a != b:
            found.append((f.name, a, b))
    return found

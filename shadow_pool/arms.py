"""Arms: one training variant each, named by a normalization and modifiers, e.g. ``batch+penalty(0.3)``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shadow_pool.errors import UserError, unknown_name
from shadow_pool.plain import short

NORMS = ("batch", "none", "group", "layer", "affine")
MODIFIERS = ("fit", "penalty(S)", "dp(EPSILON)")
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
_MODIFIER = re.compile(rf"(fit)|(penalty|dp)\(({_NUMBER})\)")


@dataclass(frozen=True)
class Arm:
    """A parsed arm.

    ``norm`` is one of :data:`NORMS`; ``fit`` trains on until the training loss of the ``batch`` model of the
    same index is reached; ``penalty`` is the strength of the gamma/sigma penalty (0 is none); ``dp`` is the
    epsilon of DP-SGD (None is none).
    """

    norm: str
    fit: bool = False
    penalty: float = 0.0
    dp: float | None = None

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise unknown_name("arm", self.norm, NORMS)
        if self.fit and (self.norm == "batch" or self.dp is not None):
            raise UserError(
                f"arm {self.norm}+fit: +fit matches the training loss of the batch arm and cannot be "
                "combined with batch or +dp; use it as none+fit or group+fit"
            )
        if self.penalty and self.norm != "batch":
            raise UserError(f"arm {self.norm}+penalty: there is no gamma/sigma without BatchNorm; use batch+penalty")
        if self.dp is not None and self.norm == "batch":
            raise UserError(
                "arm batch+dp: BatchNorm mixes the records of a batch, so DP-SGD gives no guarantee; "
                "use group+dp or none+dp"
            )

    @property
    def name(self) -> str:
        """The canonical spelling, also the name of the arm's folder in the pool."""
        parts = [self.norm]
        if self.penalty:
            parts.append(f"penalty({self.penalty:g})")
        if self.fit:
            parts.append("fit")
        if self.dp is not None:
            parts.append(f"dp({self.dp:g})")
        return "+".join(parts)


def parse_arm(text: str) -> Arm:
    """``none+fit`` -> ``Arm("none", fit=True)``. Raises :class:`UserError` naming the known spellings."""
    norm, *modifiers = text.strip().split("+")
    options: dict[str, float | bool] = {}
    for modifier in modifiers:
        match = _MODIFIER.fullmatch(modifier)
        key = (match[1] or match[2]) if match else None
        if match is None or key is None:
            raise unknown_name("arm modifier", modifier, MODIFIERS)
        if key in options:
            raise UserError(f"arm {short(text)}: modifier {key!r} is given twice; give it once")
        options[key] = True if match[1] else _positive(text, key, float(match[3]))
    return Arm(norm, **options)  # type: ignore[arg-type]


def _positive(text: str, key: str, number: float) -> float:
    # Larger numbers would be spelled with a plus sign, which separates modifiers.
    if not 1e-9 <= number <= 1e5:
        raise UserError(f"arm {short(text)}: {key} must be between 1e-9 and 1e5, got {number:g}")
    return number

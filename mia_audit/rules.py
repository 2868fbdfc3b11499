"""Rules that a gate holds an audit to, such as ``lira-online:all:tpr@0.01=0.05``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mia_audit.results import ATTACKS, FPRS, SUBSET_ROWS, AttackRow, AuditResult
from shadow_pool.errors import UserError, unknown_name

RULE_METRICS = ("auc", "epsilon_lower", *(f"tpr@{fpr:g}" for fpr in FPRS))


@dataclass(frozen=True)
class Rule:
    """The most that one metric of one attack on one subset may be. ``metric`` is one of :data:`RULE_METRICS`."""

    attack: str
    subset: str
    metric: str
    limit: float

    def __post_init__(self) -> None:
        for kind, name, known in (
            ("attack", self.attack, ATTACKS),
            ("subset", self.subset, SUBSET_ROWS),
            ("metric", self.metric, RULE_METRICS),
        ):
            if name not in known:
                raise unknown_name(f"{kind} in the rule", name, known)
        most = math.inf if self.metric == "epsilon_lower" else 1.0
        if not (0 <= self.limit < math.inf and self.limit <= most):
            bounds = "a share from 0 to 1" if most == 1 else "a number from 0"
            raise UserError(f"the limit of a rule must be {bounds}, got {self.limit:g}; give e.g. tpr@0.01=0.05")

    def exceeded(self, result: AuditResult) -> bool:
        """Whether the lower end of the metric's 95 % interval lies above the limit.

        The lower end, so that a gate closes on what is known to leak and not on chance. ``epsilon_lower`` is such
        an end already. In a pool the headline's arm is judged.

        Raises:
            UserError: the audit does not hold the number; a gate never opens for lack of one.
        """
        return self._lower_end(result) > self.limit

    def doubt(self, result: AuditResult) -> str | None:
        """Why the rule says little of this audit, or None: below the sample's resolution it can hardly be exceeded."""
        if not self.metric.startswith("tpr@"):
            return None
        row = self._row(result)
        fpr = float(self.metric.removeprefix("tpr@"))
        if all(point.resolved for point in row.tpr_at_fpr if math.isclose(point.fpr, fpr)):
            return None
        return (
            f"the rule {self} cannot do its work here: {row.nonmembers} non-members do not resolve a false-positive "
            f"rate of {fpr:g}, so that the interval's lower end stays near 0 whatever leaks; use auc or a larger rate"
        )

    def sentence(self, result: AuditResult) -> str:
        """What was compared and how it came out, in one line."""
        found, word = self._lower_end(result), "exceeds" if self.exceeded(result) else "is within"
        what = "lower bound" if self.metric == "epsilon_lower" else "lower end of the 95 % interval"
        return f"{self.attack}:{self.subset}:{self.metric}: the {what}, {found:.4g}, {word} the limit {self.limit:g}"

    def _lower_end(self, result: AuditResult) -> float:
        row = self._row(result)
        if self.metric == "epsilon_lower":
            if row.epsilon_lower is None:
                raise UserError(
                    f"the rule {self} needs an epsilon, which this audit does not have: it exists for a target whose "
                    "members were drawn by independent coins; use auc or tpr"
                )
            return row.epsilon_lower
        ci = row.auc_ci
        if self.metric != "auc":
            fpr = float(self.metric.removeprefix("tpr@"))
            ci = next((point.ci for point in row.tpr_at_fpr if math.isclose(point.fpr, fpr)), None)
        if ci is None:
            raise UserError(
                f"the rule {self} needs an interval, which this audit does not have: {row.members} members and "
                f"{row.nonmembers} non-members do not give one; audit more records or choose another metric"
            )
        return ci[0]

    def _row(self, result: AuditResult) -> AttackRow:
        arm = result.headline.arm if result.headline is not None and result.kind == "pool" else None
        for row in result.attacks:
            if (row.attack, row.subset) == (self.attack, self.subset) and arm in (None, row.arm):
                return row
        held = ", ".join(sorted({f"{row.attack}:{row.subset}" for row in result.attacks})) or "none: members unknown"
        raise UserError(
            f"the rule {self} needs {self.attack}:{self.subset}, which this audit does not have; it has {held}"
        )

    def __str__(self) -> str:
        return f"{self.attack}:{self.subset}:{self.metric}={self.limit:g}"


def parse_rule(text: str) -> Rule:
    """``ATTACK:SUBSET:METRIC=LIMIT`` as a :class:`Rule`.

    Raises:
        UserError: not of this form, or an unknown attack, subset or metric, with the known ones.
    """
    left, equals, limit = text.strip().partition("=")
    parts = left.split(":")
    if not equals or len(parts) != 3:
        raise UserError(f"a rule must be ATTACK:SUBSET:METRIC=LIMIT, got {text!r}; e.g. lira-online:all:tpr@0.01=0.05")
    attack, subset, metric = (part.strip() for part in parts)
    if metric.startswith("tpr@"):
        metric = _canonical(metric)
    try:
        value = float(limit)
    except ValueError:
        raise UserError(f"the limit of a rule must be a number, got {limit!r}; e.g. tpr@0.01=0.05") from None
    return Rule(attack, subset, metric, value)


def _canonical(metric: str) -> str:
    """``tpr@0.010`` and ``tpr@1e-2`` as ``tpr@0.01``."""
    try:
        return f"tpr@{float(metric.removeprefix('tpr@')):g}"
    except ValueError:
        return metric

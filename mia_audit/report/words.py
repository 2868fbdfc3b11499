"""How the report writes numbers, names and the verdict. Plain values in, text out; nothing here is HTML."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mia_audit.audit.rows import clearer_rows
from mia_audit.results import AttackRow, AuditResult, EffectRow, Interval, TprAtFpr
from shadow_pool.arms import parse_arm
from shadow_pool.errors import UserError

if TYPE_CHECKING:
    from mia_audit.studies.result import StudyRow

NOTHING = "–"
METRIC_WORDS = {"auc": "AUC", "balanced_accuracy": "balanced accuracy", "epsilon_lower": "epsilon, lower bound"}
SUBSET_WORDS = {
    "all": "all records",
    "clean": "clean records",
    "mislabeled": "mislabeled records",
    "ood": "out-of-distribution records",
}
_NORM_WORDS = {
    "batch": "BatchNorm",
    "none": "no normalization",
    "group": "GroupNorm",
    "layer": "LayerNorm",
    "affine": "scale and shift without statistics",
}


def number(value: float | None, digits: int = 3) -> str:
    """``0.823``; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """``+0.213`` or ``−0.020``."""
    text = number(value, digits)
    return text if text.startswith(("−", NOTHING)) else f"+{text}"


def percent(value: float | None, digits: int = 1) -> str:
    """``22.3 %`` of a share between 0 and 1."""
    return NOTHING if value is None or not math.isfinite(value) else f"{number(100 * value, digits)} %"


def points(value: float | None) -> str:
    """A difference of two shares in percentage points, ``+17.5``."""
    return NOTHING if value is None or not math.isfinite(value) else signed(100 * value, 1)


def interval(ci: Interval | None, digits: int = 3, *, scale: float = 1.0, plus: bool = False) -> str:
    """``[0.785, 0.861]``; empty where there is none."""
    if ci is None or not all(math.isfinite(end) for end in ci):
        return ""
    low, high = ((signed if plus else number)(scale * end, digits) for end in ci)
    return f"[{low}, {high}]"


def unbroken(text: str) -> str:
    """The text with no line to be broken between a number and its percent sign, or within an interval."""
    return re.sub(r"(?<=\d) (?=%)|(?<=\d,) (?=[+−]?[\d.]+\])", "\u00a0", text)


def fpr_words(fpr: float) -> str:
    """``1 %`` of a false-positive rate of 0.01."""
    return f"{100 * fpr:g} %"


def small(value: float | None) -> str:
    """A rate that can be tiny: ``12 %``, ``0.034 %``."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.2g} %"


def shown(text: object, limit: int = 120) -> str:
    """Text of unknown origin fit to be shown: control characters made visible, cut at ``limit`` characters."""
    full = str(text)
    head = "".join("�" if unicodedata.category(c) in ("Cc", "Cs") else c for c in full[:limit])
    return head if len(full) <= limit else f"{head}… ({len(full):,} characters)"


def at(value: float | str | None) -> str:
    """Where on a study's axis a number was taken: ``20``, ``0.3``, ``conv1``."""
    if value is None:
        return NOTHING
    return shown(value, 60) if isinstance(value, str) else f"{value:g}"


def findings(summary: str) -> list[tuple[str, str]]:
    """A summary's sentences, each as (what stands before its colon, the rest); empty where it has no such opening."""
    parts = re.split(r"(?<=\.) (?=[A-Z])", summary)
    opened = [re.fullmatch(r"([A-Z][a-z ]{2,30}): (.*)", part, flags=re.DOTALL) for part in parts]
    return [(match[1], match[2]) if match else ("", part) for match, part in zip(opened, parts, strict=True)]


def measure(value: float | None) -> str:
    """A study's number of any size: ``0.446``, ``17.0``, ``2.4e-15``."""
    if value is None or not 0 < abs(value) < 0.001:
        return number(value, 3 if value is None or abs(value) < 10 else 1)
    return f"{value:.1e}".replace("-", "−")


def by_claim(rows: Iterable[StudyRow]) -> dict[str, list[StudyRow]]:
    """Rows of one claim together, claims in the order in which they first come."""
    claims: dict[str, list[StudyRow]] = {}
    for row in rows:
        claims.setdefault(row.claim, []).append(row)
    return claims


def tally(rows: Sequence[StudyRow]) -> str:
    """How many of a study's verdicts came out which way: ``21 of 73 verdicts hold, 34 do not, 18 are not resolved.``"""
    verdicts = [row.verdict for row in rows if row.verdict is not None]
    if not verdicts:
        return "Nothing was judged: no row of this study carries a verdict."
    held, failed = verdicts.count("holds"), verdicts.count("does not hold")
    rest = len(verdicts) - held - failed
    parts = [f"{held} of {len(verdicts)} verdicts hold{'s' if held == 1 else ''}"]
    parts += [f"{failed} do{'es' if failed == 1 else ''} not"] * bool(failed)
    parts += [f"{rest} {'is' if rest == 1 else 'are'} not resolved"] * bool(rest)
    return f"{', '.join(parts)}."


def arm_words(arm: str) -> str:
    """What an arm is, in words: ``no normalization, trained on to equal fit``."""
    try:
        parsed = parse_arm(arm)
    except UserError:
        return shown(arm, 60)
    parts = [_NORM_WORDS[parsed.norm]]
    if parsed.penalty:
        parts.append(f"gamma/sigma penalty {parsed.penalty:g}")
    if parsed.fit:
        parts.append("trained on to equal fit")
    if parsed.dp is not None:
        parts.append(f"DP-SGD, epsilon {parsed.dp:g}")
    return ", ".join(parts)


def metric_words(metric: str) -> str:
    """``TPR at 1 % FPR`` of ``tpr@0.01``."""
    if metric.startswith("tpr@"):
        return f"TPR at {fpr_words(float(metric[4:]))} FPR"
    return METRIC_WORDS.get(metric, metric)


@dataclass(frozen=True)
class Verdict:
    """The report's answer. ``level`` is ``leaks``, ``partly``, ``unresolved`` or ``unmeasured``."""

    level: str
    title: str
    sentence: str
    remark: str


def verdict(result: AuditResult) -> Verdict:
    """What was found, in words, with the number and its interval. Claims nothing an interval does not carry."""
    subject = "This model" if result.kind == "target" else "Models trained this way"
    verb = "leaks" if result.kind == "target" else "leak"
    head = result.headline
    if head is None:
        return _without_headline(result, subject, verb)
    low, high = head.ci
    sentence = (
        f"At a false-positive rate of {fpr_words(head.fpr)}, the attack {head.attack} finds {percent(head.tpr)} of the "
        f"members (95 % interval {percent(low)} to {percent(high)})"
    )
    exposed = leaking_subsets(result)
    if low > head.fpr:
        times = head.tpr / head.fpr
        many = f"{times:,.0f}" if times >= 10 else f"{times:.1f}"
        found = f"{sentence}. Guessing would find {fpr_words(head.fpr)}: that is {many} times as many."
        return Verdict("leaks", f"{subject} {verb} who was in the training data.", found, "")
    found = (
        f"{sentence}. Guessing finds {fpr_words(head.fpr)}, which lies "
        f"{'inside' if high >= head.fpr else 'above'} that interval."
    )
    if exposed:
        where = ", ".join(exposed)
        title = f"{subject} {verb} about {where}, not by this measure about all records."
        if SUBSET_WORDS["all"] in exposed:
            title = f"{subject} {verb}: scores tell members from others, though not at this false-positive rate."
        return Verdict("partly", title, found, f"The AUC interval lies above 0.5 for {where}: see the table below.")
    others = clearer_rows(result.attacks, head.attack, head.arm)
    if others:
        named = ", ".join(f"{row.attack} (AUC {number(row.auc)} {interval(row.auc_ci)})" for row in others)
        return Verdict(
            "partly",
            f"{subject} {verb}, though not by {head.attack}.",
            f"{found} But members score higher under {named}.",
            "The headline attack was fixed beforehand. Attacks that are right where it is not point to shadow models "
            "that do not imitate the target: see the warnings.",
        )
    remark = (
        "This is no proof of safety: it says that this attack, with these shadow models, did not tell members from "
        f"non-members, and that at this false-positive rate it could find at most {percent(high)} of them."
    )
    return Verdict("unresolved", "No leakage resolved.", found, remark)


def _without_headline(result: AuditResult, subject: str, verb: str) -> Verdict:
    if not result.attacks:
        return Verdict(
            "unmeasured",
            "Leakage not measured: the members are not known.",
            "Every record has a score and a false-positive rate below; a low rate means that the model treats the "
            "record like one it was trained on.",
            "Give the members (--members) to learn how often that is right.",
        )
    exposed = leaking_subsets(result)
    if exposed:
        return Verdict(
            "partly",
            f"{subject} {verb} about {', '.join(exposed)}.",
            "The AUC interval lies above 0.5. There are too few non-members to resolve any of the low false-positive "
            "rates.",
            "",
        )
    known = any(row.auc is not None for row in headline_rows(result))
    return Verdict(
        "unresolved",
        "No leakage resolved: too few non-members.",
        "There are too few non-members to resolve any of the low false-positive rates, "
        + ("and the AUC is not clear of 0.5." if known else "or to give an AUC."),
        "Audit with more records that are known not to be members.",
    )


def leaking_subsets(result: AuditResult) -> list[str]:
    """The subsets, in words, whose AUC interval under the headline attack lies above 0.5."""
    return [
        SUBSET_WORDS.get(row.subset, row.subset)
        for row in headline_rows(result)
        if row.auc_ci is not None and row.auc_ci[0] > 0.5
    ]


def headline_attack(result: AuditResult) -> tuple[str, str] | None:
    """(attack, arm) of the headline, else of the first row; None where there are no attacks."""
    if result.headline is not None:
        return result.headline.attack, result.headline.arm
    return (result.attacks[0].attack, result.attacks[0].arm) if result.attacks else None


def headline_rows(result: AuditResult) -> list[AttackRow]:
    """The rows of the headline attack and arm, one per subset."""
    chosen = headline_attack(result)
    return [row for row in result.attacks if (row.attack, row.arm) == chosen]


def point_at(row_points: Iterable[TprAtFpr], fpr: float) -> TprAtFpr | None:
    """The TPR at one of the fixed FPRs, None where the row has none."""
    return next((point for point in row_points if math.isclose(point.fpr, fpr)), None)


def effect_sentence(row: EffectRow) -> str:
    """One comparison in words: what BatchNorm adds to a metric, or that nothing is resolved."""
    whose = "in this checkpoint" if row.scope == "checkpoint" else "with this recipe"
    at = "at equal epochs" if row.matched == "epochs" else "at equal fit"
    scale, digits, unit = (
        (1.0, 3, "AUC") if row.metric == "auc" else (100.0, 1, f"points of {metric_words(row.metric)}")
    )
    span = interval(row.ci, digits, scale=scale, plus=True)
    amount = signed(scale * row.difference, digits)
    against = f"against {arm_words(row.reference)}"
    if row.ci is None:
        return f"{whose}, {at}: {amount} {unit} {against}; no interval."
    if row.ci[0] > 0:
        return f"{whose}, {at}: BatchNorm adds {amount} {unit} {span} {against}."
    if row.ci[1] < 0:
        return f"{whose}, {at}: BatchNorm lowers leakage, {amount} {unit} {span} {against}."
    return f"{whose}, {at}: no effect of BatchNorm resolved, {amount} {unit} {span} {against}."

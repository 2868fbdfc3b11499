"""How an audit was measured, in the terms that data-protection guidance asks for; and how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mia_audit.attacks.registry import SPREAD
from mia_audit.report.words import headline_rows, percent, shown
from mia_audit.results import AuditResult

_SHADOW = "models of the same recipe trained with the record and without it"
Term = tuple[str, str]


@dataclass(frozen=True)
class Definition:
    """What an attack computes, and where it comes from."""

    text: str
    source: str
    link: str


_SPREADS = {
    "moderated": "variances are moderated by empirical Bayes over all records",
    "shrunk": "means and variances are shrunk by empirical Bayes toward what all records share",
}
_LIRA = ("Carlini et al. 2022, Membership inference attacks from first principles", "https://arxiv.org/abs/2112.03570")
_RMIA = ("Zarifzadeh et al. 2024, Low-cost high-power membership inference", "https://arxiv.org/abs/2312.03262")
DEFINITIONS = {
    "lira-online": Definition(
        f"Likelihood ratio of the model's phi (log-odds of the true label) under {_SHADOW}; {_SPREADS[SPREAD]}; mean "
        "over the record's views.",
        *_LIRA,
    ),
    "lira-offline": Definition(
        "How far the model's phi lies above that of models trained without the record (one-sided tail); "
        f"{_SPREADS[SPREAD]}.",
        *_LIRA,
    ),
    "rmia": Definition(
        "Share of population records over which the record's likelihood ratio against the shadow models prevails; "
        "shadows trained with and without the record.",
        *_RMIA,
    ),
    "rmia-offline": Definition("As rmia, with shadow models trained without the record only.", *_RMIA),
    "loss": Definition(
        "The model's loss on the record, negated; no shadow models.",
        "Yeom et al. 2018, Privacy risk in machine learning",
        "https://arxiv.org/abs/1709.01604",
    ),
    "reference": Definition(
        "The model's loss on the record, calibrated by its mean loss under shadow models trained without the record.",
        "Watson et al. 2022, On the importance of difficulty calibration in membership inference attacks",
        "https://arxiv.org/abs/2111.08440",
    ),
}

READING = (
    (
        "True- and false-positive rate (TPR, FPR)",
        "The attacker names a record a member when its score reaches a threshold. FPR is the share of non-members so "
        "named in error, TPR the share of members found. What counts is the TPR at an FPR low enough that an "
        "accusation means something; an attacker who guesses has TPR = FPR.",
    ),
    (
        "AUC",
        "The chance that a random member scores above a random non-member: 0.5 is guessing, 1 is certainty. An average "
        "over all thresholds: it can stay near 0.5 while a few records are fully exposed.",
    ),
    (
        "Interval, and †",
        "The 95 % interval says what other draws of records (and, for a pool, of models) would plausibly have given. "
        "† marks a rate that fewer than five non-members stand behind: read nothing into it.",
    ),
    (
        "False-positive rate of a record",
        "How often a non-member scores as high as this record does. At 0.1 %, an attacker who names it is wrong about "
        "once for every thousand non-members tested.",
    ),
    (
        "Vulnerability",
        "How well the pool's models trained with a record and without it can be told apart on it: 0.5 is not at all, "
        "1 is completely. A property of record and recipe, not of one model.",
    ),
    (
        "gamma/sigma",
        "The factor by which a BatchNorm channel scales its input. Its square multiplies the growth of a record's "
        "margin in a gradient step, so layers above one amplify memorization, of outliers most (arXiv 2605.24420).",
    ),
)

_LIMITS = (
    "A measured leak is a lower bound: a stronger attack, more shadow models or more queries can find more. A result "
    "that is not resolved is no proof of safety.",
    "The numbers hold for records like those audited and an attacker who can train models of the same recipe on such "
    "records. A subset's rate says nothing about one particular person's record.",
    "No guarantee in the sense of differential privacy follows from an audit.",
)
_SUSPECTS = (
    "Subsets marked suspected were found by the models' own predictions and contain errors. Measured against injected "
    "outliers (benchmarks/subsets.py), the share of suspected records that were right was, for mislabeled / ood: "
    "digits 98 to 100 % / 79 to 83 %, Fashion-MNIST 41 to 52 % / 57 to 65 %, CIFAR-10 19 to 26 % / 0 to 8 %; the share "
    "of injected ones that were suspected: digits 80 to 83 % / 100 %, Fashion-MNIST 61 % / 28 to 64 %, CIFAR-10 14 to "
    "21 % / 0 to 4 %. Models were right about 86, 72 and 38 % of the records there: the less they know, the more "
    "suspects are wrong."
)


def limits(result: AuditResult) -> list[str]:
    """What the numbers do not say, for this audit."""
    found = list(_LIMITS)
    if (result.records["subset_source"] == "suspected").any():
        found.append(_SUSPECTS)
    if any(row.scope == "recipe" for row in result.effect):
        found.append(
            "At equal epochs, arms differ in how well they fit the records as well as in normalization; the comparison "
            "at equal fit takes that part out."
        )
    if result.kind == "pool":
        found.append("A pool describes the recipe on average; one model trained by it can leak more or less.")
    return found


def attacks_used(result: AuditResult) -> list[tuple[str, Definition]]:
    """The attacks of this audit that have a definition, in the order of their rows, else of the records' columns."""
    columns = [str(column).removesuffix("_in") for column in result.records.columns]
    names = dict.fromkeys([row.attack for row in result.attacks] + columns)
    return [(name, DEFINITIONS[name]) for name in names if name in DEFINITIONS]


def measured(result: AuditResult, spec: Mapping[str, Any] | None) -> list[Term]:
    """Threat model, access, evidence, uncertainty and identity of what was audited, as (term, text)."""
    queries = int((spec or {}).get("queries", 1))
    views = (
        "one query a record" if queries == 1 else f"{queries} queries a record (augmented views; the first is plain)"
    )
    statistics = "its running statistics" if result.query_mode == "eval" else "the statistics of the query batch"
    pool = result.pool
    terms = [
        (
            "Threat model",
            "The attacker holds a record and its label and asks whether it was in the training data. They know the "
            "architecture and the recipe and can train models of their own on records like it.",
        ),
        (
            "Access",
            f"The model's outputs (logits or probabilities) only, {views}. The BatchNorm ratios, which no attack uses, "
            "were read from the weights.",
        ),
        ("Query mode", f"{result.query_mode}: BatchNorm used {statistics} while the model was queried."),
        (
            "Population",
            "Records of the same source that no shadow model trained on; they give test accuracies and, for rmia, the "
            "reference population.",
        ),
        ("Evidence", _evidence(result)),
        (
            "Shadow models",
            f"{pool.n} for each arm ({', '.join(pool.arms)}), trained in complementary pairs on random halves of "
            f"{pool.records:,} records ({_subsets(pool.subsets)}).",
        ),
        ("Uncertainty", _uncertainty(result)),
        ("Fingerprint of the data", pool.fingerprint),
        ("Pool", shown(pool.path, 200)),
    ]
    return terms + list(_target_terms(result))


def _subsets(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {shown(name, 40)}" for name, count in counts.items())


def _evidence(result: AuditResult) -> str:
    row = next((row for row in headline_rows(result) if row.subset == "all"), None)
    if row is None:
        return "Membership is not known, so no rates could be measured."
    unit = "cells (one for each model and record)" if result.kind == "pool" else "records"
    return f"{row.members:,} members and {row.nonmembers:,} non-members, counted in {unit}."


def _uncertainty(result: AuditResult) -> str:
    if result.kind == "pool":
        return (
            "95 % intervals by a jackknife that deletes one pair of models at a time, with everything rescored, and "
            "Student's t. Each model was judged with its complementary partner left out of the shadows."
        )
    return (
        "95 % intervals: AUC by DeLong; TPR by a stratified bootstrap, or, with few non-members, by order statistics "
        "of the threshold joined with Clopper-Pearson. Differences between arms: jackknife over pairs of models."
    )


def _target_terms(result: AuditResult) -> Iterator[Term]:
    target = result.target
    if target is None:
        return
    yield "Target file", shown(target.path, 200)
    yield "sha256 of the target", target.sha256
    norms = ", ".join(f"{count} {shown(kind, 40)}" for kind, count in target.norm_layers.items()) or "none"
    yield "Architecture", f"{shown(target.arch, 120)}, {target.parameters:,} parameters; normalization layers: {norms}."
    below = target.shadow_accuracy_percentile
    rank = "" if below is None else f"; {percent(below, 0)} of the shadow models are less accurate on non-members"
    yield (
        "Accuracy",
        f"{percent(target.member_accuracy)} on members, {percent(target.nonmember_accuracy)} on non-members{rank}.",
    )


def settings(spec: Mapping[str, Any], prefix: str = "") -> list[Term]:
    """Nested settings as (dotted name, value)."""
    found: list[Term] = []
    for key, value in spec.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += settings(value, f"{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            found.append((shown(name, 80), shown(text, 200)))
    return found

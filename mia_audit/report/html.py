"""report.html: one self-contained file for an audit or a study, without network access or foreign script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from mia_audit.report import figures, gallery, methods, tables, words
from mia_audit.results import SUBSET_ROWS, AuditResult, EffectRow
from shadow_pool.data.records import Records

if TYPE_CHECKING:
    from mia_audit.studies.result import StudyResult

_FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Picture:
    """A figure of the report: SVG markup made by matplotlib, and a caption that says what to see in it."""

    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Fact:
    """One of the few numbers beside the verdict."""

    name: str
    value: str
    note: str


def write_report(
    result: AuditResult, folder: Path, *, records: Records | None = None, spec: Mapping[str, Any] | None = None
) -> Path:
    """Write folder/report.html (the folder is created where missing) and return its path.

    Args:
        result: the audit.
        folder: where the file goes.
        records: the records of ``result.records`` in the same order, for pictures, class names and known true
            labels; None where the inputs are not at hand.
        spec: the pool's spec as plain values, for the table of settings.

    Raises:
        ValueError: ``records`` are not those of the result.
    """
    cards = gallery.build(result, records)
    calibration, calibrated = tables.calibration(result)
    page = _render(
        "audit.html",
        result=result,
        verdict=words.verdict(result),
        facts=facts(result),
        leakage=tables.leakage(words.headline_rows(result), "Leakage under the headline attack, by subset."),
        other_attacks=tables.other_attacks(result),
        rocs=list(_roc_pictures(result)),
        histograms=list(_histograms(result)),
        scores=tables.scores(result),
        effect_sentences=[words.effect_sentence(row) for row in _main_effects(result)],
        effect_pictures=list(_effect_pictures(result)),
        effects=tables.effects(result),
        ratio_pictures=list(_ratio_pictures(result)),
        ratios=tables.ratios(result),
        arms=tables.arms(result),
        recommendation=tables.recommendation(result),
        gallery=cards,
        calibration=calibration,
        calibrated=calibrated,
        measured=methods.measured(result, spec),
        attacks=methods.attacks_used(result),
        settings=methods.settings(spec or {}),
        reading=methods.READING,
        limits=methods.limits(result),
    )
    return _write(page, folder)


def write_study_report(study: StudyResult, folder: Path) -> Path:
    """Write folder/report.html for a study and return its path."""
    pictures = [
        _picture(f"figure-{place}", figure.title, figure.caption, figure.figure)
        for place, figure in enumerate(study.figures)
    ]
    page = _render(
        "study.html",
        study=study,
        pictures=pictures,
        settings=methods.settings(study.settings),
        claims=words.by_claim(study.rows),
        judged=words.by_claim(row for row in study.rows if row.verdict is not None),
    )
    return _write(page, folder)


def facts(result: AuditResult) -> list[Fact]:
    """The few numbers that stand beside the verdict: overall AUC, the most exposed subset, BatchNorm, accuracy."""
    found = []
    rows = words.headline_rows(result)
    overall = next((row for row in rows if row.subset == "all" and row.auc is not None), None)
    if overall is not None:
        found.append(
            Fact("AUC, all records", words.number(overall.auc), f"{words.interval(overall.auc_ci)}; 0.5 is chance")
        )
    parts = [row for row in rows if row.subset != "all" and row.auc is not None]
    worst = max(parts, key=lambda row: row.auc or 0.0, default=None)
    if worst is not None and len(parts) > 1:
        found.append(
            Fact(
                f"AUC, {words.SUBSET_WORDS[worst.subset]}",
                words.number(worst.auc),
                f"{words.interval(worst.auc_ci)}; the highest of the subsets",
            )
        )
    nearest = {row.matched: row for row in reversed(_main_effects(result))}
    for matched in sorted(nearest):
        row = nearest[matched]
        whose = "this checkpoint" if row.scope == "checkpoint" else "this recipe"
        note = f"{words.interval(row.ci, plus=True)} in AUC, {whose}"
        found.append(Fact(f"BatchNorm adds, equal {matched}", words.signed(row.difference), note))
    if result.target is not None and result.target.member_accuracy is not None:
        note = f"on members; {words.percent(result.target.nonmember_accuracy)} on non-members"
        found.append(Fact("Accuracy", words.percent(result.target.member_accuracy), note))
    return found


def _main_effects(result: AuditResult) -> list[EffectRow]:
    """AUC differences over all records, this checkpoint's before the recipe's."""
    return [row for row in tables.headline_effects(result) if row.subset == "all" and row.metric == "auc"]


def _picture(name: str, title: str, caption: str, figure: Figure) -> Picture:
    return Picture(title, caption, Markup(figures.to_svg(figure, name=name, alt=f"{title}. {caption}")))


def _roc_pictures(result: AuditResult) -> Iterator[Picture]:
    chosen = words.headline_attack(result)
    arm = chosen[1] if chosen else ""
    by_subset = [(arm, subset) for subset in SUBSET_ROWS if (arm, subset) in result.curves]
    by_arm = [(name, "all") for name in result.pool.arms if (name, "all") in result.curves]
    caption = "Both axes are logarithmic; the dotted line is chance."
    if any(key in result.bands for key in by_subset):
        caption += " Shaded: 95 % bands."
    caption += " Bars: the 95 % intervals of the table, where resolved."
    for name, title, keys in (
        ("roc-subset", f"ROC by subset, {arm}", by_subset),
        ("roc-arm", "ROC by arm, all records", by_arm),
    ):
        if keys and (name == "roc-subset" or len(keys) > 1):
            figure, axes = figures.canvas(4.9, 4.2)
            figures.plot_roc(axes, result, keys)
            yield _picture(name, title, caption, figure)


def _histograms(result: AuditResult) -> Iterator[Picture]:
    chosen = words.headline_attack(result)
    if chosen is not None and chosen[1] in result.cells:
        member, score = result.cells[chosen[1]]
        figure, axes = figures.canvas(4.9, 4.2)
        figures.plot_scores(axes, member, score, name=chosen[0])
        caption = (
            "Where the two histograms part, membership shows. Scores beyond the central 99 % are counted in the "
            "outermost bins."
        )
        yield _picture("scores", f"Scores of members and non-members, {chosen[1]}", caption, figure)


def _effect_pictures(result: AuditResult) -> Iterator[Picture]:
    rows = [row for row in tables.headline_effects(result) if row.metric == "auc"]
    if rows:
        figure, axes = figures.canvas(4.9, 1.0 + 0.27 * len(rows))
        figures.plot_effect(axes, rows)
        marks = {"epochs": "circles: equal epochs", "fit": "squares: equal fit"}
        drawn = [text for matched, text in marks.items() if any(row.matched == matched for row in rows)]
        caption = f"Right of zero, BatchNorm adds leakage. Bars: 95 % intervals; {'; '.join(drawn)}."
        yield _picture("effect", "What BatchNorm adds to the AUC", caption, figure)


def _ratio_pictures(result: AuditResult) -> Iterator[Picture]:
    if result.layers:
        figure, axes = figures.canvas(4.9, 3.5)
        figures.plot_ratios(axes, result)
        caption = "Above the dashed line at one, a layer amplifies the growth of margins; by the square of the ratio."
        yield _picture("ratios", "gamma/sigma by layer", caption, figure)


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.finalize = lambda value: words.unbroken(value) if type(value) is str else value  # markup stays
    environment.filters["shown"] = words.shown
    environment.globals["words"] = words
    script = (_FOLDER / "gallery.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        **values,
        style=Markup((_FOLDER / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _write(page: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    # Names from file systems can hold lone surrogates, which UTF-8 has no bytes for.
    path.write_text(page, encoding="utf-8", errors="backslashreplace", newline="\n")
    return path

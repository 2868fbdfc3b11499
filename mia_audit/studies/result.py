"""StudyResult: what an experiment on a pool found; written as study.json and study.parquet."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mia_audit.results import PROTOCOL, Interval, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERDICTS = ("holds", "does not hold", "not resolved")


@dataclass(frozen=True)
class StudyRow:
    """One number of a study.

    ``claim`` is the sentence the number bears on; ``at`` is where on the study's axis it was taken (an epoch, a
    penalty strength, a layer's name) or None; ``ci`` is a 95 % interval; ``verdict`` is one of :data:`VERDICTS`, or
    None for a number that decides nothing by itself.
    """

    claim: str
    arm: str
    subset: str
    metric: str
    at: float | str | None
    value: float | None
    ci: Interval | None = None
    verdict: str | None = None

    def __post_init__(self) -> None:
        if self.verdict is not None and self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)} or None, got {self.verdict!r}")


@dataclass(frozen=True)
class StudyFigure:
    """One figure. ``caption`` tells what is drawn and what to see in it, for readers with and without the picture.

    Make ``figure`` with :func:`mia_audit.report.figures.canvas`, which sets the report's style.
    """

    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class StudyResult:
    """One study. ``settings`` are shown as a two-column table; ``summary`` is one plain sentence: what was found."""

    name: str
    summary: str
    created: str
    software: dict[str, str]
    rows: tuple[StudyRow, ...]
    figures: tuple[StudyFigure, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The content of study.json: plain values, every non-finite number as null."""
        return {
            "protocol": PROTOCOL,
            "kind": "study",
            "name": self.name,
            "summary": self.summary,
            "created": self.created,
            "software": self.software,
            "settings": plain(self.settings),
            "rows": plain(self.rows),
            "warnings": list(self.warnings),
        }

    def to_frame(self) -> pd.DataFrame:
        """The rows as a table with ``ci_low`` and ``ci_high``; ``at`` is text as soon as one row's is."""
        frame = pd.DataFrame(
            [
                (r.claim, r.arm, r.subset, r.metric, r.at, r.value, *(r.ci or (None, None)), r.verdict)
                for r in self.rows
            ],
            columns=["claim", "arm", "subset", "metric", "at", "value", "ci_low", "ci_high", "verdict"],
        )
        if any(isinstance(row.at, str) for row in self.rows):
            frame["at"] = [None if row.at is None else str(row.at) for row in self.rows]
        else:
            frame["at"] = frame["at"].astype(float)
        return frame.astype({"value": float, "ci_low": float, "ci_high": float})

    def write(self, folder: Path) -> None:
        """Write study.json and study.parquet into ``folder`` (created where missing).

        The report is written by :func:`mia_audit.report.html.write_study_report`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        (folder / "study.json").write_text(text + "\n", encoding="utf-8")
        self.to_frame().to_parquet(folder / "study.parquet", index=False)

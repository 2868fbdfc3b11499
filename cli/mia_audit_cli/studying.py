"""The command that runs the paper's experiments: study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mia_audit_cli import options as o
from mia_audit_cli.auditing import check_folder
from mia_audit_cli.console import TrainingProgress, note, prose, stdout, step, table, warn
from mia_audit_cli.exits import guarded
from mia_audit_cli.training import start_workers_early

if TYPE_CHECKING:
    from mia_audit.studies.result import StudyResult, StudyRow

PLACES = ("arm", "subset", "metric", "at")
MOST_ROWS = 8
"""A claim judged more often than this is told by its tally; the report has the numbers."""


def register(app: typer.Typer) -> None:
    """Add the command of this file to the application."""
    app.command(
        "study",
        short_help="The paper's experiments on your data.",
        epilog="Example: mia-audit study memorization --out memorization",
    )(guarded(o.with_spec(study)))


def study(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="memorization, gradients, leakage, theory or mitigation.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the study's pools and results.")] = Path(
        "audit"
    ),
    data_root: o.DataRootOption = None,
    download: o.DownloadOption = False,
    query_mode: o.QueryModeOption = "eval",
    workers: o.WorkersOption = None,
    scheduler: o.SchedulerOption = None,
    device: o.DeviceOption = "cpu",
    trust: o.TrustOption = False,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
    *,
    changes: dict[str, Any],
) -> None:
    """Test the paper's claims on your data: a verdict with an interval for each, and a report with figures."""
    check_folder(out)
    if device == "cpu" and scheduler is None:
        start_workers_early(workers)
    from mia_audit.report.html import write_study_report
    from mia_audit.studies.registry import STUDIES
    from mia_audit.studies.setup import StudySetup
    from shadow_pool.errors import unknown_name

    if name not in STUDIES:
        raise unknown_name("study", name, STUDIES)
    quiet = quiet or as_json
    setup = StudySetup(
        out=out,
        changes=changes,
        data_root=data_root,
        download=download,
        device=device,
        workers=workers,
        scheduler=scheduler,
        query_mode=query_mode,
        trust=trust,
        on_progress=TrainingProgress(quiet=quiet),
    )
    with step(f"study {name}: training what its pool in {out} lacks, then judging", quiet=quiet):
        result = STUDIES[name](setup)
    result.write(out)
    write_study_report(result, out)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
        return
    if not quiet:
        warn(result.warnings)
        _show(result)
        note(f"wrote {out / 'study.json'}, {out / 'study.parquet'} and {out / 'report.html'}")
        note(f"next: open {out / 'report.html'} in a browser")


def _show(result: StudyResult) -> None:
    """A table for each claim, the count of verdicts, and what the study recommends."""
    from mia_audit.report.words import by_claim, findings, tally
    from mia_audit.studies.judge import OPENINGS

    console = stdout()
    for claim, rows in by_claim(row for row in result.rows if row.verdict).items():
        varied = [name for name in PLACES if len({getattr(row, name) for row in rows}) > 1] or ["subset"]
        fixed = _where(rows[0], [name for name in PLACES if name not in varied])
        prose(f"{claim} ({fixed})")
        if len(rows) > MOST_ROWS:
            print(tally(rows))
            continue
        cells = [[_where(row, varied), _value(row), row.verdict or ""] for row in rows]
        console.print(table("", [", ".join(varied), "value, 95 %", "verdict"], cells))
    others = [f"{name}: {text}" for name, text in findings(result.summary) if name and name not in OPENINGS.values()]
    prose(" ".join([tally(result.rows), *others]))


def _where(row: StudyRow, names: list[str]) -> str:
    """Those of a row's places, by name, that it has: ``mislabeled, at 10``."""
    parts = {name: getattr(row, name) for name in names}
    return ", ".join(f"at {_short(part)}" if name == "at" else part for name, part in parts.items() if part is not None)


def _short(at: float | str) -> str:
    return at if isinstance(at, str) else f"{at:g}"


def _value(row: StudyRow) -> str:
    text = "-" if row.value is None else f"{row.value:.3g}"
    return text if row.ci is None else f"{text} [{row.ci[0]:.3g}, {row.ci[1]:.3g}]"

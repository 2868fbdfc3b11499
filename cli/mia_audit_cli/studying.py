"""The command that runs the paper's experiments: study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mia_audit_cli import options as o
from mia_audit_cli.console import TrainingProgress, note, stdout, table, warn
from mia_audit_cli.exits import guarded


def register(app: typer.Typer) -> None:
    """Add the command of this file to the application."""
    app.command("study", epilog="Example: mia-audit study memorization --out study-memorization")(
        guarded(o.with_spec(study))
    )


def study(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="memorization, gradients, leakage, theory or mitigation.")
    ],
    out: o.OutOption = Path("audit"),
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
    result = STUDIES[name](setup)
    result.write(out)
    write_study_report(result, out)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
        return
    warn(result.warnings, quiet=quiet)
    judged = [
        [row.claim, row.subset, row.metric, "-" if row.value is None else f"{row.value:.3g}", row.verdict or ""]
        for row in result.rows
        if row.verdict
    ]
    stdout().print(table(f"Study {name}", ["claim", "subset", "metric", "value", "verdict"], judged))
    print(result.summary)
    note(f"wrote {out / 'study.json'}, {out / 'study.parquet'} and {out / 'report.html'}", quiet=quiet)

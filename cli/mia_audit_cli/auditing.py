"""Commands that judge: score, report, inspect, compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mia_audit_cli import options as o
from mia_audit_cli.console import TrainingProgress, note, prose, stdout, step, table, warn
from mia_audit_cli.exits import guarded

if TYPE_CHECKING:
    from mia_audit.results import AuditResult, Interval, TprAtFpr
    from shadow_pool.data.records import PoolData
    from shadow_pool.store.pool import Pool


def register(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(
        "inspect",
        short_help="Layers, norms and gamma/sigma of a checkpoint.",
        epilog="Example: mia-audit inspect model.pt",
    )(guarded(inspect))
    app.command(
        "score",
        short_help="Audit a checkpoint.",
        epilog="Example: mia-audit score model.pt --members train_ids.csv",
    )(guarded(score))
    app.command(
        "report",
        short_help="The pool audits itself, every model in turn the target.",
        epilog="Example: mia-audit report --pool pool --out audit",
    )(guarded(report))
    app.command(
        "compare",
        short_help="Two audits side by side, before and after a remedy.",
        epilog="Example: mia-audit compare before after",
    )(guarded(compare))


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The checkpoint to look into.")],
    arch: o.ArchOption = None,
    as_json: o.JsonOption = False,
    trust: o.TrustOption = False,
) -> None:
    """What is in a checkpoint: parameters, layers, norms, gamma/sigma. Needs no pool."""
    from mia_audit.checkpoints.inspection import inspect_checkpoint

    if trust:
        say_what_runs(model)
    found = inspect_checkpoint(model, arch=arch, trust=trust)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        return
    console = stdout()
    print(f"{found.path}: {found.kind}, {found.parameters:,} parameters, sha256 {found.sha256[:16]}")
    shapes = [[row.layer, row.kind, " x ".join(map(str, row.shape)), f"{row.parameters:,}"] for row in found.layers]
    console.print(table("Layers", ["layer", "kind", "weight", "parameters"], shapes))
    ratios = [
        [row.layer, str(row.channels)]
        + [f"{value:.2f}" for value in (row.ratio_median, row.ratio_max, row.amplification_median)]
        + [f"{row.fraction_above_one:.0%}"]
        for row in found.batchnorm
    ]
    if ratios:
        columns = ["layer", "channels", "median", "max", "median squared", "above 1"]
        console.print(table("gamma/sigma", columns, ratios))
    warn(found.notes)
    prose(found.summary)
    note(f"next: mia-audit train-shadows --data DATA --arch ARCH, then mia-audit score {model}")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of the first audit.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the second audit.")],
    as_json: o.JsonOption = False,
) -> None:
    """Two audits side by side, for example before and after a remedy: differences with intervals."""
    from mia_audit.compare import compare as compare_audits

    found = compare_audits(a, b)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        return
    lead = found.differences[0].attack if found.differences else ""
    rows = [
        [
            row.subset,
            row.metric,
            f"{row.a:.3f}",
            f"{row.b:.3f}",
            f"{row.difference:+.3f}{_ends(row.ci)}{'' if row.resolved else '?'}",
        ]
        for row in found.differences
        if row.attack == lead
    ]
    columns = ["subset", "metric", "A", "B", "B - A, 95 %"]
    print(f"A: {a}\nB: {b}\n{found.shared_records} records in both")
    stdout().print(table(f"{lead} (? = not resolved)", columns, rows))
    prose(found.sentence)
    others = list(dict.fromkeys(row.attack for row in found.differences if row.attack != lead))
    if others:
        note(f"with --json also {', '.join(others)}")
    warn(found.warnings)


def score(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The checkpoint to audit.")],
    pool: o.PoolOption = Path("pool"),
    data: o.DataOption = None,
    data_root: o.DataRootOption = None,
    arch: o.ArchOption = None,
    arm: Annotated[str | None, typer.Option("--arm", metavar="ARM", help="Judge by this arm's shadow models.")] = None,
    members: Annotated[
        Path | None,
        typer.Option(
            "--members", metavar="FILE", help="Members: ids in .csv, .parquet or .txt; .npy in the pool's order."
        ),
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option("--attack", metavar="NAME", help="Run this attack; may be repeated.")
    ] = None,
    twins: Annotated[
        int, typer.Option("--twins", metavar="K", min=0, help="Train K twins an arm: BatchNorm's effect on this model.")
    ] = 0,
    query_mode: o.QueryModeOption = "eval",
    subsets: o.SubsetsOption = "auto",
    out: o.OutOption = Path("audit"),
    as_json: o.JsonOption = False,
    fail_above: Annotated[
        list[str] | None,
        typer.Option("--fail-above", metavar="RULE", help="Exit 3 if exceeded: ATTACK:SUBSET:METRIC=VALUE."),
    ] = None,
    trust: o.TrustOption = False,
    device: o.DeviceOption = "cpu",
    workers: o.WorkersOption = None,
    quiet: o.QuietOption = False,
) -> int:
    """Audit a checkpoint: who of its training data leaks, how much, and what BatchNorm has to do with it."""
    from mia_audit.rules import parse_rule
    from shadow_pool.prepare import pool_data
    from shadow_pool.store.pool import open_pool

    rules = [parse_rule(text) for text in fail_above or ()]
    opened = open_pool(pool, trust=trust)
    if trust:
        say_what_runs(model)
        say_what_pool_runs(opened)
    records = pool_data(opened, source=data, data_root=data_root)
    result = audit_and_write(
        model,
        opened,
        records,
        out=out,
        quiet=quiet or as_json,
        as_json=as_json,
        arch=arch,
        arm=arm,
        members=members,
        attacks=tuple(attack or ()),
        twins=twins,
        workers=workers,
        on_progress=TrainingProgress(quiet=quiet or as_json),
        query_mode=query_mode,
        subsets=subsets,
        trust=trust,
        device=device,
    )
    exceeded = [rule for rule in rules if rule.exceeded(result)]
    warn(doubt for rule in rules if rule not in exceeded and (doubt := rule.doubt(result)))
    for rule in exceeded:
        note(f"exceeded: {rule.sentence(result)}")
    return 3 if exceeded else 0


def report(
    pool: o.PoolOption = Path("pool"),
    data: o.DataOption = None,
    data_root: o.DataRootOption = None,
    subsets: o.SubsetsOption = "auto",
    query_mode: o.QueryModeOption = "eval",
    out: o.OutOption = Path("audit"),
    as_json: o.JsonOption = False,
    trust: o.TrustOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """A pool audits itself: every model in turn the target, its pair left out."""
    from mia_audit.audit import audit_pool
    from shadow_pool.store.pool import open_pool

    opened = open_pool(pool, trust=trust)
    if trust:
        say_what_pool_runs(opened)
    records = _inputs(opened, data, data_root, needed=query_mode == "batch")
    check_folder(out)
    with step(f"auditing the pool {pool}", quiet=quiet or as_json):
        result = audit_pool(opened, data=records, subsets=subsets, query_mode=query_mode)
    _write_and_show(result, opened, records, out=out, quiet=quiet, as_json=as_json)


def check_folder(out: Path) -> None:
    """Before any work: raise where results cannot go to ``out``."""
    from shadow_pool.errors import UserError

    if out.exists() and not out.is_dir():
        raise UserError(f"--out must be a folder, {out} is a file; name another")


def say_what_runs(model: Path) -> None:
    """Before a trusted file is opened: the code that opening it runs, on standard error."""
    from mia_audit.checkpoints import what_would_run

    for name in what_would_run(model):
        note(f"trusted: opening {model} runs {name}")


def say_what_pool_runs(pool: Pool) -> None:
    """The code that a trusted pool names, on standard error."""
    from shadow_pool.plain import short
    from shadow_pool.spec import to_dict
    from shadow_pool.store.trust import named_code

    for text in dict.fromkeys(named_code(to_dict(pool.spec)).values()):
        note(f"trusted: the pool {pool.path} runs {short(text)}")


def audit_and_write(
    model: Path,
    pool: Pool,
    data: PoolData,
    *,
    out: Path,
    quiet: bool = False,
    as_json: bool = False,
    **options: object,
) -> AuditResult:
    """Audit a target, write its folder, show the result."""
    from mia_audit.audit import audit_target

    check_folder(out)
    with step(f"auditing {model} against the pool {pool.path}", quiet=quiet):
        result = audit_target(model, pool, data, **options)  # type: ignore[arg-type]
    _write_and_show(result, pool, data, out=out, quiet=quiet, as_json=as_json)
    return result


def _inputs(pool: Pool, data: str | None, data_root: Path | None, *, needed: bool) -> PoolData | None:
    """The pool's records; a report does without pictures where they cannot be found and were not asked for."""
    from shadow_pool.errors import UserError
    from shadow_pool.prepare import pool_data

    try:
        return pool_data(pool, source=data, data_root=data_root)
    except UserError as error:
        if needed or data is not None or data_root is not None:
            raise
        note(f"warning: the report goes without pictures of records: {error}")
        return None


def _write_and_show(
    result: AuditResult, pool: Pool, data: PoolData | None, *, out: Path, quiet: bool, as_json: bool
) -> None:
    from mia_audit.report.html import write_report
    from shadow_pool.spec import to_dict

    result.write(out)
    page = write_report(result, out, records=data.records if data else None, spec=to_dict(pool.spec))
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
        return
    warn(result.warnings, quiet=quiet)
    if not quiet:
        _show(result)
        note(f"wrote {out / 'audit.json'}, {out / 'records.parquet'} and {page}")
        note(f"next: open {page} in a browser")


def _show(result: AuditResult) -> None:
    """The leakage table, the effect of BatchNorm, and the headline in words."""
    from mia_audit.report.words import headline_attack, verdict

    console = stdout()
    lead = headline_attack(result)
    # The headline's rate and another: 10 % only where nothing lower is resolved.
    shown = (0.01, 0.1) if result.headline is not None and result.headline.fpr == 0.1 else (0.001, 0.01)
    rows = [
        [
            row.arm if result.target is None else row.attack,
            row.subset,
            "-" if row.auc is None else f"{row.auc:.3f}{_range(row.auc_ci, '.3f')}",
            *(_rate(point) for point in row.tpr_at_fpr if point.fpr in shown),
        ]
        for row in result.attacks
        if lead is not None and (row.attack == lead[0] or (result.target is not None and row.subset == "all"))
    ]
    if rows and lead is not None:
        name = "arm" if result.target is None else "attack"
        title = "Leakage with 95 % intervals (TPR in %, ? = not resolved)"
        console.print(table(title, [name, "subset", "AUC", *(f"TPR at {100 * fpr:g} %" for fpr in shown)], rows))
    effects = [
        [row.reference, row.scope, row.matched, row.subset, f"{row.difference:+.3f}{_ends(row.ci)}"]
        for row in result.effect
        if lead is not None and row.attack == lead[0] and row.metric == "auc"
    ]
    if effects:
        columns = ["against", "scope", "equal", "subset", "difference in AUC"]
        console.print(table("Effect of BatchNorm", columns, effects))
    found = verdict(result)
    prose(f"{found.title} {found.sentence}")


def _rate(point: TprAtFpr) -> str:
    text = "-" if point.tpr is None else f"{100 * point.tpr:.1f}"
    return text + _range(point.ci, ".1f", scale=100) + ("" if point.resolved else "?")


def _range(ci: Interval | None, form: str, scale: float = 1.0) -> str:
    return "" if ci is None else f" {scale * ci[0]:{form}}-{scale * ci[1]:{form}}"


def _ends(ci: Interval | None) -> str:
    return "" if ci is None else f" [{ci[0]:+.3f}, {ci[1]:+.3f}]"

"""Commands that train: demo, train-shadows, train-target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mia_audit_cli import options as o
from mia_audit_cli.console import TrainingProgress, clock, note, stdout, table, warn
from mia_audit_cli.exits import guarded

if TYPE_CHECKING:
    from shadow_pool.data.records import PoolData
    from shadow_pool.prepare import PlannedPool
    from shadow_pool.store.entry import EntryInfo
    from shadow_pool.store.pool import Pool


_SCOPES = {"pool": "the pool itself", "target": "one target"}
DEMO_SPEC = {
    "n": 12,
    "arms": ["batch", "none", "none+fit"],
    "data": {"source": "digits", "mislabeled": 0.05, "ood": 0.05},
}


def register(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command("demo", short_help="The whole job on real digits.", epilog="Example: mia-audit demo --out demo")(
        guarded(demo)
    )
    app.command(
        "train-shadows",
        short_help="Train a pool of shadow models; resume or extend it.",
        epilog="Example: mia-audit train-shadows --data cifar10 --arch resnet8 --n 16",
    )(guarded(o.with_spec(train_shadows)))
    app.command(
        "train-target",
        short_help="Train a model to audit, its members drawn by coins.",
        epilog="Example: mia-audit train-target --arm none --out model.pt",
    )(guarded(train_target))


def train_shadows(
    pool: o.PoolOption = Path("pool"),
    data_root: o.DataRootOption = None,
    download: o.DownloadOption = False,
    init: Annotated[
        Path | None, typer.Option("--init", metavar="FILE", help="Weights every model starts from (fine-tuning).")
    ] = None,
    workers: o.WorkersOption = None,
    scheduler: o.SchedulerOption = None,
    indices: Annotated[
        str | None,
        typer.Option("--indices", metavar="A-B", help="Train only models A to B of each arm; best whole fours: 0-3."),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="D", help="cpu, cuda or cuda:N; several GPUs: a run each, with --indices."),
    ] = "cpu",
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what the pool will cost and resolve; train nothing.")
    ] = False,
    trust: o.TrustOption = False,
    quiet: o.QuietOption = False,
    *,
    changes: dict[str, Any],
) -> None:
    """Train a pool of in/out shadow models, in pairs, with and without BatchNorm; run again to resume or extend."""
    from shadow_pool.spec import from_dict

    chosen = _indices(indices)
    if not (pool / "pool.json").exists():
        from_dict(changes)  # what is wrong with the options shows before anything that takes seconds
    if device == "cpu" and scheduler is None and not plan:
        start_workers_early(workers)
    from mia_audit.initial import initial_weights
    from mia_audit_cli.auditing import say_what_pool_runs, say_what_runs
    from shadow_pool.plain import short
    from shadow_pool.prepare import plan_pool, prepare_pool
    from shadow_pool.store.pool import open_pool

    if init is not None:
        changes["init"] = str(init)
    options: dict[str, Any] = {"data_root": data_root, "download": download, "device": device, "trust": trust}
    if trust and "init" in changes:
        say_what_runs(Path(changes["init"]))
    options["initial"] = initial_weights(changes, trust=trust)
    if trust and (pool / "pool.json").exists():
        say_what_pool_runs(open_pool(pool))
    if plan:
        _show_plan(pool, plan_pool(pool, changes, **options), workers=workers, indices=chosen, device=device)
        if scheduler is not None:
            stdout().print(
                "\nTimes are those of cores like this machine's; --workers says how many workers the scheduler has.",
                soft_wrap=True,
            )
        return
    opened, records = prepare_pool(pool, changes, **options)
    warn(opened.manifest.warnings, quiet=quiet)
    if opened.spec.data.normalize != "none" and "normalize" not in changes.get("data", {}):
        means, _, deviations = opened.spec.data.normalize.partition("/")
        how = f"{short(means)} and {short(deviations)}" if deviations else short(means)
        note(f"inputs are standardized by {how} (with --normalize none: as they are)", quiet=quiet)
    _train(opened, records, workers=workers, scheduler=scheduler, indices=chosen, device=device, quiet=quiet)
    if not quiet:
        _pool_table(opened)
        note(f"next: mia-audit report --pool {pool}, or mia-audit score MODEL --pool {pool} on your own checkpoint")


def train_target(
    pool: o.PoolOption = Path("pool"),
    arm: Annotated[
        str, typer.Option("--arm", metavar="ARM", help="The arm whose recipe the target follows.")
    ] = "batch",
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Seed of members and weights.")] = 0,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the state dict is written.")] = Path(
        "model.pt"
    ),
    data: o.DataOption = None,
    data_root: o.DataRootOption = None,
    device: o.DeviceOption = "cpu",
    trust: o.TrustOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Train a model to audit on records drawn by fair coins; its members stand beside it in a sidecar."""
    from mia_audit_cli.auditing import say_what_pool_runs
    from shadow_pool.prepare import pool_data
    from shadow_pool.store.drift import drift_warnings
    from shadow_pool.store.pool import open_pool
    from shadow_pool.train.target import train_target as train

    opened = open_pool(pool, trust=trust)
    if trust:
        say_what_pool_runs(opened)
    records = pool_data(opened, source=data, data_root=data_root)
    warn(drift_warnings(opened, device=device, here=True), quiet=quiet)
    target = train(opened, records, arm=arm, seed=seed, out=out, device=device)
    note(
        f"wrote {target.model} ({arm}, {target.epochs} epochs, training loss {target.loss:.4f}) and {target.members}",
        quiet=quiet,
    )
    note(f"next: mia-audit score {target.model} --pool {pool}", quiet=quiet)


def demo(
    out: o.OutOption = Path("audit"),
    workers: o.WorkersOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Train a small paired pool on real digits, train a target, audit it and write the report: about a minute."""
    from mia_audit_cli.auditing import audit_and_write, check_folder

    check_folder(out)
    start_workers_early(workers)
    from shadow_pool.prepare import prepare_pool
    from shadow_pool.train.target import train_target as train

    opened, records = prepare_pool(out / "pool", DEMO_SPEC)
    _train(opened, records, workers=workers, quiet=quiet)
    target = train(opened, records, out=out / "model.pt")
    audit_and_write(target.model, opened, records, out=out, quiet=quiet)


def start_workers_early(workers: int | None) -> None:
    """Have worker processes import torch, which takes seconds, while this one does; before anything else is done."""
    from shadow_pool.train.workers import start_workers, worker_count

    start_workers(worker_count(workers, "cpu"))


def _train(
    pool: Pool,
    data: PoolData,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    indices: range | None = None,
    device: str = "cpu",
    quiet: bool = False,
) -> None:
    """Train what is missing with progress shown; a model that failed for good is an error at the end."""
    from shadow_pool.errors import UserError
    from shadow_pool.store.drift import drift_warnings
    from shadow_pool.store.files import ADVICE
    from shadow_pool.store.repair import discard_damaged
    from shadow_pool.train.schedule import train_pool

    damaged = (str(error).removesuffix(f"; {ADVICE}") for error in discard_damaged(pool))
    warn((f"{damage}: it is trained again" for damage in damaged), quiet=quiet)
    warn(drift_warnings(pool, device=device, here=True), quiet=quiet)
    todo = sum(index in (indices or range(pool.spec.n)) for arm in pool.spec.arms for index in pool.missing(arm))
    if not todo:
        note(f"pool {pool.path}: nothing is missing", quiet=quiet)
        return
    note(
        f"pool {pool.path}: training {todo} models, arms {', '.join(pool.spec.arms)}, n {pool.spec.n}, "
        f"{pool.membership.shape[1]} records",
        quiet=quiet,
    )
    receipts = train_pool(
        pool,
        data,
        workers=workers,
        scheduler=scheduler,
        indices=indices,
        device=device,
        on_progress=TrainingProgress(quiet=quiet),
    )
    failed = [receipt for receipt in receipts if receipt.outcome == "failed"]
    if failed:
        kept = "the others are kept: " if len(failed) < len(receipts) else ""
        raise UserError(
            f"{len(failed)} of {len(receipts)} models failed, the first with: {failed[0].message}; "
            f"{kept}mend the cause and run the same command again"
        )


def _show_plan(pool: Path, planned: PlannedPool, *, workers: int | None, indices: range | None, device: str) -> None:
    from mia_audit.plan import make_plan
    from shadow_pool.memory import memory_limit
    from shadow_pool.train.workers import worker_count

    plan = make_plan(pool, planned, workers=worker_count(workers, device), indices=indices, device=device)
    costs = [
        [arm.arm, str(arm.models), _span(arm.seconds, arm.at_most, show=_tenths), f"{arm.bytes_per_model / 1e6:.1f} MB"]
        for arm in plan.arms
    ]
    warn(planned.data.warnings)
    console = stdout()
    console.print(table("Cost of a model on one core", ["arm", "to train", "time", "disk"], costs))
    console.print(
        f"all {plan.models} models on {plan.workers} workers: about {_span(plan.seconds, plan.at_most)}, "
        f"{plan.disk / 1e6:,.0f} MB of disk, {plan.memory / 1e9:.1f} of {memory_limit() / 1e9:.1f} GB of memory\n",
        markup=False,
        soft_wrap=True,
    )
    rows = [
        [_SCOPES[row.scope], f"{row.fpr:.1%}", f"{row.nonmembers:,}", "resolved" if row.resolved else "not resolved"]
        for row in plan.resolution
    ]
    console.print(table("Resolution", ["audit of", "FPR", "non-members", "TPR at that FPR"], rows))


def _span(seconds: float, at_most: float, *, show: Callable[[float], str] = clock) -> str:
    return show(seconds) if at_most <= seconds else f"{show(seconds)} to {show(at_most)}"


def _tenths(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def _pool_table(pool: Pool) -> None:
    rows = []
    for arm in pool.spec.arms:
        infos = list(pool.scan(arm)[0].values())

        def mean(name: str, infos: list[EntryInfo] = infos) -> str:
            values = [v for v in (getattr(info, name) for info in infos) if v is not None]
            return f"{sum(values) / len(values):.3f}" if values else "-"

        good = sum(info.status == "trained" for info in infos)
        rows.append(
            [arm, f"{good}/{pool.spec.n}", mean("member_accuracy"), mean("nonmember_accuracy")]
            + [mean("population_accuracy"), clock(sum(info.seconds for info in infos))]
        )
    columns = ["arm", "usable", "members", "non-members", "population", "time"]
    stdout().print(table("Accuracy, mean over models", columns, rows))


def _indices(text: str | None) -> range | None:
    """``3`` or ``0-15`` (both ends included)."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    try:
        chosen = range(int(first), int(last or first) + 1)
    except ValueError:
        chosen = range(0)
    if not chosen:
        raise typer.BadParameter(f"expected A-B with A <= B, for example 0-15, got {text!r}", param_hint="--indices")
    return chosen

"""Commands on a pool's folder: pool info, pool verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mia_audit_cli import options as o
from mia_audit_cli.console import note, stdout, table
from mia_audit_cli.exits import guarded

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the pool.")]


def register(app: typer.Typer) -> None:
    """Add ``pool`` and its commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Look at a pool, or check every byte of it.")
    group.command("info", epilog="Example: mia-audit pool info pool")(guarded(info))
    group.command("verify", epilog="Example: mia-audit pool verify pool --repair")(guarded(verify))
    app.add_typer(group, name="pool")


def info(folder: Folder, as_json: o.JsonOption = False) -> None:
    """What the pool holds: spec, records, models trained per arm."""
    from shadow_pool.spec import to_dict, to_toml
    from shadow_pool.store.pool import open_pool

    pool = open_pool(folder)
    arms = {arm: pool.scan(arm) for arm in pool.spec.arms}
    counts = {
        arm: {
            "models": len(good),
            **{status: sum(i.status == status for i in good.values()) for status in ("trained", "chance", "diverged")},
            "damaged": len(bad),
            "missing": pool.spec.n - len(good) - len(bad),
        }
        for arm, (good, bad) in arms.items()
    }
    subsets = pool.records["subset"].value_counts().sort_index().to_dict()
    if as_json:
        body = {
            "path": str(folder),
            "fingerprint": pool.manifest.fingerprint,
            "created": pool.manifest.created,
            "software": pool.manifest.software,
            "records": len(pool.records),
            "population": len(pool.population),
            "subsets": subsets,
            "arms": counts,
            "warnings": list(pool.manifest.warnings),
            "spec": to_dict(pool.spec),
        }
        print(json.dumps(body, indent=2))
        return
    subset_text = ", ".join(f"{count} {name}" for name, count in subsets.items())
    print(f"pool {folder}: {len(pool.records)} records ({subset_text}), population {len(pool.population)}")
    print(f"created {pool.manifest.created}, fingerprint {pool.manifest.fingerprint[:16]}\n")
    print(to_toml(pool.spec))
    columns = ["arm", "trained", "chance", "diverged", "damaged", "missing"]
    stdout().print(table("Models", columns, [[arm, *(str(c[k]) for k in columns[1:])] for arm, c in counts.items()]))
    _say_next(folder, whole=not any(c["damaged"] or c["missing"] for c in counts.values()))


def _say_next(folder: Path, *, whole: bool) -> None:
    if whole:
        note(f"next: mia-audit report --pool {folder}, or mia-audit score MODEL --pool {folder}")
    else:
        note(f"next: mia-audit train-shadows --pool {folder} trains what is missing")


def verify(
    folder: Folder,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove damaged models and leftovers; train-shadows makes them anew.")
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Read every byte of the pool and name what is damaged. Exit status 1 where something is."""
    from dataclasses import asdict

    from shadow_pool.errors import UserError
    from shadow_pool.store.pool import open_pool
    from shadow_pool.store.repair import verify_pool

    found = verify_pool(open_pool(folder), repair=repair)
    if as_json:
        print(json.dumps({"path": str(folder), "sound": found.sound, **asdict(found)}, indent=2))
    for text in (*found.tables, *found.models):
        note(f"damaged: {text}")
    if not as_json:
        mended = " (removed)" if repair else ""
        print(
            f"{found.checked} models read, {len(found.models)} damaged{mended}, {found.missing} missing, "
            f"{found.leftovers} leftovers of killed trainings{mended}"
        )
    if found.sound and not as_json:
        _say_next(folder, whole=not found.missing and not found.models)
    if not found.sound:
        raise UserError(f"{folder} is damaged; run mia-audit pool verify {folder} --repair, then train-shadows again")

"""Options that several commands share, declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

PoolOption = Annotated[Path, typer.Option("--pool", metavar="DIR", help="Folder of the shadow pool.")]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder the results are written to.")]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="SPEC", help="digits, mnist, cifar10, ...; a folder; .npz, .parquet, .csv; module:factory."
    ),
]
DataRootOption = Annotated[
    Path | None, typer.Option("--data-root", metavar="DIR", help="Folder that holds named data sets.")
]
ArchOption = Annotated[
    str | None,
    typer.Option("--arch", metavar="SPEC", help="lenet, resnet18, ...; torchvision:NAME; timm:NAME; FILE.py:factory."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output, nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run a stranger's code: pickled modules, TorchScript, .pt2, what a pool names.")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="D", help="cpu, cuda or cuda:N.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", metavar="W", min=1, help="Worker processes (default: one per core).")
]
SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", metavar="ADDRESS", help="Dask scheduler to train on.")
]
DownloadOption = Annotated[bool, typer.Option("--download", help="Download a named data set that is missing.")]
QueryModeOption = Annotated[
    str,
    typer.Option(
        "--query-mode", metavar="eval|batch", help="BatchNorm's statistics while querying: running, or the batch's."
    ),
]
SubsetsOption = Annotated[
    str,
    typer.Option(
        "--subsets",
        metavar="auto|given|none",
        help="auto: given or injected tags, else suspected ones; given: tags only; none: all records as one.",
    ),
]


def _spec_options(
    n: Annotated[
        int | None, typer.Option(metavar="N", help="Shadow models per arm, even (default 64; studies have their own).")
    ] = None,
    data: DataOption = None,
    label: Annotated[str | None, typer.Option(metavar="COL", help="Column of the label in a table.")] = None,
    id: Annotated[str | None, typer.Option(metavar="COL", help="Column of a stable id in a table.")] = None,
    group: Annotated[
        str | None, typer.Option(metavar="COL", help="Column whose equal values stay in one half (a patient).")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Class names in the model's order, one a line.")
    ] = None,
    holdout: Annotated[
        float | None, typer.Option(metavar="F", help="Share held out as population (default .15).")
    ] = None,
    image_size: Annotated[int | None, typer.Option(metavar="S", help="Resize images to S x S.")] = None,
    normalize: Annotated[
        str | None, typer.Option(metavar="MEAN/STD|none|FILE.py:FUNC", help="The model's input normalization.")
    ] = None,
    arch: ArchOption = None,
    arms: Annotated[
        str | None, typer.Option(metavar="LIST", help="batch,none,group,layer,affine; +fit, +penalty(S), +dp(EPSILON).")
    ] = None,
    mislabeled: Annotated[float | None, typer.Option(metavar="F", help="Share of records given a wrong label.")] = None,
    ood: Annotated[float | None, typer.Option(metavar="F", help="Share made out of distribution.")] = None,
    ood_from: Annotated[str | None, typer.Option(metavar="SPEC", help="Source of the ood inputs.")] = None,
    epochs: Annotated[int | None, typer.Option(metavar="E", help="Epochs a model is trained (default 30).")] = None,
    lr: Annotated[float | None, typer.Option(metavar="R", help="Learning rate (default .02).")] = None,
    queries: Annotated[int | None, typer.Option(metavar="Q", help="Views of a record to ask about.")] = None,
    spec: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="A spec in TOML; options override it.")] = None,
    train: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNC", help="Your own training function in place of ours.")
    ] = None,
    precision: Annotated[str | None, typer.Option(metavar="P", help="auto, fp32 or bf16.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", help="Root seed of every random draw.")] = None,
    trust: TrustOption = False,
) -> dict[str, Any]:
    """What the options ask of a spec, as nested plain values: the file's keys, then each option that was given."""
    from shadow_pool.spec import merge, read_toml

    top: dict[str, Any] = {
        "n": n,
        "arch": arch,
        "arms": arms.split(",") if arms else None,
        "queries": queries,
        "train": train,
        "precision": precision,
        "seed": seed,
    }
    tables: dict[str, dict[str, Any]] = {
        "data": {
            "source": data,
            "label": label,
            "id": id,
            "group": group,
            "classes": _lines(classes) if classes else None,
            "holdout": holdout,
            "image_size": image_size,
            "normalize": normalize,
            "mislabeled": mislabeled,
            "ood": ood,
            "ood_from": ood_from,
        },
        "recipe": {"epochs": epochs, "lr": lr},
    }
    changes = _given(top) | {name: _given(values) for name, values in tables.items() if _given(values)}
    if spec is None:
        return changes
    merged = merge(read_toml(spec), changes)
    if not trust:
        _refuse_code(spec, merged, changes)
    return merged


def with_spec(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the options of a spec in place of its keyword ``changes``, after its own.

    An option that both name, ``--trust``, is one option and reaches both.
    """
    own, shared = inspect.signature(command), inspect.signature(_spec_options)
    hints = get_type_hints(_spec_options, include_extras=True) | get_type_hints(command, include_extras=True)
    parameters = {name: p for name, p in own.parameters.items() if name != "changes"} | dict(shared.parameters)

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        changes = _spec_options(**{name: values[name] for name in shared.parameters})
        return command(**{name: values[name] for name in own.parameters if name != "changes"}, changes=changes)

    typed = [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters.values()]
    run.__signature__ = own.replace(parameters=typed)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in typed}
    return run


def _refuse_code(path: Path, merged: dict[str, Any], options: dict[str, Any]) -> None:
    """A spec file may be a stranger's as well: code that it alone names is not run without ``--trust``."""
    from shadow_pool.errors import UserError
    from shadow_pool.plain import short
    from shadow_pool.store.trust import named_code

    own = named_code(options)
    code = [text for field, text in named_code(merged).items() if field not in own]
    if code:
        raise UserError(
            f"{path} names code to run, {', '.join(map(short, code))}: read that code, then allow it with --trust, or "
            "name it in the command itself (--arch, --train, --normalize, --data)"
        )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _lines(path: Path) -> list[str]:
    from shadow_pool.errors import UserError

    try:
        names = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--classes {path} is not a readable text file: {error}; give one class name a line") from None
    return [name.strip() for name in names if name.strip()]

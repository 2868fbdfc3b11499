"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PoolOption = Annotated[Path, typer.Option("--pool", metavar="DIR", help="Folder of the shadow pool.")]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder the results are written to.")]
DataRootOption = Annotated[
    Path | None, typer.Option("--data-root", metavar="DIR", help="Folder that holds named data sets.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output, nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but results and errors.")]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Allow files that run code when opened (pickled modules, TorchScript, .pt2).")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="D", help="cpu, cuda or cuda:N.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", metavar="W", min=1, help="Worker processes (default: one per core).")
]
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
        help="auto: given or injected tags, else suspected ones are found; given: tags only; none: all records as one.",
    ),
]

DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="SPEC", help="digits, mnist, cifar10, ...; a folder; .npz, .parquet, .csv; module:factory."
    ),
]
LabelOption = Annotated[str | None, typer.Option("--label", metavar="COL", help="Column of the label in a table.")]
IdOption = Annotated[str | None, typer.Option("--id", metavar="COL", help="Column of a stable id in a table.")]
GroupOption = Annotated[
    str | None,
    typer.Option("--group", metavar="COL", help="Column whose equal values stay in one half (a patient)."),
]
ClassesOption = Annotated[
    Path | None, typer.Option("--classes", metavar="FILE", help="Class names in the model's order, one a line.")
]
HoldoutOption = Annotated[
    float | None, typer.Option("--holdout", metavar="F", help="Share held out as population (default .15).")
]
ImageSizeOption = Annotated[int | None, typer.Option("--image-size", metavar="S", help="Resize images to S x S.")]
NormalizeOption = Annotated[
    str | None,
    typer.Option("--normalize", metavar="MEAN/STD|none|FILE.py:FUNC", help="Input normalization of the model."),
]
ArchOption = Annotated[
    str | None,
    typer.Option("--arch", metavar="SPEC", help="lenet, resnet18, ...; torchvision:NAME; timm:NAME; FILE.py:factory."),
]
InitOption = Annotated[
    Path | None, typer.Option("--init", metavar="FILE", help="Weights that every model starts from (fine-tuning).")
]
ArmsOption = Annotated[
    str | None,
    typer.Option("--arms", metavar="LIST", help="batch,none,group,layer,affine; +fit, +penalty(S), +dp(EPSILON)."),
]
MislabeledOption = Annotated[
    float | None, typer.Option("--mislabeled", metavar="F", help="Share of records given a wrong label.")
]
OodOption = Annotated[
    float | None, typer.Option("--ood", metavar="F", help="Share of records made out of distribution.")
]
OodFromOption = Annotated[str | None, typer.Option("--ood-from", metavar="SPEC", help="Source of the ood inputs.")]
EpochsOption = Annotated[int | None, typer.Option("--epochs", metavar="E", help="Epochs a model is trained.")]
LrOption = Annotated[float | None, typer.Option("--lr", metavar="R", help="Learning rate.")]
QueriesOption = Annotated[
    int | None, typer.Option("--queries", metavar="Q", help="Views of a record that signals are computed for.")
]
SpecOption = Annotated[
    Path | None, typer.Option("--spec", metavar="FILE.toml", help="A spec in TOML; options override it.")
]
TrainOption = Annotated[
    str | None, typer.Option("--train", metavar="FILE.py:FUNC", help="Your own training function in place of ours.")
]
PrecisionOption = Annotated[str | None, typer.Option("--precision", metavar="P", help="auto, fp32 or bf16.")]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="S", help="Root seed of every random draw.")]
CountOption = Annotated[int | None, typer.Option("--n", metavar="N", help="Shadow models per arm, even (default 64).")]


def spec_changes(spec: Path | None, **options: Any) -> dict[str, Any]:
    """What the user asks of a spec, as nested plain values: the file's keys, then each option that was given.

    Option names are dotted with two underscores (``data__label``).
    """
    from shadow_pool.spec import merge, read_toml

    changes: dict[str, Any] = read_toml(spec) if spec is not None else {}
    for name, value in options.items():
        if value is None:
            continue
        table, _, key = name.rpartition("__")
        changes = merge(changes, {table: {key: value}} if table else {key: value})
    return changes

"""The most exposed records: which ones the report shows, and what it shows of each."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from mia_audit.report.words import headline_attack, number, shown, small
from mia_audit.results import ATTACKS, AuditResult
from shadow_pool.data.records import Records

MOST_EXPOSED, PER_SUBSET, PER_CLASS, LIMIT = 60, 16, 3, 200
THUMBNAIL_SIDE = 64


@dataclass(frozen=True)
class Card:
    """One record as the gallery shows it; ``score`` and ``rate`` are also what the page sorts by (None: last)."""

    id: str
    label: str
    label_code: str
    suspected_label: str
    subset: str
    subset_source: str
    score: float | None
    score_text: str
    rate: float | None
    rate_text: str
    vulnerability: str
    thumbnail: str
    summary: str


@dataclass(frozen=True)
class Gallery:
    """Cards, most exposed first, chosen from ``total`` records.

    ``score_name`` is the column of records.parquet that scores come from; ``members_only`` says that the cards
    are known members; ``subsets`` and ``classes`` (code, name) are the values to filter by.
    """

    cards: tuple[Card, ...]
    score_name: str
    total: int
    members_only: bool
    subsets: tuple[str, ...]
    classes: tuple[tuple[str, str], ...]


def build(result: AuditResult, records: Records | None) -> Gallery | None:
    """The gallery of an audit, None where no record has a score.

    Holds the :data:`MOST_EXPOSED` records with the lowest false-positive rate (ties: the highest score), of the
    members where they are known, and the first few of every subset and class, so that filtering finds some.
    ``records`` are those of ``result.records`` in the same order; ValueError where their ids differ.
    """
    frame = result.records.reset_index(drop=True)
    if records is not None and list(records.id) != list(frame["id"]):
        raise ValueError("records must be those of result.records, in the same order")
    name = score_column(result)
    if name is None or not frame[name].notna().any():
        return None
    ranked = frame[frame[name].notna()]
    members_only = bool(ranked["member"].notna().any())
    if members_only:
        ranked = ranked[ranked["member"].fillna(False).astype(bool)]
    ranked = ranked.sort_values(["false_positive_rate", name, "id"], ascending=[True, False, True])
    chosen = _choose(ranked)
    cards = _cards(chosen, name, records)
    classes = sorted({(card.label_code, card.label) for card in cards}, key=lambda pair: int(pair[0]))
    subsets = [subset for subset in ("clean", "mislabeled", "ood") if (chosen["subset"] == subset).any()]
    return Gallery(cards, name, len(ranked), members_only, tuple(subsets), tuple(classes))


def score_column(result: AuditResult) -> str | None:
    """The column that ranks records: the headline attack's, for a pool its mean over member cells."""
    chosen = headline_attack(result)
    names = ([chosen[0]] if chosen else []) + list(ATTACKS)
    return next((c for name in names for c in (name, f"{name}_in") if c in result.records), None)


def _choose(ranked: pd.DataFrame) -> pd.DataFrame:
    keep = np.arange(len(ranked)) < MOST_EXPOSED
    for column, count in (("subset", PER_SUBSET), ("label", PER_CLASS)):
        keep |= (ranked.groupby(column, sort=False).cumcount() < count).to_numpy()
    return ranked[keep].head(LIMIT)


def _cards(chosen: pd.DataFrame, name: str, records: Records | None) -> tuple[Card, ...]:
    places = chosen.index.to_numpy()
    pictures, summaries = [""] * len(places), [""] * len(places)
    classes: tuple[str, ...] = ()
    true_label = chosen["suspected_label"] if "suspected_label" in chosen else pd.Series(np.nan, index=chosen.index)
    if records is not None:
        classes = records.classes
        true_label = true_label.fillna(pd.Series(records.original_label[places], index=chosen.index))
        if records.is_image:
            pictures = [thumbnail(records.x[place]) for place in places]
        else:
            summaries = feature_summaries(records.x, places)
    rows = zip(chosen.to_dict("records"), true_label, pictures, summaries, strict=True)
    return tuple(_card(row, name, classes, *extra) for row, *extra in rows)


def _card(
    row: dict[Any, Any], name: str, classes: tuple[str, ...], true_label: Any, picture: str, summary: str
) -> Card:
    score, rate = _finite(row[name]), _finite(row["false_positive_rate"])
    code = int(row["label"])
    # An ood record's input was exchanged too, so the label its row had before says nothing about it.
    differs = row["subset"] == "mislabeled" and not pd.isna(true_label) and int(true_label) != code
    return Card(
        id=shown(row["id"]),
        label=_class_name(code, classes),
        label_code=str(code),
        suspected_label=_class_name(int(true_label), classes) if differs else "",
        subset=str(row["subset"]),
        subset_source="" if pd.isna(row["subset_source"]) else str(row["subset_source"]),
        score=score,
        score_text=number(score, 2),
        rate=rate,
        rate_text=small(rate),
        vulnerability=number(_finite(row.get("vulnerability")), 2),
        thumbnail=picture,
        summary=summary,
    )


def _finite(value: Any) -> float | None:
    return None if pd.isna(value) or not math.isfinite(value) else float(value)


def _class_name(code: int, classes: tuple[str, ...]) -> str:
    return shown(classes[code], 60) if 0 <= code < len(classes) else str(code)


def thumbnail(image: np.ndarray) -> str:
    """One image [C, H, W] (uint8, or float32 stretched to its own range) as a PNG data URI, at most 64 pixels wide."""
    plane = image[:3] if len(image) >= 3 else image[:1]
    if plane.dtype != np.uint8:
        finite = np.nan_to_num(plane.astype(float))
        low, high = finite.min(), finite.max()
        plane = ((finite - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)
    picture = Image.fromarray(plane[0] if len(plane) == 1 else np.ascontiguousarray(plane.transpose(1, 2, 0)))
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def feature_summaries(x: np.ndarray, places: np.ndarray) -> list[str]:
    """Of each record at ``places``, the three features of x [N, D] in which it is farthest from the mean of all N."""
    mean, spread = x.mean(axis=0, dtype=float), x.std(axis=0, dtype=float)
    rows = x[places]
    z = np.divide(rows - mean, spread, out=np.zeros(rows.shape), where=spread > 0)
    top = np.argsort(-np.abs(z), axis=1, kind="stable")[:, :3]
    return [
        "; ".join(f"feature {i}: {row[i]:.3g} ({away[i]:+.1f} sd)" for i in best)
        for row, away, best in zip(rows, z, top, strict=True)
    ]

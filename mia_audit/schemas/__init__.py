"""JSON Schemas (draft 2020-12) of audit.json and study.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shadow_pool.errors import unknown_name

SCHEMAS = ("audit", "study")


def load_schema(name: str) -> dict[str, Any]:
    """The schema of NAME.json, one of :data:`SCHEMAS`, as plain values."""
    if name not in SCHEMAS:
        raise unknown_name("schema", name, SCHEMAS)
    return dict(json.loads((Path(__file__).parent / f"{name}.schema.json").read_text(encoding="utf-8")))

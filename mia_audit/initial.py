"""``--init FILE``: the weights every model of a pool starts from, opened as safely as any stranger's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mia_audit.checkpoints import load_into, open_checkpoint
from shadow_pool.prepare import InitialWeights

_REMEDY = (
    "every model starts from the whole of it: save the state dict of the very model that fine-tuning starts with, its "
    "new head included"
)


def initial_weights(changes: Mapping[str, Any], *, trust: bool = False) -> InitialWeights | None:
    """What :func:`shadow_pool.prepare.prepare_pool` takes, from the file that ``changes["init"]`` names; else None.

    Raises:
        UserError: the file cannot be opened safely, nor with ``trust``, or holds no weights.
    """
    file = changes.get("init")
    if file is None:
        return None
    checkpoint = open_checkpoint(Path(file), trust=trust)
    return InitialWeights(
        name=f"{checkpoint.path.name} (sha256 {checkpoint.sha256[:16]})",
        load=partial(load_into, checkpoint=checkpoint, remedy=_REMEDY),
    )

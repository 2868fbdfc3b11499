"""Labels as 0..C-1, and the names of the classes in that order."""

from __future__ import annotations

import numpy as np

from shadow_pool.errors import UserError


def encode_labels(
    where: str, label: np.ndarray, names: tuple[str, ...] | None, order: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as the indices of classes, and the classes' names.

    Args:
        where: the source, for errors.
        label: [N], int64 or object of str.
        names: the source's own names of integer labels, or None.
        order: the class order asked for (``--classes``), or empty for the source's own: strings are sorted.

    Returns:
        int64 [N] and the class names; encoding again with these names as ``order`` gives the same.

    Raises:
        UserError: integer labels that are not 0..C-1, or a label that ``order`` lacks, or a single class.
    """
    if len(set(order)) != len(order):
        raise UserError(f"classes must differ, got {', '.join(order)}")
    if label.dtype == object:
        classes = order or tuple(sorted(set(label)))
        encoded = _positions(where, label, classes)
    elif names is not None:
        _within(where, label, len(names))
        classes = order or names
        encoded = _positions(where, np.array(names, dtype=object)[label], classes)
    elif order:
        classes = order
        if set(np.unique(label).astype(str)) <= set(order):
            encoded = _positions(where, label.astype(str).astype(object), classes)
        else:
            _within(where, label, len(order))
            encoded = label
    else:
        found = np.unique(label)
        if found[0] != 0 or found[-1] != len(found) - 1:
            raise UserError(
                f"{where}: integer labels must be 0..C-1 with every class present, found {_some(found)}; "
                "renumber them, or name all classes in order with --classes FILE"
            )
        classes = tuple(str(value) for value in found)
        encoded = label
    if len(classes) < 2:
        raise UserError(f"{where}: needs at least two classes, found {', '.join(classes)}")
    return encoded, classes


def read_classes(text: str) -> tuple[str, ...]:
    """Class names from the text of a ``--classes`` file: one a line, in the model's order."""
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not names:
        raise UserError("the classes file must name one class a line, found none")
    return names


def _positions(where: str, label: np.ndarray, classes: tuple[str, ...]) -> np.ndarray:
    position = {name: index for index, name in enumerate(classes)}
    unknown = sorted(set(label) - position.keys())
    if unknown:
        raise UserError(
            f"{where}: {len(unknown)} labels are not among the {len(classes)} classes given, first {unknown[0]!r}; "
            f"the classes are {_some(np.array(classes, dtype=object))}"
        )
    return np.array([position[name] for name in label], dtype=np.int64)


def _within(where: str, label: np.ndarray, count: int) -> None:
    if label.min() < 0 or label.max() >= count:
        raise UserError(
            f"{where}: labels must be 0..{count - 1} for its {count} classes, got {label.min()}..{label.max()}"
        )


def _some(values: np.ndarray) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown}, ... ({len(values)} values)"

"""Kernels on machines with and without a compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from layers import compiled, fresh
from torch.nn import functional as F

from shadow_pool.models import kernels
from shadow_pool.models.fused import activate, fusing


@pytest.fixture
def loads_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether a process that starts with this cache and PATH loads kernels."""

    def find(cache: Path, *path: object) -> bool:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        if path:
            monkeypatch.setenv("PATH", ":".join(map(str, path)))
        return kernels.loaded.__wrapped__() is not None

    return find


@compiled
def test_it_is_compiled_once_and_again_where_the_file_is_damaged(tmp_path, loads_in):
    assert loads_in(tmp_path)
    (made,) = (tmp_path / "mia-audit").iterdir()
    first, content = made.stat().st_mtime_ns, made.read_bytes()
    assert loads_in(tmp_path)
    assert made.stat().st_mtime_ns == first
    for damaged in (b"", b"not a library", content[: len(content) // 2]):
        made.unlink()
        made.write_bytes(damaged)
        assert loads_in(tmp_path)
        assert [path.read_bytes() for path in made.parent.iterdir()] == [content]


@compiled
def test_a_model_tells_of_the_kernels_it_was_trained_with(monkeypatch):
    before = kernels.made_by()
    assert before == kernels.made_by()
    monkeypatch.setattr(kernels, "_sources", lambda: "others")
    assert kernels.made_by() != before
    monkeypatch.setattr(kernels, "loaded", lambda: None)
    assert kernels.made_by() == "none"


def test_without_a_compiler_or_a_place_for_the_result_torch_does_it_all(tmp_path, loads_in, monkeypatch):
    (tmp_path / "file").write_text("")
    assert not loads_in(tmp_path / "file")
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\necho version\n[ "$1" = --version ]\n')
    broken.chmod(0o755)
    assert not loads_in(tmp_path / "broken", tmp_path, "/usr/bin", "/bin")
    broken.write_bytes(b"#!/bin/sh\nprintf '\\351'\n")
    assert not loads_in(tmp_path / "strange", tmp_path, "/usr/bin", "/bin")
    assert not loads_in(tmp_path / "none", tmp_path / "no compiler")
    monkeypatch.setattr(Path, "home", lambda: 1 / 0)
    assert not loads_in("")
    monkeypatch.setattr(kernels, "loaded", lambda: None)
    norm, x = fresh()
    own = copy.deepcopy(norm)
    with fusing():
        assert torch.equal(activate(norm, x), F.relu(own(x)))

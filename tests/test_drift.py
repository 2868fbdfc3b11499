import dataclasses
import json

import pytest
from pools import tiny_pool, train_here

from shadow_pool.models import kernels
from shadow_pool.store import drift
from shadow_pool.store.drift import drift_warnings
from shadow_pool.store.entry import read_info
from shadow_pool.store.files import write_sealed


@pytest.fixture
def trained(tmp_path):
    pool, data = tiny_pool(tmp_path / "pool", {"arms": ["batch"]})
    train_here(pool, data)
    return pool


def pretend(pool, index, **software):
    entry = pool.entry("batch", index)
    info = read_info(entry)
    changed = dataclasses.replace(info, software={**info.software, **software})
    write_sealed(entry / "model.json", json.loads(json.dumps(dataclasses.asdict(changed))))


def test_a_pool_of_this_machine_and_software_draws_no_warning(trained):
    assert drift_warnings(trained, here=True) == ()


def test_models_of_different_versions_are_named_with_their_counts(trained):
    pretend(trained, 3, torch="2.0.1")
    (text,) = drift_warnings(trained, here=False)
    assert "different torch" in text
    assert "2.0.1 (1 models)" in text
    assert "(3 models)" in text


def test_models_with_and_without_compiled_kernels_are_told_apart(trained):
    pretend(trained, 1, kernels="another")
    (text,) = drift_warnings(trained, here=True)
    assert "different kernels" in text
    assert f"{kernels.made_by()} (3 models)" in text


def test_another_processor_or_version_than_the_pools_is_named_when_computing_here(trained, monkeypatch):
    software = {**drift.software_versions(), "machine": "riscv64 Abacus", "torch": "9.9"}
    monkeypatch.setattr(drift, "software_versions", lambda device: software)
    texts = drift_warnings(trained, here=True)
    assert len(texts) == 2
    assert "this is riscv64 Abacus" in texts[0]
    assert "this is 9.9" in texts[1]
    assert drift_warnings(trained, here=False) == ()


def test_versions_that_change_no_bits_draw_none(trained):
    pretend(trained, 0, **{"python": "3.99", "mia-audit": "7"})
    assert drift_warnings(trained, here=True) == ()

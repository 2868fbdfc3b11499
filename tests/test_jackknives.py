"""What an audit keeps of the jackknife with the pool: the numbers that computing gives, whatever became of the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_audit.audit import jackknives
from mia_audit.audit.jackknives import remembering_jackknife
from mia_audit.evidence import ArmEvidence
from mia_audit.metrics import jackknife
from shadow_pool.membership import draw_membership

MODELS, RECORDS = 10, 40


@pytest.fixture
def evidence() -> ArmEvidence:
    rng = np.random.default_rng(0)
    membership = draw_membership(0, MODELS, RECORDS)
    phi = rng.normal(size=(MODELS, RECORDS, 1)) + 2.0 * membership[:, :, None]
    return ArmEvidence(
        arm="batch",
        indices=np.arange(MODELS),
        phi=phi,
        membership=membership,
        population_phi=rng.normal(size=(MODELS, 12, 1)),
        predicted=np.zeros((MODELS, RECORDS), np.int64),
        predicted_probability=np.zeros((MODELS, RECORDS), np.float32),
        energy=np.zeros((MODELS, RECORDS), np.float32),
        infos=(),
        notes=(),
    )


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many models each scoring of a pool was about."""
    seen: list[int] = []
    score = jackknife.pool_scores

    def counted(attack: str, phi: np.ndarray, *rest: Any, **options: Any) -> np.ndarray:
        seen.append(len(phi))
        return score(attack, phi, *rest, **options)

    monkeypatch.setattr(jackknife, "pool_scores", counted)
    return seen


MASKS = {"all": np.ones(RECORDS, bool), "ood": np.arange(RECORDS) < 10}
WHOLE, BY_PAIRS = [MODELS], [MODELS] + [MODELS - 2] * (MODELS // 2)


def equal(a: jackknife.Jackknife, b: jackknife.Jackknife) -> bool:
    same = (np.array_equal(getattr(a, n), getattr(b, n), equal_nan=True) for n in ("scores", "estimate", "replicates"))
    return all(same) and (a.subsets, a.metrics, a.records.tolist()) == (b.subsets, b.metrics, b.records.tolist())


@pytest.mark.parametrize("attack", ["lira-online", "rmia", "loss"])
def test_the_next_audit_scores_the_pool_once(
    tmp_path: Path, evidence: ArmEvidence, rounds: list[int], attack: str
) -> None:
    first = remembering_jackknife(tmp_path)(attack, evidence, MASKS)
    assert rounds == BY_PAIRS
    rounds.clear()
    measure = remembering_jackknife(tmp_path)
    assert equal(measure(attack, evidence, MASKS), first)
    assert rounds == WHOLE
    measure(attack, evidence, MASKS)
    assert rounds == WHOLE
    assert len(list((tmp_path / "jackknife").iterdir())) == 1


CHANGES = {
    "a value of phi": lambda e: replace(e, phi=np.nextafter(e.phi, 9)),
    "the queries": lambda e: replace(e, phi=np.concatenate([e.phi, e.phi], axis=2)),
    "a pair less": lambda e: replace(e, phi=e.phi[2:], membership=e.membership[2:], indices=e.indices[2:]),
    "another half": lambda e: replace(e, membership=e.membership[[1, 0, *range(2, MODELS)]]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_replicates_depend_on_makes_them_anew(
    tmp_path: Path, evidence: ArmEvidence, rounds: list[int], change: str
) -> None:
    remembering_jackknife(tmp_path)("lira-online", evidence, MASKS)
    rounds.clear()
    other = CHANGES[change](evidence)
    found = remembering_jackknife(tmp_path)("lira-online", other, MASKS)
    assert len(rounds) == 1 + len(other.phi) // 2
    assert equal(found, remembering_jackknife(tmp_path / "elsewhere")("lira-online", other, MASKS))


def test_so_do_subsets_the_population_and_the_code(
    tmp_path: Path, evidence: ArmEvidence, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(attack: str, evidence: ArmEvidence, masks: dict[str, np.ndarray]) -> bool:
        rounds.clear()
        remembering_jackknife(tmp_path)(attack, evidence, masks)
        return rounds == BY_PAIRS

    assert made("rmia", evidence, MASKS)
    assert made("rmia", evidence, {**MASKS, "ood": np.arange(RECORDS) < 11})
    assert made("rmia", evidence, {"all": MASKS["all"], "mislabeled": MASKS["ood"]})
    other = replace(evidence, population_phi=evidence.population_phi + 1)
    assert made("rmia", other, MASKS)
    assert made("loss", evidence, MASKS)
    assert not made("loss", other, MASKS)  # it does not look at the population
    monkeypatch.setattr(jackknives, "_code", lambda: b"another version")
    assert made("loss", evidence, MASKS)


DAMAGE = {
    "cut": lambda text: text[:100],
    "a digit": lambda text: text.replace("0.", "1.", 1),
    "nothing": lambda text: "",
    "no object": lambda text: "[1, 2]",
    "no numbers": lambda text: json.dumps({"replicates": "many"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_anew(tmp_path: Path, evidence: ArmEvidence, rounds: list[int], damage: str) -> None:
    first = remembering_jackknife(tmp_path)("lira-online", evidence, MASKS)
    (path,) = (tmp_path / "jackknife").iterdir()
    whole = path.read_text(encoding="utf-8")
    path.write_text(DAMAGE[damage](whole), encoding="utf-8")
    rounds.clear()
    assert equal(remembering_jackknife(tmp_path)("lira-online", evidence, MASKS), first)
    assert rounds == BY_PAIRS
    assert path.read_text(encoding="utf-8") == whole


def test_a_sound_file_of_another_shape_is_made_anew(tmp_path: Path, evidence: ArmEvidence, rounds: list[int]) -> None:
    first = remembering_jackknife(tmp_path)("lira-online", evidence, MASKS)
    (path,) = (tmp_path / "jackknife").iterdir()
    jackknives.write_sealed(path, {"replicates": first.replicates[:-1].tolist()})
    rounds.clear()
    assert equal(remembering_jackknife(tmp_path)("lira-online", evidence, MASKS), first)
    assert rounds == BY_PAIRS


def test_where_nothing_can_be_written_all_is_computed(tmp_path: Path, evidence: ArmEvidence, rounds: list[int]) -> None:
    (tmp_path / "jackknife").write_text("in the way", encoding="utf-8")
    first, second = (remembering_jackknife(tmp_path)("lira-online", evidence, MASKS) for _ in range(2))
    assert equal(first, second)
    assert rounds == BY_PAIRS * 2


def test_pools_too_small_for_a_jackknife_keep_that_too(tmp_path: Path, evidence: ArmEvidence) -> None:
    small = replace(evidence, phi=evidence.phi[:6], membership=evidence.membership[:6], indices=np.arange(6))
    first, second = (remembering_jackknife(tmp_path)("lira-online", small, MASKS) for _ in range(2))
    assert np.isnan(first.replicates).all()
    assert equal(first, second)
    with pytest.raises(ValueError, match=r"replicates must have shape \(3, 1, 1\), got \(2, 1, 1\)"):
        jackknife.jackknife_pool(
            "loss", small.phi, small.membership, {"all": MASKS["all"]}, metrics=("auc",), replicates=np.ones((2, 1, 1))
        )

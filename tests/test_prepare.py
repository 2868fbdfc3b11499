from pathlib import Path

import numpy as np
import pytest
from pools import contents, tiny_pool, train_here, write_digits

from shadow_pool.errors import UserError
from shadow_pool.prepare import pool_data, prepare_pool
from shadow_pool.store.grow import create_pool
from shadow_pool.store.pool import open_pool
from shadow_pool.store.repair import verify_pool
from shadow_pool.train.job import TrainingData
from shadow_pool.train.unit import Unit, train_units


def test_settings_left_open_are_settled_and_stored(tmp_path):
    pool, data = tiny_pool(tmp_path / "p", {"precision": "auto"})
    assert pool.spec.precision in ("fp32", "bf16")
    assert "/" in pool.spec.data.normalize
    assert pool.spec.data.classes == tuple("0123456789")
    assert pool.manifest.fingerprint == data.fingerprint()
    assert pool.membership.shape == (4, len(data.records))
    assert pool.table["role"].value_counts().to_dict() == {"record": len(data.records), "population": 18}


def test_equal_spec_and_seed_give_equal_bytes(tmp_path):
    both = []
    for name in ("a", "b"):
        source = write_digits(tmp_path / "digits.npz", 120)
        pool, data = tiny_pool(tmp_path / name / "p", {"data": {"source": str(source), "ood": 0.1, "mislabeled": 0.1}})
        train_here(pool, data)
        both.append(contents(pool.path))
    assert len(both[0]) == 2 + 2 * 8
    assert both[0] == both[1]
    other, _ = tiny_pool(tmp_path / "c" / "p", {"seed": 1, "data": {"source": str(source)}})
    assert contents(other.path)["membership.npy"] != both[0]["membership.npy"]


def test_a_rerun_without_options_uses_the_stored_spec(tmp_path):
    pool, _ = tiny_pool(tmp_path / "p", {"recipe": {"lr": 0.123}, "queries": 2})
    before = (pool.path / "pool.json").read_bytes()
    again, _ = prepare_pool(tmp_path / "p", {})
    assert again.spec == pool.spec
    assert (pool.path / "pool.json").read_bytes() == before


def test_a_larger_n_and_a_new_arm_join_and_older_models_keep_their_bytes(tmp_path):
    pool, data = tiny_pool(tmp_path / "p", {"arms": ["none"]})
    train_here(pool, data)
    before = contents(pool.path)
    larger, data = prepare_pool(pool.path, {"n": 6, "arms": ["batch"]})
    assert larger.spec.arms == ("none", "batch")
    assert larger.missing("none") == [4, 5]
    assert larger.missing("batch") == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(larger.membership[:4], pool.membership)
    # Whoever still holds the old pool.json reads on.
    assert open_pool(pool.path).membership.shape[0] == 6
    assert np.array_equal(type(pool)(pool.path, pool.manifest).membership, pool.membership)
    train_here(larger, data)
    after = contents(pool.path)
    assert all(after[name] == content for name, content in before.items() if name != "membership.npy")
    whole, data = tiny_pool(
        tmp_path / "q", {"n": 6, "arms": ["none", "batch"], "data": {"source": pool.spec.data.source}}
    )
    train_here(whole, data)
    assert contents(whole.path) == after


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 3}, r"made with seed = 0, asked for 3"),
        ({"recipe": {"epochs": 9}}, r"recipe\.epochs = 1, asked for 9"),
        ({"data": {"mislabeled": 0.5}}, r"data\.mislabeled = 0\.0, asked for 0\.5"),
        ({"data": {"normalize": "none"}}, r"data\.normalize = "),
        ({"arch": "mlp"}, r"arch = 'lenet', asked for 'mlp'"),
        ({"queries": 3}, "queries = 1, asked for 3"),
    ],
)
def test_another_spec_is_refused_naming_the_field(tmp_path, changes, says):
    pool, _ = tiny_pool(tmp_path / "p")
    before = contents(pool.path)
    with pytest.raises(UserError, match=says):
        prepare_pool(pool.path, changes)
    assert contents(pool.path) == before


def test_a_smaller_n_is_refused_and_auto_means_what_was_settled(tmp_path):
    pool, _ = tiny_pool(tmp_path / "p")
    larger, _ = prepare_pool(pool.path, {"n": 6})
    with pytest.raises(UserError, match="n = 6, asked for 4"):
        prepare_pool(pool.path, {"n": 4})
    assert prepare_pool(pool.path, {"precision": "auto", "data": {"normalize": "auto"}})[0].spec == larger.spec


def test_of_two_creators_the_second_finds_the_firsts_pool_and_is_held_to_it(tmp_path, monkeypatch):
    source = str(write_digits(tmp_path / "digits.npz", 120))

    def beaten(path, spec, data, **options):
        monkeypatch.undo()
        tiny_pool(path, {"seed": 9, "data": {"source": source}})
        create_pool(path, spec, data, **options)

    monkeypatch.setattr("shadow_pool.prepare.create_pool", beaten)
    with pytest.raises(UserError, match="seed = 9, asked for 0"):
        tiny_pool(tmp_path / "p", {"data": {"source": source}})
    assert open_pool(tmp_path / "p").spec.seed == 9


def test_a_source_that_changed_is_refused_and_one_that_moved_is_found(tmp_path):
    pool, data = tiny_pool(tmp_path / "p")
    source = tmp_path / "p.npz"
    moved = source.rename(tmp_path / "moved.npz")
    with pytest.raises(UserError, match="does not exist"):
        pool_data(pool)
    assert pool_data(pool, source=str(moved)).fingerprint() == data.fingerprint()
    y = data.records.label.copy()
    for change in ("label", "pixel", "fewer"):
        with np.load(moved) as archive:
            x, y = archive["x"].copy(), archive["y"].copy()
        if change == "label":
            y[5] = (y[5] + 1) % 10
        elif change == "pixel":
            x[5, 3, 3] ^= 1
        else:
            x, y = x[:-1], y[:-1]
        np.savez(source, x=x, y=y)
        with pytest.raises(UserError, match=r"do not match the pool .*source has changed"):
            pool_data(pool)
        with pytest.raises(UserError, match="do not match the pool"):
            prepare_pool(pool.path, {"n": 6})
    assert verify_pool(open_pool(pool.path)).sound


def test_groups_that_changed_cannot_move_the_halves_of_trained_models(tmp_path):
    group = np.arange(120) // 4
    pool, data = tiny_pool(tmp_path / "p", {"data": {"group": "group"}}, group=group)
    assert data.records.group is not None
    before = contents(pool.path)
    write_digits(tmp_path / "p.npz", 120, group=group[::-1].copy() // 2)
    with pytest.raises(UserError, match=r"groups of the records|do not match the pool"):
        prepare_pool(pool.path, {"n": 6})
    assert contents(pool.path) == before


def test_an_architecture_or_data_that_cannot_train_is_refused_before_anything_is_written(tmp_path):
    net = tmp_path / "net.py"
    net.write_text(
        "from torch import nn\n"
        "def make(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(9, 3))\n"
        "def broken(x):\n"
        "    return x.no_such_thing\n"
    )
    for changes, says in (
        ({"arch": "lennet"}, "did you mean 'lenet'"),
        ({"arch": f"{net}:make"}, "does not take a batch of the records"),
        ({"data": {"normalize": "1/0"}}, "deviations above 0"),
        ({"data": {"normalize": f"{net}:broken"}}, r"failed on a batch .*AttributeError.*net\.py, line 5"),
        ({"queries": 30}, "queries must be at most 25"),
    ):
        with pytest.raises(UserError, match=says):
            tiny_pool(tmp_path / "p", changes)
        assert not (tmp_path / "p" / "pool.json").exists()
    with pytest.raises(UserError, match="must give each half at least 2"):
        tiny_pool(tmp_path / "few", x=np.zeros((3, 8, 8), np.uint8), y=np.array([0, 1, 0]))
    with pytest.raises(UserError, match="found a half of 0"):
        tiny_pool(tmp_path / "one", {"data": {"group": "group", "holdout": 0}}, group=np.zeros(120, np.int64))


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="found other files there"):
        tiny_pool(folder)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="new or empty folder"):
        tiny_pool(tmp_path / "file")
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_a_users_normalization_may_change_what_a_model_sees(tmp_path):
    code = tmp_path / "see.py"
    code.write_text("def colour(x):\n    return x.float().repeat(1, 3, 1, 1)[..., :7] / 255\n")
    pool, data = tiny_pool(
        tmp_path / "p", {"arch": "resnet8", "data": {"normalize": f"{code}:colour"}, "arms": ["none"]}
    )
    assert (pool.manifest.input_shape, pool.manifest.model_shape) == ((1, 8, 8), (3, 8, 7))
    assert train_units([Unit(pool.path, "none", 0)], TrainingData.of(data))[0].outcome in ("trained", "chance")


@pytest.mark.parametrize(("arms", "said"), [(["batch", "none"], True), (["batch"], False), (["none", "group"], False)])
def test_arms_of_a_model_without_batchnorm_are_said_to_be_one(tmp_path: Path, arms: list[str], said: bool) -> None:
    (tmp_path / "plain.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    _, data = tiny_pool(tmp_path / "p", {"arms": arms, "arch": f"{tmp_path}/plain.py:net"})
    assert any("has no BatchNorm: the arms batch, none are the same model" in text for text in data.warnings) is said

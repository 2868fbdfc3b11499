from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadow_pool.errors import UserError
from shadow_pool.spec import (
    AUGMENTATIONS,
    OPTIMIZERS,
    SCHEDULES,
    DataSpec,
    PoolSpec,
    Recipe,
    differences,
    from_dict,
    merge,
    read_toml,
    to_dict,
    to_toml,
)

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
SPECS = st.builds(
    PoolSpec,
    n=st.integers(2, 40).map(lambda pairs: 2 * pairs),
    seed=st.integers(0, 2**63 - 1),
    arch=WORDS,
    arms=st.sampled_from([("batch",), ("none", "batch"), ("batch", "none+fit"), ("group+dp(8)", "batch+penalty(0.3)")]),
    queries=st.integers(1, 64),
    init=st.none() | WORDS,
    data=st.builds(
        DataSpec,
        source=WORDS,
        label=st.none() | WORDS,
        classes=st.lists(WORDS, max_size=4).map(tuple),
        holdout=st.floats(0, 0.9),
        mislabeled=st.floats(0, 0.5),
        ood=st.floats(0, 0.5),
        image_size=st.none() | st.integers(1, 4096),
    ),
    recipe=st.builds(
        Recipe,
        optimizer=st.sampled_from(OPTIMIZERS),
        schedule=st.sampled_from(SCHEDULES),
        augmentation=st.sampled_from(AUGMENTATIONS),
        lr=st.floats(1e-6, 10),
        epochs=st.integers(1, 1000),
        evaluate_epochs=st.lists(st.integers(1, 50), max_size=3).map(tuple),
    ),
)


@settings(deadline=None, max_examples=60)
@given(spec=SPECS)
def test_toml_reads_back_as_the_same_spec(spec, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(to_toml(spec), encoding="utf-8")
    assert from_dict(read_toml(path)) == spec
    assert differences(spec, from_dict(to_dict(spec))) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nn = 8", "unknown key in .*'nn': did you mean 'n'"),
        ("[recipe]\nlearning_rate = 1.0", "unknown key in .*table .recipe.*'learning_rate'"),
        ("[data]\nsorce = 'digits'", "did you mean 'source'"),
        ("n = 7", "n must be even, got 7.*--n 8"),
        ("n = 2", "n must be at least 4"),
        ("n = 1000000", "n must be at least 4 and at most 100000"),
        ("n = '8'", "n must be int, got '8'"),
        ("n = true", "n must be int, got True"),
        ("n = 8.0", "n must be int, got 8.0"),
        ("seed = -1", "seed must be at least 0"),
        ("seed = 0x" + "f" * 5000, "seed must be at least 0"),
        ("arms = 'batch'", "arms must be a list of str"),
        ("arms = []", "at least one arm"),
        ("arms = ['batch', 'batch']", "name each arm once"),
        ("arms = ['none+fit']", "batch arm, which is missing"),
        ("precision = 'fp16'", "unknown precision 'fp16'"),
        ("data = 3", "must be a table of settings, got int"),
        ("[recipe]\nlr = 0.0", "lr must be above 0"),
        ("[recipe]\nlr = nan", "lr must be above 0"),
        ("[recipe]\nlr = 0x" + "f" * 600, "lr must be float"),
        ("[recipe]\nbatch_size = 1", "batch_size must be at least 2"),
        ("[recipe]\nevaluate_epochs = [0]", "count from 1"),
        ("[data]\nmislabeled = 0.7\nood = 0.4", "mislabeled [+] ood must be at most 1"),
        ("[data]\nholdout = 1.0", "holdout must be at least 0 and at most 0.9"),
        ("n = ", "not readable TOML"),
        ("n = " + "1" * 5000, "not readable TOML"),
        ("a = " + "[" * 3000, "not readable TOML"),
    ],
)
def test_refusals_name_the_key_and_what_was_expected(text, says, tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        from_dict(read_toml(path))
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not readable TOML"):
        read_toml(tmp_path / "binary.toml")
    with pytest.raises(UserError, match="not readable TOML"):
        read_toml(Path(tmp_path))


def test_arms_are_stored_in_canonical_spelling():
    assert PoolSpec(arms=("batch+penalty(0.30)", "none")).arms == ("batch+penalty(0.3)", "none")


def test_integers_pass_for_floats_only():
    assert from_dict({"recipe": {"lr": 1}}).recipe.lr == 1.0
    assert isinstance(from_dict({"recipe": {"lr": 1}}).recipe.lr, float)


def test_merge_replaces_keys_table_by_table():
    base = {"n": 4, "data": {"source": "digits", "ood": 0.1}}
    assert merge(base, {"data": {"ood": 0.2}, "seed": 1}) == {
        "n": 4,
        "seed": 1,
        "data": {"source": "digits", "ood": 0.2},
    }
    assert base["data"]["ood"] == 0.1


def test_differences_name_fields_by_table():
    ours, theirs = PoolSpec(n=8, recipe=Recipe(lr=0.1)), PoolSpec(n=4, data=DataSpec(ood=0.1))
    assert {name for name, _, _ in differences(ours, theirs)} == {"n", "recipe.lr", "data.ood"}

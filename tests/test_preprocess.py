"""--normalize: what a model sees of a record."""

import pickle

import numpy as np
import pytest
import torch

from shadow_pool.data.preprocess import measured_normalize, parse_normalize
from shadow_pool.errors import UserError
from shadow_pool.usercode import load_object

IMAGES = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_numbers_scale_bytes_to_one_first():
    x = parse_normalize("0.1,0.2,0.3/0.5,1,2", (3, 4, 4))(IMAGES)
    expected = (IMAGES.double() / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 1, 2]).view(
        3, 1, 1
    )
    torch.testing.assert_close(x, expected.float())
    torch.testing.assert_close(parse_normalize("0.5/0.25", (3, 4, 4))(IMAGES), (IMAGES.float() / 255 - 0.5) / 0.25)


def test_none_leaves_floats_and_scales_bytes():
    floats = torch.randn(4, 7)
    assert torch.equal(parse_normalize("none", (7,))(floats), floats)
    torch.testing.assert_close(parse_normalize("none", (3, 4, 4))(IMAGES), IMAGES.float() / 255)


def test_features_have_one_number_each():
    floats = torch.randn(4, 2)
    x = parse_normalize("1,2/3,4", (2,))(floats)
    torch.testing.assert_close(x, (floats - torch.tensor([1.0, 2])) / torch.tensor([3.0, 4]))


def test_a_users_function_gets_the_stored_batch_and_survives_pickling(tmp_path):
    (tmp_path / "net.py").write_text(
        "def halve(batch):\n    assert str(batch.dtype) == 'torch.uint8'\n    return batch / 2\n"
    )
    function = parse_normalize(f"{tmp_path}/net.py:halve", (3, 4, 4))
    for copy in (function, pickle.loads(pickle.dumps(function))):
        torch.testing.assert_close(copy(IMAGES), IMAGES / 2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return batch", "must return a float tensor"),
        ("return batch[:2].float()", "each of the 5 records, got torch.float32 (2, 3, 4, 4)"),
        ("return batch.numpy()", "got ndarray"),
        ("return batch @ 3", "TypeError"),
    ],
)
def test_a_users_function_is_checked(tmp_path, body, words):
    (tmp_path / "net.py").write_text(f"def f(batch):\n    {body}\n")
    with pytest.raises(UserError) as caught:
        parse_normalize(f"{tmp_path}/net.py:f", (3, 4, 4))(IMAGES)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "0.5", "a/b", "0.5/0", "0.5/-1", "1/2/3", "1,2/1,2", "nan/1", "0.5/inf", "missing.py:f", "auto"]
)
def test_texts_that_do_not_parse(text):
    with pytest.raises(UserError):
        parse_normalize(text, (3, 4, 4))


def test_measured_numbers_standardize():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (3000, 2, 3, 3)).astype(np.uint8)
    x[:, 1] //= 4
    out = parse_normalize(measured_normalize(x), (2, 3, 3))(torch.from_numpy(x)).double()
    torch.testing.assert_close(out.mean(dim=(0, 2, 3)), torch.zeros(2).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std(dim=(0, 2, 3)), torch.ones(2).double(), atol=1e-4, rtol=0)


def test_measured_features():
    rng = np.random.default_rng(0)
    binary = rng.integers(0, 2, (500, 4)).astype(np.float32)
    assert measured_normalize(binary) == "none"
    standard = rng.standard_normal((500, 4)).astype(np.float32)
    assert measured_normalize(standard) == "none"
    mixed = np.concatenate([binary, 5 + 3 * standard, np.full((500, 1), 1e6)], axis=1, dtype=np.float32)
    mean, std = (side.split(",") for side in measured_normalize(mixed).split("/"))
    assert mean[:4] == ["0"] * 4
    assert std[:4] == ["1"] * 4
    assert float(mean[4]) == pytest.approx(5, abs=0.5)
    assert (mean[-1], std[-1]) == ("1e+06", "1")


def test_a_file_is_run_once_and_again_when_it_changes(tmp_path):
    path = tmp_path / "code.py"
    path.write_text("from beside import NUMBER\nCALLS = []\ndef f(): return NUMBER\n")
    (tmp_path / "beside.py").write_text("NUMBER = 4\n")
    assert load_object(f"{path}:f", what="x")() == 4
    assert load_object(f"{path}:CALLS", what="x") is load_object(f"{path}:CALLS", what="x")
    path.write_text("def f(): return 'changed'\n")
    assert load_object(f"{path}:f", what="x")() == "changed"


def test_a_file_that_fails_says_where(tmp_path):
    (tmp_path / "code.py").write_text("x = 1\nimport not_a_module\n")
    with pytest.raises(UserError, match=r"No module named 'not_a_module' \(code.py, line 2\)"):
        load_object(f"{tmp_path}/code.py:f", what="arch")

"""Records from .npz files, factories and names."""

import gzip
from types import SimpleNamespace

import numpy as np
import pytest

from shadow_pool.data import named
from shadow_pool.data.named import read_named
from shadow_pool.data.sources import open_source
from shadow_pool.errors import UserError
from shadow_pool.spec import DataSpec

RNG = np.random.default_rng(0)


def save(path, **arrays):
    np.savez(path, **arrays)
    return DataSpec(str(path))


def images(*shape, dtype=np.uint8):
    return RNG.integers(0, 256, size=shape).astype(dtype)


@pytest.mark.parametrize(
    ("x", "shape", "dtype"),
    [
        (images(6, 5, 4), (6, 1, 5, 4), np.uint8),
        (images(6, 3, 8, 8), (6, 3, 8, 8), np.uint8),
        (images(6, 8, 8, 3), (6, 3, 8, 8), np.uint8),
        (images(6, 1, 9, 7), (6, 1, 9, 7), np.uint8),
        (images(6, 9, 7, 4), (6, 4, 9, 7), np.uint8),
        (images(6, 13, 8, 8), (6, 13, 8, 8), np.uint8),
        (images(6, 8, 8, dtype=np.int64), (6, 1, 8, 8), np.uint8),
        (images(6, 8, 8) / 255.0, (6, 1, 8, 8), np.float32),
        (images(6, 8, 8) > 99, (6, 1, 8, 8), np.float32),
        (RNG.standard_normal((6, 7)), (6, 7), np.float32),
        (images(6, 7), (6, 7), np.float32),
        (images(6, 7) > 99, (6, 7), np.float32),
    ],
)
def test_layouts_and_dtypes(tmp_path, x, shape, dtype):
    source = open_source(save(tmp_path / "d.npz", x=x, y=np.arange(6) % 2))
    assert source.x.shape == shape
    assert source.x.dtype == dtype
    assert source.x.flags.c_contiguous


def test_channels_last_keeps_the_pixels(tmp_path):
    x = images(6, 8, 8, 3)
    source = open_source(save(tmp_path / "d.npz", x=x, y=np.arange(6) % 2))
    np.testing.assert_array_equal(source.x[4, 2], x[4, :, :, 2])


def test_optional_arrays_and_other_names(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(
        path,
        x=images(4, 5, 5),
        target=np.array(["cat", "dog", "cat", "dog"]),
        scan=np.arange(4) * 7,
        patient=np.array([b"p1", b"p1", b"p2", b"p2"]),
        subset=np.array(["clean", "ood", "clean", "mislabeled"]),
    )
    source = open_source(DataSpec(str(path), label="target", id="scan", group="patient"))
    assert list(source.id) == ["0", "7", "14", "21"]
    assert list(source.group) == ["p1", "p1", "p2", "p2"]
    assert list(source.subset) == ["clean", "ood", "clean", "mislabeled"]
    assert list(source.label) == ["cat", "dog", "cat", "dog"]


X = images(4, 5, 5)
Y = np.array([0, 1, 0, 1])


def test_whole_floats_are_labels(tmp_path):
    source = open_source(save(tmp_path / "d.npz", x=X, y=Y.astype(np.float32)[:, None]))
    assert (source.label.dtype, list(source.label)) == (np.int64, [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X}, "no array 'y'"),
        ({"images": X, "y": Y}, "no array 'x'; it holds images, y"),
        ({"x": X[:3], "y": Y}, "one row for each of the 4 labels"),
        ({"x": X.reshape(4, 1, 1, 5, 5), "y": Y}, "got shape"),
        ({"x": images(4, 4, 3, 2), "y": Y}, "transpose"),
        ({"x": np.full((4, 3), np.nan), "y": Y}, "4 records hold NaN"),
        ({"x": np.full((4, 3), "a"), "y": Y}, "features must be numbers"),
        ({"x": images(4, 5, 5, dtype=np.int16) * 7, "y": Y}, "0..255"),
        ({"x": X, "y": Y + 0.5}, "labels must be integers"),
        ({"x": X, "y": Y + np.inf}, "labels must be integers"),
        ({"x": X, "y": Y * 1e300}, "labels must be integers"),
        ({"x": X, "y": np.eye(4)}, "one per record"),
        ({"x": X[:0], "y": Y[:0]}, "no records"),
        ({"x": X, "y": Y, "id": np.array([1, 2, 2, 3])}, "first '2'"),
        ({"x": X, "y": Y, "id": np.array([1.0, 2, 3, 4])}, "id must be integers or strings"),
        ({"x": X, "y": Y, "id": np.arange(3)}, "one value for each of the 4"),
        ({"x": X, "y": Y, "subset": np.array(["clean", "oood", "clean", "ood"])}, "did you mean 'ood'"),
        ({"x": np.array([[None, 1]] * 4, dtype=object), "y": Y}, "not a readable .npz"),
    ],
)
def test_refused_arrays_take_one_line(tmp_path, arrays, words):
    with pytest.raises(UserError, match=r"(?s).*") as caught:
        open_source(save(tmp_path / "d.npz", **arrays))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_objects_in_an_npz_are_never_unpickled(tmp_path):
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    spec = save(tmp_path / "d.npz", x=np.array([Payload()] * 4, dtype=object), y=Y)
    with pytest.raises(UserError, match="not a readable"):
        open_source(spec)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"hello", None])
def test_damaged_npz_takes_one_line(tmp_path, content):
    path = tmp_path / "d.npz"
    np.savez(path, x=images(40, 9, 9), y=np.arange(40) % 2)
    path.write_bytes(path.read_bytes()[:900] if content is None else content)
    with pytest.raises(UserError, match="not a readable"):
        open_source(DataSpec(str(path)))


def test_image_size_resizes_and_features_refuse_it(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, x=np.full((4, 5, 7), 9, dtype=np.uint8), y=Y)
    x = open_source(DataSpec(str(path), image_size=10)).x
    assert x.shape == (4, 1, 10, 10)
    assert (x == 9).all()
    np.savez(path, x=np.ones((4, 5)), y=Y)
    with pytest.raises(UserError, match="image-size"):
        open_source(DataSpec(str(path), image_size=10))


FACTORIES = """
import numpy as np, torch
from torch.utils.data import TensorDataset

def arrays():
    return np.zeros((4, 3)), np.array([0, 1, 0, 1])

def tensors():
    return torch.zeros(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])

def dataset():
    return TensorDataset(torch.arange(12.).view(4, 3), torch.tensor([0, 1, 0, 1]))

def mapping():
    return {"x": np.zeros((4, 3)), "y": ["a", "b", "a", "b"], "id": ["k", "l", "m", "n"]}

class Ragged:
    def __len__(self): return 2
    def __getitem__(self, i): return np.zeros(i + 1), 0

class Augmented:
    def __len__(self): return 12
    def __getitem__(self, i): return torch.full((1, 4, 4), float(i)) + torch.rand(1), i % 2

def nothing():
    return None

def broken():
    raise KeyError("column")
"""


def test_factories(tmp_path):
    (tmp_path / "d.py").write_text(FACTORIES)

    def read(name):
        return open_source(DataSpec(f"{tmp_path}/d.py:{name}"))

    assert read("arrays").x.shape == (4, 3)
    assert read("tensors").x.shape == (4, 3, 8, 8)
    np.testing.assert_array_equal(read("dataset").x[1], [3, 4, 5])
    assert list(read("mapping").id) == ["k", "l", "m", "n"]
    with pytest.raises(UserError, match="item 1 is float64"):
        read("Ragged")
    with pytest.raises(UserError, match=r"read twice differs.*without random augmentation"):
        read("Augmented")
    with pytest.raises(UserError, match="must return a torch Dataset"):
        read("nothing")
    with pytest.raises(UserError, match=r"KeyError: 'column' \(d.py, line"):
        read("broken")
    with pytest.raises(UserError, match="did you mean 'arrays'"):
        read("array")


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return b"\0\0\x08" + bytes([array.ndim]) + sizes + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize(("folder", "zipped"), [("MNIST/raw", False), ("", True)])
def test_mnist_from_idx_files(tmp_path, folder, zipped):
    parts = {"train": images(5, 28, 28), "t10k": images(3, 28, 28)}
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for part, x in parts.items():
        for stem, array in (("images-idx3", x), ("labels-idx1", np.arange(len(x)))):
            content = idx(array)
            name = f"{part}-{stem}-ubyte" + (".gz" if zipped else "")
            (tmp_path / folder / name).write_bytes(gzip.compress(content) if zipped else content)
    source = read_named("mnist", data_root=tmp_path, download=False)
    np.testing.assert_array_equal(source.x[:, 0], np.concatenate(list(parts.values())))
    assert list(source.test) == [False] * 5 + [True] * 3
    assert list(source.row_ids()) == [f"train-{i}" for i in range(5)] + [f"test-{i}" for i in range(3)]


def test_truncated_idx_is_named(tmp_path):
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{stem}-ubyte").write_bytes(idx(images(2, 3, 3))[:-1])
    with pytest.raises(UserError, match="train-images-idx3-ubyte is not a whole IDX file"):
        read_named("kmnist", data_root=tmp_path, download=False)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "kmnist", "cifar10", "cifar100", "svhn"])
def test_missing_files_say_where_and_how(tmp_path, name):
    with pytest.raises(UserError, match=r"--download") as caught:
        open_source(DataSpec(name), data_root=tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "--data-root" in str(caught.value)


@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_torchvision_sets_are_joined_channels_first(monkeypatch, name):
    shape = (3, 32, 32) if name == "svhn" else (32, 32, 3)
    parts = {"train": images(5, *shape), "test": images(2, *shape)}

    def make(root, *, download, train=None, split=None):
        data = parts[split or ("train" if train else "test")]
        targets = list(range(len(data)))
        return SimpleNamespace(data=data, targets=targets, labels=np.array(targets), classes=list("abcde"))

    monkeypatch.setattr(named, "_torchvision_class", lambda asked: make)
    source = read_named(name, data_root=None, download=False)
    joined = np.concatenate(list(parts.values()))
    np.testing.assert_array_equal(source.x, joined if name == "svhn" else joined.transpose(0, 3, 1, 2))
    assert source.label.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert source.test.tolist() == [False] * 5 + [True] * 2
    assert source.source_index.tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_digits_are_the_real_ones_in_bytes():
    source = read_named("digits", data_root=None, download=False)
    assert source.x.shape == (1797, 1, 8, 8)
    assert source.x.max() == 255
    assert np.bincount(source.label).min() == 174


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("digit", "did you mean 'digits'"),
        ("no/such.npz", "does not exist"),
        ("nowhere.py:make", "does not exist"),
        ("no_such_module:make", "no module named 'no_such_module'"),
    ],
)
def test_unknown_sources(source, words):
    with pytest.raises(UserError, match=r".") as caught:
        open_source(DataSpec(source))
    assert words in str(caught.value)


def test_columns_are_refused_where_there_are_none():
    with pytest.raises(UserError, match="--label is for tables"):
        open_source(DataSpec("digits", label="y"))

"""Records from picture folders and from parquet with picture bytes."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shadow_pool.data.images import resize, with_channels
from shadow_pool.data.load import load_data
from shadow_pool.data.sources import open_source
from shadow_pool.errors import UserError
from shadow_pool.spec import DataSpec

RNG = np.random.default_rng(0)


def picture(mode="L", size=(6, 5), value=None):
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = RNG.integers(0, 256, (size[1], size[0], *channels)) if value is None else np.full((*size[::-1],), value)
    return Image.fromarray(pixels.astype(np.uint8), mode=None)


def write(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return image


def test_folder_of_class_folders(tmp_path):
    kept = {name: write(tmp_path / name, picture()) for name in ("b/2.png", "a/10.png", "a/9.png", "b/sub/1.png")}
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / ".cache").mkdir()
    source = open_source(DataSpec(str(tmp_path)))
    assert source.classes == ("a", "b")
    assert source.x.shape == (4, 1, 5, 6)
    for row, name in enumerate(source.id):
        np.testing.assert_array_equal(source.x[row, 0], np.asarray(kept[name]))
        assert source.classes[source.label[row]] == name[0]
    assert source.warnings == (f"{tmp_path}: 1 files that are not pictures were passed over",)


def test_train_and_test_folders(tmp_path):
    for name in ("train/a/1.png", "train/b/2.png", "train/b/3.png", "test/b/1.png"):
        write(tmp_path / name, picture())
    data = load_data(DataSpec(str(tmp_path)), seed=0)
    assert list(data.records.id) == ["train/a/1.png", "train/b/2.png", "train/b/3.png"]
    assert list(data.population.id) == ["test/b/1.png"]
    assert list(data.population.label) == [1]


def test_a_class_may_be_called_train(tmp_path):
    for name in ("bus", "test", "train"):
        write(tmp_path / name / "1.png", picture())
    source = open_source(DataSpec(str(tmp_path)))
    assert (source.classes, source.test) == (("bus", "test", "train"), None)


def test_mixed_sizes_and_modes_are_counted(tmp_path):
    for i in range(3):
        write(tmp_path / "a" / f"{i}.png", picture("RGB"))
    write(tmp_path / "b" / "grey.png", picture("L", value=77))
    write(tmp_path / "b" / "large.png", picture("RGBA", size=(12, 10)))
    source = open_source(DataSpec(str(tmp_path)))
    assert source.x.shape == (5, 3, 5, 6)
    assert (source.x[list(source.id).index("b/grey.png")] == 77).all()
    resized, converted = source.warnings
    assert "1 of 5 pictures were resized to 6 x 5" in resized
    assert "2 of 5 pictures were converted to RGB (1 L, 1 RGBA)" in converted
    asked = open_source(DataSpec(str(tmp_path), image_size=4))
    assert asked.x.shape == (5, 3, 4, 4)
    assert len(asked.warnings) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [(6, 5), (9, 9)])
def test_pictures_of_any_size_are_resized_in_silence(tmp_path, size):
    write(tmp_path / "a" / "1.png", picture("L", value=9, size=size))
    write(tmp_path / "b" / "2.png", picture("L", value=9, size=size))
    source = open_source(DataSpec(str(tmp_path), image_size=8))
    assert source.x.shape == (2, 1, 8, 8)
    assert (source.x == 9).all()


def test_sixteen_bit_grey_keeps_its_upper_byte(tmp_path):
    pixels = (np.arange(30).reshape(5, 6) * 2000).astype(np.uint16)
    write(tmp_path / "a" / "1.png", Image.fromarray(pixels))
    write(tmp_path / "b" / "1.png", Image.fromarray(pixels))
    np.testing.assert_array_equal(open_source(DataSpec(str(tmp_path))).x[0, 0], pixels >> 8)


@pytest.mark.parametrize("content", [b"", b"not a picture", None])
def test_an_unreadable_picture_is_named(tmp_path, content):
    write(tmp_path / "a" / "1.png", picture())
    bad = tmp_path / "b" / "bad.png"
    write(bad, picture(size=(64, 64)))
    bad.write_bytes(bad.read_bytes()[:200] if content is None else content)
    with pytest.raises(UserError, match=r"picture b/bad\.png cannot be read"):
        open_source(DataSpec(str(tmp_path)))


def test_an_empty_folder_says_what_it_should_hold(tmp_path):
    with pytest.raises(UserError, match="one subfolder per class"):
        open_source(DataSpec(str(tmp_path)))


def hugging_face(path, pictures, labels, names=None):
    def encoded(image):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return buffer.getvalue()

    cells = [{"bytes": encoded(image), "path": None} for image in pictures]
    table = pa.table({"image": cells, "label": labels, "who": [f"w{i}" for i in range(len(labels))]})
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)


def test_parquet_of_pictures(tmp_path):
    pictures = [picture("RGB") for _ in range(4)]
    hugging_face(tmp_path / "d.parquet", pictures, [0, 2, 1, 0], ["cat", "dog", "ox"])
    source = open_source(DataSpec(str(tmp_path / "d.parquet"), id="who"))
    np.testing.assert_array_equal(source.x, np.stack([np.asarray(p).transpose(2, 0, 1) for p in pictures]))
    assert source.classes == ("cat", "dog", "ox")
    assert list(source.id) == ["w0", "w1", "w2", "w3"]
    data = load_data(DataSpec(str(tmp_path / "d.parquet"), classes=("ox", "dog", "cat"), holdout=0), seed=0)
    assert list(data.records.label) == [2, 0, 1, 2]


def test_parquet_of_pictures_in_splits(tmp_path):
    hugging_face(tmp_path / "train-00000-of-00001.parquet", [picture() for _ in range(3)], [0, 1, 0])
    hugging_face(tmp_path / "test-00000-of-00001.parquet", [picture() for _ in range(2)], [1, 1])
    data = load_data(DataSpec(str(tmp_path)), seed=0)
    assert (len(data.records), len(data.population)) == (3, 2)
    assert list(data.population.id) == ["test-0", "test-1"]


def test_resize_is_an_antialiased_mean_and_keeps_the_dtype():
    x = RNG.integers(0, 256, (2, 3, 16, 16)).astype(np.uint8)
    small = resize(x, 4, 4)
    assert small.dtype == np.uint8
    assert abs(float(small.mean()) - float(x.mean())) < 8
    np.testing.assert_allclose(resize(x.astype(np.float32), 4, 4), small, atol=0.5)


def test_channels_follow_luma_and_back():
    red = np.zeros((1, 3, 2, 2), dtype=np.uint8)
    red[:, 0] = 200
    assert (with_channels(red, 1) == 60).all()
    assert with_channels(with_channels(red, 1), 3).shape == (1, 3, 2, 2)

"""Hostile and damaged files: one line each, nothing run, memory not exhausted."""

import os
import pickle
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from hostile import Payload, edit_zip
from safetensors.torch import save_file

from mia_audit.checkpoints import open_checkpoint
from mia_audit.checkpoints.inert_pickle import read_inert
from shadow_pool.errors import UserError

STATE = {"a.weight": torch.arange(600.0).view(20, 30), "a.bias": torch.zeros(20)}


def saved(path, value, **options):
    torch.save(value, path, **options)
    return path


def cut(path, keep):
    path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * keep)])


def compressed(path):
    torch.save({"a": torch.zeros(10_000_000)}, path.with_name("large.pt"))
    edit_zip(path.with_name("large.pt"), path, lambda name, content: content, zipfile.ZIP_DEFLATED)


def expanded(path):
    torch.save({"a": torch.zeros(1).expand(200_000, 200_000)}, path)


def pipe(path):
    os.mkfifo(path)


def safetensors_bomb(path):
    header = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)


HOSTILE = {
    "missing": (lambda path: None, "does not exist"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "pipe": (pipe, "not a regular file"),
    "empty": (lambda path: path.touch(), "is empty"),
    "web page": (lambda path: path.write_text("\n<!DOCTYPE html><html>Sign in</html>"), "is a web page"),
    "lfs": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), "git lfs pull"),
    "text": (lambda path: path.write_text("hello"), "is no checkpoint"),
    "bytes": (lambda path: path.write_bytes(bytes(range(256)) * 40), "is no checkpoint"),
    "bare pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "bare pickle"),
    "arrays": (lambda path: np.savez(path.open("wb"), x=np.ones(3)), "NumPy arrays"),
    "zip": (lambda path: zipfile.ZipFile(path, "w").writestr("a.txt", "x"), "zip archive of other files"),
    "compression bomb": (compressed, "declares"),
    "stride bomb": (expanded, "declares"),
    "safetensors bomb": (safetensors_bomb, "damaged"),
    "no tensors": (lambda path: saved(path, {"epoch": 3, "lr": 0.1}), "no weights (found epoch, lr)"),
    "number": (lambda path: saved(path, 3), "holds a int"),
    "one tensor": (lambda path: saved(path, torch.ones(3)), "holds a Tensor"),
    "meta": (lambda path: saved(path, {"a": torch.ones(3, device="meta")}), "holds no data"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_take_one_line(tmp_path, kind):
    path = tmp_path / "model.pt"
    make, words = HOSTILE[kind]
    make(path)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_truncated_files_take_one_line(tmp_path, keep, form):
    path = tmp_path / "model.pt"
    if form == "safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=form == "zip")
    cut(path, keep)
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_bits_flipped_anywhere_never_raise_anything_else(tmp_path):
    whole = saved(tmp_path / "whole.pt", {"state_dict": STATE, "beside": Payload(tmp_path / "ran")}).read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "model.pt"
    messages = []
    for _ in range(150):
        content = bytearray(whole)
        content[rng.integers(len(content) if rng.random() < 0.5 else 700)] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
        try:
            open_checkpoint(path)
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)
    assert not (tmp_path / "ran").exists()


def test_weights_that_were_never_made_are_named(tmp_path):
    path = saved(tmp_path / "model.pt", torch.nn.LazyLinear(3))
    with pytest.raises(UserError, match="weight holds no data"):
        open_checkpoint(path, trust=True)


def test_a_file_this_user_may_not_read(tmp_path, monkeypatch):
    path = saved(tmp_path / "model.pt", STATE)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(UserError, match="permissions"):
        open_checkpoint(path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_pickle_never_runs(tmp_path, legacy, protocol):
    marker = tmp_path / "ran"
    options = {"_use_new_zipfile_serialization": not legacy, "pickle_protocol": protocol}
    alone = saved(tmp_path / "alone.pt", Payload(marker), **options)
    beside = saved(tmp_path / "beside.pt", {"state_dict": STATE, "config": Payload(marker)}, **options)
    inside = saved(tmp_path / "inside.pt", {"state_dict": {**STATE, "b": Payload(marker)}}, **options)
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(Payload(marker), protocol=protocol))
    for path in (alone, bare, *([beside, inside] if legacy else [])):
        with pytest.raises(UserError, match=r"bare pickle|posix\.system"):
            open_checkpoint(path)
    if not legacy:
        for path in (beside, inside):
            checkpoint = open_checkpoint(path)
            assert checkpoint.state.keys() == STATE.keys()
            assert "posix.system" in " ".join(checkpoint.notes)
    assert not marker.exists()
    # The payload is real: what does unpickle runs it.
    subprocess.run([sys.executable, "-c", f"import pickle; pickle.load(open({str(bare)!r}, 'rb'))"], check=True)
    assert marker.exists()


def with_pickle(tmp_path, code):
    """A torch.save file whose pickle is ``code``."""
    saved(tmp_path / "m.pt", STATE)
    edit_zip(tmp_path / "m.pt", tmp_path / "h.pt", lambda name, content: code if name.endswith("data.pkl") else content)
    return tmp_path / "h.pt"


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
CRAFTED = {
    "exec": b'cbuiltins\nexec\n(S\'open("MARK", "w")\'\ntR.',
    "getattr chain": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'touch MARK'\ntR.",
    "instance": b"(S'touch MARK'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nS'touch MARK'\no.",
    "newobj": b"\x80\x02cos\nsystem\n(S'touch MARK'\nt\x81.",
    "attributes of a function": REBUILD + b"}S'__call__'\ncos\nsystem\nsb0(S'touch MARK'\ntR.",
    "slots of a function": REBUILD + b"(N}S'_name'\nS'x'\nstb.",
    "dotted name": b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93\x8c\x0atouch MARK\x85R.",
    "import": b"cantigravity\nfly\n(tR.",
    "extension": b"\x80\x02\x82\x01.",
    "huge memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "huge string": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x00abc.",
    "no stop": b"\x80\x02}",
    "negative stride": REBUILD + b"((S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI600\ntQI0\n(I5\nt(I-1\nt\x89NtR.",
    "out of bounds": REBUILD + b"((S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI600\ntQI599\n(I2\nt(I1\nt\x89NtR.",
    "no such storage": REBUILD + b"((S'storage'\nctorch\nFloatStorage\nS'../x'\nS'cpu'\nI6\ntQI0\n(I2\nt(I1\nt\x89NtR.",
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_pickles_do_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = with_pickle(tmp_path, CRAFTED[kind])
    with pytest.raises(UserError):
        open_checkpoint(path)
    if kind not in ("exec", "getattr chain", "instance", "object", "newobj", "dotted name", "import", "huge memo"):
        with pytest.raises(UserError, match="cannot be read safely"):
            read_inert(path)
    else:
        read_inert(path)
    assert not (tmp_path / "MARK").exists()
    assert "antigravity" not in sys.modules


def test_a_cycle_in_the_file_ends(tmp_path):
    cycle = {"state_dict": STATE}
    cycle["self"] = cycle
    assert open_checkpoint(saved(tmp_path / "m.pt", cycle)).state.keys() == STATE.keys()
    cycle["config"] = Payload(tmp_path / "ran")
    assert open_checkpoint(saved(tmp_path / "m.pt", cycle)).state.keys() == STATE.keys()


def test_refused_names_come_in_order_of_interest(tmp_path):
    path = saved(tmp_path / "m.pt", torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    with pytest.raises(UserError, match=r"torch\.nn\.modules\.activation\.ReLU, .*Linear.* --trust"):
        open_checkpoint(path)

"""`.tinyloop` files as safetensors: their bytes, their metadata, and the way back."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from test_arrays import CONFIG, random_tensors

import tinyloop_py as tl
from tinyloop_py import cli, export
from tinyloop_py.arrays import bfloat16, load_arrays, save
from tinyloop_py.config import FormatError
from tinyloop_py.convert import convert
from tinyloop_py.export import METADATA_KEY, read_description, to_safetensors
from tinyloop_py.format import read_file

BLOBS = {"card": b"of \xff bytes", "end_ids": np.array([7], "<i4").tobytes()}


@pytest.fixture
def model(tmp_path):
    """A file of four dtypes, in which the narrow ones come first."""
    config = replace(CONFIG, tied_head=0)
    tensors = random_tensors(config)
    tensors["embed.weight"] = np.arange(53 * 22, dtype=np.uint16).reshape(53, 22).view(bfloat16)
    tensors["head.weight"] = np.arange(53 * 22).reshape(53, 22).astype(np.int8)
    tensors["head.scale"] = np.full((53, 1), 0.01, np.float32)
    tensors["final_norm.weight"] = tensors["final_norm.weight"].astype(np.float16)
    save(tmp_path / "model.tinyloop", config, tensors, blobs=BLOBS)
    return tmp_path / "model.tinyloop"


def read(path):
    """Metadata, entries and the bytes of all tensors, from the file's own words."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    return entries.pop("__metadata__"), entries, data[end:]


def test_tensors_are_copied(model, tmp_path):
    out = tmp_path / "out.safetensors"
    steps = []
    to_safetensors(model, out, progress=lambda *step: steps.append(step))
    file = read_file(model)
    _, entries, data = read(out)
    assert list(entries) == list(file.tensors)
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        assert data[begin:end] == file.array(name).tobytes()
        assert begin % file.array(name).itemsize == 0
        assert tuple(entry["shape"]) == file.tensors[name].shape
    dtypes = {name: entries[name]["dtype"] for name in entries}
    assert dtypes["embed.weight"] == "BF16"
    assert dtypes["head.weight"] == "I8"
    assert dtypes["final_norm.weight"] == "F16"
    assert dtypes["layers.0.attn.q.weight"] == "F32"
    assert {name for name, _, _ in steps} == file.tensors.keys()
    assert steps[-1][1:] == (out.stat().st_size, out.stat().st_size)


def test_other_programs_read_it(model, tmp_path):
    to_safetensors(model, tmp_path / "out.safetensors")
    stored = load_arrays(model, stored=True).tensors
    with safe_open(tmp_path / "out.safetensors", "numpy") as file:
        assert set(file.keys()) == stored.keys()
        config, blobs = read_description(file.metadata()[METADATA_KEY])
        for name in stored.keys() - {"embed.weight"}:  # its NumPy has no bfloat16
            assert np.array_equal(file.get_tensor(name), stored[name])
    assert config == read_file(model).config
    assert blobs == BLOBS


def test_the_way_back(model, tmp_path):
    for source in (model, tl.default_model_path()):
        out, back = tmp_path / "out.safetensors", tmp_path / "back.tinyloop"
        assert cli.main(["export", str(source), str(out)]) == 0
        convert(out, back)
        first, second = load_arrays(source, stored=True), load_arrays(back, stored=True)
        assert second.config == first.config
        assert second.blobs == first.blobs
        assert second.tensors.keys() == first.tensors.keys()
        for name, array in first.tensors.items():
            assert second.tensors[name].dtype == array.dtype
            assert second.tensors[name].tobytes() == array.tobytes()


def test_without_blobs(model, tmp_path):
    config, tensors, _ = load_arrays(model, stored=True)
    save(model, config, tensors)
    to_safetensors(model, tmp_path / "out.safetensors")
    text = read(tmp_path / "out.safetensors")[0][METADATA_KEY]
    assert json.loads(text) == config.values()
    assert read_description(text) == (config, {})


def change(**changes):
    return json.dumps(CONFIG.values() | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "missing are"),
        (change(colour=1), r"unknown are \['colour'\]"),
        (change(vocab_size="7"), "config field vocab_size is '7'"),
        (change(vocab_size=None), "config field vocab_size is None"),
        (change(vocab_size=2**63), "config field vocab_size"),
        (change(norm_eps=float("nan")), "config field norm_eps is nan"),
        (change(blobs=3), "must be an object of base64 texts"),
        (change(blobs={"card": 3}), "must be an object of base64 texts"),
        (change(blobs={"card": "%%"}), "must be an object of base64 texts"),
        (change(blobs={"card": "\u00e9"}), "must be an object of base64 texts"),
    ],
)
def test_descriptions_that_are_refused(text, message):
    with pytest.raises(FormatError, match=message):
        read_description(text)


def test_damaged_tensors_are_not_copied(model, tmp_path):
    damaged = bytearray(model.read_bytes())
    damaged[-1] ^= 1
    model.write_bytes(damaged)
    last = list(read_file(model).tensors)[-1]
    with pytest.raises(FormatError, match=f"the bytes of {last} do not match their checksum"):
        to_safetensors(model, tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == [model]


def test_blobs_that_are_too_large_for_a_header(model, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_MAX_HEADER_BYTES", 3000)
    with pytest.raises(FormatError, match="as a safetensors header, which has at most 3,000"):
        to_safetensors(model, tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == [model]


def test_command(model, tmp_path, capfd):
    out = tmp_path / "out.safetensors"
    assert cli.main(["export", str(model), str(out)]) == 0
    assert capfd.readouterr() == ("", "")
    assert read(out)[1].keys() == read_file(model).tensors.keys()
    assert cli.main(["export", str(tmp_path / "none"), str(out)]) == 1
    assert cli.main(["export", str(model), str(tmp_path)]) == 1
    assert cli.main(["export", str(model), str(tmp_path / "none" / "x")]) == 1
    assert len(capfd.readouterr().err.splitlines()) == 3

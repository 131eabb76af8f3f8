"""Models from arrays and back: what `save` writes, what `load_arrays` reads, what is refused."""

import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from family_models import FAMILIES, converted
from public_models import config as make_config
from public_models import core

import tinyloop_py as tl
from tinyloop_py import arrays
from tinyloop_py.arrays import bfloat16, load_arrays, memory_file, save
from tinyloop_py.config import FormatError, Stage, tensor_shapes
from tinyloop_py.format import read_file

CONFIG = replace(
    make_config(core(1, 2, 1), (53, 22, 37), (6, 2, 10)),
    tied_head=1,
    state_init=2,
    inject=1,
    inject_source=1,
    loops_default=3,
)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def random_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for name, shape in tensor_shapes(config).items()
    }


@pytest.fixture
def tensors():
    return random_tensors(CONFIG)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.tinyloop"


def logits(path):
    with tl.Model(path, 64, threads=1, kv_mode="fp32") as model:
        return model.logits(TOKENS)


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tolist()


# ---- Round trips ----------------------------------------------------------------------------


def test_the_shipped_model_comes_back_byte_for_byte(path):
    shipped = tl.default_model_path()
    config, tensors, blobs = load_arrays(shipped, stored=True)
    assert {array.dtype for array in tensors.values()} == {bfloat16}
    save(path, config, tensors, blobs=blobs)
    assert path.read_bytes() == shipped.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_come_back_byte_for_byte(path, family):
    config, tensors, blobs = load_arrays(converted(family), stored=True)
    save(path, config, tensors, blobs=blobs)
    assert path.read_bytes() == converted(family).read_bytes()


def test_float32_of_a_bfloat16_file_is_the_same_model(path):
    config, tensors, blobs = load_arrays(tl.default_model_path())
    assert {array.dtype for array in tensors.values()} == {np.dtype("float32")}
    assert np.abs(tensors["layers.0.attn.q.weight"]).max() < 2
    save(path, config, tensors, blobs=blobs)
    assert np.array_equal(logits(path), logits(tl.default_model_path()))


def test_saved_and_loaded(path, tensors):
    blobs = {"card": b"of chance", "end_ids": np.array([7], "<i4").tobytes()}
    save(path, CONFIG, tensors, blobs=blobs)
    loaded = load_arrays(path)
    assert loaded.config == CONFIG
    assert loaded.blobs == blobs
    assert list(loaded.tensors) == list(tensors)
    assert all(np.array_equal(loaded.tensors[name], tensors[name]) for name in tensors)
    assert read_file(path).verify() == []
    assert logits(path).shape == (len(TOKENS), CONFIG.vocab_size)


def test_loaded_arrays_may_be_changed(path, tensors):
    save(path, CONFIG, tensors)
    for stored in (False, True):
        loaded = load_arrays(path, stored=stored).tensors["embed.weight"]
        loaded *= 2
        assert np.array_equal(load_arrays(path).tensors["embed.weight"], loaded / 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.astype(">f4"),
        np.asfortranarray,
        lambda array: np.repeat(array, 2, axis=0)[::2],
        lambda array: array[::-1].copy()[::-1],
        memoryview,
    ],
    ids=["big-endian", "column-major", "strided", "reversed", "buffer"],
)
def test_memory_layout_does_not_matter(tmp_path, tensors, change):
    save(tmp_path / "plain", CONFIG, tensors)
    save(tmp_path / "changed", CONFIG, {name: change(array) for name, array in tensors.items()})
    assert (tmp_path / "changed").read_bytes() == (tmp_path / "plain").read_bytes()


def test_many_rows(path, tensors, monkeypatch):
    """Arrays go to the file in parts; here of a few rows, or of one that is larger than a part."""
    monkeypatch.setattr(arrays, "_CHUNK_ELEMENTS", 30)
    save(path, CONFIG, tensors)
    loaded = load_arrays(path).tensors
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_bit_of_floats(path, tensors, dtype):
    """Not a number is one too."""
    odd = np.array([np.nan, -np.nan, np.inf, -0.0, 1e-7, 65504], dtype)
    tensors["embed.weight"] = np.resize(odd, tensors["embed.weight"].shape)
    save(path, CONFIG, tensors)
    loaded = load_arrays(path, stored=True).tensors["embed.weight"]
    assert loaded.dtype == dtype
    assert bits(loaded) == bits(tensors["embed.weight"])
    expected = tensors["embed.weight"].astype(np.float32)
    assert np.array_equal(load_arrays(path).tensors["embed.weight"], expected, equal_nan=True)


def test_bfloat16_by_its_bits(path, tensors):
    """1, -2.5, the least subnormal, infinity and a NaN."""
    patterns = np.array([0x3F80, 0xC020, 0x0001, 0x7F80, 0x7FC1], np.uint16)
    shape = tensors["embed.weight"].shape
    for order in ("<u2", ">u2"):
        marked = np.resize(patterns, shape).astype(order)
        tensors["embed.weight"] = marked.astype("<u2").view(bfloat16)[:, ::-1]
        save(path, CONFIG, tensors)
        assert read_file(path).tensors["embed.weight"].dtype == "bfloat16"
        loaded = load_arrays(path, stored=True).tensors["embed.weight"]
        assert np.array_equal(loaded["bfloat16"], marked[:, ::-1])
        values = load_arrays(path).tensors["embed.weight"].ravel()[: shape[1]][::-1]
        assert values[:4].tolist() == [1.0, -2.5, 2.0**-133, np.inf]
        assert np.isnan(values[4])


@pytest.mark.parametrize("grouped", [False, True])
def test_int8_with_scales(path, grouped):
    config = replace(CONFIG, hidden_size=150, n_heads=2, tied_head=0)
    tensors = random_tensors(config)
    rng = np.random.default_rng(1)
    name = "layers.1.mlp.up"
    values = rng.integers(-128, 128, (config.ff_size, 150), np.int8)
    scales = rng.uniform(0.001, 0.002, (config.ff_size, 2 if grouped else 1)).astype(np.float32)
    tensors |= {f"{name}.weight": values, f"{name}.scale": scales}
    save(path, config, tensors)
    stored = load_arrays(path, stored=True).tensors
    assert stored.keys() == tensors.keys()
    assert all(bits(stored[key]) == bits(tensors[key]) for key in tensors)
    plain = load_arrays(path).tensors
    assert plain.keys() == tensors.keys() - {f"{name}.scale"}
    expected = values.astype(np.float32)
    expected[:, :128] *= scales[:, :1]
    expected[:, 128:] *= scales[:, -1:]
    assert np.array_equal(plain[f"{name}.weight"], expected)


def test_int8_without_sound_scales_cannot_be_loaded(path, tensors, monkeypatch):
    save(path, CONFIG, tensors)
    file = read_file(path)
    int8 = file.tensors["embed.weight"]._replace(dtype="int8")
    narrow = int8._replace(shape=(53,))
    scale = int8._replace(name="embed.scale", dtype="float32", shape=(53, 1))
    for found in (
        [int8],
        [int8, scale._replace(shape=(53, 2))],
        [int8, scale._replace(shape=(53,))],
        [int8, scale._replace(dtype="float16")],
        [narrow, scale],
    ):
        broken = replace(file, tensors={tensor.name: tensor for tensor in found})
        monkeypatch.setattr(arrays, "read_file", lambda path, broken=broken: broken)
        with pytest.raises(FormatError, match=r"embed\.weight is int8; it must have"):
            load_arrays(path)


# ---- Memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [("<f4", 2 << 20), (">f4", 12 << 20)])
def test_arrays_are_not_held_twice(path, dtype, limit):
    """Of 33 MB nothing is copied, or some MB at a time where the bytes must be swapped."""
    config = replace(CONFIG, vocab_size=1 << 17, hidden_size=64)
    tensors = random_tensors(config)
    tensors["embed.weight"] = np.zeros((1 << 17, 64), dtype)
    tracemalloc.start()
    try:
        save(path, config, tensors)
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_file_in_memory(path, tensors):
    save(path, CONFIG, tensors, blobs={"card": b"x"})
    with memory_file(CONFIG, tensors, {"card": b"x"}) as name:
        assert read_file(name).path.read_bytes() == path.read_bytes()
        model = tl.Model(name, 64, threads=1, kv_mode="fp32")
    assert not os.path.exists(name)
    with model:  # has read it, and needs it no more
        assert np.array_equal(model.logits(TOKENS), logits(path))
        assert model.blob("card") == b"x"


def test_file_in_memory_goes_after_an_error(tensors):
    def n_descriptors():
        return len(os.listdir("/proc/self/fd"))

    def fail(numerator):
        with memory_file(CONFIG, tensors):
            return numerator / (n_descriptors() - before - 1)

    before = n_descriptors()
    with pytest.raises(ZeroDivisionError):
        fail(1)
    with pytest.raises(FormatError, match="missing"), memory_file(CONFIG, {}):
        pass
    assert n_descriptors() == before


# ---- What is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"embed.weight": None}, r"embed\.weight: missing"),
        ({"embed.bias": np.zeros(3, "f4")}, r"embed\.bias: the configuration does not call for"),
        ({"": np.zeros(3, "f4")}, r": the configuration does not call for"),
        ({"embed.weight": np.zeros((22, 53), "f4")}, r"shape \[22, 53\]; it must be \[53, 22\]"),
        ({"embed.weight": np.float32(1)}, r"embed\.weight: shape \[\]"),
        ({"embed.weight": np.zeros((53, 22, 0), "f4")}, r"shape \[53, 22, 0\]"),
        ({"embed.weight": np.zeros((53, 22))}, r"dtype float64; allowed are .*astype"),
        ({"embed.weight": [[0.0] * 22] * 53}, r"dtype float64; allowed are"),
        ({"embed.weight": np.zeros((53, 22), int)}, r"dtype int64; allowed are"),
        ({"embed.weight": np.zeros((53, 22), "u2")}, r"dtype uint16; .*view\(tinyloop_py\.bfl"),
        ({"embed.weight": np.zeros((53, 22), object)}, r"dtype object; allowed are"),
        ({"embed.weight": "words"}, r"dtype <U5; allowed are"),
        ({"embed.weight": np.zeros((53, 22), bool)}, r"dtype bool; allowed are"),
    ],
)
def test_tensors_that_are_refused(path, tensors, change, text):
    tensors |= change
    tensors = {name: array for name, array in tensors.items() if array is not None}
    with pytest.raises(FormatError, match=text):
        save(path, CONFIG, tensors)
    with pytest.raises(FormatError, match=text), memory_file(CONFIG, tensors):
        pass
    assert not list(path.parent.iterdir())


def test_all_dtypes_that_are_refused_are_named(path, tensors):
    doubles = {name: array.astype(float) for name, array in tensors.items()}
    with pytest.raises(FormatError) as caught:
        save(path, CONFIG, doubles)
    assert all(f"{name}: dtype float64" in str(caught.value) for name in tensors)


def test_blobs_that_are_refused(path, tensors):
    with pytest.raises(FormatError, match="blob card is empty"):
        save(path, CONFIG, tensors, blobs={"card": b""})
    with pytest.raises(TypeError, match="blob card is str; it must be bytes"):
        save(path, CONFIG, tensors, blobs={"card": "text"})


def test_other_types_are_refused(path, tensors):
    with pytest.raises(TypeError, match="it must be a tinyloop_py Config"):
        save(path, {"vocab_size": 53}, tensors)
    with pytest.raises(TypeError, match="5 is no name"):
        save(path, CONFIG, tensors | {5: tensors["embed.weight"]})
    with pytest.raises(TypeError, match="5 is no name"):
        save(path, CONFIG, tensors, blobs={5: b"x"})


def test_a_file_that_is_there_stays_if_saving_fails(path, tensors):
    path.write_bytes(b"precious")
    with pytest.raises(FormatError):
        save(path, CONFIG, {})
    assert path.read_bytes() == b"precious"


def test_a_configuration_that_does_not_run_is_seen_at_load(path):
    config = make_config([Stage(0, 1, 0, 0)], (7, 6, 5), (4, 3, 10), norm_eps=1e-6)
    save(path, config, random_tensors(config))
    with pytest.raises(tl.Error, match="n_heads"):
        tl.Model(path)


def test_damaged_files_cannot_be_loaded(path, tensors):
    save(path, CONFIG, tensors)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="its header says"):
        load_arrays(path)
    with pytest.raises(FileNotFoundError):
        load_arrays(path.with_name("none"))

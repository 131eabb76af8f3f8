"""Dtypes of converted tensors, and rounding against exact arithmetic."""

import struct
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from checkpoints import (
    LLAMA,
    convert_small,
    random_tensors,
    save_checkpoint,
)
from hypothesis import given
from hypothesis import strategies as st

from tinyloop_py import checkpoint as checkpoints
from tinyloop_py import format as fmt
from tinyloop_py import rounding
from tinyloop_py.convert import CheckpointError, convert


def nearest(value, candidates):
    """The candidate (number, is_even) nearest to the value; of two, the even one."""
    exact = Fraction(float(value))
    return min(candidates, key=lambda c: (abs(Fraction(c[0]) - exact), not c[1]))[0]


def bfloat16_by_search(value):
    """Nearest of the two bfloat16 numbers around a float32, by exact arithmetic."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    around = [
        (struct.unpack("<f", struct.pack("<I", b << 16))[0], b % 2 == 0) for b in (bits, bits + 1)
    ]
    return nearest(value, around)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE.filter(lambda v: abs(v) < 3.38e38), min_size=1))
def test_float32_to_bfloat16(values):
    array = np.array(values, "<f4")
    got = rounding.convert_dtype(array, "float32", "bfloat16")
    back = rounding.convert_dtype(got, "bfloat16", "float32")
    assert back.tolist() == [bfloat16_by_search(value) for value in array]
    assert np.array_equal(np.signbit(back), np.signbit(array))


@given(st.lists(FINITE | st.floats(-7e4, 7e4, width=32), min_size=1))
def test_float32_to_float16(values):
    def by_struct(value):
        try:
            return struct.pack("<e", value)
        except OverflowError:
            return struct.pack("<e", float("-inf") if value < 0 else float("inf"))

    array = np.array(values, "<f4")
    got = rounding.convert_dtype(array, "float32", "float16")
    assert got.tobytes() == b"".join(by_struct(float(value)) for value in array)


def test_ties_go_to_even():
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], "<f4")
    got = rounding.convert_dtype(ties, "float32", "bfloat16")
    assert got.tolist() == [0x3F80, 0x3F82, 0xBF80]
    ties = np.array([1 + 2**-11, 1 + 3 * 2**-11, 2049.0], "<f4")
    got = rounding.convert_dtype(ties, "float32", "float16")
    assert got.tolist() == [1.0, 1 + 2**-9, 2048.0]


def test_every_nan_stays_one():
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], "<u4")
    got = rounding.convert_dtype(bits.view("<f4"), "float32", "bfloat16")
    back = rounding.convert_dtype(got, "bfloat16", "float32")
    assert np.isnan(back).all()
    assert np.signbit(back).tolist() == [False, False, True, True]


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_widening_and_back_is_exact(source):
    every = np.arange(2**16, dtype="<u2")
    values = every if source == "bfloat16" else every.view("<f2")
    wide = rounding.convert_dtype(values, source, "float32")
    if source == "float16":
        assert np.array_equal(wide, values.astype(np.float64), equal_nan=True)
    else:
        words = b"".join(b"\0\0" + bits.tobytes() for bits in every)
        assert np.array_equal(wide, np.frombuffer(words, "<f4"), equal_nan=True)
    back = rounding.convert_dtype(wide, "float32", source)
    number = ~np.isnan(wide)
    assert np.array_equal(back[number], values[number])
    assert np.isnan(rounding.convert_dtype(back, source, "float32")[~number]).all()


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_dtype_option(tmp_path, stored, dtype):
    tensors = random_tensors(LLAMA, stored)
    report, file = convert_small(tmp_path, LLAMA, tensors, dtype)
    own = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[stored]
    target = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    assert {tensor.dtype for tensor in file.tensors.values()} == {target}
    assert list(report.parameters) == [target]
    embed = tensors["model.embed_tokens.weight"][1]
    expected = rounding.convert_dtype(embed, own, target)
    assert np.array_equal(file.array("embed.weight"), expected)


def test_stored_dtypes_are_kept(tmp_path):
    tensors = random_tensors(LLAMA)
    tensors |= {name: random_tensors(LLAMA, "BF16")[name] for name in tensors if "mlp" in name}
    report, file = convert_small(tmp_path, LLAMA, tensors)
    kept = {name: tensor.dtype for name, tensor in file.tensors.items()}
    assert kept["layers.0.mlp.up.weight"] == "bfloat16"
    assert kept["layers.0.attn.q.weight"] == kept["embed.weight"] == "float32"
    others = sum(array.size for dtype, array in tensors.values() if dtype == "F32")
    assert report.parameters == {"float32": others, "bfloat16": 2 * 3 * 5 * 6}


@pytest.mark.parametrize(
    ("value", "dtype", "name"), [(65520.0, "fp16", "float16"), (3.4e38, "bf16", "bfloat16")]
)
def test_overflow_is_refused_by_name(tmp_path, value, dtype, name):
    tensors = random_tensors(LLAMA)
    tensor = "model.layers.1.self_attn.o_proj.weight"
    tensors[tensor][1][3, 2] = value
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, tensors)
    out = tmp_path / "out.tinyloop"
    out.write_bytes(b"old")
    with pytest.raises(CheckpointError, match=f"tensor {tensor} has .* too large for {name}"):
        convert(folder, out, dtype=dtype)
    assert out.read_bytes() == b"old"
    tensors[tensor][1][3, 2] = 65519.0
    save_checkpoint(folder, LLAMA, tensors)
    convert(folder, out, dtype=dtype)
    assert fmt.read_file(out).verify() == []


def test_infinities_that_were_there_stay(tmp_path):
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"][1][0] = float("inf")
    _, file = convert_small(tmp_path, LLAMA, tensors, "fp16")
    assert np.isinf(file.array("final_norm.weight")[0])


def test_unknown_dtype_option(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    with pytest.raises(CheckpointError, match="dtype is 'int8'; allowed are bf16, fp16, fp32"):
        convert(folder, tmp_path / "out.tinyloop", dtype="int8")


def test_memory_stays_below_one_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CHUNK_ELEMENTS", 1 << 14)
    config = LLAMA | {"vocab_size": 2**17}
    tensors = random_tensors(config)
    folder = save_checkpoint(tmp_path / "checkpoint", config, tensors)
    tracemalloc.start()
    try:
        convert(folder, tmp_path / "out.tinyloop", dtype="bf16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    embed = tensors["model.embed_tokens.weight"][1]
    assert peak < embed.nbytes / 2
    expected = rounding.convert_dtype(embed, "float32", "bfloat16")
    assert np.array_equal(fmt.read_file(tmp_path / "out.tinyloop").array("embed.weight"), expected)

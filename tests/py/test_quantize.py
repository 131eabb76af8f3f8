"""int8 weights: error bounds by exact arithmetic, which tensors, streaming, what is refused."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from checkpoints import (
    DATA,
    LLAMA,
    convert_small,
    golden_checkpoint,
    random_tensors,
    refused,
    save_checkpoint,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import tinyloop_py as tl
from tinyloop_py import cli, rounding
from tinyloop_py import convert as converter
from tinyloop_py import format as fmt
from tinyloop_py.config import may_be_int8
from tinyloop_py.convert import CheckpointError, convert
from tinyloop_py.quantize import quantize_rows

GROUP = 128


def spread(scales, columns):
    """A scale for each column."""
    if scales.shape[1] == 1:
        return np.repeat(scales, columns, axis=1)
    return np.repeat(scales, GROUP, axis=1)[:, :columns]


def dequantized(file, name):
    values = file.array(name).astype(np.float64)
    return values * spread(file.array(name.removesuffix("weight") + "scale"), values.shape[1])


# ---- The numbers ----------------------------------------------------------------------------

MATRICES = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 7, 127, 128, 129, 300])),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    fill=st.just(np.float32(0.5)),
)


@given(rows=MATRICES, group=st.sampled_from([None, GROUP]))
def test_error_is_half_a_step(rows, group):
    """At most half a scale, and what rounding the scale itself and the quotient adds."""
    values, scales = quantize_rows(rows, group)
    n_groups = 1 if group is None else -(-rows.shape[1] // group)
    assert (values.dtype, values.shape) == (np.int8, rows.shape)
    assert (scales.dtype, scales.shape) == (np.float32, (len(rows), n_groups))
    assert values.min() >= -127
    wide = spread(scales, rows.shape[1]).astype(np.float64)
    error = np.abs(values * wide - rows.astype(np.float64))
    smallest = np.finfo(np.float32).smallest_subnormal
    assert (error <= wide * (0.5 + 127 * 2.0**-23) + 127 * float(smallest)).all()


@given(rows=MATRICES)
def test_each_scale_is_the_largest_magnitude_over_127(rows):
    _, scales = quantize_rows(rows, GROUP)
    for row, of_row in zip(rows, scales, strict=True):
        for g, scale in enumerate(of_row):
            exact = Fraction(float(np.abs(row[g * GROUP : (g + 1) * GROUP]).max())) / 127
            distance = abs(Fraction(float(scale)) - exact)
            for other in np.nextafter(scale, np.float32([-1, 1])):
                assert distance <= abs(Fraction(float(other)) - exact)


def test_ties_go_to_even_and_signs_are_symmetric():
    row = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]], np.float32)
    values, scales = quantize_rows(row, None)
    assert scales.tolist() == [[1.0]]
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]
    assert np.array_equal(quantize_rows(-row, None)[0], -values)


def test_zero_rows_have_scale_zero():
    rows = np.zeros((3, 300), np.float32)
    rows[1, 200] = 254.0
    values, scales = quantize_rows(rows, GROUP)
    assert scales.tolist() == [[0, 0, 0], [0, 2, 0], [0, 0, 0]]
    assert values.sum() == values[1, 200] == 127


def test_groups_do_not_see_each_other():
    rows = np.ones((2, 2 * GROUP + 5), np.float32)
    rows[:, :GROUP] = 1000.0
    rows[:, -5:] = 0.001
    values, scales = quantize_rows(rows, GROUP)
    assert (values == 127).all()
    assert np.array_equal(scales, np.float32([[1000, 1, 0.001]] * 2) / np.float32(127))
    values, _ = quantize_rows(rows, None)
    assert (values[:, GROUP:] == 0).all()


# ---- Files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["int8", "int8-group"])
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_matrices_become_int8_and_the_rest_stays(tmp_path, quantize, stored):
    config = LLAMA | {"intermediate_size": 300, "hidden_size": 131}
    tensors = random_tensors(config, stored)
    report, file = convert_small(tmp_path, config, tensors, quantize=quantize)
    assert file.verify() == []
    own = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[stored]
    plain = {n: t for n, t in file.tensors.items() if not n.endswith(".scale")}
    for name, tensor in plain.items():
        matrix = may_be_int8(name, tensor.shape)
        assert tensor.dtype == ("int8" if matrix else own)
        assert (len(tensor.shape) == 2) == matrix
        assert (f"{name.removesuffix('.weight')}.scale" in file.tensors) == matrix
    sizes = {own: 5 * 131, "int8": sum(np.prod(t.shape) for t in plain.values()) - 5 * 131}
    assert report.parameters == sizes
    groups = {131: 2, 300: 3, 8: 1} if quantize == "int8-group" else {131: 1, 300: 1, 8: 1}
    for name, its in (("attn.o", "self_attn.o_proj"), ("mlp.down", "mlp.down_proj")):
        own_array = file.array(f"layers.1.{name}.weight")
        exact = rounding.convert_dtype(tensors[f"model.layers.1.{its}.weight"][1], own, "float32")
        values, scales = quantize_rows(exact, GROUP if quantize == "int8-group" else None)
        assert np.array_equal(own_array, values)
        assert np.array_equal(file.array(f"layers.1.{name}.scale"), scales)
        assert scales.shape == (len(values), groups[values.shape[1]])


def test_small_gates_stay_as_they_are(tmp_path):
    for family, names in {
        "ouro": ["exit.weight", "exit.bias", "stages.0.norm.weight"],
        "parcae": ["layers.1.attn.value_gate.weight", "inject.a_log", "prelude_norm.weight"],
        "iquest_loop": ["layers.0.attn.loop_gate.weight", "layers.0.attn.loop_gate.bias"],
        "hrm_text": ["state_init.weight"],
        "qwen2": ["layers.0.attn.q.bias"],
    }.items():
        config, tensors = golden_checkpoint(family)
        _, file = convert_small(tmp_path, config, tensors, quantize="int8")
        assert file.verify() == []
        assert {file.tensors[name].dtype for name in names} == {"float32"}
        assert file.tensors["embed.weight"].dtype == "int8"
        tl.Model(file.path, 16, threads=1).close()


def test_dtype_is_for_what_is_not_quantized(tmp_path):
    tensors = random_tensors(LLAMA)
    _, exact = convert_small(tmp_path, LLAMA, tensors, quantize="int8")
    weights = exact.array("head.weight")
    _, file = convert_small(tmp_path, LLAMA, tensors, dtype="bf16", quantize="int8")
    assert np.array_equal(file.array("head.weight"), weights)
    assert file.tensors["final_norm.weight"].dtype == "bfloat16"
    assert file.tensors["head.scale"].dtype == "float32"


@pytest.mark.parametrize("quantize", ["int8", "int8-group"])
def test_any_chunk_size_gives_the_same_file(tmp_path, monkeypatch, quantize):
    config = LLAMA | {"hidden_size": 200, "intermediate_size": 150}
    tensors = random_tensors(config)
    _, file = convert_small(tmp_path, config, tensors, quantize=quantize)
    whole = file.path.read_bytes()
    for n in (1, 200, 601):
        monkeypatch.setattr(converter, "CHUNK_ELEMENTS", n)
        _, file = convert_small(tmp_path, config, tensors, quantize=quantize)
        assert file.path.read_bytes() == whole


def test_fused_rows_are_quantized_as_their_parts(tmp_path):
    config, tensors = golden_checkpoint("huginn")
    _, file = convert_small(tmp_path, config, tensors, quantize="int8")
    fused = tensors["transformer.prelude.1.attn.Wqkv.weight"][1]
    for i, part in enumerate("qkv"):
        rows = fused[64 * i : 64 * i + 64]
        name = f"layers.1.attn.{part}.weight"
        assert np.array_equal(file.array(name), quantize_rows(rows, None)[0])
        assert np.abs(dequantized(file, name) - rows).max() <= np.abs(rows).max() / 253


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantize", ["int8", "int8-group"])
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path, value, quantize):
    tensors = random_tensors(LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][1][3, 2] = value
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, tensors)
    with pytest.raises(CheckpointError, match=f"tensor {name} has values that are not finite"):
        convert(folder, tmp_path / "out.tinyloop", quantize=quantize)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_int8_of_elsewhere_is_refused(tmp_path):
    """What such numbers mean, the checkpoint's own code knows alone."""
    tensors = random_tensors(LLAMA)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = ("I8", np.ones((6, 5), np.int8))
    refused(tmp_path, f"tensor {name} has dtype I8; convertible are F32, F16, BF16", LLAMA, tensors)


def test_unknown_option(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    with pytest.raises(CheckpointError, match="quantize is 'int4'; allowed are int8, int8-group"):
        convert(folder, tmp_path / "out.tinyloop", quantize="int4")


def test_command(tmp_path, capsys):
    out = tmp_path / "out.tinyloop"
    status = cli.main(["convert", str(DATA / "llama"), str(out), "--quantize", "int8-group"])
    assert status == 0
    assert fmt.read_file(out).tensors["layers.0.mlp.down.scale"].shape == (64, 2)
    assert "215,040 int8" in capsys.readouterr().out


def test_memory_stays_below_one_tensor(tmp_path):
    config = LLAMA | {"vocab_size": 2**20}
    folder = save_checkpoint(tmp_path / "checkpoint", config, random_tensors(config, "F16"))
    tracemalloc.start()
    try:
        convert(folder, tmp_path / "out.tinyloop", quantize="int8")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    scales = 4 * 2**20
    assert peak < scales + 12 * 2**20 < 2**20 * 6 * 4


# ---- What comes of it -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "ouro", "huginn", "hrm_text", "iquest_loop", "parcae"])
def test_logits_stay_near(tmp_path, family):
    """int8 moves each product by about 1 %, and these models have up to a hundred in a row."""
    tokens = np.random.default_rng(5).integers(0, 256, 40).tolist()
    logits = {}
    for quantize in (None, "int8", "int8-group"):
        path = tmp_path / f"{quantize}.tinyloop"
        convert(DATA / family, path, quantize=quantize)
        with tl.Model(path, 64, threads=1, kv_mode="fp32", init_scale=0) as model:
            logits[quantize] = model.logits(tokens)
    for quantize in ("int8", "int8-group"):
        error = logits[quantize] - logits[None]
        assert 0 < np.sqrt((error**2).mean()) < 0.15 * logits[None].std(), quantize

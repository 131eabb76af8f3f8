"""What `tinyloop inspect` says of files: every part of the description, from known models."""

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import public_models as public
import pytest
from checkpoints import DATA, LLAMA, random_tensors, save_checkpoint
from family_models import FAMILIES, converted
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyloop_py import format as fmt
from tinyloop_py.config import Config, Stage, stage_fields
from tinyloop_py.convert import convert
from tinyloop_py.describe import describe
from tinyloop_py.diagram import draw

SHIPPED = Path(fmt.__file__).parent / "data/refdesk.tinyloop"


def text_of(config):
    """The description of a file that has no tensors."""
    file = fmt.TinyloopFile(Path("x.tinyloop"), config, {}, {}, 0, np.zeros(1, "u1"))
    text = describe(file)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    return text


def rows(text):
    """Label -> text of the rows outside the drawing, each with the lines that go on from it."""
    found = {}
    for line in text.splitlines():
        row = re.fullmatch(r" {0,4}(\w.*?)  +(\S.*)", line)
        if row and row[1] not in ("tokens", "embedding"):
            label, found[row[1]] = row[1], row[2]
        elif line.startswith(" " * 8) and found:
            found[label] += " " + line.strip()
    return found


def steps(text):
    """(step, note) of the drawing's rows, without frames and lines."""
    drawing = next(part for part in text.split("\n\n") if part.lstrip().startswith("tokens"))
    column = len(re.search(r"^ +embedding +", drawing, re.MULTILINE)[0])
    found = [(line[:column].strip("|+-> "), line[column:]) for line in drawing.splitlines()]
    return [row for row in found if row != ("", "")]


# ---- Known files ----------------------------------------------------------------------------


def test_shipped_model():
    text = describe(fmt.read_file(SHIPPED))
    assert (
        text
        == f"""\
file        refdesk.tinyloop, {SHIPPED.stat().st_size:,} bytes
parameters  11,014,656 in 48 tensors of 22,029,312 bytes: 11,014,656 bfloat16
vocabulary  8,192; begin none; end 4; pad 0
positions   2,048 trained
blobs       tokenizer.json 540,371, chat_template 287, card 25,758, end_ids 4 bytes

    tokens
      |
    embedding       x = embed[token]
      |
    layer 0         stage 0, run once, 1,573,632 parameters
      |
      |             e = x
      |             s = 0
      |
+---->|             runs 8 times by default; 1 to 1024 allowed, trained up to 12
|     |
|   inject          s = s + e
|     |
|   layers 1 to 3   stage 1, looped, 4,720,896 parameters
|     |
|   norm            s = stages.1.norm(s)
|     |
+-----+
      |
      |             x = s
      |
    layer 4         stage 2, run once, 1,573,632 parameters
      |
    norm            x = final_norm(x)
      |
    head            logits = embed x, tied to the embedding
      |
    logits

each layer, x of width 384
  attention  x = x + attention(in(x))
             6 heads of 64, 2 KV heads
  rotation   half-split pairs, theta 10,000, 64 of 64 channels
  mask       causal
  MLP        x = x + MLP(in(x))
             MLP(x) = down(silu(gate x) * up x); 1,024 wide
  norms      pre, RMS with weight, eps 1e-06

a token costs                    1 loop   8 loops (default)      12 loops
  matrix products            22.0 MFLOP          88.1 MFLOP   125.8 MFLOP
  attention, each position   7,680 FLOP         39,936 FLOP   58,368 FLOP
  KV cache, fp16                2.5 KiB              13 KiB        19 KiB
  KV cache, fp32                  5 KiB              26 KiB        38 KiB"""
    )


def test_nested_schedule():
    """Two frames, of which the outer one goes on around the inner one."""
    text = text_of(public.HRM_TEXT_1B)
    assert (
        "\n".join(draw(public.HRM_TEXT_1B))
        == """\
        tokens
          |
        embedding         high = 39.19 embed[token]
          |
          |               low = state_init, a stored vector
          |
+-------->|               H: runs 2 times by default
|         |
|   +---->|               L: runs 3 times by default
|   |     |
|   |   add               low = low + high
|   |     |
|   |   layers 0 to 15    stage 0, the low one
|   |     |
|   |   norm              low = norm(low), weightless
|   |     |
|   +-----+
|         |
|       add               high = high + low
|         |
|       layers 16 to 31   stage 1, the high one
|         |
|       norm              high = norm(high), weightless
|         |
+---------+
          |
        head              logits = head high
          |
        logits"""
    )
    assert "heads' output times sigmoid(gate x)" in text
    assert rows(text)["mask"].startswith("prefix-LM: ")
    assert rows(text)["norms"] == "pre, RMS weightless, eps 1e-06"


LOOPS = "by default; 1 to 1024 allowed"


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "OURO_1B": [
            ("", f"runs 4 times {LOOPS}, trained up to 4"),
            ("layers 0 to 23", "stage 0, looped, 0 parameters"),
            ("norm", "x = stages.0.norm(x)"),
            (
                "exit gate",
                "lambda = sigmoid(exit x + bias), the share of what is left that leaves here",
            ),
            ("", "threshold 1: a token takes the last loop"),
            ("head", "logits = head x"),
        ],
        "HUGINN": [
            ("embedding", "x = 72.6636 embed[token]"),
            ("layers 0 to 1", "stage 0, run once, 0 parameters"),
            ("", "e = x"),
            ("", "s = noise: 72.6636 x normal of std 0.0087, cut at 3 std"),
            ("", f"runs 32 times {LOOPS}, trained up to 64"),
            ("inject", "s = inject [s; e], a matrix"),
            ("layers 2 to 5", "stage 1, looped, 0 parameters"),
            ("norm", "x = final_norm(s), once after the last loop"),
            ("layers 6 to 7", "stage 2, run once, 0 parameters"),
            ("norm", "x = final_norm(x)"),
            ("head", "logits = embed x, tied to the embedding"),
        ],
        "PARCAE_1B": [
            ("", "e = prelude_norm(x)"),
            ("inject", "s = s exp(-dt A) + dt (b e), A = exp(a_log), dt = softplus(dt_bias)"),
            ("projection", "x = state_out s"),
        ],
        "IQUEST_40B": [
            ("", "runs 2 times by default; only 2 allowed, trained up to 2"),
            ("", "loops after the first: g first + (1 - g) own,"),
            ("", "g = sigmoid(loop_gate q + bias) for each head,"),
            ("", "own: attention to the loop's own KV, its last 64 positions"),
            ("norm", "x = final_norm(x)"),
        ],
        "NANBEIGE_3B": [
            ("", f"runs 2 times {LOOPS}, trained up to 2"),
            ("norm", "x = stages.0.norm(x)"),
            ("head", "logits = head x"),
        ],
        "LLAMA": [
            ("tokens", ""),
            ("embedding", "x = embed[token]"),
            ("layers 0 to 3", "stage 0, run once, 0 parameters"),
            ("norm", "x = final_norm(x)"),
            ("head", "logits = head x"),
            ("logits", ""),
        ],
    }.items(),
)
def test_steps(name, expected):
    """The steps come in this order; others may stand between them."""
    found = iter(steps(text_of(getattr(public, name))))
    for step in expected:
        assert step in found, step


@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("OURO_1B", "attention", "x = x + out(attention(in(x)))"),
        ("HUGINN", "attention", "x = out(x + attention(in(x)))"),
        ("RECURRENT_OLMO", "MLP", "x = x + out(MLP(x))"),
        ("IQUEST_40B", "MLP", "x = x + MLP(in(x))"),
        ("OURO_1B", "norms", "sandwich_branch, RMS with weight, eps 1e-06"),
        ("HUGINN", "rotation", "interleaved pairs, theta 50,000, 96 of 96 channels"),
        (
            "RECURRENT_LLAMA",
            "rotation",
            "half-split pairs, theta 500,000, 64 of 64 channels; llama3 scaling by 32 from 8,192",
        ),
        (
            "PARCAE_1B",
            "values",
            "v = v + 2 sigmoid(value_gate x[:32]) value_embed[token], in layers (none)",
        ),
        ("LLAMA", "vocabulary", "288; begin 1; end none; pad none"),
        ("HUGINN", "positions", "4,096 trained"),
        ("PARCAE_1B", "positions", "unknown"),
    ],
)
def test_rows(name, label, expected):
    assert rows(text_of(getattr(public, name)))[label].startswith(expected)


@pytest.mark.parametrize(
    ("name", "label", "cells"),
    [
        ("OURO_1B", "a token costs", ["1 loop", "4 loops (default)"]),
        ("OURO_1B", "matrix products", ["2.7 GFLOP", "10.1 GFLOP"]),
        ("OURO_1B", "KV cache, fp16", ["192 KiB", "768 KiB"]),
        ("OURO_1B", "KV cache, fp32", ["384 KiB", "1,536 KiB"]),
        ("HUGINN", "a token costs", ["1 loop", "32 loops (default)", "64 loops"]),
        ("HUGINN", "KV cache, fp16", ["165 KiB", "2,722.5 KiB", "5,362.5 KiB"]),
        ("HRM_TEXT_1B", "a token costs", ["H 1, L 1", "H 2, L 3 (default)"]),
        ("IQUEST_40B", "KV cache, fp16", ["320 KiB"]),
        ("IQUEST_40B", "constant, of loop_window", ["40 MiB"]),  # fp32's, the last row
        ("LLAMA", "a token costs", ["without loops"]),
        ("LLAMA", "attention, each position", ["1,024 FLOP"]),
    ],
)
def test_costs(name, label, cells):
    assert re.split("  +", rows(text_of(getattr(public, name)))[label]) == cells


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("HUGINN", "55 heads of 96, 55 KV heads; bias on q, k"),
        (
            "PARCAE_1B",
            "12 heads of 128, 12 KV heads; q and k normed over each head after the rotation,",
        ),
        ("PARCAE_1B", "MLP(x) = down(0.5 relu2(up x)); 6,144 wide"),
    ],
)
def test_lines(name, line):
    assert line in [line.strip() for line in text_of(getattr(public, name)).splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_checkpoints(family):
    file = fmt.read_file(converted(family))
    text = describe(file)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert "unknown (" not in text
    drawn = [note for _, note in steps(text) if note.startswith("stage ")]
    assert len(drawn) == len(file.config.stages)
    in_layers = sum(
        int(np.prod(tensor.shape)) for tensor in file.tensors.values() if "layers." in tensor.name
    )
    sizes = [re.search(r"([\d,]+) parameters", note)[1].replace(",", "") for note in drawn]
    assert sum(map(int, sizes)) == in_layers


def test_int8_scales_are_no_parameters(tmp_path):
    tensors = {
        name: fmt.Tensor(name, dtype, shape, 0, fmt.TensorSpec(name, dtype, shape).nbytes, 0)
        for name, dtype, shape in [
            ("embed.weight", "int8", (7, 6)),
            ("embed.scale", "float32", (7, 1)),
            ("final_norm.weight", "float16", (6,)),
        ]
    }
    file = fmt.TinyloopFile(tmp_path / "x", public.LLAMA, tensors, {}, 0, np.zeros(1, "u1"))
    assert rows(describe(file))["parameters"] == (
        "48 in 2 tensors of 82 bytes: 42 int8, 6 float16, and scales of 1 of them"
    )


def test_tensors_are_listed(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    file = fmt.read_file(convert(folder, tmp_path / "x.tinyloop").path)
    plain, full = rows(describe(file)), rows(describe(file, tensors=True))
    assert not plain.keys() & file.tensors.keys()
    assert full.keys() - plain.keys() == file.tensors.keys()
    assert full["layers.1.mlp.down.weight"] == "float32 [6, 5], 120 bytes"
    assert full["head.weight"] == "float32 [7, 6], 168 bytes"


def test_end_ids(tmp_path):
    text = describe(fmt.read_file(convert(DATA / "llama", tmp_path / "llama.tinyloop").path))
    assert rows(text)["vocabulary"] == "288; begin 1; end 2; pad none"


# ---- Files that this version does not run ---------------------------------------------------


def test_unknown_variants():
    text = text_of(
        replace(
            public.LLAMA,
            **stage_fields([Stage(0, 1, 0, 3), Stage(1, 2, 1, 7)]),
            norm_placement=9,
            qk_norm=5,
            attn_out_gate=2,
            mlp_kind=4,
            activation=12,
            rope_style=8,
            rope_scaling=7,
            mask=3,
            value_embed=2,
            final_norm=5,
            state_init=9,
            inject=11,
            inject_source=7,
            norm_after_last=6,
            loop_attention=3,
            exit_mode=14,
            exit_threshold=0.5,
            logit_softcap=30,
            logit_scale=0.5,
        )
    )
    assert {
        ("norm", "x = unknown (3) norm(x)"),
        ("", "e = unknown (7)"),
        ("", "s = unknown (9)"),
        ("inject", "unknown (11)"),
        ("", "attention: unknown (3)"),
        ("norm", "s = unknown (7) norm(s)"),
        ("exit gate", "unknown (14), threshold 0.5"),
        ("norm", "x = unknown (6)(s), once after the last loop"),
        ("norm", "x = unknown (5)(x)"),
        ("head", "logits = 0.5 head x"),
        ("softcap", "logits = 30 tanh(logits / 30)"),
    } <= set(steps(text))
    found = rows(text)
    assert found["attention"].startswith("unknown (9) ")
    assert found["MLP"] == "unknown (9) unknown (4), unknown (12); 168 wide"
    assert found["mask"] == "unknown (3)"
    assert found["values"] == "unknown (2)"
    assert found["rotation"].startswith("unknown (8) pairs, theta 500,000, 16 of 16 channels; unk")
    assert "over unknown (5)" in text
    assert "times unknown (2)" in text


def test_fields_without_a_place_in_the_drawing():
    config = replace(public.HUGINN, restart=1, damping=0.5, lora_rank=8, schedule=3, clp_a=0.25)
    assert rows(text_of(config))["also"] == (
        "schedule 3 (unknown (3)), restart 1 (from the prelude), damping 0.5, clp_a 0.25, "
        "lora_rank 8"
    )
    assert "also" not in rows(text_of(public.HUGINN)) | rows(text_of(public.HRM_TEXT_1B))


def test_loops_not_in_the_first():
    config = replace(public.PARCAE_1B, inject=1, inject_skip_first=1, loop_window=5)
    found = steps(text_of(config))
    assert ("inject", "s = s + e, but not in the first loop") in found
    assert ("", "loops after the first attend to its last 5 positions") in found


extremes = st.sampled_from([0, 1, -1, 2, 5, 99, 2**31, 2**62, -(2**62)])
anything = st.fixed_dictionaries(
    {f.name: extremes if f.type is int else st.floats(-1e300, 1e300) for f in fields(Config)}
)


@settings(deadline=None)
@given(anything)
def test_anything_is_described(values):
    """Whatever 96 fields a file may hold."""
    file = fmt.TinyloopFile(Path("x"), Config(**values), {}, {}, 0, np.zeros(1, "u1"))
    assert describe(file).startswith("file ")

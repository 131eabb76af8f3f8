"""What `tinyloop inspect` says of files: every part of the description, from known models."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DATA, LLAMA, random_tensors, save_checkpoint

from tinyloop_py import format as fmt
from tinyloop_py.config import Stage, stage_fields
from tinyloop_py.convert import convert
from tinyloop_py.describe import describe, kv_bytes_per_token

SHIPPED = Path(fmt.__file__).parent / "data/refdesk.tinyloop"


def described(file, **options):
    """Label -> text of the description's lines; the texts begin in one column."""
    lines = describe(file, **options).splitlines()
    column = max(re.match(r"(\w+ )?\S+ {2,}", line).end() for line in lines)
    assert all(line[column - 2 : column] == "  " for line in lines)
    return {line[:column].strip(): line[column:] for line in lines}


def test_shipped_model():
    text = described(fmt.read_file(SHIPPED))
    size = f"{SHIPPED.stat().st_size:,}"
    assert text == {
        "file": f"refdesk.tinyloop, {size} bytes",
        "parameters": "11,014,656 (48 bfloat16 tensors)",
        "vocabulary": "8,192",
        "hidden": "384",
        "attention": "6 heads of 64, 2 KV heads",
        "mlp": "1,024, gated, silu",
        "norms": "pre, eps 1e-06; final: with weight",
        "rope": "half-split, theta 10000, 64 channels",
        "head": "tied to the embedding",
        "positions": "2,048 trained",
        "mask": "causal",
        "stage 0": "layer 0, once",
        "stage 1": "layers 1 to 3, looped, norm after each run",
        "stage 2": "layer 4, once",
        "loops": "8 by default, 1 to 1024 allowed, trained up to 12",
        "state": "starts as zeros",
        "injection": "add prelude's output",
        "exit": "none",
        "KV cache": "13,312 bytes a token (fp16, loops 8)",
        "blobs": "tokenizer.json 540,371 bytes, chat_template 287 bytes, card 25,758 bytes, "
        "end_ids 4 bytes",
    }


def test_plain_llama(tmp_path):
    text = described(fmt.read_file(convert(DATA / "llama", tmp_path / "llama.tinyloop").path))
    config = json.loads((DATA / "llama/config.json").read_text())
    assert config["rope_scaling"]["factor"] == 32
    assert text["rope"] == "half-split, theta 500000, 16 channels, llama3 scaling by 32"
    assert text["head"] == "own tensor"
    assert text["stage 0"] == "layers 0 to 3, once"
    assert text["loops"] == text["injection"] == "none"
    assert text["KV cache"] == f"{4 * 2 * 2 * 16 * 2:,} bytes a token (fp16, loops 1)"
    assert text["blobs"] == "end_ids 4 bytes"


def test_tensors_are_listed(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    file = fmt.read_file(convert(folder, tmp_path / "x.tinyloop").path)
    plain, full = described(file), described(file, tensors=True)
    assert not plain.keys() & file.tensors.keys()
    assert full.keys() - plain.keys() == file.tensors.keys()
    assert full["layers.1.mlp.down.weight"] == "float32 [6, 5], 120 bytes"
    assert full["head.weight"] == "float32 [7, 6], 168 bytes"


def config_of(stages, **values):
    sizes = {"vocab_size": 7, "hidden_size": 6, "n_heads": 4, "n_kv_heads": 3, "head_dim": 10}
    return fmt.Config(**sizes, **stage_fields(stages), **values)


@pytest.mark.parametrize(
    ("stages", "loops", "expected"),
    [
        ([Stage(0, 5, 0, 0)], 1, 3 * (10 + 16) * 2 * 5),
        ([Stage(0, 5, 1, 0)], 4, 3 * (10 + 16) * 2 * 20),
        ([Stage(0, 1, 0, 0), Stage(1, 3, 1, 1), Stage(4, 2, 0, 0)], 7, 3 * (10 + 16) * 2 * 24),
    ],
)
def test_kv_bytes(stages, loops, expected):
    assert kv_bytes_per_token(config_of(stages), loops) == expected


def test_kv_bytes_are_the_librarys(tiny, tiny_path):
    config, info = fmt.read_file(tiny_path).config, tiny.info
    for loops in (1, 3, 12):
        expected = info["kv_bytes_fixed"] + loops * info["kv_bytes_loop"]
        assert kv_bytes_per_token(config, loops) == expected


def test_families_that_do_not_run_yet_are_described(tmp_path):
    """A description needs no more than the config: here of fields that no converter writes yet."""
    config = config_of(
        [Stage(0, 2, 1, 2), Stage(2, 1, 0, 7)],
        norm_weightless=1,
        norm_placement=2,
        q_bias=1,
        k_bias=1,
        qk_norm=2,
        loop_attention=1,
        loop_window=64,
        inject=2,
        exit_mode=1,
        mask=1,
        loops_min=2,
        loops_max=4,
        activation=9,
    )
    file = fmt.TinyloopFile(tmp_path / "x", config, {}, {}, 0, np.zeros(1, "u1"))
    text = described(file)
    assert text["attention"] == (
        "4 heads of 10, 3 KV heads, bias on q, k, qk-norm over full width, "
        "gated global and local, window 64"
    )
    assert text["norms"] == "sandwich_sum, weightless, eps 0; final: with weight"
    assert text["mlp"] == "0, gated, unknown (9)"
    assert text["stage 0"] == "layers 0 to 1, looped, weightless norm after each run"
    assert text["stage 1"] == "layer 2, once, end_norm 7"
    assert text["loops"] == "4 by default, 2 to 4 allowed"
    assert text["injection"] == "concat_linear embedding"
    assert text["exit"] == "sigmoid CDF"
    assert text["mask"] == "prefix-LM"
    assert text["positions"] == "unknown"
    assert text["blobs"] == "none"

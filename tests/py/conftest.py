"""Models and golden data that several test files use."""

import json
import os
from pathlib import Path

# Read when a model is made: fresh KV blocks hold NaN, so a kernel that reads what nobody wrote
# spoils every later number.
os.environ["TINYLOOP_DEBUG_POISON_KV"] = "1"

import numpy as np
import pytest
from checkpoints import save_checkpoint as save
from checkpoints import small_refdesk, tensor_shapes
from safetensors.numpy import load_file

import tinyloop_py as tl
from tinyloop_py.convert import convert

DATA = Path(__file__).resolve().parents[1] / "data"


class Golden:
    """A folder of golden values: `meta` from golden.json, arrays by name."""

    def __init__(self, folder):
        self.meta = json.loads((DATA / folder / "golden.json").read_text())
        self.arrays = load_file(DATA / folder / "golden.safetensors")

    def __getitem__(self, name):
        return self.arrays[name]

    def prompt(self, name):
        return next(p for p in self.meta["prompts"] if p["name"] == name)["tokens"]


@pytest.fixture(scope="session")
def refdesk_golden():
    return Golden("golden_refdesk")


@pytest.fixture(scope="session")
def model():
    with tl.Model(tl.default_model_path(), threads=2) as model:
        yield model


@pytest.fixture(scope="session")
def model_fp32():
    with tl.Model(tl.default_model_path(), threads=2, kv_mode="fp32") as model:
        yield model


def scaled_tensors(config, seed):
    """Random weights of about unit gain, so that the logits of a small model say something."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 1.0 if len(shape) == 1 else 1.5 / np.sqrt(shape[1])
        offset = 1.0 if len(shape) == 1 else 0.0
        values = offset + scale * rng.standard_normal(shape) * (0.1 if len(shape) == 1 else 1.0)
        tensors[name] = ("F32", values.astype(np.float32))
    return tensors


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A looped model with odd sizes that runs thousands of tokens a second."""
    config = small_refdesk(prelude=1, core=2, coda=1) | {
        "vocab_size": 53,
        "hidden_size": 22,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 37,
        "max_position_embeddings": 512,
        "default_loops": 3,
    }
    folder = tmp_path_factory.mktemp("tiny")
    save(folder / "checkpoint", config, scaled_tensors(config, seed=7))
    convert(folder / "checkpoint", folder / "tiny.tinyloop")
    return folder / "tiny.tinyloop"


@pytest.fixture(scope="session")
def tiny(tiny_path):
    with tl.Model(tiny_path, max_seq_len=256, threads=2) as model:
        yield model


def work(model, call):
    """The call's result, and by how much it moved the model's counters (zeros left out)."""
    before = model.counters()
    result = call()
    after = model.counters()
    return result, {key: after[key] - before[key] for key in after if after[key] != before[key]}

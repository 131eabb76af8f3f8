"""Models and golden data that several test files use."""

import json
import os
from pathlib import Path

# Read when a model is made: fresh KV blocks hold NaN, so a kernel that reads what nobody wrote
# spoils every later number.
os.environ["TINYLOOP_DEBUG_POISON_KV"] = "1"

import pytest
import tiny_models
from safetensors.numpy import load_file

import tinyloop_py as tl

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


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A looped model with odd sizes that runs thousands of tokens a second."""
    return tiny_models.make(tmp_path_factory.mktemp("tiny"), seed=7)


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

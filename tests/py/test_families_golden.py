"""Each family against the numbers of its original code, which came in float64.

With fp32 weights and KV only float32 rounding is left: 1e-4 absolute, on logits that spread by 0.8
to 2.7. fp16 KV rounds K and V to 11 bits: 0.02 of the logits' standard deviation.
"""

import json
import shutil

import numpy as np
import pytest
from conftest import DATA
from family_models import FAMILIES, NOISE, cases, converted, golden
from reference import sigmoid

import tinyloop_py as tl
from tinyloop_py.convert import convert

# Deeper and longer than a model was trained for is one warning, and the same function.
pytestmark = pytest.mark.filterwarnings("ignore:(loops|max_seq_len) .* is above the")

ALL_CASES = [(family, case) for family in FAMILIES for case in cases(family)]
NOT_DECIDED = 1e-3  # a margin between the two best logits that rounding may turn

# What the golden files call the states: before the norm where that comes after the last loop only.
STATES = {"nanbeige_skipnorm": "hidden_prenorm"} | {
    family: "hidden" for family in FAMILIES if family not in ("iquest_loop", "nanbeige_skipnorm")
}


def named(pairs):
    return [pytest.param(family, case, id=f"{family}-{case.id}") for family, case in pairs]


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def kv_mode(request):
    return request.param


@pytest.fixture(scope="module")
def open_family():
    """A function that opens a family's model once; where its core starts from noise, at zero."""
    models = {}

    def open_once(family, kv_mode="fp32"):
        if (family, kv_mode) not in models:
            models[family, kv_mode] = tl.Model(
                converted(family), 128, threads=2, kv_mode=kv_mode, init_scale=0
            )
        return models[family, kv_mode]

    yield open_once
    for model in models.values():
        model.close()


def largest_difference(got, wanted):
    assert got.shape == wanted.shape
    return float(np.abs(got.astype(np.float64) - wanted).max())


def test_every_family_is_here():
    """A folder that is not seen, or a case that is not read, would pass silently."""
    assert len(FAMILIES) == 14
    assert len(ALL_CASES) == 4 * 3 + 18 * 5 + 9 * 3 + 3 + 20


@pytest.mark.parametrize(("family", "case"), named(ALL_CASES))
def test_logits(open_family, kv_mode, family, case):
    wanted = golden(family)[case.tensors["logits"]]
    got = open_family(family, kv_mode).logits(case.tokens, **case.arguments(family))
    limit = 1e-4 if kv_mode == "fp32" else 0.02 * float(wanted.std())
    assert largest_difference(got, wanted) <= limit


@pytest.mark.parametrize(("family", "case"), named(p for p in ALL_CASES if p[0] in STATES))
def test_states(open_family, family, case):
    """At the last position: after each loop or stack call, and of plain models after the last
    layer.
    """
    wanted = golden(family)[case.tensors[STATES[family]]]
    got = open_family(family).states(case.tokens, **case.arguments(family))[:, -1]
    if len(got) == 1:
        wanted = wanted[-1:]
    assert largest_difference(got, wanted) <= 1e-4


# ---- the exit gate --------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "case"), named(p for p in ALL_CASES if p[0] == "ouro"))
def test_exit_logits(open_family, family, case):
    wanted = golden(family)[case.tensors["gate_logits"]]
    got = open_family(family).exit_logits(case.tokens, case.loops)
    assert largest_difference(got.T, wanted) <= 1e-4


@pytest.mark.parametrize("n", range(3))
def test_early_exit(tmp_path, n):
    meta = golden("ouro").meta
    case = meta["early_exit"]["cases"][n]
    checkpoint = shutil.copytree(DATA / "ouro", tmp_path / "checkpoint")
    settings = json.loads((checkpoint / "config.json").read_text())
    settings["early_exit_threshold"] = case["threshold"]
    (checkpoint / "config.json").write_text(json.dumps(settings))
    convert(checkpoint, tmp_path / "model.tinyloop")
    tokens = meta["prompts"][case["prompt"]]
    with tl.Model(tmp_path / "model.tinyloop", 64, threads=2, kv_mode="fp32") as model:
        got = model.logits(tokens, case["loops"])
        exit_logits = model.exit_logits(tokens, case["loops"])
    assert largest_difference(got, golden("ouro")[case["logits"]]) <= 1e-4
    summed = 1 - np.cumprod(sigmoid(-exit_logits.astype(np.float64)), axis=0)
    summed[-1] = 1
    left_after = (summed >= case["threshold"]).argmax(axis=0)
    assert left_after.tolist() == case["exit_loop_index"]


# ---- greedy continuations -------------------------------------------------------------------


def n_decided(greedy):
    return next((i for i, m in enumerate(greedy["margins"]) if m <= NOT_DECIDED), 16)


def continue_with_given_states(model, family, case, n):
    """generate takes no initial state: the next token from all logits, again and again."""
    tokens = list(case.tokens)
    for _ in range(n):
        logits = model.logits(tokens, **case.arguments(family, len(tokens)))
        tokens.append(int(logits[-1].argmax()))
    return tokens


@pytest.mark.parametrize(("family", "case"), named(p for p in ALL_CASES if p[1].greedy))
def test_greedy_continuation(open_family, family, case):
    model, n = open_family(family), n_decided(case.greedy)
    assert n >= 8
    if case.given_state:
        tokens = continue_with_given_states(model, family, case, n)
    else:
        arguments = {"temperature": 0.0, "stop_token_ids": ()}
        if family == "hrm_text" and not case.prefix_len:
            arguments["prefix_len"] = 0
        tokens = model.generate(case.tokens, n, case.loops, **arguments)
    assert tokens == case.tokens + case.greedy["tokens"][:n]


@pytest.mark.parametrize("family", NOISE)
def test_a_given_state_is_read(open_family, family):
    """A state of zeros is init_scale 0; another row changes its position and those after it."""
    model, tokens = open_family(family), golden(family).meta["prompts"]["p9"]
    rows = np.zeros((len(tokens), model.info["hidden_size"]), np.float32)
    zeros = model.logits(tokens, 2)
    assert model.logits(tokens, 2, init_state=rows).tobytes() == zeros.tobytes()
    rows[4] = golden(family)["init_state"][4]
    other = model.logits(tokens, 2, init_state=rows)
    assert other[:4].tobytes() == zeros[:4].tobytes()
    assert np.abs(other[4:] - zeros[4:]).max(axis=1).min() > 1e-4

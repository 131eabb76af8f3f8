"""The float64 reference against the golden values, and the library against the reference over
random models of every kind that docs/format.md allows.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from family_models import FAMILIES, cases, converted, golden
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_models import models, text_lengths, write_model
from reference import Reference, load, philox, sigmoid

import tinyloop_py as tl

# Deeper and longer than a model was trained for is one warning, and the same function.
pytestmark = pytest.mark.filterwarnings("ignore:(loops|max_seq_len) .* is above the")

# The original code of this one computed in float32.
TOLERANCE = dict.fromkeys(FAMILIES, 1e-9) | {"iquest_loop": 2e-5}


def largest_difference(a, b):
    assert a.shape == b.shape
    return float(np.abs(a.astype(np.float64) - b).max())


# ---- against the golden values --------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def reference(family):
    config, tensors = load(converted(family))
    if family == "parcae":  # machine epsilon of the arithmetic, float64 in the golden values
        config = replace(config, qk_norm_eps=2.0**-52)
    return Reference(config, tensors, init_scale=0)


def test_golden_values(family, reference):
    n_states = 0
    for case in cases(family):
        got = reference(case.tokens, **case.arguments(family))
        wanted = {kind: golden(family)[name] for kind, name in case.tensors.items()}
        assert largest_difference(got.logits, wanted["logits"]) <= TOLERANCE[family], case.id
        if "gate_logits" in wanted:
            assert largest_difference(got.exit_logits.T, wanted["gate_logits"]) <= 1e-9
        kind = "hidden_prenorm" if family == "nanbeige_skipnorm" else "hidden"
        if got.states.shape[0] == len(wanted[kind]):
            assert largest_difference(got.states[:, -1], wanted[kind]) <= 1e-9, case.id
            n_states += 1
    plain = reference.config.loops_max == 1 or not any(s.looped for s in reference.config.stages)
    assert plain or family == "iquest_loop" or n_states == len(list(cases(family)))


def test_early_exit_of_ouro():
    config, tensors = load(converted("ouro"))
    meta = golden("ouro").meta
    for case in meta["early_exit"]["cases"]:
        reference = Reference(replace(config, exit_threshold=case["threshold"]), tensors)
        got = reference(meta["prompts"][case["prompt"]], case["loops"])
        assert largest_difference(got.logits, golden("ouro")[case["logits"]]) <= 1e-9


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        (0, 0, ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
        (2**32 - 1, 2**64 - 1, ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
    ],
)
def test_philox_known_answers(word, key, expected):
    """Vectors that the authors of Philox published with it (Random123)."""
    got = philox([np.array([word])] * 4, key)
    assert [f"{int(word):08x}" for word in got[:, 0]] == expected


# ---- the library against the reference ------------------------------------------------------


@pytest.mark.parametrize("cache_window", [0, 100])
def test_long_texts(family, cache_window):
    """Many blocks and passes; the initial noise of far positions; a two-sided part of 290."""
    config, tensors = load(converted(family))
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 300).astype(np.int32)
    arguments = {"cache_window": cache_window, "prefix_len": 290 if config.mask else 0}
    if config.schedule == 0 and config.loops > 3:
        arguments["loops"] = 3
    expected = Reference(config, tensors, init_seed=5)(tokens, **arguments).logits
    with tl.Model(converted(family), 300, threads=2, kv_mode="fp32", init_seed=5) as model:
        got = model.logits(tokens, **arguments)
    assert largest_difference(got, expected) <= 1e-4


@st.composite
def calls(draw):
    """A random model, how to open it, and the arguments of a call of it."""
    model = draw(models())
    config = model.config
    opened = {"init_scale": draw(st.sampled_from([None, None, 0.0, 2.0]))}
    opened["init_seed"] = draw(st.integers(0, 2**64 - 1))
    n = draw(text_lengths)
    seed = draw(st.integers(0, 2**32))
    arguments = {"cache_window": draw(st.sampled_from([0, 0, 1, 2, 5, 32, 33]))}
    if config.schedule == 1:
        arguments["loops"] = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    elif any(stage.looped for stage in config.stages):
        arguments["loops"] = draw(st.integers(1, 4))
    if config.mask == 1:
        arguments["prefix_len"] = draw(st.integers(0, n))
    if config.inject and config.schedule == 0 and draw(st.booleans()):
        rows = np.random.default_rng(seed).standard_normal((n, config.hidden_size))
        arguments["init_state"] = rows.astype(np.float32)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, n)
    return model, opened, tokens.astype(np.int32), arguments


def disturbed(tensors, seed):
    """The tensors, each number changed by about a millionth of itself: 16 roundings of float32."""
    rng = np.random.default_rng(seed)
    return {n: a * (1 + 2.0**-20 * rng.standard_normal(a.shape)) for n, a in tensors.items()}


def is_near_an_exit(config, exit_logits):
    """Whether rounding may decide after which loop a token leaves."""
    if not config.exit_mode or config.exit_threshold >= 1:
        return False
    summed = 1 - np.cumprod(sigmoid(-exit_logits), axis=0)[:-1]
    return bool((np.abs(summed - config.exit_threshold) < 1e-3).any())


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_library_agrees_with_the_reference(call):
    """As near as float32 can be: a rounding moves a result no further than a disturbance of the
    weights by a few times as much, which the reference itself measures.
    """
    (_, tensors), opened, tokens, arguments = call
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tinyloop"
        write_model(path, *call[0])
        config, tensors = load(path)
        expected = Reference(config, tensors, **opened)(tokens, **arguments)
        assume(not is_near_an_exit(config, expected.exit_logits))
        moved = [
            Reference(config, disturbed(tensors, seed), **opened)(tokens, **arguments)
            for seed in range(3)
        ]
        with tl.Model(path, 128, threads=2, kv_mode="fp32", **opened) as model:
            got = [model.logits(tokens, **arguments), model.states(tokens, **arguments)]
            if config.exit_mode and arguments.keys() <= {"loops", "cache_window"}:
                got.append(model.exit_logits(tokens, **arguments))
    for result, wanted, *others in zip(got, expected, *moved, strict=False):
        spread = max(largest_difference(other, wanted) for other in others)
        size = float(np.abs(wanted).max())
        assume(spread <= 1e-2 * size)  # else float32 says nothing
        assert largest_difference(result, wanted) <= 4 * spread + 1e-6 * size

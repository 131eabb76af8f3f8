"""Results against numbers that came from elsewhere: an independent float64 program (refdesk), and
the original code of Llama (tests/data/llama*).

Tolerances: fp16 KV rounds K and V to 11 bits, which may move a logit by up to 0.02 of the logits'
standard deviation; with fp32 KV only float32 rounding is left, within 1e-4 absolute.
"""

import numpy as np
import pytest
from conftest import DATA, Golden

import tinyloop_py as tl
from tinyloop_py.convert import convert

PROMPTS = ["p1", "p7", "p64", "p300", "p777", "p1500"]
LOOPS = [1, 2, 4, 8]


@pytest.fixture(params=["fp16", "fp32"])
def kv_mode(request):
    return request.param


@pytest.fixture
def refdesk(kv_mode, model, model_fp32):
    return model if kv_mode == "fp16" else model_fp32


def tolerance(kv_mode, reference):
    return 0.02 * float(reference.std()) if kv_mode == "fp16" else 1e-4


def largest_difference(result, reference):
    return float(np.abs(result.astype(np.float64) - reference).max())


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("name", PROMPTS)
def test_last_logits(refdesk, kv_mode, refdesk_golden, name, loops):
    reference = refdesk_golden[f"logits.last.{name}.loops{loops}"]
    logits = refdesk.logits(refdesk_golden.prompt(name), loops=loops)[-1]
    assert largest_difference(logits, reference) <= tolerance(kv_mode, reference)


@pytest.mark.parametrize("loops", [1, 4, 8])
def test_logits_at_every_eighth_position(refdesk, kv_mode, refdesk_golden, loops):
    reference = refdesk_golden[f"logits.every8.p64.loops{loops}"]
    logits = refdesk.logits(refdesk_golden.prompt("p64"), loops=loops)[::8]
    for got, expected in zip(logits, reference, strict=True):
        assert largest_difference(got, expected) <= tolerance(kv_mode, expected)


def test_logits_with_a_window(refdesk, kv_mode, refdesk_golden):
    reference = refdesk_golden["logits.last.p777.loops8.window256"]
    logits = refdesk.logits(refdesk_golden.prompt("p777"), loops=8, cache_window=256)[-1]
    assert largest_difference(logits, reference) <= tolerance(kv_mode, reference)


def test_states_after_each_loop(refdesk, kv_mode, refdesk_golden):
    reference = refdesk_golden["state.p64.loops8"]
    states = refdesk.states(refdesk_golden.prompt("p64"), loops=8)[:, -1]
    assert states.shape == reference.shape
    for got, expected in zip(states, reference, strict=True):
        assert largest_difference(got, expected) <= tolerance(kv_mode, expected)


@pytest.mark.parametrize("window", [0, 256])
def test_greedy_continuations(refdesk, kv_mode, refdesk_golden, window):
    """Equal tokens until the reference itself was nearly undecided."""
    n_compared = 0
    for prompt in refdesk_golden.meta["prompts"]:
        expected, margins = prompt["greedy"], prompt["margin"]
        if window:
            if "greedy_window256" not in prompt:
                continue
            expected, margins = prompt["greedy_window256"], prompt["margin_window256"]
        logits = refdesk_golden[f"logits.last.{prompt['name']}.loops8"]
        undecided = 2 * tolerance(kv_mode, logits)
        n = next((i for i, margin in enumerate(margins) if margin < undecided), len(margins))
        tokens = refdesk.generate(
            prompt["tokens"], n, temperature=0.0, stop_token_ids=(), cache_window=window
        )
        assert tokens[len(prompt["tokens"]) :] == expected[:n]
        n_compared += n
    assert n_compared >= (4 if window else 100)


def test_negative_log_likelihood(refdesk, refdesk_golden):
    """Held-out documents: the mean within 0.2 %."""
    ours, reference = [], []
    for i, document in enumerate(refdesk_golden.meta["documents"]):
        tokens = document["tokens"]
        logits = refdesk.logits(tokens, loops=8)[:-1].astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(shifted).sum(axis=1))
        ours.append(log_sum - shifted[np.arange(len(tokens) - 1), tokens[1:]])
        reference.append(refdesk_golden[f"nll.doc{i}"])
        assert ours[-1].mean() == pytest.approx(reference[-1].mean(), rel=2e-3)
    assert np.concatenate(ours).mean() == pytest.approx(
        float(np.concatenate(reference).mean()), rel=2e-3
    )


@pytest.fixture(scope="session", params=["llama", "llama_bf16_sharded"])
def llama(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "model.tinyloop"
    convert(DATA / request.param, path)
    with tl.Model(path, kv_mode="fp32", threads=2) as model:
        yield model, Golden(request.param)


@pytest.mark.parametrize("name", ["p1", "p9", "p40"])
def test_llama(llama, name):
    """Rotary scaling, grouped heads, an untied head, and shards, against the original code."""
    model, golden = llama
    tokens = golden.meta["prompts"][name]
    case = next(case for case in golden.meta["cases"] if case["prompt"] == name)
    reference = golden[case["tensors"]["logits"]]
    assert largest_difference(model.logits(tokens), reference) <= 1e-4
    decided = [margin > 1e-3 for margin in case["greedy"]["margins"]]
    n = decided.index(False) if False in decided else len(decided)
    generated = model.generate(tokens, n, temperature=0.0, stop_token_ids=())
    assert generated[len(tokens) :] == case["greedy"]["tokens"][:n]
    assert n > 0

"""The law: results depend on the model, the KV mode, loops, window and token ids, and on nothing
else, bit for bit; and what a cache saves is counted.

Bits are compared through final hidden states and logits, equal tokens through sampling with one
seed. The tiny model's fresh KV blocks hold NaN (conftest.py).
"""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from conftest import work
from hypothesis import given, settings
from hypothesis import strategies as st

import tinyloop_py as tl

PROMPT = np.random.default_rng(5).integers(0, 53, 97).tolist()

prompts = st.lists(st.integers(0, 52), min_size=1, max_size=80)
windows = st.sampled_from([0, 1, 2, 5, 31, 32, 33, 64, 90])
loops_range = st.integers(1, 12)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def final_state(model, pieces, loops=None, cache_window=0):
    """Feeds the pieces one after the other into one KV cache."""
    kv = tl.RuntimeKVCache(model, loops, cache_window)
    for piece in pieces:
        state = tl.decode_with_kv_cache_capture(kv, piece)
    return state


def cut(tokens, sizes):
    """The tokens in pieces of the given sizes, which repeat."""
    pieces, at, turn = [], 0, 0
    while at < len(tokens):
        size = sizes[turn % len(sizes)]
        pieces.append(tokens[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


@pytest.mark.parametrize("window", [0, 1, 7, 32, 40, 97, 200])
def test_every_split_of_a_prompt(tiny, window):
    """Registering the first k tokens, for every k, changes only the work."""
    n, extra = len(PROMPT), 6
    arguments = {"max_tokens": extra, "cache_window": window, "seed": 11, "stop_token_ids": ()}
    expected, full_work = work(tiny, lambda: tiny.generate(PROMPT, **arguments))
    assert full_work == {"tokens_prefilled": n, "tokens_decoded": extra - 1}
    for k in range(1, n + 1):
        pool = tl.PrefixPool()
        assert tiny.register_prefix(pool, PROMPT[:k], cache_window=window) == k
        for _ in range(2):  # the entry is not used up
            got, done = work(
                tiny, lambda pool=pool: tiny.generate_with_pool(pool, PROMPT, **arguments)
            )
            assert got == expected
            saved = {"tokens_decoded": extra - 1}
            if k == n:
                assert done == saved | {"pool_full": 1}
            else:
                assert done == saved | {"tokens_prefilled": n - k, "pool_partial": 1}


@settings(max_examples=60, deadline=None)
@given(
    tokens=prompts,
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    window=windows,
    loops=loops_range,
)
def test_chunks_do_not_matter(tiny, tokens, sizes, window, loops):
    whole = final_state(tiny, [tokens], loops, window)
    assert same_bits(final_state(tiny, cut(tokens, sizes), loops, window), whole)
    assert np.isfinite(whole).all()


def test_every_chunk_size(tiny):
    whole = final_state(tiny, [PROMPT])
    for size in range(1, len(PROMPT) + 1):
        assert same_bits(final_state(tiny, cut(PROMPT, [size])), whole)


def open_model(path, isa, **arguments):
    """The model, or a context of None where the processor lacks the instruction set."""
    flags = Path("/proc/cpuinfo").read_text()
    if {"portable": "", "avx2": " avx2 ", "avx512": " avx512vl "}[isa] in flags:
        return tl.Model(path, 256, **arguments)
    with pytest.raises(tl.Error, match=f"this processor has no {isa}"):
        tl.Model(path, 256, **arguments)
    return contextlib.nullcontext()


@pytest.mark.parametrize("kv_mode", ["fp16", "fp32"])
@pytest.mark.parametrize("window", [0, 40])
def test_threads_and_instruction_sets_do_not_matter(tiny_path, monkeypatch, kv_mode, window):
    results = []
    for isa in ("portable", "avx2", "avx512"):
        monkeypatch.setenv("TINYLOOP_CPU_ISA", isa)
        for threads in (1, 2, 3, 4):
            with open_model(tiny_path, isa, threads=threads, kv_mode=kv_mode) as model:
                if model is None:
                    continue
                results.append(model.logits(PROMPT, cache_window=window))
                results.append(model.logits(PROMPT, cache_window=window))
    assert len(results) >= 8
    assert all(same_bits(result, results[0]) for result in results)


def test_refdesk_splits(model, refdesk_golden):
    """The real model: chunks at and around block and pass edges, threads, pool."""
    tokens = refdesk_golden.prompt("p300")
    whole = final_state(model, [tokens])
    for size in (7, 31, 32, 33, 64, 255, 256, 257, 299):
        assert same_bits(final_state(model, cut(tokens, [size])), whole)
    expected = model.generate(tokens, 8, seed=3)
    for k in (1, 15, 16, 17, 32, 100, 256, 299, 300):
        pool = tl.PrefixPool()
        model.register_prefix(pool, tokens[:k])
        assert model.generate_with_pool(pool, tokens, 8, seed=3) == expected


@settings(max_examples=40, deadline=None)
@given(
    stem=prompts,
    left=st.lists(st.integers(0, 52), min_size=1, max_size=40),
    right=st.lists(st.integers(0, 52), min_size=1, max_size=40),
    window=windows,
)
def test_clones_diverge_freely(tiny, stem, left, right, window):
    kv = tl.RuntimeKVCache(tiny, cache_window=window)
    tl.decode_with_kv_cache_capture(kv, stem)
    other, third = kv.clone(), kv.clone()
    one = tl.decode_with_kv_cache_capture(kv, left)
    two = tl.decode_with_kv_cache_capture(other, right)
    three = tl.decode_with_kv_cache_capture(third, left)
    assert same_bits(one, final_state(tiny, [stem + left], None, window))
    assert same_bits(two, final_state(tiny, [stem + right], None, window))
    assert same_bits(three, one)


@settings(max_examples=40, deadline=None)
@given(
    tokens=prompts,
    order=st.randoms(use_true_random=False),
    loops=loops_range,
    window=windows,
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 1, 5, 50]),
)
def test_pool_equals_plain_in_any_order(tiny, tokens, order, loops, window, seed, top_k):
    """Nested prefixes registered in any order, with sampling: the longest is used."""
    arguments = {
        "max_tokens": 5,
        "loops": loops,
        "cache_window": window,
        "seed": seed,
        "top_k": top_k,
        "stop_token_ids": (),
    }
    lengths = sorted({1, len(tokens) // 2 or 1, max(1, len(tokens) - 1)})
    order.shuffle(lengths)
    pool = tl.PrefixPool()
    for length in lengths:
        tiny.register_prefix(pool, tokens[:length], loops, window)
    expected = tiny.generate(tokens, **arguments)
    got, done = work(tiny, lambda: tiny.generate_with_pool(pool, tokens, **arguments))
    assert got == expected
    assert done.get("tokens_prefilled", 0) == len(tokens) - max(lengths)
    assert tiny.generate(tokens, pool=pool, **arguments) == expected
    assert tokens + list(tiny.generate_stream(tokens, pool=pool, **arguments)) == expected


@settings(max_examples=30, deadline=None)
@given(tokens=prompts, suffix=st.lists(st.integers(0, 52), max_size=90), window=windows)
def test_prefix_cache_equals_plain(tiny, tokens, suffix, window):
    """Suffixes longer than the prefix included; the cache is not changed by its use."""
    cache = tiny.build_prefix_cache(tokens, cache_window=window)
    expected = tiny.generate(tokens + suffix, 4, cache_window=window, seed=1)
    for _ in range(2):
        got = tiny.generate_from_prefix_cache(cache, suffix, 4, seed=1)
        assert got == expected
    assert len(cache) == len(tokens)


def test_a_prompt_that_ends_at_max_seq_len(tiny):
    limit = tiny.info["max_seq_len"]
    tokens = (PROMPT * 3)[:limit]
    pool = tl.PrefixPool()
    assert tiny.register_prefix(pool, tokens) == limit
    assert tiny.register_prefix(pool, tokens[: limit - 3]) == limit - 3
    assert tiny.generate_with_pool(pool, tokens, 0) == tokens
    shorter = tokens[: limit - 1]
    expected = tiny.generate(shorter, 1, temperature=0.0)
    assert tiny.generate_with_pool(pool, shorter, 1, temperature=0.0) == expected
    assert len(expected) == limit
    kv = tl.RuntimeKVCache(tiny)
    tl.decode_with_kv_cache_capture(kv, tokens)
    with pytest.raises(tl.Error, match="256 positions in the cache"):
        tl.decode_with_kv_cache_capture(kv, [1])
    assert len(kv) == limit


def test_prompt_shorter_than_every_entry_is_a_miss(tiny):
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, PROMPT[:20])
    expected = tiny.generate(PROMPT[:19], 3, temperature=0.0)
    got, done = work(tiny, lambda: tiny.generate_with_pool(pool, PROMPT[:19], 3, temperature=0.0))
    assert got == expected
    assert done["pool_miss"] == 1
    assert done["tokens_prefilled"] == 19


def test_loops_change_the_function_and_never_match(tiny):
    pool = tl.PrefixPool()
    for loops in range(1, 13):
        tiny.register_prefix(pool, PROMPT[:30], loops)
    states = [final_state(tiny, [PROMPT], loops).tobytes() for loops in range(1, 13)]
    assert len(set(states)) == 12
    for loops in range(1, 13):
        expected = tiny.generate(PROMPT, 4, loops, seed=2)
        got, done = work(
            tiny, lambda loops=loops: tiny.generate_with_pool(pool, PROMPT, 4, loops, seed=2)
        )
        assert got == expected
        assert done["pool_partial"] == 1


def test_truncate_then_go_on(tiny):
    kv = tl.RuntimeKVCache(tiny)
    tl.decode_with_kv_cache_capture(kv, PROMPT)
    for length in (96, 64, 33, 32, 31, 1, 0):
        kv.truncate(length)
        clone = kv.clone()
        again = tl.decode_with_kv_cache_capture(clone, PROMPT[length:])
        assert same_bits(again, final_state(tiny, [PROMPT]))

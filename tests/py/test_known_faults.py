"""Kinds of faults that prefix and KV caches are known for: what matches, what a match is worth,
whose entry it is, and what is evicted. docs/reliability.md has them all.

`work` tells what was reused; equal tokens alone would also come from a pool that does nothing.
"""

import array
import gc
import itertools

import numpy as np
import pytest
import tiny_models
from conftest import work

import tinyloop_py as tl

TEXT = np.random.default_rng(31).integers(3, 53, 256).tolist()
LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65]


def check_pool(model, pool, prompt, matched, max_tokens=4, **options):
    """A request through the pool: the tokens of a plain one, and the work that a match of that
    length leaves."""
    options = {"seed": 5, "stop_token_ids": ()} | options
    expected = model.generate(prompt, max_tokens, **options)
    got, done = work(model, lambda: model.generate_with_pool(pool, prompt, max_tokens, **options))
    assert got == expected
    kind = "full" if matched == len(prompt) else "partial" if matched else "miss"
    wanted = {f"pool_{kind}": 1, "tokens_prefilled": len(prompt) - matched}
    wanted["tokens_decoded"] = max_tokens - 1
    assert done == {name: count for name, count in wanted.items() if count}


# ---- the right entry ----


@pytest.mark.parametrize("length", LENGTHS)
def test_a_full_hit_is_never_answered_by_a_longer_entry(tiny, length):
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, TEXT[:length])
    tiny.register_prefix(pool, TEXT[: length + 20])
    for _ in range(2):
        check_pool(tiny, pool, TEXT[:length], length, 32, temperature=0.0)
        check_pool(tiny, pool, TEXT[: length + 20], length + 20, 32, temperature=0.0)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_empty_suffix(tiny, length):
    """Nothing is left to run after a full hit, on any of the ways to get one."""
    with pytest.raises(tl.Error, match="prompt is empty"):
        tiny.generate([])
    prompt = TEXT[:length]
    pool, cache = tl.PrefixPool(), tiny.build_prefix_cache(prompt)
    tiny.register_prefix(pool, prompt)
    expected = tiny.generate(prompt, 3, seed=1)
    for suffix in (None, [], (), np.empty(0, np.int32), array.array("i")):
        assert tiny.generate_from_prefix_cache(cache, suffix, 3, seed=1) == expected
        assert tiny.generate_from_prefix_cache(cache, suffix, 0) == prompt
    assert tiny.generate(prompt, 3, seed=1, pool=pool) == expected
    assert prompt + list(tiny.generate_stream(prompt, 3, seed=1, pool=pool)) == expected
    assert tl.last_error() == "prompt is empty; it needs at least one token"  # the one from above


def test_an_entry_of_one_token(tiny):
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, TEXT[:1])
    for length in (1, 2, 3, 40):
        check_pool(tiny, pool, TEXT[:length], 1)
    check_pool(tiny, pool, TEXT[1:4], 0)


@pytest.mark.parametrize("order", list(itertools.permutations([10, 33, 64])), ids=str)
def test_the_longest_match_whatever_was_registered_first(tiny, order):
    pool = tl.PrefixPool()
    for length in order:
        tiny.register_prefix(pool, TEXT[:length])
    other = (TEXT[40] + 1) % 53
    check_pool(tiny, pool, TEXT[:70], 64)
    check_pool(tiny, pool, [*TEXT[:40], other, *TEXT[41:70]], 33)
    check_pool(tiny, pool, TEXT[:33], 33)
    check_pool(tiny, pool, TEXT[:32], 10)
    check_pool(tiny, pool, TEXT[:9], 0)


# ---- windows ----


@pytest.mark.parametrize("window", [1, 2, 5, 31, 32, 33, 40])
def test_a_window_that_has_slid(tiny, window):
    """Prefixes and suffixes around the window's length: never cut short, never run again, and the
    fourth time as the first."""
    for n_prefix in {window - 1, window, window + 1, 2 * window, 3 * window + 1} - {0}:
        pool = tl.PrefixPool()
        tiny.register_prefix(pool, TEXT[:n_prefix], cache_window=window)
        for n_suffix in {0, 1, window, window + 1}:
            for _ in range(4):
                check_pool(tiny, pool, TEXT[: n_prefix + n_suffix], n_prefix, cache_window=window)


# ---- resuming changes no bit ----


def test_every_split_point_gives_the_bits_of_one_run(tiny_path):
    """Compared in the final state, of which the logits are a function."""
    text = np.random.default_rng(3).integers(0, 53, 300).tolist()
    with tl.Model(tiny_path, max_seq_len=512, threads=2) as model:
        whole = tl.RuntimeKVCache(model)
        expected = tl.decode_with_kv_cache_capture(whole, text)
        n_different = 0
        for k in range(1, 300):
            kv = tl.RuntimeKVCache(model)
            tl.decode_with_kv_cache_capture(kv, text[:k])
            resumed = kv.clone()
            got = tl.decode_with_kv_cache_capture(resumed, text[k:])
            n_different += not np.array_equal(got, expected)
        assert n_different == 0


@pytest.mark.filterwarnings("ignore:max_seq_len 4200 is above")
def test_long_prefixes_give_one_output_every_time(tiny_path):
    text = np.random.default_rng(4).integers(0, 53, 4100).tolist()
    with tl.Model(tiny_path, max_seq_len=4200, threads=2) as model:
        pool = tl.PrefixPool()
        outputs = {tuple(model.generate(text, 20, seed=1, stop_token_ids=()))}
        for k in (1, 511, 512, 513, 2048, 4097):
            model.register_prefix(pool, text[:k])
            for _ in range(20 if k == 4097 else 1):
                got = model.generate_with_pool(pool, text, 20, seed=1, stop_token_ids=())
                outputs.add(tuple(got))
        assert len(outputs) == 1


# ---- randomness is the caller's ----


def test_an_entry_carries_no_random_state(tiny):
    """Seeds mean the same with and without an entry, and without one each call draws anew."""
    prompt, pool = TEXT[:20], tl.PrefixPool()
    plain = [tiny.generate(prompt, 12, seed=seed, stop_token_ids=()) for seed in range(6)]
    assert len(set(map(tuple, plain))) > 1
    for length in (20, 7):
        tiny.register_prefix(pool, prompt[:length])
        for seed in range(6):
            got = tiny.generate_with_pool(pool, prompt, 12, seed=seed, stop_token_ids=())
            assert got == plain[seed]
            tiny.register_prefix(pool, TEXT[: 30 + seed])  # draws nothing
    fresh = [tiny.generate_with_pool(pool, prompt, 12, stop_token_ids=()) for _ in range(8)]
    assert len(set(map(tuple, fresh))) > 1


# ---- keys ----


@pytest.fixture(scope="module")
def twin_path(tmp_path_factory):
    """Every shape of the tiny model, with other weights."""
    return tiny_models.make(tmp_path_factory.mktemp("twin"), seed=8)


@pytest.mark.parametrize(
    "difference",
    [{"weights": True}, {"kv_mode": "fp32"}, {"max_seq_len": 200}, {"threads": 1}, {}],
    ids=str,
)
def test_another_model_never_gets_an_entry(tiny, tiny_path, twin_path, difference):
    """However alike: other weights, another KV format, or the same file opened twice."""
    options = {"max_seq_len": 256} | difference
    path = twin_path if options.pop("weights", False) else tiny_path
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, TEXT[:40])
    with tl.Model(path, **options) as other:
        check_pool(other, pool, TEXT[:50], 0)
        other.register_prefix(pool, TEXT[:30])
        check_pool(other, pool, TEXT[:50], 30)
        check_pool(tiny, pool, TEXT[:50], 40)


def test_a_model_at_a_dead_ones_address_gets_nothing(tiny_path, twin_path):
    """Models come and go while their entries stay in the pool."""
    pool = tl.PrefixPool(32)
    for turn in range(16):
        model = tl.Model(twin_path if turn % 2 else tiny_path, max_seq_len=256, threads=1)
        check_pool(model, pool, TEXT[:50], 0)
        model.register_prefix(pool, TEXT[:40])
        check_pool(model, pool, TEXT[:50], 40)
        if turn % 3:
            model.close()
        del model
        gc.collect()
    assert pool.size() == 16


def test_loops_and_windows_are_never_mixed_up_with_tokens(tiny):
    """Keys from the same few small numbers, all in one pool: each finds its own entry."""
    pool = tl.PrefixPool(1000)
    texts = [t for n in (1, 2, 3) for t in itertools.product((1, 2, 3), repeat=n)]
    keys = list(itertools.product(texts, (1, 2, 3), (0, 1, 2, 3)))
    for i, key in enumerate(keys):
        _, done = work(tiny, lambda key=key: tiny.register_prefix(pool, *key))
        assert done == {"tokens_prefilled": len(key[0])}
        assert pool.size() == i + 1
    for tokens, loops, window in keys[::5]:
        check_pool(tiny, pool, [*tokens, 9], len(tokens), 1, loops=loops, cache_window=window)


CONTAINERS = [
    list,
    tuple,
    lambda tokens: np.array(tokens, np.int32),
    lambda tokens: np.array(tokens, np.int64),
    lambda tokens: np.array(tokens, np.uint16),
    lambda tokens: np.array(tokens, ">i4"),
    lambda tokens: np.array(tokens, object),
    lambda tokens: np.repeat(np.array(tokens), 2)[::2],
    lambda tokens: np.array(tokens[::-1])[::-1],
    lambda tokens: np.array([tokens, tokens]).T[:, 0],
    lambda tokens: array.array("q", tokens),
    lambda tokens: memoryview(bytes(tokens)),
    bytearray,
]


def test_tokens_are_one_key_in_any_container(tiny):
    pool, tokens = tl.PrefixPool(), TEXT[:20]
    forms = [make(tokens) for make in CONTAINERS]
    frozen = np.array(tokens)
    frozen.setflags(write=False)
    tiny.register_prefix(pool, tokens)
    for form in (*forms, frozen):
        _, done = work(tiny, lambda form=form: tiny.register_prefix(pool, form))
        assert done == {}
        _, done = work(tiny, lambda form=form: tiny.generate_with_pool(pool, form, 1))
        assert done == {"pool_full": 1}
    assert pool.size() == 1
    for wrong in (np.array([tokens]), np.array(tokens, float), bytes(tokens), set(tokens)):
        with pytest.raises(TypeError):
            tiny.register_prefix(pool, wrong)
    assert (pool.size(), pool.total_cached_tokens()) == (1, 20)


# ---- eviction ----


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_registering_on_top_of_the_victim(tiny, capacity):
    """Each new entry begins with the one that has to go, which streams still use."""
    pool, streams = tl.PrefixPool(capacity), []
    arguments = {"seed": 3, "stop_token_ids": ()}
    for n in range(20, 60, 4):
        assert tiny.register_prefix(pool, TEXT[:n]) == n
        for prompt in (TEXT[:n], TEXT[: n + 5]):
            streams.append((prompt, [], tiny.generate_stream(prompt, 8, pool=pool, **arguments)))
        for _, tokens, stream in streams:
            tokens.extend(itertools.islice(stream, 1))
    assert pool.size() == capacity
    del pool
    for prompt, tokens, stream in streams:
        assert prompt + tokens + list(stream) == tiny.generate(prompt, 8, **arguments)


def test_a_long_entry_is_worth_itself_when_its_beginning_was_evicted(tiny):
    pool = tl.PrefixPool(2)
    for length in (10, 20, 30):
        tiny.register_prefix(pool, TEXT[:length])
    check_pool(tiny, pool, [*TEXT[:10], 1, 2], 0)
    check_pool(tiny, pool, [*TEXT[:20], 1, 2], 20)
    check_pool(tiny, pool, [*TEXT[:30], 1, 2], 30)
    tiny.register_prefix(pool, TEXT[:10])  # and comes back
    check_pool(tiny, pool, [*TEXT[:10], 1, 2], 10)


def test_a_chat_that_registers_every_turn(tiny):
    """Fifty turns: each runs only its own tokens, and old turns do not pile up."""
    pool, text, lengths = tl.PrefixPool(3), [1], []
    for turn in range(50):
        reused = len(text) if turn else 0
        text = [*text, TEXT[turn], TEXT[turn + 1]]
        check_pool(tiny, pool, text, reused, 3)
        text = tiny.generate_with_pool(pool, text, 2, seed=turn, stop_token_ids=())
        tiny.register_prefix(pool, text)
        lengths.append(len(text))
        assert pool.size() == len(lengths[-3:])
        assert pool.total_cached_tokens() == sum(lengths[-3:])


def test_a_pool_without_hits_costs_no_work(tiny):
    pool = tl.PrefixPool(1000)
    for i in range(1000):
        tiny.register_prefix(pool, [1, *np.unravel_index(i, (10, 10, 10))])
    for length in (1, 20, 200):
        check_pool(tiny, pool, TEXT[:length], 0)


# ---- limits ----


def outcome(path, call):
    """What a fresh model's call gives: the tokens, or the error's type and text."""
    with tl.Model(path, max_seq_len=256, threads=2) as model:
        try:
            return call(model)
        except tl.Error as error:
            return type(error), str(error)


@pytest.mark.parametrize("n_prefix", [254, 255, 256])
@pytest.mark.parametrize("n_suffix", [0, 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_at_the_end_of_max_seq_len(tiny_path, n_prefix, n_suffix, max_tokens):
    """Up to the limit and beyond: from pool and cache the same tokens or the same error, as the
    first thing that the model generates."""
    text = [3, *TEXT]
    prompt = text[: n_prefix + n_suffix]
    arguments = {"max_tokens": max_tokens, "seed": 1, "stop_token_ids": ()}

    def from_pool(model):
        pool = tl.PrefixPool()
        assert model.register_prefix(pool, prompt[:n_prefix]) == n_prefix
        return model.generate_with_pool(pool, prompt, **arguments)

    def from_cache(model):
        cache = model.build_prefix_cache(prompt[:n_prefix])
        return model.generate_from_prefix_cache(cache, prompt[n_prefix:], **arguments)

    plain = outcome(tiny_path, lambda model: model.generate(prompt, **arguments))
    assert outcome(tiny_path, from_pool) == plain
    assert outcome(tiny_path, from_cache) == plain
    assert isinstance(plain, list) == (n_prefix + n_suffix + max_tokens <= 256)


# ---- one entry, many users ----


def test_samples_from_one_entry_side_by_side(tiny):
    """Streams that start in the same half-filled block, a token at a time in turn."""
    prompt, pool = TEXT[:37], tl.PrefixPool()
    tiny.register_prefix(pool, prompt)
    arguments = {"max_tokens": 40, "stop_token_ids": (), "temperature": 1.5}
    expected = [tiny.generate(prompt, seed=seed, **arguments) for seed in range(8)]
    streams = [tiny.generate_stream(prompt, seed=i, pool=pool, **arguments) for i in range(8)]
    got = list(zip(*zip(*streams, strict=True), strict=True))
    assert [prompt + list(tokens) for tokens in got] == expected
    assert len(set(got)) > 1
    check_pool(tiny, pool, prompt, 37)

"""Streams that are dropped at any token, by any means: what they held is free at once, and all goes
on.

Exact byte counts are the C tests' (test_known_faults.c); here the process must not grow although
the garbage collector is off.
"""

import gc

import pytest
import tiny_models
from conftest import work
from soak import resident

import tinyloop_py as tl

N_PROMPT, N_NEW = 200, 12
PROMPT = [i * i % 53 for i in range(N_PROMPT)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of little work and much KV: 24 MB for each sequence of these tests."""
    path = tiny_models.make(
        tmp_path_factory.mktemp("wide"),
        seed=9,
        hidden_size=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=8,
        default_loops=6,
    )
    with tl.Model(path, 256, threads=2, kv_mode="fp32") as model:
        yield model


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def sequence_bytes(model):
    kv = tl.RuntimeKVCache(model)
    tl.decode_with_kv_cache_capture(kv, PROMPT)
    return kv.bytes()


def forget(stream, n):
    for _ in range(n):
        next(stream)


def close(stream, n):
    forget(stream, n)
    stream.close()
    assert list(stream) == []


def leave_a_loop(stream, n):
    for i, _ in enumerate(stream, 1):
        if i >= n:
            break


def leave_a_generator(stream, n):
    def generator():
        yield from stream

    leave_a_loop(generator(), n)


def leave_a_block(stream, n):
    with stream:
        forget(stream, n)


def fail_while_consuming(stream, n):
    def consume(stream):
        for i, _ in enumerate(stream, 1):
            if i >= n:
                raise LookupError("the consumer's own")

    with pytest.raises(LookupError, match="the consumer's own"):
        consume(stream)


WAYS = [forget, close, leave_a_loop, leave_a_generator, leave_a_block, fail_while_consuming]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.usefixtures("no_collector")
def test_a_dropped_stream_is_free_at_once(wide, way):
    """From nothing, a partial hit, a full hit and a prefix cache; at the first token, the last but
    one, and in between."""
    arguments = {"max_tokens": N_NEW, "seed": 1, "stop_token_ids": ()}
    partial, full = tl.PrefixPool(), tl.PrefixPool()
    wide.register_prefix(partial, PROMPT[:33])
    wide.register_prefix(full, PROMPT)
    expected = wide.generate(PROMPT, **arguments)
    before = resident()
    for n in (1, 2, N_NEW // 2, N_NEW - 1):
        for pool in (None, partial, full):
            way(wide.generate_stream(PROMPT, pool=pool, **arguments), n)
    size = sequence_bytes(wide)
    assert size > 20 << 20
    assert resident() - before < size + (16 << 20)  # one was alive at a time, not twelve
    for pool in (None, partial, full):
        assert wide.generate(PROMPT, pool=pool, **arguments) == expected


@pytest.mark.parametrize("n", range(N_NEW + 2))
@pytest.mark.parametrize("n_cached", [0, 33, N_PROMPT])
def test_after_a_drop_at_any_token_the_next_stream_is_whole(tiny, n, n_cached):
    arguments = {"max_tokens": N_NEW, "seed": 1, "stop_token_ids": ()}
    expected = tiny.generate(PROMPT, **arguments)[N_PROMPT:]
    pool = tl.PrefixPool(1)
    if n_cached:
        tiny.register_prefix(pool, PROMPT[:n_cached])
    seen = []

    def take():
        stream = tiny.generate_stream(PROMPT, pool=pool, **arguments)
        seen.extend(token for token, _ in zip(stream, range(n), strict=False))

    _, done = work(tiny, take)
    assert seen == expected[:n]
    # zip asks the stream once more than it gives
    assert done.get("tokens_decoded", 0) == min(n, N_NEW - 1)
    assert list(tiny.generate_stream(PROMPT, pool=pool, **arguments)) == expected
    tiny.register_prefix(pool, [1])  # the entry that was in use can go
    assert (pool.size(), pool.total_cached_tokens()) == (1, 1)

"""generate and its kin: sampling, stopping, streams, ranges, errors."""

import array
import inspect

import numpy as np
import pytest
import sampling
from conftest import work
from hypothesis import given, settings
from hypothesis import strategies as st

import tinyloop_py as tl
from tinyloop_py import format as fmt

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, 53, 1000]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.7, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 10.0]),
    }
)


@settings(max_examples=150, deadline=None)
@given(options=options, seed=st.integers(0, 2**64 - 1))
def test_sampling_follows_the_chain(tiny, options, seed):
    """Each token is the one that the logits, the chain and the (seed, position) draw give."""
    tokens = tiny.generate(PROMPT, 4, seed=seed, stop_token_ids=(), **options)
    assert tokens[: len(PROMPT)] == PROMPT
    logits = tiny.logits(tokens)
    for position in range(len(PROMPT), len(tokens)):
        ids, probabilities = sampling.distribution(
            logits[position - 1], tokens[:position], **options
        )
        assert tokens[position] in ids
        drawn = sampling.uniform(seed, position)
        at = ids.tolist().index(tokens[position])
        if options["top_k"] in (0, 53, 1000) and options["top_p"] == 1.0:
            # no order is needed there, and the draw goes by ids
            at = sorted(ids.tolist()).index(tokens[position])
            probabilities = probabilities[np.argsort(ids)]
        reached = np.concatenate([[0.0], np.cumsum(probabilities)])
        assert reached[at] - 1e-9 <= drawn <= reached[at + 1] + 1e-9


def test_seeds(tiny):
    assert tiny.generate(PROMPT, 20, seed=1) == tiny.generate(PROMPT, 20, seed=1)
    assert len({tuple(tiny.generate(PROMPT, 20, seed=seed)) for seed in range(5)}) > 1
    fresh = {tuple(tiny.generate(PROMPT, 20, stop_token_ids=())) for _ in range(5)}
    assert len(fresh) > 1


def test_greedy_takes_the_largest_logit(tiny):
    tokens = tiny.generate(PROMPT, 10, temperature=0.0, stop_token_ids=())
    logits = tiny.logits(tokens)
    for position in range(len(PROMPT), len(tokens)):
        assert tokens[position] == int(np.argmax(logits[position - 1]))


def test_stopping(tiny):
    free = tiny.generate(PROMPT, 30, seed=4, stop_token_ids=())
    assert len(free) == len(PROMPT) + 30
    stop = free[len(PROMPT) + 2]
    first = free.index(stop, len(PROMPT))
    for stops in ([stop], (stop, 52), np.array([stop])):
        stopped = tiny.generate(PROMPT, 30, seed=4, stop_token_ids=stops)
        assert stopped == free[: first + 1]  # the stop id is part of the result
    # the file's own end ids
    by_default = tiny.generate(PROMPT, 200, seed=4, temperature=50.0, top_k=0)
    assert by_default.index(2, len(PROMPT)) == len(by_default) - 1


def test_max_tokens_0_returns_the_prompt_and_does_nothing(tiny):
    tokens, done = work(tiny, lambda: tiny.generate(PROMPT, 0))
    assert (tokens, done) == (PROMPT, {})
    assert list(tiny.generate_stream(PROMPT, 0)) == []


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        tuple(PROMPT),
        np.array(PROMPT),
        np.array(PROMPT, np.uint8),
        np.array(PROMPT, np.uint64),
        np.array(PROMPT, ">i4"),
        np.array(PROMPT[::-1])[::-1],
        np.repeat(np.array(PROMPT, np.int16), 2)[::2],
        array.array("H", PROMPT),
        memoryview(array.array("q", PROMPT)),
        bytearray(PROMPT),
        [np.int64(token) for token in PROMPT],
        np.array(PROMPT, object),
    ],
    ids=str,
)
def test_prompts_of_every_kind_of_integers(tiny, prompt):
    before = np.array(prompt).tolist()
    result = tiny.generate(prompt, 3, temperature=0.0)
    assert result == tiny.generate(PROMPT, 3, temperature=0.0)
    assert all(type(token) is int for token in result)
    assert np.array(prompt).tolist() == before


def test_read_only_prompt(tiny):
    prompt = np.array(PROMPT, np.int32)
    prompt.setflags(write=False)
    assert tiny.generate(prompt, 0) == PROMPT


@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        b"\x01\x02",
        None,
        5,
        1.5,
        [1.0, 2.0],
        [[1, 2]],
        [[1], [2, 3]],
        ["1"],
        [None],
        {1: 2},
        {1, 2},
        np.array(5),
        np.array([True, False]),
        np.array([1 + 0j]),
        iter([1]),
        np.array([1, "a"], object),
    ],
    ids=repr,
)
def test_prompts_of_wrong_types(tiny, prompt):
    with pytest.raises(TypeError, match="prompt") as caught:
        tiny.generate(prompt)
    assert isinstance(caught.value, tl.Error)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        (np.array([]), "prompt is empty"),
        (range(0), "prompt is empty"),
        (np.empty(0, np.int32), "prompt is empty"),
        ([53], r"prompt\[0\] is 53; token ids are 0 to 52"),
        ([0, -1], r"prompt\[1\] is -1"),
        ([2**31], r"prompt\[0\] is 2147483648"),
        ([0, 2**63], r"prompt\[1\] is 9223372036854775808"),
        ([0, 2**70], r"prompt\[1\] is 1180591620717411303424"),
        ([-(2**33)], r"prompt\[0\] is -8589934592"),
    ],
)
def test_prompts_out_of_range(tiny, prompt, message):
    with pytest.raises(ValueError, match=message) as caught:
        tiny.generate(prompt)
    assert isinstance(caught.value, tl.Error)
    assert tl.last_error() == str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [-1, 2**63]),
        ("loops", [0, -1, 1025, 2**63]),
        ("cache_window", [-1, 2**63]),
        ("temperature", [-0.1, float("nan"), float("inf"), 10**400]),
        ("top_k", [-1, 2**63]),
        ("top_p", [0.0, -0.1, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.1, float("nan")]),
        ("repetition_penalty", [0.0, -1.0, float("inf"), float("nan")]),
        ("seed", [-1, 2**64]),
        ("stop_token_ids", [[-1], [53]]),
    ],
)
def test_values_out_of_range(tiny, name, values):
    for value in values:
        for method in (tiny.generate, tiny.generate_stream):
            with pytest.raises(ValueError, match=name) as caught:
                method(PROMPT, **{name: value})
            assert isinstance(caught.value, tl.Error)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "loops", "cache_window", "temperature", "top_k", "top_p", "min_p",
     "repetition_penalty", "seed", "stop_token_ids"],
)  # fmt: skip
def test_values_of_wrong_types(tiny, name):
    for value in ("1", [1.5], object()):
        with pytest.raises(TypeError, match=name):
            tiny.generate(PROMPT, **{name: value})


def test_edges_of_the_ranges_are_allowed(tiny):
    tiny.generate(PROMPT, 1, loops=1)
    tiny.generate(PROMPT, 1, top_k=2**40, top_p=1.0, min_p=1.0, seed=2**64 - 1)
    tiny.generate(PROMPT, 1, temperature=5e-324, repetition_penalty=1e300)
    tiny.generate(PROMPT, 1, temperature=1e300, repetition_penalty=1e-300)
    tiny.generate(PROMPT, 1, cache_window=2**62)
    assert tiny.generate(PROMPT, 256 - len(PROMPT), temperature=0.0, stop_token_ids=())


def test_lengths(tiny):
    with pytest.raises(RuntimeError, match=r"8 prompt tokens.*249.*256"):
        tiny.generate(PROMPT, 249)
    with pytest.raises(RuntimeError, match=r"257 prompt tokens.*0.*256"):
        tiny.generate([1] * 257, 0)


def test_not_finite_logits(tiny_path, tmp_path):
    """A weight of infinity: an error with the position, and nothing read outside."""
    file = fmt.read_file(tiny_path)
    tensor = file.tensors["final_norm.weight"]
    raw = bytearray(tiny_path.read_bytes())
    raw[tensor.offset : tensor.offset + 4] = np.float32(np.inf).tobytes()
    broken = tmp_path / "broken.tinyloop"
    broken.write_bytes(raw)
    with tl.Model(broken, max_seq_len=256) as model:
        with pytest.raises(tl.Error, match="position 8"):
            model.generate(PROMPT, 3)
        with pytest.raises(tl.Error, match=r"checksum of tensor final_norm\.weight"):
            tl.Model(broken, max_seq_len=256, verify=True)


# ---- streams ----


def test_stream_equals_generate(tiny):
    expected = tiny.generate(PROMPT, 25, seed=8, stop_token_ids=())
    stream = tiny.generate_stream(PROMPT, 25, seed=8, stop_token_ids=())
    assert iter(stream) is stream
    assert PROMPT + list(stream) == expected
    assert list(stream) == []


def test_stream_checks_its_arguments_at_once_and_works_when_asked(tiny):
    with pytest.raises(ValueError, match="prompt is empty"):
        tiny.generate_stream([])
    stream, done = work(tiny, lambda: tiny.generate_stream(PROMPT, 5, stop_token_ids=()))
    assert done == {}
    _, done = work(tiny, lambda: next(stream))
    assert done == {"tokens_prefilled": len(PROMPT)}
    _, done = work(tiny, lambda: next(stream))
    assert done == {"tokens_decoded": 1}


def test_closing_a_stream(tiny):
    stream = tiny.generate_stream(PROMPT, 50, stop_token_ids=())
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    with tiny.generate_stream(PROMPT, 50, stop_token_ids=()) as stream:
        next(stream)
    assert list(stream) == []


def test_stream_of_a_closed_model(tiny_path):
    model = tl.Model(tiny_path, max_seq_len=256)
    stream = model.generate_stream(PROMPT, 50, stop_token_ids=())
    next(stream)
    model.close()
    with pytest.raises(tl.Error, match=r"tinyloop.Model is closed; cannot call generate_stream"):
        next(stream)
    assert list(stream) == []


# ---- prefix caches ----


def test_prefix_cache(tiny):
    cache = tiny.build_prefix_cache(PROMPT, loops=2, cache_window=40)
    assert (len(cache), cache.length(), cache.loops, cache.cache_window) == (8, 8, 2, 40)
    info = tiny.info
    blocks = info["kv_block_size"] * (info["kv_bytes_fixed"] + 2 * info["kv_bytes_loop"])
    assert cache.bytes() == blocks + 4 * info["hidden_size"] + 4 * len(PROMPT)
    _, done = work(tiny, lambda: tiny.generate_from_prefix_cache(cache, max_tokens=1))
    assert done == {}
    _, done = work(tiny, lambda: tiny.generate_from_prefix_cache(cache, [1, 2], 3, seed=0))
    assert done["tokens_prefilled"] == 2


def test_prefix_cache_arguments(tiny, tiny_path):
    cache = tiny.build_prefix_cache(PROMPT, loops=2, cache_window=40)
    tiny.generate_from_prefix_cache(cache, None, 1, loops=2, cache_window=40)
    with pytest.raises(ValueError, match="loops is 3, but the prefix cache was built with 2"):
        tiny.generate_from_prefix_cache(cache, None, 1, loops=3)
    for window in (0, 41):
        with pytest.raises(ValueError, match=f"cache_window is {window}"):
            tiny.generate_from_prefix_cache(cache, None, 1, cache_window=window)
    with pytest.raises(ValueError, match=r"suffix\[1\] is 99"):
        tiny.generate_from_prefix_cache(cache, [1, 99])
    with pytest.raises(RuntimeError, match=r"9 prompt tokens.*248.*256"):
        tiny.generate_from_prefix_cache(cache, [1], 248)
    with pytest.raises(TypeError, match="PrefixCache"):
        tiny.generate_from_prefix_cache(PROMPT)
    with pytest.raises(TypeError):
        tl.PrefixCache()
    with tl.Model(tiny_path, max_seq_len=256) as other, pytest.raises(ValueError, match="another"):
        other.generate_from_prefix_cache(cache)
    for bad in ([], [53], [0] * 257):
        with pytest.raises(ValueError, match="tokens"):
            tiny.build_prefix_cache(bad)


# ---- KV caches ----


def test_kv_cache(tiny):
    kv = tl.RuntimeKVCache(tiny)
    assert (kv.length(), len(kv), kv.bytes()) == (0, 0, 0)
    hidden = tl.decode_with_kv_cache_capture(kv, PROMPT)
    assert (hidden.shape, hidden.dtype) == ((tiny.info["hidden_size"],), np.float32)
    info = tiny.info
    block = info["kv_block_size"] * (info["kv_bytes_fixed"] + 3 * info["kv_bytes_loop"])
    assert (kv.length(), kv.bytes()) == (8, block)
    clone = kv.clone()
    tiny.decode_with_kv_cache_capture(clone, [1])
    assert (kv.length(), clone.length()) == (8, 9)
    clone.truncate(0)
    assert clone.bytes() == 0


def test_window_bounds_memory(tiny):
    info = tiny.info
    block = info["kv_block_size"] * (info["kv_bytes_fixed"] + 3 * info["kv_bytes_loop"])
    kv = tl.RuntimeKVCache(tiny, cache_window=40)
    for _ in range(60):
        tl.decode_with_kv_cache_capture(kv, [1, 2, 3, 4])
        assert kv.bytes() <= block * ((40 + 4) // 32 + 2)
    with pytest.raises(ValueError, match="a window has dropped"):
        kv.truncate(100)
    assert kv.length() == 240
    kv.truncate(235)
    tl.decode_with_kv_cache_capture(kv, [1])


def test_kv_cache_arguments(tiny, tiny_path):
    kv = tl.RuntimeKVCache(tiny)
    tl.decode_with_kv_cache_capture(kv, PROMPT)
    for bad in ([], [53], [-1]):
        with pytest.raises(ValueError, match="tokens"):
            tl.decode_with_kv_cache_capture(kv, bad)
    for length in (-1, 9):
        with pytest.raises(ValueError, match="length"):
            kv.truncate(length)
    with pytest.raises(TypeError):
        tl.RuntimeKVCache("model")
    with pytest.raises(TypeError):
        tl.decode_with_kv_cache_capture(object(), [1])
    with tl.Model(tiny_path, max_seq_len=256) as other, pytest.raises(ValueError, match="another"):
        other.decode_with_kv_cache_capture(kv, [1])
    assert kv.length() == 8


# ---- logits, states, model ----


def test_logits_and_states(tiny, tiny_path):
    logits, states = tiny.logits(PROMPT), tiny.states(PROMPT, loops=5)
    assert (logits.shape, logits.dtype) == ((8, 53), np.float32)
    assert (states.shape, states.dtype) == ((5, 8, 22), np.float32)
    assert np.array_equal(tiny.states(PROMPT, loops=2), states[:2])
    for method in (tiny.logits, tiny.states):
        with pytest.raises(ValueError, match="tokens is empty"):
            method([])
        with pytest.raises(ValueError, match="257"):
            method([1] * 257)
        with pytest.raises(ValueError, match="loops"):
            method([1], loops=2000)


def test_model_arguments(tiny_path, tmp_path):
    for arguments, message in [
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"device": "tpu"}, "device is 'tpu'; allowed are 'auto', 'cpu', 'cuda'"),
        ({"kv_mode": "int3"}, "kv_mode is 'int3'"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 257}, "threads is 257"),
        ({"init_seed": -1}, "init_seed is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            tl.Model(tiny_path, **arguments)
    for arguments in ({"max_seq_len": 1.5}, {"device": 3}, {"device": None}, {"threads": "2"}):
        with pytest.raises(TypeError):
            tl.Model(tiny_path, **arguments)
    with pytest.raises(TypeError):
        tl.Model(5)
    with pytest.raises(tl.Error, match="no CUDA"):
        tl.Model(tiny_path, device="cuda")
    with pytest.raises(tl.Error, match="cannot open"):
        tl.Model(tmp_path / "none")
    with pytest.raises(tl.Error, match="not a regular file"):
        tl.Model(tmp_path)
    for scale in (0.0, -1.0, float("nan")):  # of no use to a model that starts from zeros
        tl.Model(tiny_path, 100, init_scale=scale).close()
    with tl.Model(str(tiny_path), 100, init_scale=0.5, init_seed=3, verify=True) as model:
        assert model.info["max_seq_len"] == 100
        assert "22" not in repr(model)
    assert model.closed
    assert repr(model) == "<tinyloop.Model, closed>"


def test_every_method_of_a_closed_model_raises_with_its_name(tiny_path):
    model = tl.Model(tiny_path, max_seq_len=256)
    pool, kv = tl.PrefixPool(), tl.RuntimeKVCache(model)
    cache = model.build_prefix_cache([1])
    model.close()
    arguments = {
        "logits": ([1],),
        "states": ([1],),
        "exit_logits": ([1],),
        "generate": ([1],),
        "generate_stream": ([1],),
        "generate_with_pool": (pool, [1]),
        "generate_from_prefix_cache": (cache,),
        "build_prefix_cache": ([1],),
        "register_prefix": (pool, [1]),
        "decode_with_kv_cache_capture": (kv, [1]),
        "counters": (),
        "blob": ("card",),
    }
    public = {
        name
        for name, member in inspect.getmembers(tl.Model, callable)
        if not name.startswith("_") and name not in ("close", "from_arrays")
    }
    assert public == set(arguments)
    for name, values in arguments.items():
        with pytest.raises(RuntimeError) as caught:
            getattr(model, name)(*values)
        assert str(caught.value) == f"tinyloop.Model is closed; cannot call {name}"
    with pytest.raises(RuntimeError, match="closed"):
        tl.RuntimeKVCache(model)
    with pytest.raises(RuntimeError, match="closed"):
        tl.decode_with_kv_cache_capture(kv, [1])
    assert kv.clone().length() == 0


def test_signatures():
    """As the specification writes them."""
    text = {
        name: str(inspect.signature(getattr(tl.Model, name)))
        for name in ("generate", "register_prefix", "generate_with_pool", "build_prefix_cache")
    }
    assert text["generate"] == (
        "(self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *, "
        "top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=None, stop_token_ids=None, "
        "prefix_len=None, pool=None)"
    )
    assert text["register_prefix"] == (
        "(self, pool, tokens, loops=None, cache_window=0, *, prefix_len=None)"
    )
    assert text["generate_with_pool"].startswith(
        "(self, pool, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0"
    )
    assert text["build_prefix_cache"] == (
        "(self, tokens, loops=None, cache_window=0, *, prefix_len=None)"
    )


def test_warnings_come_once(tiny_path):
    with pytest.warns(RuntimeWarning, match="max_seq_len 513 is above the 512 positions"):
        model = tl.Model(tiny_path, max_seq_len=513)
    with model:
        with pytest.warns(RuntimeWarning, match="loops 13 is above the 12"):
            model.generate([1], 1, loops=13)
        model.generate([1], 1, loops=14)  # a second warning would be an error


@pytest.mark.parametrize("name", ["H_MODE", "INT8", "INT4"])
def test_kv_modes_that_are_not_built(tiny_path, monkeypatch, name):
    monkeypatch.setenv(f"TINYLOOP_KV_{name}", "0")
    tl.Model(tiny_path, max_seq_len=256).close()
    monkeypatch.setenv(f"TINYLOOP_KV_{name}", "1")
    with pytest.raises(tl.Error, match=f"TINYLOOP_KV_{name}"):
        tl.Model(tiny_path, max_seq_len=256)
    with pytest.raises(tl.Error, match=f"TINYLOOP_KV_{name} and kv_mode fp32 contradict"):
        tl.Model(tiny_path, max_seq_len=256, kv_mode="fp32")
    other = "INT8" if name != "INT8" else "INT4"
    monkeypatch.setenv(f"TINYLOOP_KV_{other}", "1")
    with pytest.raises(tl.Error, match="contradict") as caught:
        tl.Model(tiny_path, max_seq_len=256)
    assert f"TINYLOOP_KV_{name}" in str(caught.value)
    assert f"TINYLOOP_KV_{other}" in str(caught.value)


def test_unknown_kv_mode(tiny_path, monkeypatch):
    monkeypatch.setenv("TINYLOOP_KV_INT9", "1")
    with pytest.raises(ValueError, match="TINYLOOP_KV_INT9 is no KV mode"):
        tl.Model(tiny_path, max_seq_len=256)

"""The law for every family: how the tokens came changes the work and not one bit of the results.

Cores that start from noise do so here, as their files say: noise goes by position, so it too must
be the same however the tokens came.
"""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import work
from family_models import FAMILIES, NOISE, PREFIX_LM, converted, golden, write_changed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import models, text_lengths, write_model
from test_law import cut, open_model, same_bits

import tinyloop_py as tl
from tinyloop_py.format import read_file

# Deeper and longer than a model was trained for is one warning, and the same function.
pytestmark = pytest.mark.filterwarnings("ignore:(loops|max_seq_len) .* is above the")

# Few loops: the law does not know how many there are.
LOOPS = dict.fromkeys(FAMILIES, 3) | {"hrm_text": (2, 2), "iquest_loop": 2}
LOOPS |= dict.fromkeys(["llama", "llama_bf16_sharded", "qwen2", "qwen3"], 1)

WINDOWS = [0, 5, 32]


class Family:
    """A family's open model, with the arguments that keep its prompts causal, and a prompt."""

    def __init__(self, name, path, model):
        self.path, self.model, self.loops = path, model, LOOPS[name]
        self.prompt = golden(name).meta["prompts"]["p40"]
        self.causal = {"prefix_len": 0} if name in PREFIX_LM else {}

    def sampled(self, **changes):
        """Arguments of a generation that a wrong logit soon turns."""
        arguments = {"max_tokens": 4, "loops": self.loops, "seed": 7, "top_k": 0}
        return arguments | {"stop_token_ids": ()} | self.causal | changes

    def final_state(self, pieces, window=0):
        kv = tl.RuntimeKVCache(self.model, self.loops, window)
        for piece in pieces:
            state = tl.decode_with_kv_cache_capture(kv, piece)
        return state


@pytest.fixture(scope="module", params=[*FAMILIES, "ouro, leaving early"])
def family(request, tmp_path_factory):
    name, _, leaves = request.param.partition(",")
    path = converted(name)
    if leaves:
        path = tmp_path_factory.mktemp(name) / "model.tinyloop"
        write_changed(path, name, exit_threshold=0.6)
    with tl.Model(path, 128, threads=2, init_seed=3) as model:
        yield Family(name, path, model)


# ---- splits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
def test_every_split_from_a_prefix_cache(family, window):
    model, prompt = family.model, family.prompt
    expected = model.generate(prompt, **family.sampled(cache_window=window))
    for k in range(1, len(prompt) + 1):
        cache = model.build_prefix_cache(prompt[:k], family.loops, window, **family.causal)
        got, done = work(
            model,
            lambda k=k, cache=cache: model.generate_from_prefix_cache(
                cache, prompt[k:], **family.sampled()
            ),
        )
        assert got == expected
        assert done.get("tokens_prefilled", 0) == len(prompt) - k


@pytest.mark.parametrize("window", WINDOWS)
def test_every_chunk_size(family, window):
    whole = family.final_state([family.prompt], window)
    assert np.isfinite(whole).all()
    for size in range(1, len(family.prompt)):
        assert same_bits(family.final_state(cut(family.prompt, [size]), window), whole)
    assert same_bits(family.final_state(cut(family.prompt, [1, 7, 2, 32]), window), whole)


def test_a_captured_state_is_that_of_all_logits(family):
    """Logits of a prefix are the first rows of the whole text's."""
    tokens = family.prompt
    whole = family.model.logits(tokens, family.loops)
    for k in (1, 31, 32, 33, 39):
        assert same_bits(family.model.logits(tokens[:k], family.loops), whole[:k])
    generated = family.model.generate(tokens[:20], **family.sampled(temperature=0.0))
    again = family.model.logits(generated, family.loops)
    assert generated[20:] == again[19:-1].argmax(axis=1).tolist()


def test_a_window_of_everything_is_none(family):
    tokens = family.prompt
    whole = family.model.logits(tokens, family.loops)
    assert same_bits(family.model.logits(tokens, family.loops, len(tokens)), whole)
    narrow = family.model.logits(tokens, family.loops, 5)
    assert same_bits(narrow[:5], whole[:5])
    assert not same_bits(narrow[5:], whole[5:])


def test_clones_and_truncation(family):
    kv = tl.RuntimeKVCache(family.model, family.loops)
    whole = tl.decode_with_kv_cache_capture(kv, family.prompt)
    windowed = read_file(family.path).config.loop_window > 0  # and has dropped what came before
    for length in (39, 0) if windowed else (39, 33, 32, 1, 0):
        clone = kv.clone()
        clone.truncate(length)
        assert same_bits(tl.decode_with_kv_cache_capture(clone, family.prompt[length:]), whole)


# ---- pool -----------------------------------------------------------------------------------


def test_pool(family):
    """Full, partial and no match: the same tokens, and the work that is left."""
    model, prompt = family.model, family.prompt
    other = [(token + 1) % model.info["vocab_size"] for token in prompt]
    expected = model.generate(prompt, **family.sampled())
    for registered, outcome, n_left in (
        ([prompt, prompt[:9]], "pool_full", 0),
        ([prompt[:33], prompt[:9]], "pool_partial", 7),
        ([prompt[:1]], "pool_partial", 39),
        ([other, [*prompt, 0]], "pool_miss", 40),
    ):
        pool = tl.PrefixPool()
        for tokens in registered:
            length = model.register_prefix(pool, tokens, family.loops, **family.causal)
            assert length == len(tokens)
        for _ in range(2):
            got, done = work(
                model, lambda pool=pool: model.generate_with_pool(pool, prompt, **family.sampled())
            )
            assert got == expected
            assert done.pop("tokens_prefilled", 0) == n_left
            assert done == {"tokens_decoded": 3, outcome: 1}


def test_other_windows_never_match(family):
    model, prompt = family.model, family.prompt
    pool = tl.PrefixPool()
    model.register_prefix(pool, prompt, family.loops, 8, **family.causal)
    for window, outcome in ((8, "pool_full"), (9, "pool_miss"), (0, "pool_miss")):
        arguments = family.sampled(cache_window=window)
        expected = model.generate(prompt, **arguments)
        got, done = work(
            model, lambda arguments=arguments: model.generate_with_pool(pool, prompt, **arguments)
        )
        assert got == expected
        assert done[outcome] == 1


# ---- what else runs -------------------------------------------------------------------------


def test_threads_and_instruction_sets(family, monkeypatch):
    results = []
    for isa, threads in (("portable", 1), ("avx2", 3), ("avx512", 1), ("avx512", 2)):
        monkeypatch.setenv("TINYLOOP_CPU_ISA", isa)
        with open_model(family.path, isa, threads=threads, init_seed=3) as model:
            if model is not None:
                results.append(model.logits(family.prompt, family.loops, 20))
    assert len(results) >= 1
    expected = family.model.logits(family.prompt, family.loops, 20)
    assert all(same_bits(result, expected) for result in results)


def test_streams_that_run_together(family):
    """Three at a time, token by token in turns."""
    model, arguments = family.model, family.sampled(max_tokens=6)
    prompts = [family.prompt[:n] for n in (3, 17, 40)]
    expected = [model.generate(prompt, **arguments)[len(prompt) :] for prompt in prompts]
    streams = [model.generate_stream(prompt, **arguments) for prompt in prompts]
    turns = [[next(stream) for stream in streams] for _ in range(6)]
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == expected
    assert all(next(stream, None) is None for stream in streams)


def test_sampling_follows_its_seed(family):
    prompt = family.prompt
    runs = [
        family.model.generate(prompt, **family.sampled(max_tokens=12, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


# ---- loops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f for f in FAMILIES if LOOPS[f] == 3] + PREFIX_LM)
def test_more_loops_begin_with_the_same_states(name):
    pairs = [((1, 2), (3, 2), 3)] if name in PREFIX_LM else [(1, 5, 1), (4, 5, 4)]
    tokens = golden(name).meta["prompts"]["p40"]
    with tl.Model(converted(name), 64, threads=2) as model:
        for few, many, n in pairs:
            states = model.states(tokens, few)
            assert len(states) == n
            assert same_bits(model.states(tokens, many)[:n], states)


@pytest.mark.parametrize("name", NOISE)
def test_noise_belongs_to_the_model(name):
    """Its seed and scale change the function; at scale 0 no seed does."""
    tokens = golden(name).meta["prompts"]["p9"]

    def logits(**arguments):
        with tl.Model(converted(name), 64, threads=2, **arguments) as model:
            return model.logits(tokens, 2).tobytes()

    different = [
        logits(),
        logits(init_seed=1),
        logits(init_seed=2**63),
        logits(init_scale=0.5),
        logits(init_scale=0),
    ]
    assert len(set(different)) == 5
    assert logits(init_seed=0) == different[0]
    assert logits(init_seed=1, init_scale=0) == different[4]


# ---- prefix-LM ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PREFIX_LM)
def two_sided(request):
    path = converted(request.param)
    with tl.Model(path, 128, threads=2) as model:
        yield Family(request.param, path, model)


def test_prefix_len_is_part_of_the_function(two_sided):
    model, tokens, loops = two_sided.model, two_sided.prompt, two_sided.loops
    results = [model.logits(tokens, loops, prefix_len=n) for n in range(len(tokens) + 1)]
    assert same_bits(results[0], model.logits(tokens, loops))
    assert same_bits(results[1], results[0])  # one token sees no other
    assert len({result.tobytes() for result in results}) == len(tokens)
    for n in (2, 17, 33):
        assert same_bits(model.logits(tokens[:35], loops, prefix_len=n), results[n][:35])


def test_generate_takes_the_prompt_as_the_prefix(two_sided):
    model, prompt = two_sided.model, two_sided.prompt
    whole = two_sided.sampled(prefix_len=len(prompt), temperature=0.0)
    default = two_sided.sampled(prefix_len=None, temperature=0.0)
    generated = model.generate(prompt, **default)
    assert generated == model.generate(prompt, **whole)
    logits = model.logits(generated, two_sided.loops, prefix_len=len(prompt))
    assert generated[40:] == logits[39:-1].argmax(axis=1).tolist()
    assert generated[:40] + list(model.generate_stream(prompt, **default)) == generated


@pytest.mark.parametrize("window", WINDOWS)
def test_only_the_whole_prompt_is_a_hit(two_sided, window):
    model, prompt = two_sided.model, two_sided.prompt
    arguments = two_sided.sampled(prefix_len=None, cache_window=window)
    expected = model.generate(prompt, **arguments)
    for registered, prefix_len, outcome in (
        (prompt, None, "pool_full"),
        (prompt, 40, "pool_full"),
        (prompt, 0, "pool_miss"),
        (prompt, 39, "pool_miss"),
        (prompt[:39], None, "pool_miss"),
        (prompt[:1], None, "pool_miss"),
    ):
        pool = tl.PrefixPool()
        model.register_prefix(pool, registered, two_sided.loops, window, prefix_len=prefix_len)
        got, done = work(
            model, lambda pool=pool: model.generate_with_pool(pool, prompt, **arguments)
        )
        assert got == expected
        assert done[outcome] == 1
        assert done.get("tokens_prefilled", 0) == (0 if outcome == "pool_full" else 40)


def test_a_part_of_the_prefix_in_one_pool_with_all_of_it(two_sided):
    """Entries of other prefix lengths are other keys and neither match nor replace each other."""
    model, prompt = two_sided.model, two_sided.prompt
    pool = tl.PrefixPool()
    for n in (0, 10, 40):
        model.register_prefix(pool, prompt, two_sided.loops, prefix_len=n)
    assert pool.size() == 3
    for n in (0, 10, 40):
        arguments = two_sided.sampled(prefix_len=n)
        expected = model.generate(prompt, **arguments)
        got, done = work(
            model, lambda arguments=arguments: model.generate_with_pool(pool, prompt, **arguments)
        )
        assert got == expected
        assert done == {"tokens_decoded": 3, "pool_full": 1}


def test_a_suffix_is_no_part_of_the_prefix(two_sided):
    model, prompt = two_sided.model, two_sided.prompt
    cache = model.build_prefix_cache(prompt[:30], two_sided.loops)
    assert cache.prefix_len == 30
    with pytest.raises(tl.Error, match="prefix_len") as caught:
        model.generate_from_prefix_cache(cache, prompt[30:], **two_sided.sampled(prefix_len=None))
    assert isinstance(caught.value, ValueError)
    with pytest.raises(tl.Error, match="prefix_len"):
        model.generate_from_prefix_cache(cache, prompt[30:], **two_sided.sampled(prefix_len=0))
    stated = two_sided.sampled(prefix_len=30)
    got = model.generate_from_prefix_cache(cache, prompt[30:], **stated)
    assert got == model.generate(prompt, **stated)
    alone = two_sided.sampled(prefix_len=None)
    got = model.generate_from_prefix_cache(cache, **alone)
    assert got == model.generate(prompt[:30], **alone)


def test_other_models_have_no_two_sided_prefix():
    with tl.Model(converted("llama"), 64) as model:
        assert not model.info["two_sided_prefix"]
        with pytest.raises(tl.Error, match="prefix_len"):
            model.logits([1, 2, 3], prefix_len=2)
        assert model.logits([1, 2, 3], prefix_len=0).shape[0] == 3
    with tl.Model(converted("hrm_text"), 64) as model:
        assert model.info["two_sided_prefix"]
        with pytest.raises(tl.Error, match="prefix_len"):
            model.logits([1, 2, 3], prefix_len=4)


# ---- any model ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    model=models(),
    seed=st.integers(0, 2**32),
    n=text_lengths,
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    window=st.sampled_from(WINDOWS),
    prefix_len=st.integers(0, 70),
    kv_mode=st.sampled_from(["fp16", "fp32"]),
)
def test_random_models_keep_the_law(model, seed, n, sizes, window, prefix_len, kv_mode):
    """Pieces of a text, of which the first holds what is two-sided, give the whole text's state."""
    prefix_len = min(prefix_len, n) if model.config.mask else 0
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, n).tolist()
    first = max(1, prefix_len)
    pieces = [tokens[:first], *cut(tokens[first:], sizes)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tinyloop"
        write_model(path, *model)
        for threads, parts in ((1, [tokens]), (2, [tokens]), (2, pieces)):
            with tl.Model(path, 128, threads=threads, kv_mode=kv_mode) as opened:
                kv = tl.RuntimeKVCache(opened, cache_window=window, prefix_len=prefix_len)
                for part in parts:
                    state = tl.decode_with_kv_cache_capture(kv, part)
                results.append(state)
    assert all(same_bits(result, results[0]) for result in results)

"""PrefixPool: the rules of registration, matching and eviction, and every way of failing."""

import threading

import numpy as np
import pytest
from conftest import work
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pool_model import PoolModel

import tinyloop_py as tl

# few ids and short prompts, so that prefixes nest and keys repeat
token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=7)
loops_values = st.sampled_from([1, 2, 3])
windows = st.sampled_from([0, 4])


def pool_machine(models):
    """A state machine over the given models; model i is named i."""

    class PoolMachine(RuleBasedStateMachine):
        @initialize(capacity=st.integers(0, 5))
        def make(self, capacity):
            self.pool = tl.PrefixPool(capacity)
            self.expected = PoolModel(capacity)

        @rule(which=st.sampled_from([0, 1]), tokens=token_lists, loops=loops_values, window=windows)
        def register(self, which, tokens, loops, window):
            built = self.expected.register(which, tokens, loops, window)
            length, done = work(
                models[which],
                lambda: models[which].register_prefix(self.pool, tokens, loops, window),
            )
            assert length == len(tokens)
            assert done == ({"tokens_prefilled": len(tokens)} if built else {})

        @rule(bad=st.sampled_from([[], [-1], [53], [0] * 257, [2**40]]))
        def register_what_cannot_be(self, bad):
            with pytest.warns(RuntimeWarning, match="register_prefix: "):
                assert models[0].register_prefix(self.pool, bad) == 0

        @rule(
            which=st.sampled_from([0, 1]),
            prompt=token_lists,
            loops=loops_values,
            window=windows,
            seed=st.integers(0, 3),
        )
        def generate(self, which, prompt, loops, window, seed):
            model = models[which]
            matched = self.expected.match(which, prompt, loops, window)
            arguments = (prompt, 3, loops, 1.0, 50, window)
            plain = model.generate(*arguments, seed=seed, stop_token_ids=())
            got, done = work(
                model,
                lambda: model.generate_with_pool(
                    self.pool, *arguments, seed=seed, stop_token_ids=()
                ),
            )
            assert got == plain
            kind = "miss" if not matched else "full" if matched == len(prompt) else "partial"
            rest = len(prompt) - matched
            expected = {"tokens_decoded": 2, f"pool_{kind}": 1}
            assert done == (expected | {"tokens_prefilled": rest} if rest else expected)

        @invariant()
        def counts_agree(self):
            assert self.pool.size() == self.expected.size()
            assert self.pool.total_cached_tokens() == self.expected.total_cached_tokens()

    return PoolMachine


def test_against_the_plain_python_model(tiny, tiny_path):
    with tl.Model(tiny_path, max_seq_len=256, threads=1) as second:
        machine = pool_machine([tiny, second]).TestCase()
        machine.settings = settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        machine.runTest()


# ---- the document's rules, one by one ----


def test_capacity(tiny):
    assert tl.PrefixPool().size() == 0
    pool = tl.PrefixPool(0)  # becomes 1
    tiny.register_prefix(pool, [1, 2])
    tiny.register_prefix(pool, [3])
    assert (pool.size(), pool.total_cached_tokens()) == (1, 1)
    assert "1 entries, 1 cached tokens" in repr(pool)


@pytest.mark.parametrize("capacity", [-1, 2**70])
def test_capacity_out_of_range(capacity):
    with pytest.raises(ValueError, match=f"capacity is {capacity}"):
        tl.PrefixPool(capacity)


@pytest.mark.parametrize("capacity", [1.5, "16", None, True])
def test_capacity_of_a_wrong_type(capacity):
    with pytest.raises(TypeError, match="capacity"):
        tl.PrefixPool(capacity)


def test_eviction_takes_the_shortest_that_was_there(tiny):
    pool = tl.PrefixPool(2)
    tiny.register_prefix(pool, [1, 2, 3])
    tiny.register_prefix(pool, [4, 5])
    tiny.register_prefix(pool, [6])  # shorter than both, and yet not the victim
    assert pool.total_cached_tokens() == 4
    _, done = work(tiny, lambda: tiny.generate_with_pool(pool, [6, 7], 1))
    assert done["pool_partial"] == 1
    _, done = work(tiny, lambda: tiny.generate_with_pool(pool, [4, 5, 6], 1))
    assert done["pool_miss"] == 1


def test_of_equally_short_ones_the_first_registered_goes(tiny):
    pool = tl.PrefixPool(2)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        tiny.register_prefix(pool, tokens)
    outcomes = []
    for tokens in ([1, 1], [2, 2], [3, 3]):
        _, done = work(tiny, lambda tokens=tokens: tiny.generate_with_pool(pool, tokens, 1))
        outcomes.append("pool_full" in done)
    assert outcomes == [False, True, True]


def test_registering_again_changes_nothing(tiny):
    pool = tl.PrefixPool(2)
    tiny.register_prefix(pool, [1, 1])
    tiny.register_prefix(pool, [2, 2])
    for again in ([1, 1], (1, 1), np.array([1, 1], np.int64), np.array([1, 0, 1, 0], ">i2")[::2]):
        length, done = work(tiny, lambda again=again: tiny.register_prefix(pool, again))
        assert (length, done) == (2, {})
    tiny.register_prefix(pool, [3, 3])  # [1, 1] is still the first registered
    _, done = work(tiny, lambda: tiny.generate_with_pool(pool, [2, 2], 1))
    assert "pool_full" in done


def test_tokens_are_copied_in(tiny):
    pool = tl.PrefixPool()
    tokens = np.array([5, 6, 7], np.int32)
    tiny.register_prefix(pool, tokens)
    tokens[:] = 0
    _, done = work(tiny, lambda: tiny.generate_with_pool(pool, [5, 6, 7], 1))
    assert "pool_full" in done


def test_full_hit_runs_no_layer(tiny):
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, [5, 6, 7])
    _, done = work(tiny, lambda: tiny.generate_with_pool(pool, [5, 6, 7], 1))
    assert done == {"pool_full": 1}


def test_longest_wins_and_a_longer_entry_never_helps_a_shorter_prompt(tiny):
    a, b = [1, 2, 3, 4], [5, 6, 7]
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, a)
    tiny.register_prefix(pool, a + b)
    for _ in range(2):
        for prompt, prefilled in ((a, 0), (a + b, 0), (a + b + [8], 1), ([*a, 5, 6, 0], 3)):
            expected = tiny.generate(prompt, 20, temperature=0.0)
            got, done = work(
                tiny,
                lambda prompt=prompt: tiny.generate_with_pool(pool, prompt, 20, temperature=0.0),
            )
            assert got == expected
            assert done.get("tokens_prefilled", 0) == prefilled


def test_loops_and_window_are_part_of_the_key(tiny):
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, [1, 2, 3], loops=2, cache_window=8)
    for loops, window, hit in ((2, 8, True), (3, 8, False), (2, 0, False), (2, 9, False)):
        _, done = work(
            tiny,
            lambda loops=loops, window=window: tiny.generate_with_pool(
                pool, [1, 2, 3, 4], 1, loops, cache_window=window
            ),
        )
        assert ("pool_partial" in done) is hit
    assert tiny.register_prefix(pool, [1, 2, 3]) == 3  # the default, 3 loops
    assert tiny.register_prefix(pool, [1, 2, 3], loops=3) == 3  # the same key, resolved
    assert pool.size() == 2


def test_another_models_entries_never_match(tiny, tiny_path):
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, [1, 2, 3])
    with tl.Model(tiny_path, max_seq_len=256) as other:
        _, done = work(other, lambda: other.generate_with_pool(pool, [1, 2, 3], 1))
        assert done["pool_miss"] == 1
        other.register_prefix(pool, [1, 2, 3])
        assert pool.size() == 2


# ---- failures ----


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (([],), "tokens is empty"),
        (([0] * 257,), "tokens has 257 tokens; max_seq_len is 256"),
        (([53],), r"tokens\[0\] is 53; token ids are 0 to 52"),
        (([1, -1],), r"tokens\[1\] is -1"),
        (([2**31],), r"tokens\[0\] is 2147483648"),
        (([1], 0), "loops is 0; it must be 1 or more"),
        (([1], 1025), "loops is 1025; this model takes 1 to 1024"),
        (([1], None, -1), "cache_window is -1"),
    ],
)
def test_what_cannot_be_registered_gives_0_and_a_warning(tiny, arguments, reason):
    pool = tl.PrefixPool()
    tiny.register_prefix(pool, [1])
    with pytest.warns(RuntimeWarning, match=reason):
        assert tiny.register_prefix(pool, *arguments) == 0
    assert pool.size() == 1
    assert tl.last_error().startswith(reason.replace("\\", ""))


def test_no_pool_gives_0_and_a_warning(tiny):
    with pytest.warns(RuntimeWarning, match="pool is None"):
        assert tiny.register_prefix(None, [1]) == 0


@pytest.mark.parametrize("tokens", ["text", b"text", [1.5], np.ones(3), np.ones((2, 2), int), None])
def test_wrong_types_raise(tiny, tokens):
    pool = tl.PrefixPool()
    with pytest.raises((TypeError, ValueError)):
        tiny.register_prefix(pool, tokens)
    assert pool.size() == 0


@pytest.mark.parametrize("pool", [object(), [], "pool", 5])
def test_another_object_than_a_pool_raises(tiny, pool):
    with pytest.raises(TypeError, match="PrefixPool"):
        tiny.register_prefix(pool, [1])
    with pytest.raises(TypeError, match="PrefixPool"):
        tiny.generate_with_pool(pool, [1])
    with pytest.raises(TypeError, match="PrefixPool"):
        tiny.generate([1], pool=pool)


def test_closed_model(tiny_path):
    model = tl.Model(tiny_path, max_seq_len=256)
    pool = tl.PrefixPool()
    model.register_prefix(pool, [1, 2])
    model.close()
    model.close()
    message = "^tinyloop.Model is closed; cannot call register_prefix$"
    with pytest.raises(RuntimeError, match=message):
        model.register_prefix(pool, [1, 2])
    with pytest.raises(RuntimeError, match="cannot call generate_with_pool"):
        model.generate_with_pool(pool, [1, 2])
    assert pool.size() == 1  # outlives its model's close
    assert pool.total_cached_tokens() == 2


def test_lengths_beyond_max_seq_len(tiny):
    pool = tl.PrefixPool()
    with pytest.raises(RuntimeError, match=r"200 prompt tokens.*57.*256"):
        tiny.generate_with_pool(pool, [1] * 200, max_tokens=57)


def test_threads_share_a_pool(tiny):
    """Every output equals the serial one while others register, evict and look at the pool."""
    pool = tl.PrefixPool(3)
    failures = []

    def work_on(canary):
        rng = np.random.default_rng(canary)
        for _ in range(12):
            prompt = [canary, *rng.integers(0, 53, 24).tolist()]
            tiny.register_prefix(pool, prompt[: int(rng.integers(1, 25))])
            expected = tiny.generate(prompt, 6, seed=canary)
            if tiny.generate_with_pool(pool, prompt, 6, seed=canary) != expected:
                failures.append(prompt)
            pool.size(), pool.total_cached_tokens(), repr(pool)

    threads = [threading.Thread(target=work_on, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.size() == 3

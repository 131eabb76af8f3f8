"""Signals end a long call between two forward passes, and leave everything as it was."""

import contextlib
import itertools
import signal
import threading

import numpy as np
import pytest
from test_lifetimes import run_python

import tinyloop_py as tl

N = 20_000
LONG = np.arange(N) % 53
MIDDLE = LONG[:6000]  # for calls that run to their end: most of a second
SHORT = [3, 1, 4, 1, 5, 9, 2, 6]
UNSTOPPED = {"stop_token_ids": ()}


class Stop(Exception):  # noqa: N818
    """What the tests' own handlers raise."""


@pytest.fixture(scope="module")
def long(tiny_path):
    with pytest.warns(RuntimeWarning, match="max_seq_len"):
        model = tl.Model(tiny_path, max_seq_len=200_000, threads=2)
    with model:
        yield model


@contextlib.contextmanager
def alarm(handler, seconds=0.05, interval=0.0):
    """Calls the handler (without arguments) on the main thread after that time."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def raise_stop():
    raise Stop


def forward_tokens(model):
    counters = model.counters()
    return counters["tokens_prefilled"] + counters["tokens_decoded"]


class Calls:
    """Every call that computes, on N tokens or on a few, with one set of objects."""

    def __init__(self, model):
        self.model = model
        self.pool = tl.PrefixPool()
        self.kv = tl.RuntimeKVCache(model, cache_window=40)
        self.cache = model.build_prefix_cache(SHORT)
        model.register_prefix(self.pool, SHORT)

    def state(self):
        fallbacks = self.model.counters()["pool_fallback"]
        return self.pool.size(), self.pool.total_cached_tokens(), len(self.kv), fallbacks

    def logits(self, tokens):
        return self.model.logits(tokens)

    def states(self, tokens):
        return self.model.states(tokens)

    def generate(self, tokens):
        return self.model.generate(tokens, 5, seed=1, **UNSTOPPED)

    def generate_many(self, tokens):
        return self.model.generate(SHORT, len(tokens), seed=1, cache_window=40, **UNSTOPPED)

    def generate_many_with_pool_full(self, tokens):
        n = len(tokens)
        return self.model.generate_with_pool(self.pool, SHORT, n, seed=1, **UNSTOPPED)

    def generate_with_pool_partial(self, tokens):
        prompt = [*SHORT, *tokens]
        return self.model.generate_with_pool(self.pool, prompt, 5, seed=1, **UNSTOPPED)

    def generate_with_pool_miss(self, tokens):
        prompt = [50, *tokens]
        return self.model.generate_with_pool(self.pool, prompt, 5, seed=1, **UNSTOPPED)

    def generate_from_prefix_cache(self, tokens):
        return self.model.generate_from_prefix_cache(self.cache, tokens, 5, seed=1, **UNSTOPPED)

    def generate_stream(self, tokens):
        return list(self.model.generate_stream(tokens, 5, seed=1, **UNSTOPPED))

    def generate_many_in_a_stream(self, tokens):
        return list(
            self.model.generate_stream(SHORT, len(tokens), seed=1, cache_window=40, **UNSTOPPED)
        )

    def build_prefix_cache(self, tokens):
        return len(self.model.build_prefix_cache(tokens))

    def register_prefix(self, tokens):
        return self.model.register_prefix(self.pool, tokens)

    def decode_with_kv_cache_capture(self, tokens):
        return tl.decode_with_kv_cache_capture(self.kv, tokens)


CALLS = [name for name, value in vars(Calls).items() if callable(value) and name[0] != "_"]
CALLS.remove("state")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, tl.Error])
def test_what_a_handler_raises_ends_the_call(long, name, error):
    raised = error("from the handler")
    n_tokens = []

    def handler():
        n_tokens.append(forward_tokens(long))
        raise raised

    calls, fresh = Calls(long), Calls(long)
    before, tokens_before = calls.state(), forward_tokens(long)
    with alarm(handler), pytest.raises(error) as caught:
        getattr(calls, name)(LONG)
    assert caught.value is raised
    assert [forward_tokens(long)] == n_tokens
    assert n_tokens[0] - tokens_before < N  # it was not the end that let it through
    assert calls.state() == before
    after = getattr(calls, name)(SHORT)
    np.testing.assert_array_equal(after, getattr(fresh, name)(SHORT))


def test_a_handler_that_does_not_raise_lets_the_call_go_on(long):
    expected = long.logits(MIDDLE)
    generated = long.generate(SHORT, 1000, seed=1, **UNSTOPPED)
    ran = []
    with alarm(lambda: ran.append(1), 0.002, 0.002):
        np.testing.assert_array_equal(long.logits(MIDDLE), expected)
        n_ran = len(ran)
        assert n_ran >= 2
        assert long.generate(SHORT, 1000, seed=1, **UNSTOPPED) == generated
    assert len(ran) >= n_ran + 2


def test_a_stream_goes_on_where_it_was_interrupted(long):
    expected = long.generate(MIDDLE, 40, seed=1, **UNSTOPPED)[len(MIDDLE) :]
    stream = long.generate_stream(MIDDLE, 40, seed=1, **UNSTOPPED)
    tokens, n_stopped = [], 0
    while len(tokens) < 40:
        try:
            with alarm(raise_stop, 0.01):
                tokens.extend(itertools.islice(stream, 1))  # no token is lost between the two
        except Stop:
            n_stopped += 1
            tokens.extend(itertools.islice(stream, 1))
    assert n_stopped >= 1
    assert tokens == expected
    assert list(stream) == []


def test_a_handler_may_call_the_library(long):
    """Its calls can be interrupted in turn, and then the outer one still can."""
    expected = long.logits(MIDDLE)
    found = []

    def inner():
        with pytest.raises(Stop), alarm(raise_stop):
            long.logits(LONG)
        found.append(long.generate(SHORT, 5, seed=1, **UNSTOPPED))

    with alarm(inner, 0.01):
        np.testing.assert_array_equal(long.logits(MIDDLE), expected)
    assert found == [long.generate(SHORT, 5, seed=1, **UNSTOPPED)]

    def outer():
        inner()
        signal.signal(signal.SIGALRM, lambda number, frame: raise_stop())
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    with alarm(outer, 0.01), pytest.raises(Stop):
        long.logits(LONG)


def test_a_handler_finds_the_objects_of_the_call_busy(long):
    kv = tl.RuntimeKVCache(long)
    stream = long.generate_stream(MIDDLE, 5, seed=1, **UNSTOPPED)
    refused = []

    def use(*calls):
        for call in calls:
            with pytest.raises(tl.Error, match="in use"):
                call()
            refused.append(call)

    with alarm(lambda: use(stream.__next__, stream.close), 0.02):
        first = next(stream)
    assert len(refused) == 2
    assert [first, *stream] == long.generate(MIDDLE, 5, seed=1, **UNSTOPPED)[len(MIDDLE) :]
    with alarm(lambda: use(kv.length, kv.clone, lambda: kv.truncate(0)), 0.02):
        tl.decode_with_kv_cache_capture(kv, MIDDLE)
    assert (len(refused), len(kv)) == (5, len(MIDDLE))


def test_a_handler_may_close_the_model(tiny_path):
    with pytest.warns(RuntimeWarning, match="max_seq_len"):
        model = tl.Model(tiny_path, max_seq_len=200_000)
    expected = model.logits(MIDDLE)
    with alarm(model.close, 0.01):
        np.testing.assert_array_equal(model.logits(MIDDLE), expected)
    assert model.closed


def test_calls_of_other_threads_are_not_interrupted(long):
    results = []
    ended = threading.Event()

    def call():
        results.append(long.logits(MIDDLE))
        ended.set()

    n_before = forward_tokens(long)
    threading.Thread(target=call).start()
    while forward_tokens(long) == n_before:  # until the call has passes behind it
        pass
    with pytest.raises(Stop), alarm(raise_stop, 0.01):
        ended.wait()
    assert not ended.is_set()
    assert ended.wait(60)
    np.testing.assert_array_equal(results[0], long.logits(MIDDLE))


def test_the_main_thread_of_a_child(tiny_path):
    """After a fork on another thread, that one is the child's main thread."""
    code = """
        import os, signal, sys, threading, warnings, tinyloop_py as tl
        warnings.simplefilter("ignore")  # of the length
        model = tl.Model(sys.argv[1], max_seq_len=200_000, threads=1)

        def fork():
            child = os.fork()
            if child > 0:
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                return
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                model.logits([1] * 30_000)
            except KeyboardInterrupt:
                os._exit(7 if model.counters()["tokens_prefilled"] < 30_000 else 1)
            os._exit(2)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    """
    result = run_python(code, tiny_path)
    assert (result.stdout, result.stderr) == ("7\n", "")


def test_ctrl_c(tiny_path):
    """The signal itself, in a program of its own."""
    code = """
        import os, signal, sys, threading, time, warnings, tinyloop_py as tl
        warnings.simplefilter("ignore")  # of the length
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
        model = tl.Model(sys.argv[1], max_seq_len=200_000, threads=1)
        pool = tl.PrefixPool()

        def press():
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press).start()
        try:
            model.register_prefix(pool, [1] * 30_000)
        except KeyboardInterrupt:
            print(pool.size(), model.counters()["tokens_prefilled"] < 30_000)
        print(model.register_prefix(pool, [1, 2, 3]))
    """
    result = run_python(code, tiny_path)
    assert (result.stdout, result.stderr) == ("0 True\n3\n", "")

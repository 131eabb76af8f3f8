"""Threads in calls of every kind: canaries, close(), forks, and the interpreter's exit.

The minute with canaries is `make soak`; here it is seconds of the same code.
"""

import gc
import threading
import time
import weakref

import pytest
import soak
from conftest import work
from test_lifetimes import run_python

import tinyloop_py as tl

PROMPT = [(7 * i + i * i) % 53 for i in range(60)]


def start_all(threads):
    for thread in threads:
        thread.start()
    return threads


def join_all(threads):
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)


# ---- one pool and one model under eight threads ----


def test_every_output_is_the_serial_one(tiny, tiny_path):
    _, n_calls = soak.share_with_threads(tiny_path, tiny, seconds=3)
    assert set(n_calls) == {
        "register", "generate", "stream", "drop_stream", "statistics", "own_pool", "own_caches",
        "own_model",
    }  # fmt: skip


def test_long_runs_in_short(tiny):
    soak.register_and_evict(tiny, 400)
    soak.generate_from_pool(tiny, 200)


def test_an_entry_that_is_seen_is_complete(tiny):
    """A prefix enters the pool when all of it is there: whoever sees it can use it at once."""
    text = PROMPT * 4
    expected = tiny.generate(text, 5, seed=1, stop_token_ids=())
    results = []

    def use_when_seen(pool):
        while pool.size() == 0:
            pass
        results.append(tiny.generate_with_pool(pool, text, 5, seed=1, stop_token_ids=()))

    def once():
        pool = tl.PrefixPool()
        users = start_all([threading.Thread(target=use_when_seen, args=(pool,)) for _ in range(3)])
        tiny.register_prefix(pool, text[:200])
        join_all(users)

    for _ in range(20):
        _, done = work(tiny, once)
        assert done["pool_partial"] == 3
        assert done["tokens_prefilled"] == 200 + 3 * 40
    assert results == [expected] * 60


# ---- close ----

KEPT = {"seed": 1, "stop_token_ids": ()}
CALLS = {
    "logits": lambda m, things: m.logits(PROMPT).tobytes(),
    "states": lambda m, things: m.states(PROMPT).tobytes(),
    "generate": lambda m, things: m.generate(PROMPT, 20, **KEPT),
    "generate_with_pool": lambda m, things: m.generate_with_pool(
        things["pool"], PROMPT, 20, **KEPT
    ),
    "generate_from_prefix_cache": lambda m, things: m.generate_from_prefix_cache(
        things["cache"], PROMPT[20:], 20, **KEPT
    ),
    "generate_stream": lambda m, things: list(m.generate_stream(PROMPT, 20, **KEPT)),
    "build_prefix_cache": lambda m, things: m.build_prefix_cache(PROMPT).bytes(),
    "register_prefix": lambda m, things: m.register_prefix(tl.PrefixPool(), PROMPT),
    "decode_with_kv_cache_capture": lambda m, things: m.decode_with_kv_cache_capture(
        things["kv"].clone(), PROMPT
    ).tobytes(),
    "RuntimeKVCache": lambda m, things: tl.RuntimeKVCache(m).length(),
    "counters": lambda m, things: sorted(m.counters()),
    "blob": lambda m, things: m.blob("end_ids"),
    "info": lambda m, things: m.info["vocab_size"],
}


def make_things(model):
    pool, kv = tl.PrefixPool(), tl.RuntimeKVCache(model)
    model.register_prefix(pool, PROMPT[:20])
    tl.decode_with_kv_cache_capture(kv, PROMPT[:5])
    return {"pool": pool, "cache": model.build_prefix_cache(PROMPT[:20]), "kv": kv}


def call_until_closed(call, model, things, results, errors):
    try:
        while True:
            results.append(call(model, things))
    except tl.Error as error:
        errors.append(str(error))


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02])
@pytest.mark.parametrize("name", CALLS)
def test_close_during_calls_of_every_kind(tiny_path, name, delay):
    """Those under way end with the right result, the next ones raise; four threads close."""
    model = tl.Model(tiny_path, max_seq_len=256, threads=2)
    things = make_things(model)
    expected, results, errors = CALLS[name](model, things), [], []
    callers = []
    for _ in range(4):
        own = things | {"kv": things["kv"].clone()}
        arguments = (CALLS[name], model, own, results, errors)
        callers.append(threading.Thread(target=call_until_closed, args=arguments))
    start_all(callers)
    time.sleep(delay)
    closers = start_all([threading.Thread(target=model.close) for _ in range(4)])
    join_all(callers + closers)
    model.close()
    assert model.closed
    assert all(result == expected for result in results)
    assert errors == [f"tinyloop.Model is closed; cannot call {name}"] * 4


def test_a_pool_goes_on_without_the_model_that_filled_it(tiny_path):
    """Entries of a closed model match nothing, and leave in their turn."""
    pool = tl.PrefixPool(3)
    for length in (10, 20, 30):
        with tl.Model(tiny_path, max_seq_len=256, threads=1) as model:
            model.register_prefix(pool, PROMPT[:length])
    assert (pool.size(), pool.total_cached_tokens()) == (3, 60)
    with tl.Model(tiny_path, max_seq_len=256, threads=1) as model:
        _, done = work(model, lambda: model.generate_with_pool(pool, PROMPT, 1))
        assert done == {"pool_miss": 1, "tokens_prefilled": 60}
        for length in (40, 50, 60):
            model.register_prefix(pool, PROMPT[:length])
        assert (pool.size(), pool.total_cached_tokens()) == (3, 150)
        _, done = work(model, lambda: model.generate_with_pool(pool, PROMPT, 1))
        assert done == {"pool_full": 1}


@pytest.mark.parametrize("through", ["model", "pool", "kv"])
def test_cycles_through_every_type_that_can_have_them(tiny_path, through):
    """Subclasses have a dict, and a KV cache knows its model: both can close a circle."""
    subclass = {
        "model": type("OwnModel", (tl.Model,), {}),
        "pool": type("OwnPool", (tl.PrefixPool,), {}),
        "kv": type("OwnKVCache", (tl.RuntimeKVCache,), {}),
    }
    model = subclass["model"](tiny_path, max_seq_len=256, threads=1)
    things = {"model": model, "pool": subclass["pool"](), "kv": subclass["kv"](model)}
    model.register_prefix(things["pool"], PROMPT)
    stream = model.generate_stream(PROMPT, 5, pool=things["pool"])
    next(stream)
    things[through].all = [*things.values(), stream, model.build_prefix_cache(PROMPT)]
    gone = [weakref.ref(thing) for thing in things[through].all]
    del model, stream, things
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5


# ---- forks and exits, with threads inside calls ----

BUSY = """
    import os, sys, threading, time, warnings
    import tinyloop_py as tl
    warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons', of forks with threads
    prompt = [(7 * i + i * i) % 53 for i in range(60)]
    model = tl.Model(sys.argv[1], max_seq_len=256, threads=2)
    pool = tl.PrefixPool(2) if sys.argv[2] == "pool" else None
    n_calls = [0] * 4

    def busy(index):
        kv = tl.RuntimeKVCache(model)
        while True:
            if pool is not None:
                model.register_prefix(pool, prompt[: 1 + n_calls[index] % 60])
            model.generate(prompt, 3, pool=pool)
            next(model.generate_stream(prompt, 3, pool=pool))
            model.logits(prompt)
            model.build_prefix_cache(prompt)
            tl.decode_with_kv_cache_capture(kv.clone(), prompt)
            n_calls[index] += 1

    for i in range(4):
        threading.Thread(target=busy, args=(i,), daemon=True).start()
    while min(n_calls) == 0:
        time.sleep(0.001)
"""


@pytest.mark.parametrize("pool", ["pool", "no pool"])
def test_fork_while_other_threads_are_inside_calls(tiny_path, pool):
    """Each child computes, registers and leaves; the parent goes on."""
    code = (
        BUSY
        + """
    def compute():
        tokens = model.generate(prompt, 20, seed=1, pool=pool, stop_token_ids=())
        if pool is not None:
            assert model.register_prefix(pool, prompt[:50]) == 50
            assert model.generate_with_pool(pool, prompt, 20, seed=1, stop_token_ids=()) == tokens
            assert 0 < pool.size() <= 2
        return tokens

    expected = compute()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            os._exit(0 if compute() == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = list(n_calls)
    while any(now == then for now, then in zip(n_calls, before)):
        time.sleep(0.001)
    print(compute() == expected, flush=True)
    os._exit(0)
    """
    )
    result = run_python(code, tiny_path, pool)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("pool", ["pool", "no pool"])
@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("sys.exit(3)", 3), ("model.close()", 0), ("del model", 0)]
)
def test_exit_with_threads_inside_calls(tiny_path, pool, ending, code):
    """Daemon threads are anywhere in the library when the interpreter goes."""
    quiet = """
    threading.excepthook = lambda arguments: None  # calls of a closed model raise
    """
    for _ in range(3):
        result = run_python(BUSY + quiet + f"\n    {ending}\n", tiny_path, pool, timeout=60)
        assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_exit_by_an_exception_with_streams_open(tiny_path):
    code = (
        BUSY
        + """
    streams = [model.generate_stream(prompt, 50, pool=pool) for _ in range(5)]
    kept = [next(stream) for stream in streams]
    raise SystemExit("the program's own last words")
    """
    )
    result = run_python(code, tiny_path, "pool", timeout=60)
    assert (result.returncode, result.stderr) == (1, "the program's own last words\n")

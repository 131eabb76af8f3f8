"""Objects in every order of release, threads inside calls, forks, exits, and no memory."""

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest

import tinyloop_py as tl

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def run_python(code, *arguments, timeout=120):
    """Runs the code in a fresh interpreter, as a program of its own would."""
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def make_all(path):
    model = tl.Model(path, max_seq_len=256)
    pool = tl.PrefixPool()
    model.register_prefix(pool, PROMPT)
    cache = model.build_prefix_cache(PROMPT)
    kv = tl.RuntimeKVCache(model)
    tl.decode_with_kv_cache_capture(kv, PROMPT)
    stream = model.generate_stream(PROMPT, 5, pool=pool)
    next(stream)
    return {"model": model, "pool": pool, "cache": cache, "kv": kv, "stream": stream}


@pytest.mark.parametrize("close", [False, True], ids=["left open", "closed"])
def test_objects_go_in_every_order(tiny_path, close):
    """Each is gone as soon as nobody refers to it; only the KV cache refers to its model."""
    for order in itertools.permutations(["model", "pool", "cache", "kv", "stream"]):
        things = make_all(tiny_path)
        if close:
            things["model"].close()
        for name in order:
            gone = weakref.ref(things.pop(name))
            assert gone() is None or (name == "model" and "kv" in things), order


def test_a_model_dropped_without_close(tiny_path):
    things = make_all(tiny_path)
    model = things.pop("model")
    expected = model.generate(PROMPT, 5, seed=1)
    del model
    gc.collect()
    assert len(list(things["stream"])) <= 4
    assert things["cache"].length() == 8
    with tl.Model(tiny_path, max_seq_len=256) as again:
        assert again.generate(PROMPT, 5, seed=1) == expected
        with pytest.raises(ValueError, match="another model"):
            again.generate_from_prefix_cache(things["cache"])


def test_reference_cycles_are_collected(tiny_path):
    class Holder:
        pass

    holder = Holder()
    holder.things = make_all(tiny_path)
    holder.things["holder"] = holder
    gone = [weakref.ref(value) for value in holder.things.values()]
    del holder
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_pickling_and_copying_are_refused(tiny):
    import copy
    import pickle

    for thing in (tiny, tl.PrefixPool(), tl.RuntimeKVCache(tiny)):
        with pytest.raises(TypeError):
            pickle.dumps(thing)
        with pytest.raises(TypeError):
            copy.copy(thing)


def test_close_during_calls(tiny_path):
    """Calls under way end with the right result, later ones raise; nothing crashes."""
    with tl.Model(tiny_path, max_seq_len=256) as reference:
        expected = reference.generate(PROMPT, 100, seed=1, stop_token_ids=())
    for delay in (0.0, 0.001, 0.01):
        model = tl.Model(tiny_path, max_seq_len=256)
        results, errors = [], []

        def call(model=model, results=results, errors=errors):
            try:
                results.append(model.generate(PROMPT, 100, seed=1, stop_token_ids=()))
            except tl.Error as closed:
                errors.append(str(closed))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(delay)
        model.close()
        for thread in threads:
            thread.join()
        assert len(results) + len(errors) == 4
        assert all(result == expected for result in results)
        assert set(errors) <= {"tinyloop.Model is closed; cannot call generate"}


def test_one_thread_at_a_time_for_a_stream(tiny):
    """Two threads on one stream: each token comes once, in order, or the call says why not."""
    expected = tiny.generate(PROMPT, 60, seed=2, stop_token_ids=())[len(PROMPT) :]
    stream = tiny.generate_stream(PROMPT, 60, seed=2, stop_token_ids=())
    seen, refused = [], []

    def drain():
        while True:
            try:
                seen.append(next(stream))
            except StopIteration:
                return
            except tl.Error as error:
                refused.append(str(error))

    threads = [threading.Thread(target=drain) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(expected)
    assert set(refused) <= {"the stream is in use on another thread"}


@pytest.mark.parametrize("with_pool", [False, True])
def test_fork(tiny_path, with_pool):
    """The child of a fork computes the same; the parent goes on."""
    code = """
        import os, sys, tinyloop_py as tl
        model = tl.Model(sys.argv[1], max_seq_len=256, threads=2)
        pool = tl.PrefixPool() if sys.argv[2] == "True" else None
        prompt = [3, 1, 4, 1, 5]
        if pool is not None:
            model.register_prefix(pool, prompt[:3])
        expected = model.generate(prompt, 20, seed=1, pool=pool)
        child = os.fork()
        same = model.generate(prompt, 20, seed=1, pool=pool) == expected
        if child == 0:
            os._exit(0 if same else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(same, status)
    """
    result = run_python(code, tiny_path, with_pool)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True 0\n", "")


def test_interpreter_exit_with_live_objects(tiny_path):
    code = """
        import sys, threading, tinyloop_py as tl
        model = tl.Model(sys.argv[1], max_seq_len=256)
        pool = tl.PrefixPool()
        model.register_prefix(pool, [1, 2])
        cache = model.build_prefix_cache([1, 2])
        kv = tl.RuntimeKVCache(model)
        stream = model.generate_stream([1, 2, 3], 50, pool=pool)
        next(stream)
        everything = [model, pool, cache, kv, stream]
        everything.append(everything)
        def forever():
            while True:
                model.generate([1, 2, 3], 50, pool=pool)
        threading.Thread(target=forever, daemon=True).start()
    """
    result = run_python(code, tiny_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_tokens_that_change_during_the_call(tiny):
    """What another thread writes into the array meanwhile has no effect."""
    tokens = np.full(250, 3, np.int32)
    expected = tiny.logits(tokens)
    stop = threading.Event()

    def spoil():
        while not stop.is_set():
            tokens[:] = 2**30
            tokens[:] = 3

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        results = []
        for _ in range(20):
            with contextlib.suppress(ValueError):  # it was copied at a bad moment
                results.append(tiny.logits(tokens))
    finally:
        stop.set()
        thread.join()
    assert all(np.array_equal(result, expected) for result in results)


def test_output_that_finds_no_memory(tiny_path):
    code = """
        import pathlib, resource, sys, tinyloop_py as tl
        model = tl.Model(sys.argv[1], max_seq_len=512, threads=1)
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
        try:
            model.states([1] * 500, loops=1000)
        except MemoryError as error:
            print(isinstance(error, tl.Error), "out of memory" in str(error))
    """
    result = run_python(code, tiny_path)
    assert (result.stdout, result.stderr) == ("True True\n", "")


def test_out_of_memory(tiny_path):
    """With an address space that cannot hold the KV: MemoryError, and everything goes on."""
    code = """
        import resource, sys, warnings, tinyloop_py as tl
        warnings.simplefilter("ignore")  # of loops and positions beyond the trained ones
        model = tl.Model(sys.argv[1], max_seq_len=4000, threads=1)
        pool = tl.PrefixPool()
        short = model.register_prefix(pool, [1, 2, 3])
        model.generate([1], 4, loops=2)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        for call in (
            lambda: model.register_prefix(pool, [1] * 4000, loops=1024),
            lambda: model.build_prefix_cache([1] * 4000, loops=1024),
            lambda: model.generate([1] * 4000, 0) and model.generate([1] * 3999, 1, loops=1024),
        ):
            try:
                call()
            except MemoryError as error:
                print(isinstance(error, tl.Error), "out of memory" in str(error))
        print(pool.size(), pool.total_cached_tokens())
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(len(model.generate_with_pool(pool, [1, 2, 3, 4], 5, stop_token_ids=())))
    """
    result = run_python(code, tiny_path)
    assert result.stderr == ""
    assert result.stdout == "True True\n" * 3 + "1 3\n9\n"


def test_memory_is_flat(tiny):
    """Registering, evicting, generating and dropping streams half-way keeps nothing."""
    pool = tl.PrefixPool(2)

    def cycle(i):
        tiny.register_prefix(pool, [i % 53, (i // 53) % 53, 1, 2])
        tiny.generate_with_pool(pool, [i % 53, 7, 8], 2)
        stream = tiny.generate_stream([1, 2, 3], 9)
        next(stream)

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    for i in range(200):
        cycle(i)
    before = resident()
    for i in range(400):
        cycle(i)
    assert resident() - before < 4 << 20

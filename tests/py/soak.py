"""Long runs in which memory must stay flat and no output may change.

    python tests/py/soak.py --register 10000 --generate 3000 --seconds 60

Each part prints one line: what it did, how long it took, and the resident memory after a first
tenth and at the end. Exact byte counts are the business of tests/c/test_pool_tables.c. The tests
run the same functions with small counts.
"""

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiny_models
from conftest import work
from pool_model import PoolModel

import tinyloop_py as tl

MB = 1 << 20
MAX_GROWTH = 4 * MB
MAX_GROWTH_THREADS = 16 * MB  # the C library's heaps of eight threads fill up at their own times
N_THREADS = 8


def resident():
    """Bytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


class Watch:
    """Time and memory of one part; its memory counts from the first tenth on."""

    def __init__(self, name, limit):
        self.name, self.limit = name, limit
        self.began, self.warm = time.monotonic(), None

    def warmed_up(self):
        gc.collect()
        self.warm = resident()

    def finish(self, what):
        """Returns the summary line; AssertionError if memory grew beyond the limit."""
        gc.collect()
        now, seconds = resident(), time.monotonic() - self.began
        line = (
            f"{self.name}: {what}, {seconds:.1f} s, RSS {self.warm / MB:.1f} -> {now / MB:.1f} MB"
        )
        assert now - self.warm < self.limit, f"{line}: grew by more than {self.limit / MB:.0f} MB"
        return line


# ---- one thread ----


def register_and_evict(model, n):
    """n registrations of random texts, most of which evict; against the plain-Python pool."""
    rng = np.random.default_rng(1)
    pool, expected = tl.PrefixPool(8), PoolModel(8)
    watch = Watch("register", MAX_GROWTH)
    for i in range(n):
        if i == n // 10:
            watch.warmed_up()
        tokens = rng.integers(0, 53, int(rng.integers(1, 200))).tolist()
        loops, window = int(rng.integers(1, 5)), int(rng.choice([0, 40]))
        assert model.register_prefix(pool, tokens, loops, window) == len(tokens)
        expected.register("model", tokens, loops, window)
        if expected.size() == 8 and rng.random() < 0.05:
            # long entries would stay for ever, and then every newcomer but one would be short
            pool, expected = tl.PrefixPool(8), PoolModel(8)
        assert pool.size() == expected.size()
        assert pool.total_cached_tokens() == expected.total_cached_tokens()
    return watch.finish(f"{n} registrations")


def generate_from_pool(model, n):
    """n generations with random suffixes; each 100th is compared with a plain one."""
    rng = np.random.default_rng(2)
    pool = tl.PrefixPool(8)
    heads = [rng.integers(0, 53, length).tolist() for length in (1, 16, 31, 32, 33, 64, 90, 120)]
    for head in heads:
        model.register_prefix(pool, head)
    n_bytes = [model.build_prefix_cache(head).bytes() for head in heads]
    watch, n_compared = Watch("generate", MAX_GROWTH), 0
    for i in range(n):
        if i == n // 10:
            watch.warmed_up()
        head = heads[int(rng.integers(8))]
        prompt = head + rng.integers(0, 53, int(rng.integers(0, 60))).tolist()
        arguments = {"max_tokens": int(rng.integers(1, 60)), "seed": i, "stop_token_ids": ()}
        got, done = work(
            model, lambda p=prompt, a=arguments: model.generate_with_pool(pool, p, **a)
        )
        assert "pool_miss" not in done
        assert "pool_fallback" not in done
        if i % 100 == 0:
            assert got == model.generate(prompt, **arguments)
            n_compared += 1
    assert n_bytes == [model.build_prefix_cache(head).bytes() for head in heads]
    return watch.finish(f"{n} generations, {n_compared} of them compared")


# ---- eight threads ----


@dataclass
class Canary:
    """A prompt that belongs to one thread, and what must come of it."""

    prompt: list[int]
    options: dict
    expected: list[int]


def make_canaries(model, thread):
    """Texts of one thread: after a head that all threads share, only ids of its own."""
    rng = np.random.default_rng(100 + thread)
    head = np.random.default_rng(99).integers(0, 53, 40).tolist()
    canaries = []
    for i in range(6):
        own = rng.integers(6 * thread, 6 * thread + 6, 10 + 9 * i).tolist()
        prompt = (head[: 8 * i] if i % 2 else []) + own
        options = {
            "max_tokens": 12,
            "loops": 1 + i % 4,
            "cache_window": [0, 0, 9, 40][i % 4],
            "temperature": 0.0 if i == 0 else 1.3,
            "seed": 10 * thread + i,
            "stop_token_ids": (),
        }
        canaries.append(Canary(prompt, options, model.generate(prompt, **options)))
    return canaries


class Worker(threading.Thread):
    """Calls of every kind, one after the other, until the time is up or something is wrong."""

    def __init__(self, path, model, pool, index, deadline):
        super().__init__()
        self.path, self.model, self.pool, self.deadline = path, model, pool, deadline
        self.canaries = make_canaries(model, index)
        self.rng = np.random.default_rng(index)
        self.n_calls, self.n_requests, self.error = Counter(), 0, None

    def run(self):
        calls = [
            *[self.register, self.generate, self.stream, self.drop_stream, self.statistics] * 4,
            *[self.own_pool, self.own_caches] * 2,
            self.own_model,
        ]
        try:
            while time.monotonic() < self.deadline:
                call = calls[int(self.rng.integers(len(calls)))]
                call(self.canaries[int(self.rng.integers(len(self.canaries)))])
                self.n_calls[call.__name__] += 1
        except Exception as error:  # the main thread raises it
            self.error = error

    def cut(self, canary):
        return int(self.rng.integers(1, len(canary.prompt) + 1))

    def enter(self, model, pool, canary):
        n, options = self.cut(canary), canary.options
        key = (options["loops"], options["cache_window"])
        assert model.register_prefix(pool, canary.prompt[:n], *key) == n

    def check(self, canary, got):
        assert got == canary.expected, f"{self.name}: {got} instead of {canary.expected}"

    def register(self, canary):
        self.enter(self.model, self.pool, canary)

    def generate(self, canary):
        self.n_requests += 1
        got = self.model.generate_with_pool(self.pool, canary.prompt, **canary.options)
        self.check(canary, got)

    def stream(self, canary):
        self.n_requests += 1
        stream = self.model.generate_stream(canary.prompt, pool=self.pool, **canary.options)
        self.check(canary, canary.prompt + list(stream))

    def drop_stream(self, canary):
        self.n_requests += 1
        stream = self.model.generate_stream(canary.prompt, pool=self.pool, **canary.options)
        n = int(self.rng.integers(1, 12))
        got = canary.prompt + [next(stream) for _ in range(n)]
        assert got == canary.expected[: len(got)]
        if n % 2:
            stream.close()

    def statistics(self, canary):
        assert 0 <= self.pool.size() <= 6
        assert 0 <= self.pool.total_cached_tokens() <= 6 * 100
        assert "cached tokens" in repr(self.pool)
        assert self.model.counters()["pool_fallback"] == 0
        assert self.model.info["threads"] == 2
        assert "parameters" in repr(self.model)

    def own_pool(self, canary):
        pool = tl.PrefixPool(2)
        for _ in range(3):
            self.enter(self.model, pool, canary)
            self.n_requests += 1
            got = self.model.generate_with_pool(pool, canary.prompt, **canary.options)
            self.check(canary, got)

    def own_caches(self, canary):
        n = self.cut(canary)
        options = dict(canary.options)
        key = (options.pop("loops"), options.pop("cache_window"))
        cache = self.model.build_prefix_cache(canary.prompt[:n], *key)
        got = self.model.generate_from_prefix_cache(cache, canary.prompt[n:], **options)
        self.check(canary, got)
        kv = tl.RuntimeKVCache(self.model, *key)
        tl.decode_with_kv_cache_capture(kv, canary.prompt[:n])
        clone = kv.clone()
        one = tl.decode_with_kv_cache_capture(clone, canary.prompt)
        two = tl.decode_with_kv_cache_capture(kv, canary.prompt)
        assert np.array_equal(one, two)

    def own_model(self, canary):
        """Another model of the same file, in the shared pool, closed half-way."""
        with tl.Model(self.path, max_seq_len=256, threads=1) as model:
            self.enter(model, self.pool, canary)
            got = model.generate_with_pool(self.pool, canary.prompt, **canary.options)
            self.check(canary, got)
            stream = model.generate_stream(canary.prompt, pool=self.pool, **canary.options)
            assert next(stream) == canary.expected[len(canary.prompt)]
        with contextlib.suppress(tl.Error):
            next(stream)
            raise AssertionError("a stream went on after its model was closed")


def share_with_threads(path, model, seconds):
    """Eight threads with canaries on one model and one pool; returns (line, calls by name)."""
    pool = tl.PrefixPool(6)
    before, began = model.counters(), time.monotonic()
    watch = Watch("threads", MAX_GROWTH_THREADS)
    workers = [Worker(path, model, pool, i, began + seconds) for i in range(N_THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # threads meet in the midst of things
    try:
        for worker in workers:
            worker.start()
        time.sleep(seconds / 10)
        watch.warmed_up()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    done = {name: count - before[name] for name, count in model.counters().items()}
    outcomes = done["pool_full"] + done["pool_partial"] + done["pool_miss"]
    assert outcomes == sum(worker.n_requests for worker in workers)
    assert done["pool_fallback"] == 0
    n_calls = sum((worker.n_calls for worker in workers), Counter())
    return watch.finish(f"{n_calls.total()} calls on {N_THREADS} threads"), n_calls


# ---- the program ----


def main():
    parser = argparse.ArgumentParser(description="Long runs with flat memory.")
    parser.add_argument("--register", type=int, default=10_000, help="registrations")
    parser.add_argument("--generate", type=int, default=3_000, help="generations from a pool")
    parser.add_argument("--seconds", type=float, default=60, help="of eight threads")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.make(Path(folder), seed=7)
        with tl.Model(path, max_seq_len=256, threads=2) as model:
            if wanted.register:
                print(register_and_evict(model, wanted.register), flush=True)
            if wanted.generate:
                print(generate_from_pool(model, wanted.generate), flush=True)
            if wanted.seconds:
                line, n_calls = share_with_threads(path, model, wanted.seconds)
                print(line, dict(n_calls), flush=True)


if __name__ == "__main__":
    main()

"""The rows of the benchmark, each a comparison of tinyloop with its peers and with the limit."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from limits import Limits
from measure import Clock, import_seconds, repeated, timed
from models import BenchModel
from peers import LlamaPeer, Peers, TorchPeer

import tinyloop_py as tl

PREFIXES = (256, 1024, 1900)
CONTEXTS = (128, 1024)
SUFFIX = 16
PREFILL = 512
CLONED = 2000
GREEDY = {"temperature": 0.0, "stop_token_ids": ()}


@dataclass
class Row:
    """`ours`, `peers` and `limit` in `unit`; `threads` 0 where they make no difference."""

    name: str
    model: str
    threads: int
    ours: float
    peers: dict[str, float] = field(default_factory=dict)
    limit: float | None = None
    unit: str = "s"
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def random_tokens(n: int, seed: int) -> np.ndarray:
    """Token ids that both models know and that end nothing."""
    return np.random.default_rng(seed).integers(5, 8192, n).astype(np.int32)


class Rows:
    """Measures one model at one number of threads."""

    def __init__(
        self, bench: BenchModel, model: tl.Model, peers: Peers, limits: Limits, clock: Clock
    ):
        self.name, self.model, self.peers, self.limits = bench.name, model, peers, limits
        self.clock = clock
        self.tokens = random_tokens(2048, 0)
        for peer in peers:
            peer.set_threads(limits.rates.threads)

    def row(self, name: str, times: dict[str, float], limit: float | None, note: str = "") -> Row:
        """A row of the times by program; "ours" is tinyloop's."""
        peers = {key: value for key, value in times.items() if key != "ours"}
        return Row(
            name, self.name, self.limits.rates.threads, times["ours"], peers, limit, note=note
        )

    def runs_of_peers(self, start: int, end: int) -> dict[str, Any]:
        """Of each peer, a call that times the tokens start .. end over what it has below."""
        part = self.tokens[start:end]
        return {peer.name: timed(lambda peer=peer: peer.run(part, start)) for peer in self.peers}

    def prefill(self) -> Row:
        """From PREFILL tokens to the logits of the next one."""
        prompt = self.tokens[:PREFILL]
        ours = timed(lambda: self.model.generate(prompt, 1, **GREEDY))
        times = self.clock.medians({"ours": ours} | self.runs_of_peers(0, PREFILL))
        rate = PREFILL / times["ours"]
        limit = self.limits.run(PREFILL)
        return self.row(f"prefill {PREFILL} tokens", times, limit, f"{rate:,.0f} tokens/s")

    def decode(self, context: int, steps: int = 12, warm_up: int = 4) -> Row:
        """A decode step after `context` tokens."""
        prefix = self.tokens[:context]
        pool = tl.PrefixPool()
        self.model.register_prefix(pool, prefix)

        def ours() -> float:
            stream = self.model.generate_stream(prefix, steps + warm_up + 1, **GREEDY, pool=pool)
            next(stream)
            return repeated(lambda _: next(stream), steps, warm_up)()

        def theirs(peer: TorchPeer | LlamaPeer) -> Any:
            def step(i: int) -> None:
                peer.run(self.tokens[context + i : context + i + 1], context + i).argmax()

            return repeated(step, steps, warm_up)

        for peer in self.peers:
            peer.run(prefix, 0)
        times = self.clock.medians(
            {"ours": ours} | {peer.name: theirs(peer) for peer in self.peers}
        )
        note = f"{1 / times['ours']:,.0f} tokens/s"
        spilled = self.limits.decode(context, spill=True) / times["ours"]
        note += f"; {spilled:.0%} with all but the core from DRAM"
        limit = self.limits.decode(context)
        return self.row(f"decode step, context {context:,}", times, limit, note)

    def first_tokens(self, length: int, step: float) -> Iterator[Row]:
        """Miss, full hit and partial hit of a prefix; `step`: seconds of a decode step."""
        pool = tl.PrefixPool()
        prefix, prompt = self.tokens[:length], self.tokens[: length + SUFFIX]
        self.model.register_prefix(pool, prefix)
        what = f"first token, prefix {length:,}: "

        def with_pool(prompt: np.ndarray, runs: int) -> Any:
            return repeated(lambda _: self.model.generate(prompt, 1, **GREEDY, pool=pool), runs, 1)

        miss = timed(lambda: self.model.generate(prefix, 1, **GREEDY))
        miss_times = self.clock.medians({"ours": miss} | self.runs_of_peers(0, length))
        yield self.row(what + "miss", miss_times, self.limits.run(length))

        partial = with_pool(prompt, 3)
        times = self.clock.medians({"ours": partial} | self.runs_of_peers(length, length + SUFFIX))
        note = f"{miss_times['ours'] / times['ours']:.1f}x faster than the miss"
        limit = self.limits.run(SUFFIX, length)
        yield self.row(what + f"partial hit + {SUFFIX}", times, limit, note)

        full = with_pool(prefix, 9)
        times = self.clock.medians({"ours": full} | self.runs_of_peers(length - 1, length))
        note = f"{times['ours'] / step:.2f} decode steps"
        yield self.row(what + "full hit", times, self.limits.head(), note)

    def clone(self) -> Row:
        """Making and dropping a clone of CLONED tokens' KV."""
        kv = tl.RuntimeKVCache(self.model)
        tl.decode_with_kv_cache_capture(kv, self.tokens[:CLONED])
        times = {"ours": self.clock.median(repeated(lambda _: kv.clone(), 500, 50))}
        return self.row(f"clone of {CLONED:,} tokens", times, None)

    def all(self) -> Iterator[Row]:
        """Every row that depends on the number of threads."""
        yield self.prefill()
        steps = [self.decode(context) for context in CONTEXTS]
        yield from steps
        if self.name == "refdesk":
            for length in PREFIXES:
                yield from self.first_tokens(length, steps[0].ours)
            yield self.clone()

    def rag_calls(
        self, document: np.ndarray, question: np.ndarray, pool: tl.PrefixPool, cache: tl.PrefixCache
    ) -> dict[str, Any]:
        """The same request in three ways."""
        prompt, model = np.concatenate([document, question]), self.model
        return {
            "with the pool": lambda: model.generate(prompt, 64, **GREEDY, pool=pool),
            "bare prefix caches": lambda: model.generate_from_prefix_cache(
                cache, question, 64, **GREEDY
            ),
            "without": lambda: model.generate(prompt, 64, **GREEDY),
        }

    def rag(self, requests: int) -> Iterator[Row]:
        """Documents of 1,000 tokens asked for by Zipf's law; 100-token questions, 64 out."""
        documents = [random_tokens(1000, 100 + i) for i in range(64)]
        weights = 1 / np.arange(1, len(documents) + 1)
        random = np.random.default_rng(1)
        chosen = random.choice(len(documents), requests, p=weights / weights.sum())
        pool = tl.PrefixPool(len(documents))
        begin = time.perf_counter()
        for document in documents:
            self.model.register_prefix(pool, document)
        registering = (time.perf_counter() - begin) / len(documents)
        caches = {int(i): self.model.build_prefix_cache(documents[i]) for i in set(chosen)}

        sums = {"with the pool": 0.0, "bare prefix caches": 0.0, "without": 0.0}
        for i, document in enumerate(map(int, chosen)):
            question = random_tokens(100, 1000 + i)
            calls = self.rag_calls(documents[document], question, pool, caches[document])
            for name, call in calls.items():
                sums[name] += timed(call)()
        ours = sums["with the pool"]
        notes = {
            "with the pool": f"{sums['without'] / ours:.2f}x the throughput without; "
            f"registering took {registering * 1e3:,.0f} ms a document",
            "bare prefix caches": f"the pool has {sums['bare prefix caches'] / ours:.3f}x this",
            "without": f"{requests} requests, 64 documents",
        }
        for name, seconds in sums.items():
            times = {"ours": seconds / requests}
            yield self.row(f"RAG-like request, {name}", times, None, notes[name])


def fixed_rows(bench: BenchModel, peers: Peers, limits: Limits, clock: Clock) -> Iterator[Row]:
    """Rows of a model that the number of threads hardly changes: memory and loading."""
    name, path = bench.name, bench.path
    with tl.Model(path) as model:
        info = model.info
        ours = info["kv_bytes_fixed"] + info["loops_default"] * info["kv_bytes_loop"]
        block = info["kv_block_size"]
    theirs = {
        peer.name: limits.kv_token * (2 if peer.name == "torch float32" else 1) for peer in peers
    }
    note = f"in blocks of {block} tokens"
    yield Row("KV bytes per token", name, 0, ours, theirs, limits.kv_token, "B", note)

    first: list[float] = []

    def load() -> float:
        begin = time.perf_counter()
        with tl.Model(path) as model:
            loaded = time.perf_counter()
            model.generate(random_tokens(16, 3), 1, **GREEDY)
            first.append(time.perf_counter() - loaded)
        return loaded - begin

    calls = {"ours": load}
    if bench.gguf is not None and any(isinstance(peer, LlamaPeer) for peer in peers):
        calls["llama.cpp"] = lambda: load_llama(bench)
    times = clock.medians(calls)
    yield Row("load a model", name, 0, times.pop("ours"), times, limits.load())
    yield Row(
        "first token after load, 16 tokens", name, 0, statistics.median(first), {}, limits.run(16)
    )


def load_llama(bench: BenchModel) -> float:
    """Seconds in which llama.cpp has a model and a context."""
    begin = time.perf_counter()
    peer = LlamaPeer(bench)
    seconds = time.perf_counter() - begin
    peer.close()
    return seconds


def import_row(clock: Clock, peer_modules: dict[str, str]) -> Row:
    """Importing tinyloop_py; `peer_modules`: name -> module of the installed peers."""
    calls = {"ours": import_seconds("tinyloop_py")}
    calls |= {name: import_seconds(module) for name, module in peer_modules.items()}
    times = clock.medians(calls)
    return Row("import beyond NumPy's own", "", 0, times.pop("ours"), times)

"""What the machine can do at most, measured, and the times that follow from it for each row.

docs/performance.md explains the formulas. All times are in seconds, all sizes in bytes.
"""

import ctypes
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from models import BenchModel

DRAM_BLOCK = 1 << 30
_GRAIN = 1024  # bytes that one step of probe_read takes


class Probe:
    """The functions of probe.c, built for this processor into the folder."""

    def __init__(self, folder: Path):
        library = folder / "probe.so"
        source = Path(__file__).with_name("probe.c")
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, "-O3", "-march=native", "-fPIC", "-shared", source, "-o", library],
            check=True,
        )
        functions = ctypes.CDLL(str(library))
        self._read, self._fma, self._bf16 = (
            functions.probe_read,
            functions.probe_fma,
            functions.probe_bf16,
        )
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
        for function in (self._fma, self._bf16):
            function.argtypes = (ctypes.c_size_t,)
            function.restype = ctypes.c_float

    def read_rate(self, size: int, threads: int) -> float:
        """Bytes a second of reading a block again and again, each thread its own share."""
        share = size // threads // _GRAIN * _GRAIN
        passes = max(1, (1 << 30) // (share * threads))
        with mmap.mmap(-1, share * threads) as block:
            block.madvise(mmap.MADV_HUGEPAGE)
            array = np.frombuffer(block, np.uint64)
            array[:] = np.arange(len(array), dtype=np.uint64)
            address = array.ctypes.data
            del array
            seconds = _fastest(
                lambda thread: self._read(address + thread * share, share, passes), threads
            )
        return share * threads * passes / seconds

    def float32_rate(self, threads: int, steps: int = 3_000_000) -> float:
        """Floating-point operations a second of float32 multiply-adds."""
        return 512 * steps * threads / _fastest(lambda _: self._fma(steps), threads)

    def bfloat16_rate(self, threads: int, steps: int = 3_000_000) -> float | None:
        """The same of bfloat16 dot products, or None where the processor has none."""
        if self._bf16(0) < 0:
            return None
        return 1024 * steps * threads / _fastest(lambda _: self._bf16(steps), threads)


def _fastest(part: Callable[[int], object], threads: int, runs: int = 15) -> float:
    """Seconds of the fastest of `runs` runs of part(0) .. part(threads - 1) side by side."""

    def work(thread: int, start: threading.Barrier) -> None:
        start.wait()
        part(thread)

    best = float("inf")
    for _ in range(runs):
        start = threading.Barrier(threads + 1)
        workers = [threading.Thread(target=work, args=(i, start)) for i in range(threads)]
        for worker in workers:
            worker.start()
        start.wait()
        begin = time.perf_counter()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - begin)
    return best


@dataclass(frozen=True)
class Rates:
    """What `threads` threads reach: bytes and floating-point operations a second.

    `cache` is measured over a block as large as the core's weights, `dram` over DRAM_BLOCK.
    """

    threads: int
    cache: float
    dram: float
    float32: float
    bfloat16: float | None


def l3_size() -> int:
    """Bytes of the last-level cache, or 0 if the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return 0
    return int(text.removesuffix("K")) * 1024


class Limits:
    """Shortest times of one model at some number of threads."""

    def __init__(self, model: BenchModel, probe: Probe, threads: int):
        config = model.config
        matrix = {name: array.size for name, array in model.weights.items() if array.ndim == 2}
        core = [
            range(stage.first_layer, stage.first_layer + stage.n_layers)
            for stage in config.stages
            if stage.looped
        ]
        in_core = {f"layers.{n}." for layers in core for n in layers}
        core_size = sum(size for name, size in matrix.items() if name.startswith(tuple(in_core)))
        layers_size = sum(size for name, size in matrix.items() if name.startswith("layers."))
        self.loops = config.loops
        self.l3_bytes = l3_size()
        self.core_bytes = 2 * core_size
        self.head_bytes = 2 * config.vocab_size * config.hidden_size
        self.once_bytes = 2 * (layers_size - core_size)
        self.all_bytes = 2 * sum(matrix.values())
        self.visited = layers_size + (self.loops - 1) * core_size
        self.visits = sum(s.n_layers * (self.loops if s.looped else 1) for s in config.stages)
        self.q_width = config.n_heads * config.head_dim
        self.kv_token = self.visits * 2 * config.n_kv_heads * config.head_dim * 2
        self.rates = Rates(
            threads,
            probe.read_rate(self.core_bytes, threads),
            probe.read_rate(DRAM_BLOCK, threads),
            probe.float32_rate(threads),
            probe.bfloat16_rate(threads),
        )

    def decode(self, context: int, spill: bool | None = None) -> float:
        """Reading the core's weights once a loop, and the rest of the weights and the KV once.

        `spill`: the rest comes from DRAM; by default if all of it together is larger than L3.
        """
        rest = self.once_bytes + self.head_bytes + context * self.kv_token
        if spill is None:
            spill = self.core_bytes + rest > self.l3_bytes
        rate = self.rates.dram if spill else self.rates.cache
        return self.loops * self.core_bytes / self.rates.cache + rest / rate

    def run(self, n: int, start: int = 0) -> float:
        """Of n tokens after `start` others, and the last one's logits: operations, or weights."""
        attended = n * start + n * (n + 1) / 2
        operations = (
            2 * n * self.visited + 4 * self.visits * self.q_width * attended + self.head_bytes
        )
        return max(operations / self.rates.float32, self.decode(start))

    def head(self) -> float:
        """Reading the head's weights from cache."""
        return self.head_bytes / self.rates.cache

    def load(self) -> float:
        """All weights read and written once, at the rate of reading."""
        return 2 * self.all_bytes / self.rates.dram

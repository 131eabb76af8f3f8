"""Look-ups in pools of many entries, through the C interface.

Registering a key that is there already does nothing but check the ids and look them up, so that is
what is timed. The entries belong to a tiny model, which makes 100,000 of them cheap.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measure import Clock, repeated
from models import tiny
from rows import Row, random_tokens

import tinyloop_py as tl

PROMPT = 2000
N_PROMPTS = 16
SIZES = (16, 1_000, 100_000)
OTHER = 64  # tokens of an entry that is not looked up


class _PoolOptions(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("capacity", ctypes.c_int64))


class CPool:
    """A pool and a model of the C interface."""

    def __init__(self, model_path: Path, capacity: int):
        package = Path(tl.__file__).parent
        self.library = ctypes.CDLL(str(package / "lib/libtinyloop.so.0"))
        self.library.tl_last_error.restype = ctypes.c_char_p
        self.library.tl_prefix_pool_size.restype = ctypes.c_int64
        self.model, self.pool = ctypes.c_void_p(), ctypes.c_void_p()
        self._try("tl_model_load", ctypes.byref(self.model), str(model_path).encode(), None)
        options = _PoolOptions(ctypes.sizeof(_PoolOptions), capacity)
        self._try("tl_prefix_pool_create", ctypes.byref(self.pool), ctypes.byref(options))
        self._length = ctypes.c_int64()

    def _try(self, name: str, *arguments: object) -> None:
        if getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name}: {self.library.tl_last_error().decode()}")

    def registration(self, tokens: np.ndarray) -> tuple[object, ...]:
        """The arguments of tl_prefix_pool_register; `tokens` must outlive them."""
        pointer = ctypes.c_void_p(tokens.ctypes.data)
        length = ctypes.byref(self._length)
        return length, self.pool, self.model, pointer, ctypes.c_size_t(len(tokens)), None

    def register(self, tokens: np.ndarray) -> None:
        """Enters a prefix."""
        self._try("tl_prefix_pool_register", *self.registration(tokens))

    def size(self) -> int:
        """Number of entries."""
        return self.library.tl_prefix_pool_size(self.pool)

    def close(self) -> None:
        """Frees both."""
        self.library.tl_prefix_pool_release(self.pool)
        self.library.tl_model_release(self.model)


def look_up_seconds(pool: CPool, prompts: list[np.ndarray], clock: Clock) -> float:
    """Median seconds of a look-up; the prompts take turns."""
    size = pool.size()
    calls = [pool.registration(prompt) for prompt in prompts]
    register = pool.library.tl_prefix_pool_register
    seconds = clock.median(repeated(lambda i: register(*calls[i % len(calls)]), 2000, len(calls)))
    if pool.size() != size:
        raise RuntimeError("a look-up has changed the pool: its prompt was not there")
    return seconds


def lookup_rows(folder: Path, clock: Clock) -> Iterator[Row]:
    """A row for each size of the pool, and one where the entries branch off along the prompt."""
    path = folder / "tiny.tinyloop"
    tiny(path)
    prompts = [random_tokens(PROMPT, 10 + i) for i in range(N_PROMPTS)]
    pool = CPool(path, max(SIZES))
    for prompt in prompts:
        pool.register(prompt)
    random = np.random.default_rng(2)
    for size in SIZES:
        while pool.size() < size:
            pool.register(random.integers(5, 8192, OTHER).astype(np.int32))
        seconds = look_up_seconds(pool, prompts, clock)
        yield Row(f"look-up of {PROMPT:,} tokens in {size:,} entries", "tiny", 0, seconds)
    pool.close()

    pool = CPool(path, max(SIZES))
    for length in range(2, PROMPT, 2):
        branch = prompts[0][:length].copy()
        branch[-1] = (branch[-1] + 1) % 8192
        pool.register(branch)
    pool.register(prompts[0])
    seconds = look_up_seconds(pool, prompts[:1], clock)
    note = "every second token of the prompt is the end of another entry's common part"
    name = f"look-up of {PROMPT:,} tokens in {pool.size():,} entries that branch off"
    yield Row(name, "tiny", 0, seconds, note=note)
    pool.close()

from collections.abc import Sequence
from os import PathLike
from typing import (
    Any,
    Literal,
    Self,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    type_check_only,
)

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer, disjoint_base

from .arguments import MAX_INT64 as MAX_INT64

# One-dimensional integer ids. A string, a set or an array of floats is refused at run time.
_Tokens: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer] | Buffer

@type_check_only
class _ModelInfo(TypedDict):
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_seq_len: int
    max_positions: int
    loops_default: int
    loops_min: int
    loops_max: int
    loops_max_trained: int
    n_parameters: int
    weight_bytes: int
    kv_block_size: int
    kv_bytes_fixed: int
    kv_bytes_loop: int
    device: Literal["cpu", "cuda"]
    kv_mode: Literal["fp16", "fp32"]
    threads: int

@disjoint_base
class Model:
    def __new__(
        cls,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        max_seq_len: SupportsIndex = 2048,
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        kv_mode: Literal["fp16", "fp32"] | None = None,
        threads: SupportsIndex | None = None,
        init_scale: SupportsFloat | None = None,
        init_seed: SupportsIndex = 0,
        verify: bool = False,
    ) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def info(self) -> _ModelInfo: ...
    def blob(self, name: str) -> bytes | None: ...
    def counters(self) -> dict[str, int]: ...
    def logits(
        self, tokens: _Tokens, loops: SupportsIndex | None = None, cache_window: SupportsIndex = 0
    ) -> npt.NDArray[np.float32]: ...
    def states(
        self, tokens: _Tokens, loops: SupportsIndex | None = None
    ) -> npt.NDArray[np.float32]: ...
    def generate(
        self,
        prompt: _Tokens,
        max_tokens: SupportsIndex = 128,
        loops: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = 50,
        cache_window: SupportsIndex = 0,
        *,
        top_p: SupportsFloat = 1.0,
        min_p: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop_token_ids: _Tokens | None = None,
        pool: PrefixPool | None = None,
    ) -> list[int]: ...
    def generate_with_pool(
        self,
        pool: PrefixPool,
        prompt: _Tokens,
        max_tokens: SupportsIndex = 128,
        loops: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = 50,
        cache_window: SupportsIndex = 0,
        *,
        top_p: SupportsFloat = 1.0,
        min_p: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop_token_ids: _Tokens | None = None,
    ) -> list[int]: ...
    def generate_stream(
        self,
        prompt: _Tokens,
        max_tokens: SupportsIndex = 128,
        loops: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = 50,
        cache_window: SupportsIndex = 0,
        *,
        top_p: SupportsFloat = 1.0,
        min_p: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop_token_ids: _Tokens | None = None,
        pool: PrefixPool | None = None,
    ) -> TokenStream: ...
    def generate_from_prefix_cache(
        self,
        cache: PrefixCache,
        suffix: _Tokens | None = None,
        max_tokens: SupportsIndex = 128,
        loops: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = 50,
        cache_window: SupportsIndex | None = None,
        *,
        top_p: SupportsFloat = 1.0,
        min_p: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop_token_ids: _Tokens | None = None,
    ) -> list[int]: ...
    def build_prefix_cache(
        self, tokens: _Tokens, loops: SupportsIndex | None = None, cache_window: SupportsIndex = 0
    ) -> PrefixCache: ...
    def register_prefix(
        self,
        pool: PrefixPool | None,
        tokens: _Tokens,
        loops: SupportsIndex | None = None,
        cache_window: SupportsIndex = 0,
    ) -> int: ...
    def decode_with_kv_cache_capture(
        self, kv: RuntimeKVCache, tokens: _Tokens
    ) -> npt.NDArray[np.float32]: ...

@disjoint_base
class RuntimeKVCache:
    def __new__(
        cls, model: Model, loops: SupportsIndex | None = None, cache_window: SupportsIndex = 0
    ) -> Self: ...
    @property
    def model(self) -> Model: ...
    def length(self) -> int: ...
    def __len__(self) -> int: ...
    def bytes(self) -> int: ...
    def clone(self) -> RuntimeKVCache: ...
    def truncate(self, length: SupportsIndex) -> None: ...

@disjoint_base
class PrefixCache:
    @property
    def loops(self) -> int: ...
    @property
    def cache_window(self) -> int: ...
    def length(self) -> int: ...
    def __len__(self) -> int: ...
    def bytes(self) -> int: ...

@disjoint_base
class PrefixPool:
    def __new__(cls, capacity: SupportsIndex = 16) -> Self: ...
    def size(self) -> int: ...
    def total_cached_tokens(self) -> int: ...

@disjoint_base
class TokenStream:
    def __iter__(self) -> Self: ...
    def __next__(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

def decode_with_kv_cache_capture(
    kv: RuntimeKVCache, tokens: _Tokens
) -> npt.NDArray[np.float32]: ...
def library_version() -> str: ...

# Inside of the module, visible at run time: no part of the API.
@disjoint_base
class Options: ...

def __reduce_cython__(self: object) -> Any: ...  # noqa: N807
def __setstate_cython__(self: object, __pyx_state: object) -> Any: ...  # noqa: N807

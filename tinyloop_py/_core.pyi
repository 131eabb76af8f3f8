from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, Self, SupportsFloat, SupportsIndex, TypedDict, type_check_only

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from ._caches import ModelHandle, PrefixCache, PrefixPool, RuntimeKVCache
from ._caches import _Loops as _Loops
from ._caches import _Tokens as _Tokens
from .config import Config

__all__ = ["Model", "TokenStream", "library_version"]

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
    inner_loops_default: int
    n_parameters: int
    weight_bytes: int
    kv_block_size: int
    kv_bytes_fixed: int
    kv_bytes_loop: int
    device: Literal["cpu", "cuda"]
    kv_mode: Literal["fp16", "fp32"]
    threads: int
    two_sided_prefix: bool

class Model(ModelHandle):
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
    @classmethod
    def from_arrays(
        cls,
        config: Config,
        tensors: Mapping[str, npt.ArrayLike],
        blobs: Mapping[str, bytes] | None = None,
        **arguments: Any,
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
        self,
        tokens: _Tokens,
        loops: _Loops = None,
        cache_window: SupportsIndex = 0,
        *,
        prefix_len: SupportsIndex = 0,
        init_state: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float32]: ...
    def states(
        self,
        tokens: _Tokens,
        loops: _Loops = None,
        cache_window: SupportsIndex = 0,
        *,
        prefix_len: SupportsIndex = 0,
        init_state: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float32]: ...
    def exit_logits(
        self, tokens: _Tokens, loops: _Loops = None, cache_window: SupportsIndex = 0
    ) -> npt.NDArray[np.float32]: ...
    def generate(
        self,
        prompt: _Tokens,
        max_tokens: SupportsIndex = 128,
        loops: _Loops = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = 50,
        cache_window: SupportsIndex = 0,
        *,
        top_p: SupportsFloat = 1.0,
        min_p: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop_token_ids: _Tokens | None = None,
        prefix_len: SupportsIndex | None = None,
        pool: PrefixPool | None = None,
    ) -> list[int]: ...
    def generate_with_pool(
        self,
        pool: PrefixPool,
        prompt: _Tokens,
        max_tokens: SupportsIndex = 128,
        loops: _Loops = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = 50,
        cache_window: SupportsIndex = 0,
        *,
        top_p: SupportsFloat = 1.0,
        min_p: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop_token_ids: _Tokens | None = None,
        prefix_len: SupportsIndex | None = None,
    ) -> list[int]: ...
    def generate_stream(
        self,
        prompt: _Tokens,
        max_tokens: SupportsIndex = 128,
        loops: _Loops = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = 50,
        cache_window: SupportsIndex = 0,
        *,
        top_p: SupportsFloat = 1.0,
        min_p: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop_token_ids: _Tokens | None = None,
        prefix_len: SupportsIndex | None = None,
        pool: PrefixPool | None = None,
    ) -> TokenStream: ...
    def generate_from_prefix_cache(
        self,
        cache: PrefixCache,
        suffix: _Tokens | None = None,
        max_tokens: SupportsIndex = 128,
        loops: _Loops = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = 50,
        cache_window: SupportsIndex | None = None,
        *,
        top_p: SupportsFloat = 1.0,
        min_p: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop_token_ids: _Tokens | None = None,
        prefix_len: SupportsIndex | None = None,
    ) -> list[int]: ...
    def build_prefix_cache(
        self,
        tokens: _Tokens,
        loops: _Loops = None,
        cache_window: SupportsIndex = 0,
        *,
        prefix_len: SupportsIndex | None = None,
    ) -> PrefixCache: ...
    def register_prefix(
        self,
        pool: PrefixPool | None,
        tokens: _Tokens,
        loops: _Loops = None,
        cache_window: SupportsIndex = 0,
        *,
        prefix_len: SupportsIndex | None = None,
    ) -> int: ...
    def decode_with_kv_cache_capture(
        self, kv: RuntimeKVCache, tokens: _Tokens
    ) -> npt.NDArray[np.float32]: ...

@disjoint_base
class TokenStream:
    def __iter__(self) -> Self: ...
    def __next__(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

def library_version() -> str: ...

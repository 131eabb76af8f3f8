from collections.abc import Sequence
from typing import Self, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer, disjoint_base

__all__ = [
    "ModelHandle",
    "PrefixCache",
    "PrefixPool",
    "RuntimeKVCache",
    "decode_with_kv_cache_capture",
]

# One-dimensional integer ids. A string, a set or an array of floats is refused at run time.
_Tokens: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer] | Buffer

# How often the core runs; a pair (H, L) for a nested schedule; None is the file's default.
_Loops: TypeAlias = SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None

@disjoint_base
class ModelHandle: ...

@disjoint_base
class RuntimeKVCache:
    def __new__(
        cls,
        model: ModelHandle,
        loops: _Loops = None,
        cache_window: SupportsIndex = 0,
        *,
        prefix_len: SupportsIndex = 0,
    ) -> Self: ...
    @property
    def model(self) -> ModelHandle: ...
    def length(self) -> int: ...
    def __len__(self) -> int: ...
    def bytes(self) -> int: ...
    def clone(self) -> RuntimeKVCache: ...
    def truncate(self, length: SupportsIndex) -> None: ...

@disjoint_base
class PrefixCache:
    @property
    def loops(self) -> int | tuple[int, int]: ...
    @property
    def prefix_len(self) -> int: ...
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

def decode_with_kv_cache_capture(
    kv: RuntimeKVCache, tokens: _Tokens
) -> npt.NDArray[np.float32]: ...

"""tinyloop: a runtime for looped (depth-recurrent) decoder language models.

import tinyloop_py as tl

with tl.Model(tl.default_model_path()) as model:
    pool = tl.PrefixPool(capacity=16)
    model.register_prefix(pool, system_prompt_tokens)
    tokens = model.generate_with_pool(pool, conversation_tokens, temperature=0.0)
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._caches import PrefixCache, PrefixPool, RuntimeKVCache, decode_with_kv_cache_capture
from ._core import Model, library_version
from .errors import Error, failure, last_error

if TYPE_CHECKING:
    from .arrays import ModelArrays, bfloat16, load_arrays, save
    from .config import Config, Stage, stage_fields, tensor_shapes
    from .export import to_safetensors
    from .linking import get_include, get_library_dir

__all__ = [
    "Config",
    "Error",
    "Model",
    "ModelArrays",
    "PrefixCache",
    "PrefixPool",
    "RuntimeKVCache",
    "Stage",
    "bfloat16",
    "build_info",
    "decode_with_kv_cache_capture",
    "default_model_path",
    "get_include",
    "get_library_dir",
    "last_error",
    "load_arrays",
    "save",
    "stage_fields",
    "tensor_shapes",
    "to_safetensors",
]

__version__ = library_version()

# What serves and generates does without these, whose modules take thrice the time to import.
_LATER = {
    "Config": "config",
    "ModelArrays": "arrays",
    "Stage": "config",
    "bfloat16": "arrays",
    "get_include": "linking",
    "get_library_dir": "linking",
    "load_arrays": "arrays",
    "save": "arrays",
    "stage_fields": "config",
    "tensor_shapes": "config",
    "to_safetensors": "export",
}


def __getattr__(name: str) -> Any:
    """Imports what is used for the first time (PEP 562)."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Also the names that have not been used yet."""
    return sorted(globals().keys() | _LATER)


def default_model_path() -> Path:
    """The model that ships with the package: refdesk, a small looped reference desk.

    Raises Error where the package was built without it.
    """
    path = Path(__file__).parent / "data" / "refdesk.tinyloop"
    if not path.is_file():
        raise failure(Error, "this package was built without its demo model; name a file")
    return path


def build_info() -> dict[str, Any]:
    """What this build can do: its version, and the CUDA architectures it has code for."""
    return {"version": __version__, "cuda": {"archs": []}}

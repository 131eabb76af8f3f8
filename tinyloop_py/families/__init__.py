"""What each model family's config.json means: one function a family, one row in FAMILIES.

A family's function turns config.json, and the names of the checkpoint's tensors, into a Layout:
the config fields of the `.tinyloop` file, and where in the checkpoint its tensors are.
"""

from collections.abc import Callable, Collection
from typing import Any

from .decoder import llama, mistral, qwen2, qwen3
from .hrm_text import hrm_text
from .keys import Keys
from .layout import Layout
from .looped import iquest, nanbeige, ouro, refdesk
from .parcae import parcae
from .raven import raven

__all__ = ["FAMILIES", "Keys", "Layout", "read_layout"]

FAMILIES: dict[str, Callable[[Keys, Collection[str]], Layout]] = {
    "hrm_text": hrm_text,
    "huginn_raven": raven,
    "iquestloopcoder": iquest,
    "llama": llama,
    "mistral": mistral,
    "nanbeige": nanbeige,
    "ouro": ouro,
    "parcae": parcae,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "tinyloop_refdesk": refdesk,
}
_BY_CLASS_NAME = {"ParcaeConfig": "parcae"}  # configs without a model_type


def read_layout(config: dict[str, Any], names: Collection[str]) -> tuple[str, Layout, list[str]]:
    """The family of a config.json, its layout, and the keys that nothing is known of.

    Raises CheckpointError for a family, a key or a value that is not supported.
    """
    keys = Keys(config)
    class_name = keys.get("_class_name", None) if "model_type" not in keys else None
    if isinstance(class_name, str) and class_name in _BY_CLASS_NAME:
        family = _BY_CLASS_NAME[class_name]
    else:
        family = keys.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise keys.refuse("model_type", "supported: " + ", ".join(FAMILIES))
    layout = FAMILIES[family](keys, names)
    return family, layout, keys.unread()

"""Llama-like decoders, whose layers run once: llama, mistral, qwen2, qwen3.

The looped families that are made of such layers share `decoder_fields` and `decoder_names`.
"""

from collections.abc import Collection, Iterable
from typing import Any

from ..checkpoint import CheckpointError
from ..config import Config, Stage, stage_fields
from .keys import Keys
from .layout import Layout, head_fields, layer_count, named, refuse_general
from .rope import rope_fields

_NORM_NAMES = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_LINEAR_NAMES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_QK_NORM_NAMES = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
_MLP_BIASES = ("mlp.gate", "mlp.up", "mlp.down")


# What configuration classes that have a window make of a config.json that says nothing.
_DEFAULT_WINDOW = 4096


def decoder_fields(keys: Keys, *, eps: float = 1e-6, theta: float = 10000.0) -> dict[str, Any]:
    """The fields of a Llama-like decoder, but for its stages; refuses what it cannot be.

    Biases and windows are the families' own matter; `eps` and `theta` are their defaults.
    """
    refuse_general(keys)
    keys.expect("hidden_act", "silu")
    keys.ignore("pretraining_tp")  # how products were cut for training
    keys.expect("rope_interleaved", False)
    keys.expect("use_mrope", False)
    layer_types = keys.get("layer_types", [])
    if not isinstance(layer_types, list) or set(map(str, layer_types)) - {"full_attention"}:
        raise keys.refuse("layer_types", "supported: 'full_attention' in every layer")
    hidden = keys.integer("hidden_size", field="hidden_size")
    return {
        "vocab_size": keys.integer("vocab_size", field="vocab_size"),
        "ff_size": keys.integer("intermediate_size", field="ff_size"),
        "max_positions": keys.integer("max_position_embeddings", 0, field="max_positions"),
        "bos_id": keys.token("bos_token_id"),
        "pad_id": keys.token("pad_token_id"),
        "norm_eps": keys.positive("rms_norm_eps", eps),
        "tied_head": int(keys.flag("tie_word_embeddings", False)),
        **head_fields(keys, hidden),
        **rope_fields(keys, theta),
    }


def no_biases(keys: Keys) -> None:
    """Refuses biases, which the family's code has none of."""
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)


def no_window(keys: Keys) -> None:
    """Refuses a sliding window that hides anything, where use_sliding_window asks for one.

    It is that of layers from max_window_layers on.
    """
    keys.ignore("sliding_window", "max_window_layers")
    if not keys.flag("use_sliding_window", False):
        return
    n_layers = keys.integer("num_hidden_layers", 0)
    if not 0 < n_layers <= keys.integer("max_window_layers", 0):
        refuse_window(keys, _DEFAULT_WINDOW)


def refuse_window(keys: Keys, default: int | None) -> None:
    """Refuses a window that hides trained positions; `default`: what a missing key means."""
    window = keys.get("sliding_window", None if keys.states("sliding_window") else default)
    positions = keys.integer("max_position_embeddings", 0)
    if window is not None and (type(window) is not int or not 1 <= positions <= window):
        raise CheckpointError(
            f"config.json: sliding_window is {window!r}; supported: null, or no less than "
            f"max_position_embeddings {positions}"
        )


def decoder_names(config: Config, layers: Iterable[str]) -> dict[str, str]:
    """Names of the checkpoint by the file's; `layers` are the prefixes of its layers, in order.

    For norms before each block, and for the biases and q and k norms that the config has.
    """
    names = {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    if not config.tied_head:
        names["head.weight"] = "lm_head.weight"
    biased = [f"attn.{part}" for part in "qkvo" if getattr(config, f"{part}_bias")]
    biased += _MLP_BIASES if config.mlp_bias else ()
    for n, prefix in enumerate(layers):
        weights = _NORM_NAMES | _LINEAR_NAMES | (_QK_NORM_NAMES if config.qk_norm else {})
        for own, its in weights.items():
            names[f"layers.{n}.{own}.weight"] = f"{prefix}.{its}.weight"
        for own in biased:
            names[f"layers.{n}.{own}.bias"] = f"{prefix}.{_LINEAR_NAMES[own]}.bias"
    return names


def rotary_buffers(names: Collection[str]) -> list[str]:
    """Inverse frequencies, which older checkpoints saved and which follow from the config."""
    return sorted(name for name in names if name.endswith(".rotary_emb.inv_freq"))


def _plain(keys: Keys, names: Collection[str], **fields: Any) -> Layout:
    """A decoder whose one stage runs once."""
    n_layers = layer_count(keys, "num_hidden_layers")
    config = Config(**decoder_fields(keys), **stage_fields([Stage(0, n_layers, 0, 0)]), **fields)
    layers = (f"model.layers.{n}" for n in range(n_layers))
    return Layout(config, named(decoder_names(config, layers)), skipped=rotary_buffers(names))


def _all_biases(keys: Keys) -> dict[str, int]:
    return dict.fromkeys(
        ("q_bias", "k_bias", "v_bias", "o_bias"), int(keys.flag("attention_bias", False))
    )


def llama(keys: Keys, names: Collection[str]) -> Layout:
    """Norms before each block; biases if the config has them. Its code knows no window."""
    if keys.flag("use_sliding_window", True):
        refuse_window(keys, None)
    keys.ignore("sliding_window")
    mlp_bias = int(keys.flag("mlp_bias", False))
    return _plain(keys, names, **_all_biases(keys), mlp_bias=mlp_bias)


def mistral(keys: Keys, names: Collection[str]) -> Layout:
    """As Llama; a window counts unless it shows all trained positions, and a missing key is one."""
    no_biases(keys)
    refuse_window(keys, _DEFAULT_WINDOW)
    return _plain(keys, names)


def qwen2(keys: Keys, names: Collection[str]) -> Layout:
    """Biases on q, k and v whatever the config says."""
    keys.ignore("attention_bias")
    keys.expect("mlp_bias", False)
    no_window(keys)
    return _plain(keys, names, q_bias=1, k_bias=1, v_bias=1)


def qwen3(keys: Keys, names: Collection[str]) -> Layout:
    """Queries and keys are normed head by head, before the rotation."""
    keys.expect("mlp_bias", False)
    no_window(keys)
    eps = keys.positive("rms_norm_eps", 1e-6)
    return _plain(keys, names, **_all_biases(keys), qk_norm=1, qk_norm_eps=eps)

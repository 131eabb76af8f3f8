"""huginn_raven: Huginn, and models that were given its loop: TinyLlama, Llama and OLMo-2.

All say the same model_type and block class; what they are, their tensors tell.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from ..config import Config, stage_fields
from .keys import Keys
from .layout import Layout, fused, head_fields, layer_count, named, refuse_general, stages_of
from .rope import rope_fields

_HUGINN_NORMS = {
    "attn_norm": "norm_1",
    "attn_out_norm": "norm_2",
    "mlp_norm": "norm_3",
    "mlp_out_norm": "norm_4",
}
_LLAMA_NORMS = {"attn_norm": "norm_1", "mlp_norm": "norm_2"}
_OLMO_NORMS = {
    "attn_out_norm": "norm_1",
    "mlp_out_norm": "norm_2",
    "attn.q_norm": "attn.q_norm",
    "attn.k_norm": "attn.k_norm",
}
_STACKS = {
    "prelude": "n_layers_in_prelude",
    "core_block": "n_layers_in_recurrent_block",
    "coda": "n_layers_in_coda",
}


def raven(keys: Keys, names: Collection[str]) -> Layout:
    """Prelude, a core whose state starts from noise and is joined with the prelude, coda."""
    if any(name.endswith(".norm_3.weight") for name in names):
        return _layout(keys, names, _HUGINN_NORMS, **_huginn_fields(keys))
    if any(name.endswith(".attn.q_norm.weight") for name in names):
        eps = keys.positive("norm_eps", _DEFAULTS["norm_eps"])
        fields = _retrofit_fields(keys) | {"norm_placement": 3, "qk_norm": 2, "qk_norm_eps": eps}
        return _layout(keys, names, _OLMO_NORMS, **fields)
    return _layout(keys, names, _LLAMA_NORMS, **_retrofit_fields(keys))


def recurrent_stages(keys: Keys) -> tuple[dict[str, int], dict[str, Any]]:
    """Layers of prelude, core and coda by the checkpoint's names, and the config's stages."""
    low = {"core_block": 1}
    counts = {stack: layer_count(keys, key, low.get(stack, 0)) for stack, key in _STACKS.items()}
    keys.ignore("n_layers", "effective_expected_depth")
    return counts, stage_fields(
        stages_of((n, int(stack == "core_block"), 0) for stack, n in counts.items())
    )


# What Huginn's configuration class takes for keys that are not there.
_DEFAULTS = {"tie_embeddings": True, "norm_eps": 1e-6, "mean_recurrence": 32}


def recurrent_fields(
    keys: Keys, heads: dict[str, int], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What Huginn and Parcae share: sizes, and noise of the width's standard deviation."""
    defaults = defaults or {}
    refuse_general(keys)
    keys.expect("bias", False)
    keys.expect("state_init", "like-init")
    # How it was made and trained; what is told by the tensors; the embedding is padded or not.
    keys.ignore("init_orthogonal", "sampling_scheme", "mean_backprop_depth", "padding_multiple")
    keys.ignore("activation_checkpoint_impl", "architecture_class_name", "vocab_size")
    untold = defaults.get("tie_embeddings", False)
    tied = keys.flag("tie_embeddings", keys.get("tie_word_embeddings", untold))
    keys.expect("tie_word_embeddings", tied)
    vocab_key = "padded_vocab_size" if "padded_vocab_size" in keys else "vocab_size"
    return heads | {
        "vocab_size": keys.integer(vocab_key, field="vocab_size"),
        "ff_size": keys.integer("intermediate_size", field="ff_size"),
        "bos_id": keys.token("bos_token_id"),
        "pad_id": keys.token("pad_token_id"),
        "norm_eps": keys.positive("norm_eps", *_default(defaults, "norm_eps")),
        "tied_head": int(tied),
        "loops_default": keys.integer(
            "mean_recurrence", defaults.get("mean_recurrence", 0), field="loops_default"
        ),
        "state_init": 3,
        "init_std": math.sqrt(2 / (5 * heads["hidden_size"])),
        "init_cut": 3.0,
        "inject_source": 1,
    }


def _default(defaults: Mapping[str, Any], key: str) -> list[Any]:
    return [defaults[key]] if key in defaults else []


def _huginn_fields(keys: Keys) -> dict[str, Any]:
    for key in ("rope_scaling", "rope_parameters"):
        if rope := keys.mapping(key):
            rope.expect("rope_type", "default")
    base = keys.positive("rope_base", 50000.0)
    if keys.positive("rope_theta", base) != base:
        raise keys.refuse("rope_theta", f"rope_base is {base}; give one of the two")
    scale = math.sqrt(keys.integer("n_embd", field="hidden_size"))
    keys.ignore("max_position_embeddings")
    return {
        "norm_placement": 2,
        "rope_style": 1,
        "rope_theta": base,
        "max_positions": keys.integer("block_size", 0, field="max_positions"),
        # The code takes the width's root, whatever init_values.embed_scale says.
        "embed_scale": scale,
        "init_scale": scale,
        "norm_after_last": 1,
        "loops_max_trained": 64,
    }


def _retrofit_fields(keys: Keys) -> dict[str, Any]:
    keys.expect("initial_state_mode", "random")
    keys.ignore("rope_base", "block_size")
    init = keys.mapping("init_values")
    scale = init.positive("embed_scale", 1.0) if init else 1.0
    return {
        **rope_fields(keys, default_theta=None),
        "max_positions": keys.integer("max_position_embeddings", 0, field="max_positions"),
        "embed_scale": scale,
        "init_scale": scale,
        "loops_max_trained": 32,
    }


def _layout(keys: Keys, names: Collection[str], norms: dict[str, str], **fields: Any) -> Layout:
    keys.expect("injection_type", "linear")
    keys.expect("mlp_class_name", "GatedMLP")
    keys.expect("nonlin_name", "SiLU")
    keys.expect("norm_class_name", "RMSNorm_llama")
    keys.expect("test_time_noise", 0, 0.0)
    keys.ignore("block_class_name", "init_strategy", "test_time_noise_type", "auto_map")
    width = keys.integer("n_embd", field="hidden_size")
    heads = head_fields(keys, width, ("n_heads", "num_attention_heads"))
    shared = recurrent_fields(keys, heads, _DEFAULTS)
    if init := keys.mapping("init_values"):
        shared["init_std"] = init.positive("std", shared["init_std"])
        init.ignore("out_proj", "embedding", "embed_scale")
    counts, stages = recurrent_stages(keys)
    bias = int(keys.flag("qk_bias", any(name.endswith(".attn.qk_bias") for name in names)))
    if bias and heads["n_kv_heads"] != heads["n_heads"]:
        raise keys.refuse("qk_bias", "that takes as many KV heads as heads")
    config = Config(**shared | stages | fields, inject=2, q_bias=bias, k_bias=bias)
    tensors = named(recurrent_ends(config))
    tensors["transformer.adapter.weight"] = ("inject.weight",)
    shapes = {}
    layers = [f"transformer.{stack}.{n}" for stack, count in counts.items() for n in range(count)]
    for n, layer in enumerate(layers):
        own = f"layers.{n}"
        tensors |= {f"{layer}.{its}.weight": (f"{own}.{o}.weight",) for o, its in norms.items()}
        tensors[f"{layer}.attn.Wqkv.weight"] = fused(f"{own}.attn", "qkv")
        tensors[f"{layer}.attn.proj.weight"] = (f"{own}.attn.o.weight",)
        tensors[f"{layer}.mlp.fc.weight"] = fused(f"{own}.mlp", ("gate", "up"))
        tensors[f"{layer}.mlp.proj.weight"] = (f"{own}.mlp.down.weight",)
        if bias:
            tensors[f"{layer}.attn.qk_bias"] = fused(f"{own}.attn", "qk", "bias")
            shapes[f"{layer}.attn.qk_bias"] = (2, 1, config.n_heads, config.head_dim)
    return Layout(config, tensors, shapes, skipped=rotation_buffers(names))


def recurrent_ends(config: Config) -> dict[str, str]:
    """Names of what comes before and after the layers."""
    names = {
        "embed.weight": "transformer.wte.weight",
        "final_norm.weight": "transformer.ln_f.weight",
    }
    return names if config.tied_head else names | {"head.weight": "lm_head.weight"}


def rotation_buffers(names: Collection[str]) -> list[str]:
    """Saved tables of cosines and sines."""
    return sorted(name for name in names if name.split(".")[-1] == "freqs_cis")

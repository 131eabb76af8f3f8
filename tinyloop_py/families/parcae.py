"""Parcae: Huginn's stages around a core whose state decays and takes up the prelude's output."""

from collections.abc import Collection
from typing import Any

from ..config import Config
from .keys import Keys
from .layout import Layout, head_fields, named
from .raven import recurrent_ends, recurrent_fields, recurrent_stages, rotation_buffers

_VALUE_CHANNELS = 32
_FLOAT32_EPSILON = 2.0**-23
_LAYER_NAMES = {
    "attn_norm": "norm_1",
    "mlp_norm": "norm_2",
    "attn.q": "attn.c_q",
    "attn.k": "attn.c_k",
    "attn.v": "attn.c_v",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.fc",
    "mlp.down": "mlp.proj",
}
_WITHOUT_EFFECT = (
    "_is_recurrent_block_config",
    "attn_impl",
    "curriculum_target",
    "hf_config",
    "lockstep_k",
    "lockstep_n",
    "name",
    "recurrent_iteration_method",
    "simple_ops",
    "skip_initialization",
    "strategy",
    "use_fused_head",
)


def parcae(keys: Keys, names: Collection[str]) -> Layout:
    """Diagonal injection, a projection after the loop, and value embeddings in some layers."""
    _refuse_others(keys)
    width = keys.integer("n_embd", field="hidden_size")
    heads = head_fields(keys, width, ("num_attention_heads", "n_heads"))
    keys.expect("recurrent_embedding_dimension", width)
    keys.expect("recurrent_intermediation_embedding_dimension", keys.get("intermediate_size"))
    keys.expect("recurrent_num_attention_heads", heads["n_heads"])
    counts, stages = recurrent_stages(keys)
    layers = [f"transformer.{stack}.{n}" for stack, count in counts.items() for n in range(count)]
    value_layers = [n for n, layer in enumerate(layers) if set(_value_names(n, layer)) <= {*names}]
    config = Config(
        **recurrent_fields(keys, heads) | stages | _rope_fields(keys) | _qk_norm_fields(keys),
        max_positions=keys.integer("block_size", 0, field="max_positions"),
        mlp_kind=1,
        activation=3,
        activation_scale=0.5,
        value_embed=int(bool(value_layers)),
        value_embed_channels=_VALUE_CHANNELS if value_layers else 0,
        init_scale=1.0,
        inject=3,
        prelude_norm=int(keys.flag("prelude_norm", False)),
        state_out_proj=1,
    )
    tensors = named(recurrent_ends(config) | _core_names(config))
    for n, layer in enumerate(layers):
        for own, its in _LAYER_NAMES.items():
            tensors[f"{layer}.{its}.weight"] = (f"layers.{n}.{own}.weight",)
    for n in value_layers:
        table, gate = _value_names(n, layers[n])
        tensors[table] = (f"layers.{n}.attn.value_embed.weight",)
        tensors[gate] = (f"layers.{n}.attn.value_gate.weight",)
    unused = {name for n, layer in enumerate(layers) for name in _value_names(n, layer)}
    skipped = rotation_buffers(names) + sorted(unused & {*names} - tensors.keys())
    return Layout(config, tensors, skipped=skipped)


def _value_names(n: int, layer: str) -> tuple[str, str]:
    """Table and gate of the value embedding, which acts only where both are there."""
    return f"value_embeds.{n}.weight", f"{layer}.attn.ve_gate.weight"


def _refuse_others(keys: Keys) -> None:
    keys.expect("_class_name", "ParcaeConfig")
    keys.expect("model_class_name", "Parcae")
    keys.expect("block_class_name", "TransformerPreNormBlock")
    keys.expect("norm_class_name", "RMSNorm")
    keys.expect("mlp_class_name", "BaseMLP")
    keys.expect("nonlin_name", "ReLU2")
    keys.expect("injection_type", "diagonal")
    keys.expect("init_strategy", "scaled-zero")  # others scale embedding and logits
    keys.expect("mup_model_scaling_factor", 1, 1.0)
    keys.unset("qk_bias", "use_abacus", "randomize_positions_from")
    keys.unset("debias_attention", "center_attention", "clip_qkv", "logit_softcap")
    keys.ignore(*_WITHOUT_EFFECT)


def _rope_fields(keys: Keys) -> dict[str, Any]:
    rope = keys.mapping("rope_settings") or Keys({})
    rope.expect("use_rope", True)
    rope.expect("rope_condense_ratio", 1, 1.0)
    return {"rope_style": 1, "rope_theta": rope.positive("rope_base", 50000.0)}


def _qk_norm_fields(keys: Keys) -> dict[str, Any]:
    """The code normalises without weights, by the dtype's epsilon: here float32's."""
    if not keys.flag("qk_norm", False):
        return {}
    return {
        "qk_norm": 1,
        "qk_norm_after_rope": 1,
        "qk_norm_weightless": 1,
        "qk_norm_eps": _FLOAT32_EPSILON,
    }


def _core_names(config: Config) -> dict[str, str]:
    names = {
        "inject.a_log": "transformer.adapter.A_log",
        "inject.dt_bias": "transformer.adapter.dt_bias",
        "inject.b.weight": "transformer.adapter.B",
        "state_out.weight": "transformer.C.weight",
    }
    if config.prelude_norm:
        names["prelude_norm.weight"] = "transformer.ln_prelude.weight"
    return names

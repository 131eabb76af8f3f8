"""What each model family's config.json means: one function a family, one row in FAMILIES.

A family's function turns config.json into a Layout: the config fields of the `.tinyloop` file, and
for each of its tensors the name that the checkpoint has for it.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .checkpoint import CheckpointError
from .config import MAX_TENSORS, RANGES, Config, Stage, stage_fields

# Keys that say how a model was trained, stored or sampled, but not what it computes.
_WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "do_sample",
    "dtype",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_length",
    "max_new_tokens",
    "model_max_length",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
}
_MISSING = object()


@dataclass(frozen=True)
class Layout:
    """A checkpoint described: the file's config, and its tensors' names in the checkpoint.

    `names` has an entry for every tensor that the config calls for, and for `head.weight` in any
    case: a checkpoint with a tied head may hold it. `skipped` matches saved buffers that can be
    computed and are not needed.
    """

    config: Config
    names: dict[str, str]
    skipped: re.Pattern[str]


class Keys:
    """config.json as a family reads it: checks each value and remembers which keys were read.

    A key that is null counts as missing. Errors are CheckpointErrors that give key and value.
    """

    def __init__(self, values: dict[str, Any], name: str = "config.json") -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._name = name
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there with a value that is not null."""
        return key in self._values

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of any type; without a default a missing key is an error."""
        self._read.add(key)
        value = self._values.get(key, default)
        if value is _MISSING:
            raise CheckpointError(f"{self._name} has no {key}")
        return value

    def refuse(self, key: str, allowed: str) -> CheckpointError:
        """The error for a value that is not allowed."""
        return CheckpointError(f"{self._name}: {key} is {self._values[key]!r}; {allowed}")

    def integer(self, key: str, default: Any = _MISSING, field: str = "") -> int:
        """An integer, within the range of the config field that it is for, if that has one."""
        value = self.get(key, default)
        low, high = RANGES.get(field, (-(2**63), 2**63 - 1))
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"it must be an integer from {low} to {high}")
        return value

    def positive(self, key: str, default: Any = _MISSING) -> float:
        """A finite number above zero."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.refuse(key, "it must be a number above 0")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "it must be true or false")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuses the key unless it is missing or has one of the allowed values."""
        value = self.get(key, allowed[0])
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise self.refuse(key, "supported: " + ", ".join(map(repr, allowed)))

    def mapping(self, key: str) -> "Keys | None":
        """A nested object as Keys of its own; None if the key is missing."""
        value = self.get(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "it must be an object")
        return Keys(value, f"{self._name}: {key}")

    def unread(self) -> list[str]:
        """Keys that were not read and are not known to have no effect."""
        return sorted(self._values.keys() - self._read - _WITHOUT_EFFECT)


# ---- Parts that families share --------------------------------------------------------------


def _attention_fields(keys: Keys) -> dict[str, int]:
    hidden = keys.integer("hidden_size", field="hidden_size")
    heads = keys.integer("num_attention_heads", field="n_heads")
    kv_heads = keys.integer("num_key_value_heads", heads, field="n_kv_heads")
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", f"it must divide num_attention_heads {heads}")
    if "head_dim" in keys:
        head_dim = keys.integer("head_dim", field="head_dim")
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise keys.refuse("hidden_size", f"without head_dim, {heads} heads must divide it")
    low, high = RANGES["head_dim"]
    if head_dim % 2 or not low <= head_dim <= high:
        raise CheckpointError(f"head_dim is {head_dim}; it must be even, from {low} to {high}")
    return {
        "hidden_size": hidden,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": head_dim,
    }


def _no_scaling(_: Keys) -> dict[str, int | float]:
    return {}


def _llama3_scaling(rope: Keys) -> dict[str, int | float]:
    low = rope.positive("low_freq_factor")
    high = rope.positive("high_freq_factor")
    if high <= low:
        raise rope.refuse("high_freq_factor", f"it must be above low_freq_factor {low}")
    positions = rope.integer("original_max_position_embeddings")
    if positions < 1:
        raise rope.refuse("original_max_position_embeddings", "it must be at least 1")
    return {
        "rope_scaling": 2,
        "rope_factor": rope.positive("factor"),
        "rope_low_freq_factor": low,
        "rope_high_freq_factor": high,
        "rope_original_positions": positions,
    }


_ROPE_SCALINGS: dict[str, Callable[[Keys], dict[str, int | float]]] = {
    "default": _no_scaling,
    "llama3": _llama3_scaling,
}


def _rope_fields(keys: Keys) -> dict[str, int | float]:
    """RoPE, given as rope_theta and rope_scaling, or as one object rope_parameters."""
    keys.expect("partial_rotary_factor", 1.0, 1)
    parameters, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    if parameters is not None and scaling is not None:
        raise keys.refuse("rope_scaling", "rope_parameters is there too; give one of the two")
    theta = keys.positive("rope_theta", 10000.0)
    rope = parameters or scaling
    if rope is None:
        return {"rope_theta": theta}
    rope.expect("partial_rotary_factor", 1.0, 1)
    if "rope_theta" in rope:
        own_theta = rope.positive("rope_theta")
        if "rope_theta" in keys and own_theta != theta:
            raise rope.refuse("rope_theta", f"outside of it, rope_theta is {theta}")
        theta = own_theta
    kind_key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.get(kind_key, "default")
    if not isinstance(kind, str) or kind not in _ROPE_SCALINGS:
        raise rope.refuse(kind_key, "supported: " + ", ".join(_ROPE_SCALINGS))
    if kind_key != "type":
        rope.expect("type", kind)
    fields = _ROPE_SCALINGS[kind](rope)
    for key in rope.unread():
        raise rope.refuse(key, f"rope type {kind!r} is not supported with it")
    return {"rope_theta": theta, **fields}


def _decoder_fields(keys: Keys) -> dict[str, Any]:
    """The fields of a Llama-like decoder, but for its stages; refuses what it cannot be."""
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)
    keys.expect("pretraining_tp", 1)
    keys.expect("is_encoder_decoder", False)
    keys.expect("add_cross_attention", False)
    keys.expect("rope_interleaved", False)
    keys.expect("pruned_heads", {})
    keys.expect("chunk_size_feed_forward", 0)
    for key in ("quantization_config", "sliding_window"):
        if key in keys:
            raise keys.refuse(key, "supported: null")
    return {
        "vocab_size": keys.integer("vocab_size", field="vocab_size"),
        "ff_size": keys.integer("intermediate_size", field="ff_size"),
        "max_positions": keys.integer("max_position_embeddings", 0, field="max_positions"),
        "bos_id": keys.integer("bos_token_id", -1),
        "pad_id": keys.integer("pad_token_id", -1),
        "norm_eps": keys.positive("rms_norm_eps", 1e-6),
        "tied_head": int(keys.flag("tie_word_embeddings", False)),
        **_attention_fields(keys),
        **_rope_fields(keys),
    }


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def _decoder_names(layers: Iterable[str]) -> dict[str, str]:
    """Names of a Llama-like checkpoint; `layers` are the prefixes of its layers, in order."""
    names = {"embed": "model.embed_tokens", "head": "lm_head", "final_norm": "model.norm"}
    for n, prefix in enumerate(layers):
        names |= {f"layers.{n}.{own}": f"{prefix}.{its}" for own, its in _LAYER_NAMES.items()}
    return {f"{own}.weight": f"{its}.weight" for own, its in names.items()}


# Older checkpoints saved the inverse frequencies, which follow from the config.
_ROTARY_BUFFER = re.compile(r".*\.self_attn\.rotary_emb\.inv_freq")


def _consecutive(parts: Sequence[tuple[int, int, int]]) -> list[Stage]:
    """Stages from (n_layers, looped, end_norm), without those that have no layers."""
    stages: list[Stage] = []
    first = 0
    for n_layers, looped, end_norm in parts:
        if n_layers:
            stages.append(Stage(first, n_layers, looped, end_norm))
            first += n_layers
    return stages


def _count(keys: Keys, key: str, low: int) -> int:
    value = keys.integer(key)
    high = MAX_TENSORS // len(_LAYER_NAMES)
    if not low <= value <= high:
        raise keys.refuse(key, f"it must be from {low} to {high}")
    return value


# ---- Families -------------------------------------------------------------------------------


def _llama(keys: Keys) -> Layout:
    n_layers = _count(keys, "num_hidden_layers", 1)
    stages = stage_fields([Stage(0, n_layers, 0, 0)])
    config = Config(**_decoder_fields(keys), **stages)
    names = _decoder_names(f"model.layers.{n}" for n in range(n_layers))
    return Layout(config, names, _ROTARY_BUFFER)


def _refdesk(keys: Keys) -> Layout:
    """Prelude, a core that is looped over the prelude's output plus its own state, coda."""
    keys.expect("injection", "add")
    keys.expect("state_init", "zero")
    for key in ("system_token_id", "user_token_id", "assistant_token_id"):
        keys.get(key, None)  # the chat template writes them as text
    counts = {
        "prelude": _count(keys, "num_prelude_layers", 0),
        "core": _count(keys, "num_core_layers", 1),
        "coda": _count(keys, "num_coda_layers", 0),
    }
    end_norm = int(keys.flag("norm_each_loop"))
    stages = _consecutive(
        [(counts["prelude"], 0, 0), (counts["core"], 1, end_norm), (counts["coda"], 0, 0)]
    )
    config = Config(
        **_decoder_fields(keys),
        **stage_fields(stages),
        loops_default=keys.integer("default_loops", 0, field="loops_default"),
        loops_max_trained=keys.integer("loops_max_trained", 0, field="loops_max_trained"),
        state_init=2,
        inject=1,
        inject_source=1,
    )
    names = _decoder_names(f"model.{part}.{n}" for part in counts for n in range(counts[part]))
    core = next(s for s, stage in enumerate(stages) if stage.looped)
    names[f"stages.{core}.norm.weight"] = "model.loop_norm.weight"
    return Layout(config, names, _ROTARY_BUFFER)


FAMILIES: dict[str, Callable[[Keys], Layout]] = {
    "llama": _llama,
    "tinyloop_refdesk": _refdesk,
}


def read_layout(config: dict[str, Any]) -> tuple[str, Layout, list[str]]:
    """The family of a config.json, its layout, and the keys that nothing is known of.

    Raises CheckpointError for a family, a key or a value that is not supported.
    """
    keys = Keys(config)
    family = keys.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise keys.refuse("model_type", "supported: " + ", ".join(FAMILIES))
    layout = FAMILIES[family](keys)
    return family, layout, keys.unread()

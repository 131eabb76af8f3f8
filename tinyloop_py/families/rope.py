"""Rotary positions: rope_theta and rope_scaling, or both in one object rope_parameters."""

import math
from collections.abc import Callable

from .keys import Keys

Fields = dict[str, int | float]
_MAX_POSITIONS = 2**31


def rope_fields(keys: Keys, default_theta: float | None = 10000.0) -> Fields:
    """The config fields of the rotation; without a default theta a missing one is an error."""
    keys.expect("partial_rotary_factor", 1.0, 1)
    parameters, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    if parameters is not None and scaling is not None and not parameters.says_all_of(scaling):
        raise keys.refuse("rope_scaling", "rope_parameters is there too, and says something else")
    rope = parameters or scaling
    theta = _theta(keys, rope, default_theta)
    if rope is None:
        return {"rope_theta": theta}
    rope.expect("partial_rotary_factor", 1.0, 1)
    kind_key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.get(kind_key, "default")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise rope.refuse(kind_key, "supported: " + ", ".join(_SCALINGS))
    if kind_key != "type":
        rope.expect("type", kind)
    fields = _SCALINGS[kind](rope, keys)
    for key in rope.unread():
        raise rope.refuse(key, f"rope type {kind!r} is not supported with it")
    if kind == "yarn" and theta <= 1:
        raise rope.refuse(kind_key, f"it takes a rope_theta above 1, and that is {theta}")
    return {"rope_theta": theta, **fields}


def _theta(keys: Keys, rope: Keys | None, default: float | None) -> float:
    if rope is None or "rope_theta" not in rope:
        return keys.positive("rope_theta", *([] if default is None else [default]))
    theta = rope.positive("rope_theta")
    if "rope_theta" in keys and keys.positive("rope_theta") != theta:
        raise rope.refuse("rope_theta", f"outside of it, rope_theta is {keys.get('rope_theta')}")
    return theta


def _plain(rope: Keys, keys: Keys) -> Fields:
    rope.expect("factor", 1.0, 1)
    return {}


def _linear(rope: Keys, keys: Keys) -> Fields:
    return {"rope_scaling": 1, "rope_factor": rope.positive("factor")}


def _llama3(rope: Keys, keys: Keys) -> Fields:
    low = rope.positive("low_freq_factor")
    high = rope.positive("high_freq_factor")
    if high <= low:
        raise rope.refuse("high_freq_factor", f"it must be above low_freq_factor {low}")
    return {
        "rope_scaling": 2,
        "rope_factor": rope.positive("factor"),
        "rope_low_freq_factor": low,
        "rope_high_freq_factor": high,
        "rope_original_positions": _original_positions(rope),
    }


def _yarn(rope: Keys, keys: Keys) -> Fields:
    rope.expect("truncate", True)
    rope.ignore("finetuned")
    fast, slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    if fast <= slow:
        key = "beta_fast" if "beta_fast" in rope else "beta_slow"
        raise rope.refuse(key, f"beta_fast {fast} must be above beta_slow {slow}")
    factor = rope.positive("factor")
    if "original_max_position_embeddings" in rope:
        positions = _original_positions(rope)
    elif "original_max_position_embeddings" in keys:
        positions = _original_positions(keys)
    else:
        positions = keys.integer("max_position_embeddings", low=1)
    return {
        "rope_scaling": 3,
        "rope_factor": factor,
        "rope_original_positions": positions,
        "rope_beta_fast": fast,
        "rope_beta_slow": slow,
        "rope_attention_factor": _attention_factor(rope, factor),
    }


def _attention_factor(rope: Keys, factor: float) -> float:
    """Given, or by factor; of mscale and mscale_all_dim both count if both are there."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    rope.ignore("mscale", "mscale_all_dim")
    if "attention_factor" in rope:
        return rope.positive("attention_factor")
    if rope.get("mscale", 0) and rope.get("mscale_all_dim", 0):
        return grown(rope.positive("mscale")) / grown(rope.positive("mscale_all_dim"))
    return grown(1)


def _original_positions(rope: Keys) -> int:
    positions = rope.integer("original_max_position_embeddings", low=1)
    if positions > _MAX_POSITIONS:
        raise rope.refuse("original_max_position_embeddings", f"at most {_MAX_POSITIONS}")
    return positions


_SCALINGS: dict[str, Callable[[Keys, Keys], Fields]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}

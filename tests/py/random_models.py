"""Draws small random models over every field of docs/format.md that can be run, and writes them."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from tinyloop_py.config import Config, Stage, stage_fields, tensor_shapes
from tinyloop_py.format import DTYPES, TensorSpec, write_file
from tinyloop_py.rounding import convert_dtype

FLOATS = ("float32", "float16", "bfloat16")
STORAGES = (*FLOATS, "int8", "int8-group", "mixed")
GROUP = 128  # columns that share a scale of an int8 weight
NEVER_INT8 = ("exit.weight", "value_gate.weight", "loop_gate.weight")

flags = st.integers(0, 1)
text_lengths = st.one_of(st.integers(2, 12), st.integers(30, 70), st.just(1))


class RandomModel(NamedTuple):
    """`tensors` holds each tensor's dtype, a key of DTYPES, and its elements in that dtype."""

    config: Config
    tensors: dict[str, tuple[str, np.ndarray]]


@st.composite
def models(draw, config=None):
    """A RandomModel; of this config if one is given."""
    config = draw(configs()) if config is None else config
    storage = draw(st.sampled_from(STORAGES))
    shapes = {n: s for n, s in tensor_shapes(config).items() if ".value_" not in n}
    if config.value_embed:
        layers = draw(st.lists(st.integers(0, config.n_layers - 1), unique=True))
        kv_width = config.n_kv_heads * config.head_dim
        for n in layers:
            gate = (config.n_kv_heads, config.value_embed_channels)
            shapes[f"layers.{n}.attn.value_gate.weight"] = gate
            shapes[f"layers.{n}.attn.value_embed.weight"] = (config.vocab_size, kv_width)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensors = {}
    for name, shape in shapes.items():
        tensors |= random_tensor(rng, name, shape, storage)
    return RandomModel(config, tensors)


def write_model(path, config, tensors):
    """Writes a file of a RandomModel's parts."""
    specs = [TensorSpec(name, dtype, a.shape) for name, (dtype, a) in tensors.items()]
    write_file(path, config, specs, lambda spec: [tensors[spec.name][1]], {})


def random_tensor(rng, name, shape, storage):
    """The tensor, and its scales if it is int8, by name. Linear layers have a gain of about 1."""
    if storage == "mixed":
        storage = str(rng.choice(STORAGES[:-1]))
    if storage not in FLOATS and (len(shape) == 1 or name.endswith(NEVER_INT8)):
        storage = "float32"
    if storage not in FLOATS:
        return int8_tensor(rng, name, shape, grouped=storage == "int8-group")
    if len(shape) == 2:
        gain = 0.6 if name.startswith("embed") else shape[1] ** -0.5
        values = gain * rng.standard_normal(shape)
    else:
        values = (1.0 if "norm.weight" in name else 0.0) + 0.2 * rng.standard_normal(shape)
    return {name: (storage, convert_dtype(values.astype("<f4"), "float32", storage))}


def int8_tensor(rng, name, shape, grouped):
    rows, columns = shape
    values = rng.integers(-127, 128, shape).astype(DTYPES["int8"])
    groups = -(-columns // GROUP) if grouped else 1
    scales = rng.uniform(0.5, 1.5, (rows, groups)) / (73 * columns**0.5)  # 73: spread of the values
    scale_name = name.removesuffix("weight") + "scale"
    return {name: ("int8", values), scale_name: ("float32", scales.astype("<f4"))}


# ---- configurations -------------------------------------------------------------------------


@st.composite
def configs(draw):
    """A valid Config. Fields that nothing uses are 0, as the format asks."""
    fields = draw(sizes()) | draw(layers()) | draw(ends())
    fields |= draw(qk_norms()) | draw(ropes(fields["head_dim"]))
    if fields["value_embed"]:
        fields["value_embed_channels"] = draw(st.integers(1, fields["hidden_size"]))
    kind = draw(st.sampled_from([plain, looped, looped, looped, nested]))
    return Config(**fields | draw(kind(fields["final_norm"])))


@st.composite
def sizes(draw):
    n_kv_heads = draw(st.integers(1, 3))
    widths = st.one_of(st.integers(3, 40), st.integers(3, 40), st.integers(125, 140))
    return {
        "vocab_size": draw(st.integers(2, 70)),
        "hidden_size": draw(widths),
        "n_heads": n_kv_heads * draw(st.integers(1, 3)),
        "n_kv_heads": n_kv_heads,
        "head_dim": 2 * draw(st.integers(1, 20)),
        "ff_size": draw(widths),
        "max_positions": draw(st.sampled_from([0, 512])),
        "bos_id": draw(st.integers(-1, 1)),
        "pad_id": draw(st.integers(-1, 1)),
        "kv_policies_allowed": draw(st.integers(0, 3)),
    }


@st.composite
def layers(draw):
    return {
        "norm_placement": draw(st.integers(0, 3)),
        "norm_weightless": draw(flags),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        "attn_out_gate": draw(flags),
        "value_embed": draw(flags),
        "mlp_kind": draw(flags),
        "activation": draw(st.integers(0, 3)),
        "activation_scale": draw(st.sampled_from([1.0, 0.5, -1.5])),
    } | {f"{name}_bias": draw(flags) for name in ("q", "k", "v", "o", "mlp")}


@st.composite
def ends(draw):
    return {
        "embed_scale": draw(st.sampled_from([1.0, 8.0, -0.5])),
        "tied_head": draw(flags),
        "logit_scale": draw(st.sampled_from([1.0, 0.3, -2.0])),
        "logit_softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "mask": draw(flags),
        "final_norm": draw(st.integers(0, 2)),
    }


@st.composite
def qk_norms(draw):
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return {}
    return {
        "qk_norm": kind,
        "qk_norm_after_rope": draw(flags) if kind == 1 else 0,
        "qk_norm_weightless": draw(flags),
        "qk_norm_eps": draw(st.sampled_from([2.0**-23, 1e-5])),
    }


@st.composite
def ropes(draw, head_dim):
    style, scaling = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    if style == 2:
        return {"rope_style": 2}
    fields = {
        "rope_style": style,
        "rope_theta": draw(st.sampled_from([50.0, 1e4, 5e5])),
        "rotary_dim": draw(st.one_of(st.just(head_dim), st.integers(1, head_dim // 2).map(_twice))),
        "rope_scaling": scaling,
    }
    if scaling:
        fields["rope_factor"] = draw(st.sampled_from([0.5, 4.0, 32.0]))
    if scaling >= 2:
        fields["rope_original_positions"] = draw(st.sampled_from([16, 64, 4096]))
    if scaling == 2:
        fields |= {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
    if scaling == 3:
        fields["rope_attention_factor"] = draw(st.sampled_from([1.0, 1.3]))
        fields["rope_beta_fast"], fields["rope_beta_slow"] = draw(
            st.sampled_from([(32.0, 1.0), (4.0, 0.5)])
        )
    return fields


def _twice(n):
    return 2 * n


@st.composite
def stages(draw, looped):
    """The fields of stages of one or two layers, looped as given."""
    parts, first = [], 0
    for is_looped in looped:
        n_layers = draw(st.integers(1, 2))
        parts.append(Stage(first, n_layers, is_looped, draw(st.integers(0, 2))))
        first += n_layers
    return stage_fields(parts)


@st.composite
def plain(draw, final_norm):
    fields = draw(stages([0] * draw(st.integers(1, 4))))
    return fields | {"loops_default": draw(flags)}


@st.composite
def looped(draw, final_norm):
    """A flat schedule: stages before and after the looped one may be missing."""
    before, after = draw(st.sampled_from([1, 0, 2])), draw(st.sampled_from([1, 0]))
    fields = draw(stages([0] * before + [1] + [0] * after))
    fields |= draw(injections()) | {
        "loops_default": draw(st.sampled_from([0, 1, 3])),
        "loops_min": draw(flags),
        "loops_max": draw(st.sampled_from([0, 6])),
        "state_out_proj": draw(flags),
        "norm_after_last": draw(st.sampled_from([0, 1, 2] if final_norm == 1 else [0, 2])),
        "loop_attention": draw(flags),
        "loop_window": draw(st.sampled_from([0, 0, 1, 3, 20])),
    }
    if draw(flags):
        threshold = draw(st.sampled_from([0.3, 0.6, 0.85, 1.0]))
        fields |= {"exit_mode": 1, "exit_threshold": threshold}
    return fields


@st.composite
def injections(draw):
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return {}
    fields = {
        "inject": kind,
        "inject_source": 1,
        "inject_skip_first": draw(flags),
        "prelude_norm": draw(flags),
        "state_init": draw(st.sampled_from([0, 2, 3, 3, 4])),
    }
    if fields["state_init"] == 3:
        fields |= {
            "init_std": draw(st.sampled_from([0.08, 1.0])),
            "init_cut": draw(st.sampled_from([0.5, 3.0])),
            "init_scale": draw(st.sampled_from([0.0, 1.0, 8.0])),
        }
    return fields


@st.composite
def nested(draw, final_norm):
    return draw(stages([1, 1])) | {
        "schedule": 1,
        "cycles_high": draw(st.integers(1, 2)),
        "cycles_low": draw(st.integers(1, 3)),
        "inject": 1,
        "inject_source": 2,
        "state_init": draw(st.sampled_from([2, 4])),
    }

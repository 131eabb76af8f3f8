"""What a `.tinyloop` file says of a model: its config fields and the tensors that follow from them.

`docs/format.md` lists the same fields with their meaning.
"""

import struct
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

MAX_TENSORS = 65_536
MAX_STAGES = 4
_INT64 = range(-(2**63), 2**63)


class FormatError(ValueError):
    """A file, or what should become one, breaks the rules of docs/format.md."""


class Stage(NamedTuple):
    """A run of consecutive layers, executed once or once for each loop."""

    first_layer: int
    n_layers: int
    looped: int
    end_norm: int


def _size(low: int, high: int, default: int = 0) -> Any:
    """An integer with the range that this version can run."""
    return field(default=default, metadata={"range": (low, high)})


def _choice(*names: str, default: int = 0) -> Any:
    """An integer that selects one of the named variants."""
    return field(default=default, metadata={"names": names})


_END_NORM = ("none", "with weight", "weightless")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The 96 fields in file order: name, type and default of each, the one table of them in Python.

    The defaults describe a plain Llama; sizes have none that would do. Raises FormatError for a
    value that the field's 8 bytes cannot hold, and for floats that are not finite.
    """

    vocab_size: int = _size(1, 2**24)
    hidden_size: int = _size(1, 2**17)
    n_heads: int = _size(1, 4096)
    n_kv_heads: int = _size(1, 4096)
    head_dim: int = _size(2, 256)
    ff_size: int = _size(1, 2**20)
    max_positions: int = _size(0, 2**31)
    bos_id: int = -1
    pad_id: int = -1
    norm_placement: int = _choice("pre", "sandwich_branch", "sandwich_sum", "post_branch")
    norm_weightless: int = 0
    norm_eps: float = 0.0
    qk_norm: int = _choice("none", "each head", "full width")
    qk_norm_after_rope: int = 0
    qk_norm_weightless: int = 0
    qk_norm_eps: float = 0.0
    q_bias: int = 0
    k_bias: int = 0
    v_bias: int = 0
    o_bias: int = 0
    mlp_bias: int = 0
    attn_out_gate: int = _choice("none", "sigmoid")
    value_embed: int = _choice("none", "gated")
    value_embed_channels: int = 0
    mlp_kind: int = _choice("gated", "plain")
    activation: int = _choice("silu", "gelu", "gelu_tanh", "relu2")
    activation_scale: float = 1.0
    rope_style: int = _choice("half-split", "interleaved", "none")
    rope_theta: float = 0.0
    rotary_dim: int = 0
    rope_scaling: int = _choice("none", "linear", "llama3", "yarn")
    rope_factor: float = 0.0
    rope_low_freq_factor: float = 0.0
    rope_high_freq_factor: float = 0.0
    rope_original_positions: int = 0
    rope_beta_fast: float = 0.0
    rope_beta_slow: float = 0.0
    rope_attention_factor: float = 0.0
    embed_scale: float = 1.0
    tied_head: int = 0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    mask: int = _choice("causal", "prefix-LM")
    final_norm: int = _choice("none", "with weight", "weightless", default=1)
    n_stages: int = _size(1, MAX_STAGES, default=1)
    stage0_first_layer: int = 0
    stage0_n_layers: int = 0
    stage0_looped: int = 0
    stage0_end_norm: int = _choice(*_END_NORM)
    stage1_first_layer: int = 0
    stage1_n_layers: int = 0
    stage1_looped: int = 0
    stage1_end_norm: int = _choice(*_END_NORM)
    stage2_first_layer: int = 0
    stage2_n_layers: int = 0
    stage2_looped: int = 0
    stage2_end_norm: int = _choice(*_END_NORM)
    stage3_first_layer: int = 0
    stage3_n_layers: int = 0
    stage3_looped: int = 0
    stage3_end_norm: int = _choice(*_END_NORM)
    loops_default: int = _size(0, 1024)
    loops_min: int = _size(0, 1024)
    loops_max: int = _size(0, 1024)
    loops_max_trained: int = 0
    schedule: int = _choice("flat", "nested")
    cycles_high: int = 0
    cycles_low: int = 0
    restart: int = _choice("continue", "from the prelude")
    damping: float = 1.0
    state_init: int = _choice("the stage's input", "prelude", "zeros", "truncated normal", "tensor")
    init_std: float = 0.0
    init_cut: float = 0.0
    init_scale: float = 0.0
    inject: int = _choice("none", "add", "concat_linear", "diagonal", "cross-loop")
    inject_source: int = _choice("embedding", "prelude's output", "the other state")
    inject_skip_first: int = 0
    state_out_proj: int = 0
    prelude_norm: int = 0
    clp_a: float = 0.0
    clp_b: float = 0.0
    clp_shift: int = 0
    loop_norm: int = _choice("none", "the final norm")
    feed_normed: int = 0
    norm_after_last: int = _choice("none", "the final norm", "own")
    loop_attention: int = _choice("own KV in each loop", "gated global and local")
    loop_window: int = 0
    gate_input: int = _choice("rotated query", "normed hidden state")
    exit_mode: int = _choice("none", "sigmoid CDF", "KL", "latent difference", "argmax")
    exit_threshold: float = 0.0
    exit_readout: int = _choice("none", "norm and head")
    kv_policy_default: int = _choice("own")
    kv_policies_allowed: int = 0
    lora_rank: int = 0
    lora_alpha: float = 0.0
    loop_embed: int = 0

    def __post_init__(self) -> None:
        """Checks the type of each value; integers given for floats become floats."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is int:
                if isinstance(value, bool) or not isinstance(value, int) or value not in _INT64:
                    raise FormatError(f"config field {f.name} is {value!r}; it is a 64-bit integer")
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise FormatError(f"config field {f.name} is {value!r}; it is a number")
            elif not abs(value) <= sys.float_info.max:
                raise FormatError(f"config field {f.name} is {value!r}; it must be finite")
            else:
                object.__setattr__(self, f.name, float(value))

    def values(self) -> dict[str, int | float]:
        """All fields by name, in file order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def variant(self, name: str) -> str:
        """The readable value of a field that selects a variant."""
        value: int = getattr(self, name)
        names = VARIANTS[name]
        return names[value] if 0 <= value < len(names) else f"unknown ({value})"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in use. A file may claim more than there are; those read as four."""
        all_stages = (
            Stage(*(getattr(self, f"stage{s}_{part}") for part in Stage._fields))
            for s in range(MAX_STAGES)
        )
        return tuple(all_stages)[: max(self.n_stages, 0)]

    @property
    def n_layers(self) -> int:
        """Physical layers."""
        return sum(stage.n_layers for stage in self.stages)

    @property
    def loops(self) -> int:
        """Loops of a generation that states none; of a nested schedule the outer ones."""
        if self.schedule == 1:
            return self.cycles_high
        if not any(stage.looped for stage in self.stages):
            return 1
        return self.loops_default or min(8, self.loops_max or 8)


def stage_fields(stages: Sequence[Stage]) -> dict[str, int]:
    """The config fields that describe these stages, `n_stages` included."""
    values = {"n_stages": len(stages)}
    for s, stage in enumerate(stages):
        values |= {f"stage{s}_{part}": value for part, value in stage._asdict().items()}
    return values


RANGES: dict[str, tuple[int, int]] = {
    f.name: f.metadata["range"] for f in fields(Config) if "range" in f.metadata
}
VARIANTS: dict[str, tuple[str, ...]] = {
    f.name: f.metadata["names"] for f in fields(Config) if "names" in f.metadata
}
N_FIELDS = len(fields(Config))
CONFIG_LAYOUT = struct.Struct("<" + "".join("q" if f.type is int else "d" for f in fields(Config)))


def unpack_config(meta: bytes, offset: int) -> Config:
    """The config whose fields stand in `meta` from `offset` on."""
    names = (f.name for f in fields(Config))
    return Config(**dict(zip(names, CONFIG_LAYOUT.unpack_from(meta, offset), strict=True)))


def pack_config(config: Config) -> bytes:
    """The fields as the file holds them."""
    return CONFIG_LAYOUT.pack(*config.values().values())


# ---- Tensors --------------------------------------------------------------------------------

SCALE_GROUP = 128  # columns of an int8 weight that share a scale, where a row has several

# Weights of few rows or columns, which are kept as floats.
_NEVER_INT8 = ("exit.weight", ".value_gate.weight", ".loop_gate.weight")

Shape = tuple[int, ...]


def tensor_shapes(config: Config, value_embed_layers: Collection[int] = ()) -> dict[str, Shape]:
    """Every tensor that the configuration calls for, in the order in which files hold them.

    `value_embed_layers` are the layers with value embeddings, which may be any if the configuration
    has them at all. Scales of int8 weights are left out: they follow from the dtypes. Raises
    FormatError if the layers alone would be more than a directory can hold.
    """
    if not 0 <= config.n_layers <= MAX_TENSORS:
        raise FormatError(f"the stages have {config.n_layers} layers; allowed are {MAX_TENSORS}")
    shapes = _ends(config) | _core(config)
    n = 0
    for stage in config.stages:
        for _ in range(stage.n_layers):
            layer = _attention(config, bool(stage.looped), n in value_embed_layers)
            layer = _norms(config) | layer | _mlp(config)
            shapes |= {f"layers.{n}.{name}": shape for name, shape in layer.items()}
            n += 1
    return shapes


def value_embed_layers(config: Config, names: Collection[str]) -> list[int]:
    """The layers for which `names` has a value gate or a value embedding."""
    if not config.value_embed:
        return []
    parts = ("attn.value_gate.weight", "attn.value_embed.weight")
    n_layers = min(config.n_layers, MAX_TENSORS)
    return [n for n in range(n_layers) if any(f"layers.{n}.{part}" in names for part in parts)]


def scale_name(weight: str) -> str:
    """The name of the scales that belong to an int8 weight."""
    return f"{weight.removesuffix('.weight')}.scale"


def is_scale(name: str) -> bool:
    """Whether this is the name of an int8 weight's scales."""
    return name.endswith(".scale")


def scale_shapes(shape: Shape) -> tuple[Shape, Shape]:
    """The shapes that the scales of an int8 weight may have: one a row, one a group of columns."""
    rows, columns = shape
    return (rows, 1), (rows, -(-columns // SCALE_GROUP))


def may_be_int8(name: str, shape: Shape) -> bool:
    """Whether the tensor may be int8."""
    return len(shape) == 2 and name.endswith(".weight") and not name.endswith(_NEVER_INT8)


def tensor_problems(config: Config, tensors: Mapping[str, tuple[str, Shape]]) -> list[str]:
    """What is wrong with a file's tensors (dtype and shape by name), a sentence each."""
    wanted = tensor_shapes(config, value_embed_layers(config, tensors))
    problems = [f"{name}: missing" for name in wanted if name not in tensors]
    scales: set[str] = set()
    for name, (dtype, shape) in tensors.items():
        if name in wanted and dtype == "int8":
            scales.add(scale_name(name))
            problems += _int8_problems(name, shape, tensors)
    for name, (_, shape) in tensors.items():
        if name not in wanted and name not in scales:
            problems.append(f"{name}: the configuration does not call for it")
        elif name in wanted and shape != wanted[name]:
            problems.append(f"{name}: shape {list(shape)}; it must be {list(wanted[name])}")
    return problems


def _int8_problems(
    name: str, shape: Shape, tensors: Mapping[str, tuple[str, Shape]]
) -> Iterator[str]:
    if not may_be_int8(name, shape):
        yield f"{name}: int8, which only weights of linear layers and embeddings may be"
        return
    scales = scale_name(name)
    if scales not in tensors:
        yield f"{scales}: missing, the scales of the int8 weight {name}"
        return
    dtype, found = tensors[scales]
    allowed = scale_shapes(shape)
    if dtype != "float32" or found not in allowed:
        one, groups = map(list, allowed)
        yield f"{scales}: {dtype} {list(found)}; it must be float32 {one} or {groups}"


def _ends(config: Config) -> dict[str, Shape]:
    """What comes before and after all layers, and after stages."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab_size, hidden)}
    if not config.tied_head:
        shapes["head.weight"] = (config.vocab_size, hidden)
    if config.final_norm == 1:
        shapes["final_norm.weight"] = (hidden,)
    for s, stage in enumerate(config.stages):
        if stage.end_norm == 1:
            shapes[f"stages.{s}.norm.weight"] = (hidden,)
    return shapes


def _core(config: Config) -> dict[str, Shape]:
    """What the loops need beside their layers."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {}
    if config.norm_after_last == 2:
        shapes["after_last_norm.weight"] = (hidden,)
    if config.state_init == 4:
        shapes["state_init.weight"] = (hidden,)
    if config.prelude_norm:
        shapes["prelude_norm.weight"] = (hidden,)
    if config.inject == 2:
        shapes["inject.weight"] = (hidden, 2 * hidden)
    if config.inject == 3:
        shapes["inject.a_log"] = shapes["inject.dt_bias"] = (hidden,)
        shapes["inject.b.weight"] = (hidden, hidden)
    if config.state_out_proj:
        shapes["state_out.weight"] = (hidden, hidden)
    if config.exit_mode == 1:
        shapes |= {"exit.weight": (1, hidden), "exit.bias": (1,)}
    return shapes


def _norms(config: Config) -> dict[str, Shape]:
    if config.norm_weightless:
        return {}
    names = []
    if config.norm_placement != 3:
        names += ["attn_norm.weight", "mlp_norm.weight"]
    if config.norm_placement != 0:
        names += ["attn_out_norm.weight", "mlp_out_norm.weight"]
    return dict.fromkeys(names, (config.hidden_size,))


def _attention(config: Config, looped: bool, value_embed: bool) -> dict[str, Shape]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_width, kv_width = config.n_heads * head_dim, config.n_kv_heads * head_dim
    shapes: dict[str, Shape] = {
        "q.weight": (q_width, hidden),
        "k.weight": (kv_width, hidden),
        "v.weight": (kv_width, hidden),
    }
    for part, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        if getattr(config, f"{part}_bias"):
            shapes[f"{part}.bias"] = (width,)
    if config.qk_norm and not config.qk_norm_weightless:
        full = config.qk_norm == 2
        shapes["q_norm.weight"] = (q_width if full else head_dim,)
        shapes["k_norm.weight"] = (kv_width if full else head_dim,)
    if config.attn_out_gate:
        shapes["gate.weight"] = (q_width, hidden)
    if value_embed:
        shapes["value_gate.weight"] = (config.n_kv_heads, config.value_embed_channels)
        shapes["value_embed.weight"] = (config.vocab_size, kv_width)
    if config.loop_attention == 1 and looped:
        shapes["loop_gate.weight"] = (config.n_heads, head_dim)
        shapes["loop_gate.bias"] = (config.n_heads,)
    shapes["o.weight"] = (hidden, q_width)
    if config.o_bias:
        shapes["o.bias"] = (hidden,)
    return {f"attn.{name}": shape for name, shape in shapes.items()}


def _mlp(config: Config) -> dict[str, Shape]:
    hidden, ff = config.hidden_size, config.ff_size
    parts: dict[str, Shape] = {"up": (ff, hidden), "down": (hidden, ff)}
    if config.mlp_kind == 0:
        parts = {"gate": (ff, hidden), **parts}
    shapes = {f"mlp.{part}.weight": shape for part, shape in parts.items()}
    if config.mlp_bias:
        shapes |= {f"mlp.{part}.bias": shape[:1] for part, shape in parts.items()}
    return shapes

"""What a token costs, as functions of the configuration alone: FLOPs and bytes of KV cache."""

from typing import NamedTuple

from .config import Config

# How often the looped stages run; of a nested schedule (H, L).
Loops = int | tuple[int, int]

KV_ELEMENT_BYTES = {"fp16": 2, "fp32": 4}
_KV_VALUE_ALIGNMENT = 16  # channels; KV_V_ALIGN in libtinyloop/kv/layout.h


class LayerRuns(NamedTuple):
    """Times that layers run for a token, by what they attend to of their own K and V.

    `full`: all positions; `windowed`: the last `loop_window` ones.
    """

    full: int
    windowed: int


class KvBytes(NamedTuple):
    """`growing` bytes for each position, and at most `constant` more, however long the text."""

    growing: int
    constant: int


def is_nested(config: Config) -> bool:
    """Whether two stages, a low and a high one, take turns."""
    return config.schedule == 1 and len(config.stages) == 2


def is_looped(config: Config) -> bool:
    """Whether the number of loops makes a difference."""
    return is_nested(config) or any(stage.looped for stage in config.stages)


def default_loops(config: Config) -> Loops:
    """The loops of a generation that states none."""
    return (config.cycles_high, config.cycles_low) if is_nested(config) else config.loops


def layer_runs(config: Config, loops: Loops) -> LayerRuns:
    """How many layers a token passes through. Raises ValueError for a pair that is not due."""
    if is_nested(config):
        if isinstance(loops, int):
            raise ValueError(f"loops is {loops}; a nested schedule has a pair (H, L)")
        high, low = loops
        low_stage, high_stage = config.stages
        return LayerRuns(high * (low * low_stage.n_layers + high_stage.n_layers), 0)
    if not isinstance(loops, int):
        raise ValueError(f"loops is {loops}; a flat schedule has a number")
    full = windowed = 0
    for stage in config.stages:
        later_loops = (loops - 1) * stage.n_layers if stage.looped else 0
        full += stage.n_layers
        if config.loop_window:
            windowed += later_loops
        else:
            full += later_loops
    return LayerRuns(full, windowed)


def matmul_flops(config: Config, loops: Loops) -> int:
    """FLOPs a token of the large matrices: layers, injection and head; 2 for each weight used.

    Left out are attention (see attention_flops), norms, and gates that give a number a head or a
    token.
    """
    n_runs = sum(layer_runs(config, loops))
    weights = n_runs * _layer_weights(config) + config.vocab_size * config.hidden_size
    weights += config.state_out_proj * config.hidden_size**2
    if isinstance(loops, int) and is_looped(config):
        weights += loops * _injection_weights(config)
    return 2 * weights


def attention_flops(config: Config, loops: Loops) -> int:
    """FLOPs a token of scores and mixed values, for each position that it attends to.

    Those of layers that see a window only are left out: with the text's length they don't grow.
    """
    runs = layer_runs(config, loops)
    n_runs = runs.full
    if config.loop_attention == 1:  # loops after the first attend to all of the first one's KV too
        n_runs += sum(runs) - config.n_layers
    return 4 * config.n_heads * config.head_dim * n_runs


def kv_bytes(config: Config, loops: Loops, kv_mode: str = "fp16") -> KvBytes:
    """Bytes of a sequence's KV cache; `kv_mode` is "fp16" or "fp32".

    A head's value takes whole vectors of 16 channels. Blocks of positions and a call's
    cache_window are not counted.
    """
    runs = layer_runs(config, loops)
    value_dim = -(-config.head_dim // _KV_VALUE_ALIGNMENT) * _KV_VALUE_ALIGNMENT
    position = config.n_kv_heads * (config.head_dim + value_dim) * KV_ELEMENT_BYTES[kv_mode]
    return KvBytes(runs.full * position, runs.windowed * config.loop_window * position)


def _layer_weights(config: Config) -> int:
    q_width = config.n_heads * config.head_dim
    kv_width = config.n_kv_heads * config.head_dim
    n_mlp_matrices = 3 if config.mlp_kind == 0 else 2
    n_q_matrices = 3 if config.attn_out_gate else 2  # q, o, and the gate
    return config.hidden_size * (
        n_q_matrices * q_width + 2 * kv_width + n_mlp_matrices * config.ff_size
    )


def _injection_weights(config: Config) -> int:
    """Of concat_linear and diagonal."""
    return {2: 2, 3: 1}.get(config.inject, 0) * config.hidden_size**2

"""hrm_text: a low and a high stack of layers that take turns, each adding the other's state."""

from collections.abc import Collection

from ..checkpoint import CheckpointError
from ..config import Config, Stage, stage_fields
from .decoder import decoder_fields, no_biases, no_window
from .keys import Keys
from .layout import Layout, Tensors, count_layers, fused, loop_count

_STACKS = ("L_module", "H_module")


def hrm_text(keys: Keys, names: Collection[str]) -> Layout:
    """Norms without weights, gated attention, and a prompt whose tokens all see each other.

    The number of layers is what the tensors tell.
    """
    no_biases(keys)
    no_window(keys)
    keys.ignore("L_bp_cycles")
    counts = {stack: count_layers(names, f"model.{stack}.layers.") for stack in _STACKS}
    for stack, count in counts.items():
        if not count:
            raise CheckpointError(f"tensors missing: model.{stack}.layers.0 and what follows it")
    low, high = counts.values()
    cycles = loop_count(keys, "H_cycles"), loop_count(keys, "L_cycles")
    _check_layers(keys, low, high, cycles[0] * (cycles[1] + 1))
    config = Config(
        **decoder_fields(keys),
        **stage_fields([Stage(0, low, 1, 2), Stage(low, high, 1, 2)]),
        schedule=1,
        cycles_high=cycles[0],
        cycles_low=cycles[1],
        norm_weightless=1,
        final_norm=0,
        attn_out_gate=1,
        inject=1,
        inject_source=2,
        state_init=4,
        embed_scale=_embed_scale(keys),
        mask=int(keys.flag("prefix_lm", True)),
    )
    tensors: Tensors = {
        "model.embed_tokens.weight": ("embed.weight",),
        "model.z_L_init": ("state_init.weight",),
    }
    if not config.tied_head:
        tensors["lm_head.weight"] = ("head.weight",)
    layers = [f"model.{stack}.layers.{n}" for stack in _STACKS for n in range(counts[stack])]
    for n, layer in enumerate(layers):
        own = f"layers.{n}"
        tensors[f"{layer}.attn.gqkv_proj.weight"] = fused(f"{own}.attn", ("gate", "q", "k", "v"))
        tensors[f"{layer}.attn.o_proj.weight"] = (f"{own}.attn.o.weight",)
        tensors[f"{layer}.mlp.gate_up_proj.weight"] = fused(f"{own}.mlp", ("gate", "up"))
        tensors[f"{layer}.mlp.down_proj.weight"] = (f"{own}.mlp.down.weight",)
    return Layout(config, tensors)


def _check_layers(keys: Keys, low: int, high: int, n_runs: int) -> None:
    """Refuses stacks of different height, and a number of layers that is not theirs.

    Files that don't give that of one stack give it, or both, or those of all runs.
    """
    if low != high:
        raise CheckpointError(
            f"tensors missing: {_STACKS[0]} has {low} layers and {_STACKS[1]} {high}; both have "
            "the same number"
        )
    keys.expect("num_layers_per_stack", low)
    if "num_layers_per_stack" in keys:
        keys.ignore("num_hidden_layers")
    else:
        keys.expect("num_hidden_layers", low, 2 * low, low * n_runs)


def _embed_scale(keys: Keys) -> float:
    if "embedding_scale" in keys:
        return keys.positive("embedding_scale")
    return 1 / keys.positive("initializer_range")

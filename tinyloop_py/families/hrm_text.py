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

    The number of layers is what the tensors tell: config.json states it in several ways.
    """
    no_biases(keys)
    no_window(keys, default=False)
    keys.ignore("L_bp_cycles", "num_hidden_layers", "num_layers_per_stack")
    counts = {stack: count_layers(names, f"model.{stack}.layers.") for stack in _STACKS}
    for stack, count in counts.items():
        if not count:
            raise CheckpointError(f"tensors missing: model.{stack}.layers.0 and what follows it")
    low, high = counts.values()
    config = Config(
        **decoder_fields(keys),
        **stage_fields([Stage(0, low, 1, 2), Stage(low, high, 1, 2)]),
        schedule=1,
        cycles_high=loop_count(keys, "H_cycles"),
        cycles_low=loop_count(keys, "L_cycles"),
        norm_weightless=1,
        final_norm=0,
        attn_out_gate=1,
        inject=1,
        inject_source=2,
        state_init=4,
        embed_scale=_embed_scale(keys),
        mask=int(keys.flag("prefix_lm")),
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


def _embed_scale(keys: Keys) -> float:
    if "embedding_scale" in keys:
        return keys.positive("embedding_scale")
    return 1 / keys.positive("initializer_range")

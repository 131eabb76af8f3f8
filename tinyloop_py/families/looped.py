"""Llama-like decoders with a looped stage: ouro, nanbeige, iquestloopcoder, tinyloop_refdesk."""

from collections.abc import Collection
from typing import Any

from ..config import Config, Stage, stage_fields
from .decoder import decoder_fields, decoder_names, no_biases, no_window, rotary_buffers
from .keys import Keys
from .layout import Layout, layer_count, loop_count, named, stages_of

_OURO_VOCAB_SIZE = 49152
_OURO_BOS, _OURO_EOS = 1, 2

# Options of Nanbeige's code that no published model uses, and that change what it computes.
_NANBEIGE_OPTIONS = (
    "emb_neighbor_num",
    "enable_depth_attention",
    "enable_double_loop_split",
    "enable_hyper_connection",
    "enable_mhc",
    "loop_middle_layers",
    "loop_share_kv",
    "qk_layernorm",
)


def _one_stage(n_layers: int, end_norm: int, loops: int) -> dict[str, Any]:
    """All layers looped, as often as they were trained."""
    stages = stage_fields([Stage(0, n_layers, 1, end_norm)])
    return stages | {
        "loops_default": loops,
        "loops_max_trained": loops,
        # The norm after each loop is then the last one too: the head reads its output.
        "final_norm": int(not end_norm),
    }


def _loop_names(config: Config) -> dict[str, str]:
    names = decoder_names(config, (f"model.layers.{n}" for n in range(config.n_layers)))
    if not config.final_norm:
        names["stages.0.norm.weight"] = names.pop("final_norm.weight")
    return names


def ouro(keys: Keys, names: Collection[str]) -> Layout:
    """Norms before and after each block; the final norm after each loop; a gate to leave early."""
    no_biases(keys)
    no_window(keys)
    keys.unset("early_exit_step")
    loops = loop_count(keys, "total_ut_steps")
    fields = decoder_fields(keys)
    notes, end_ids = _ouro_special_ids(keys, fields)
    config = Config(
        **fields,
        **_one_stage(layer_count(keys, "num_hidden_layers"), 1, loops),
        norm_placement=1,
        exit_mode=1,
        exit_threshold=keys.positive("early_exit_threshold", 1.0),
    )
    own = _loop_names(config)
    for n in range(config.n_layers):
        layer = f"model.layers.{n}"
        own |= {
            f"layers.{n}.attn_out_norm.weight": f"{layer}.input_layernorm_2.weight",
            f"layers.{n}.mlp_out_norm.weight": f"{layer}.post_attention_layernorm_2.weight",
        }
    own |= {f"exit.{part}": f"model.early_exit_gate.{part}" for part in ("weight", "bias")}
    skipped = rotary_buffers(names)
    return Layout(config, named(own), skipped=skipped, notes=notes, end_ids=end_ids)


def _ouro_special_ids(keys: Keys, fields: dict[str, Any]) -> tuple[list[str], list[int] | None]:
    """Notes on wrong ids, and the end ids if they are corrected, as `fields` then are too."""
    end = keys.get("eos_token_id", None)
    if fields["bos_id"] != 0 or end not in (0, [0]) or fields["pad_id"] not in (0, -1):
        return [], None
    known = "bos and eos ids are both 0; Ouro's tokenizer has bos 1, eos 2 and pad 0"
    if fields["vocab_size"] != _OURO_VOCAB_SIZE:
        return [f"{known}. They were kept: the vocabulary is not Ouro's"], None
    fields |= {"bos_id": _OURO_BOS, "pad_id": 0}
    return [f"{known}, which were used"], [_OURO_EOS]


def nanbeige(keys: Keys, names: Collection[str]) -> Layout:
    """The final norm after every loop, or once after the last."""
    no_biases(keys)
    no_window(keys)
    keys.unset(*_NANBEIGE_OPTIONS)
    fields = decoder_fields(keys)
    keys.expect("kv_channels", fields["head_dim"])
    end_norm = int(not keys.flag("skip_loop_final_norm", False))
    n_layers = layer_count(keys, "num_hidden_layers")
    config = Config(**fields, **_one_stage(n_layers, end_norm, _nanbeige_loops(keys)))
    return Layout(config, named(_loop_names(config)), skipped=rotary_buffers(names))


def _nanbeige_loops(keys: Keys) -> int:
    """Weights of the losses, if there are any, count the loops before the last one."""
    weights = keys.get("loop_loss_weights", [])
    if not isinstance(weights, list) or len(weights) >= 1024:
        raise keys.refuse("loop_loss_weights", "it must be a list of at most 1023 numbers")
    keys.ignore("num_loops")
    return len(weights) + 1 if weights else loop_count(keys, "num_loops")


def iquest(keys: Keys, names: Collection[str]) -> Layout:
    """Two loops, of which the second mixes attention to the first one's KV with a window."""
    no_biases(keys)
    no_window(keys)
    keys.expect("loop_num", 2)
    loops = keys.integer("loop_num")
    config = Config(
        **decoder_fields(keys, eps=1e-5, theta=500000.0),
        **_one_stage(layer_count(keys, "num_hidden_layers"), 0, loops),
        loops_min=loops,
        loops_max=loops,
        loop_attention=1,
        loop_window=keys.integer("loop_window_size", low=1),
    )
    own = _loop_names(config)
    for n in range(config.n_layers):
        for part in ("weight", "bias"):
            own[f"layers.{n}.attn.loop_gate.{part}"] = f"model.gate_projections.{n}.{part}"
    return Layout(config, named(own), skipped=rotary_buffers(names))


def refdesk(keys: Keys, names: Collection[str]) -> Layout:
    """Prelude, a core that is looped over the prelude's output plus its own state, coda."""
    no_biases(keys)
    keys.unset("sliding_window")
    keys.expect("injection", "add")
    keys.expect("state_init", "zero")
    # The chat template writes these tokens as text.
    keys.ignore("system_token_id", "user_token_id", "assistant_token_id")
    counts = {
        "prelude": layer_count(keys, "num_prelude_layers", 0),
        "core": layer_count(keys, "num_core_layers"),
        "coda": layer_count(keys, "num_coda_layers", 0),
    }
    end_norm = int(keys.flag("norm_each_loop"))
    stages = stages_of(
        [(counts["prelude"], 0, 0), (counts["core"], 1, end_norm), (counts["coda"], 0, 0)]
    )
    config = Config(
        **decoder_fields(keys),
        **stage_fields(stages),
        loops_default=keys.integer("default_loops", 0, field="loops_default"),
        loops_max_trained=keys.integer("loops_max_trained", 0),
        state_init=2,
        inject=1,
        inject_source=1,
    )
    layers = (f"model.{part}.{n}" for part in counts for n in range(counts[part]))
    own = decoder_names(config, layers)
    if end_norm:
        core = next(s for s, stage in enumerate(stages) if stage.looped)
        own[f"stages.{core}.norm.weight"] = "model.loop_norm.weight"
    return Layout(config, named(own), skipped=rotary_buffers(names))

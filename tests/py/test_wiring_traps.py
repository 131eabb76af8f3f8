"""Wirings that stay fluent and are wrong: each moves the golden result far out of the tolerance.

So the golden tests tell them from the right one. A trap changes config fields, tensors or the
call's arguments, and the library runs what comes of it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from family_models import FAMILIES, cases, converted, golden, read_model
from random_models import write_model

import tinyloop_py as tl

# Deeper and longer than a model was trained for is one warning, and the same function.
pytestmark = pytest.mark.filterwarnings("ignore:(loops|max_seq_len) .* is above the")

TOLERANCE = 1e-4
FAR = 100 * TOLERANCE

Tensors = dict[str, tuple[str, np.ndarray]]


class Trap(NamedTuple):
    family: str
    name: str
    fields: dict[str, Any] = {}  # noqa: RUF012
    edits: tuple[Callable[[Tensors], Tensors], ...] = ()
    case: str | None = None  # the id; None: 40 tokens at the default loops
    arguments: dict[str, Any] = {}  # noqa: RUF012
    least: float = FAR


# ---- edits of the tensors -------------------------------------------------------------------


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def swapped(a, b):
    """Exchanges the tensors whose names differ only in `a` and `b`."""
    return lambda tensors: {
        name.replace(a, "\0").replace(b, a).replace("\0", b): value
        for name, value in tensors.items()
    }


def without(*parts):
    return lambda tensors: {
        name: value for name, value in tensors.items() if not any(part in name for part in parts)
    }


def copied(source, target):
    return lambda tensors: tensors | {target: tensors[source]}


def changed(part, function):
    """Applies the function to the elements of the tensors whose names contain `part`."""
    return lambda tensors: {
        name: (dtype, function(value).astype(value.dtype)) if part in name else (dtype, value)
        for name, (dtype, value) in tensors.items()
    }


def swap_halves(weight):
    return np.roll(weight, weight.shape[1] // 2, axis=1)


GATE_AND_UP = swapped(".mlp.gate.", ".mlp.up.")
NORM_AT_THE_END = {"stage0_end_norm": 0, "final_norm": 1}
NORM_EACH_LOOP = {"stage0_end_norm": 1, "final_norm": 0}

TRAPS = [
    # Ouro
    Trap("ouro", "post_attention_layernorm after attention",
         edits=(swapped(".attn_out_norm.", ".mlp_norm."),)),
    Trap("ouro", "norms on the sum", {"norm_placement": 2}),
    Trap("ouro", "norms before the block only", {"norm_placement": 0},
         (without("_out_norm."),)),
    Trap("ouro", "eps 1e-5", {"norm_eps": 1e-5}, least=5 * TOLERANCE),
    Trap("ouro", "the norm once at the end", NORM_AT_THE_END,
         (renamed("stages.0.norm", "final_norm"),)),
    Trap("ouro", "the norm again at the end", {"final_norm": 1},
         (copied("stages.0.norm.weight", "final_norm.weight"),)),
    Trap("ouro", "a loop less", arguments={"loops": 3}),
    Trap("ouro", "an exit at half", {"exit_threshold": 0.5}),
    Trap("ouro", "gate and up swapped", edits=(GATE_AND_UP,)),
    # Huginn
    Trap("huginn", "adapter halves swapped", edits=(changed("inject.weight", swap_halves),)),
    Trap("huginn", "gate and up swapped", edits=(GATE_AND_UP,)),
    Trap("huginn", "half-split rotation", {"rope_style": 0}),
    Trap("huginn", "norms on the branch", {"norm_placement": 1}),
    Trap("huginn", "no norm before the coda", {"norm_after_last": 0}),
    Trap("huginn", "embedding not scaled", {"embed_scale": 1.0}),
    Trap("huginn", "biases of queries and keys swapped",
         edits=(swapped(".attn.q.bias", ".attn.k.bias"),)),
    Trap("huginn", "no biases", {"q_bias": 0, "k_bias": 0}, (without(".bias"),)),
    Trap("huginn", "the state set to the prelude's output", {"state_init": 0, "init_std": 0.0,
         "init_cut": 0.0, "init_scale": 0.0}, case="p40.L4.zero"),
    Trap("huginn", "the state starts at zero", case="p40.L4.state",
         arguments={"init_state": None}),
    Trap("huginn", "a head of its own that is not the embedding", {"tied_head": 0},
         (copied("embed.weight", "head.weight"),
          changed("head.weight", lambda weight: weight[::-1]))),
    # Recurrent-*
    Trap("recurrent_llama", "adapter halves swapped",
         edits=(changed("inject.weight", swap_halves),)),
    Trap("recurrent_llama", "llama3 scaling left out",
         {"rope_scaling": 0, "rope_factor": 0.0, "rope_low_freq_factor": 0.0,
          "rope_high_freq_factor": 0.0, "rope_original_positions": 0}),
    Trap("recurrent_llama", "a norm before the coda", {"norm_after_last": 1}),
    Trap("recurrent_llama", "embedding scaled as Huginn's", {"embed_scale": 8.0}),
    Trap("recurrent_llama", "no adapter in the first loop", {"inject_skip_first": 1},
         case="p40.L4.state"),
    Trap("recurrent_llama", "the prelude added instead of the adapter", {"inject": 1},
         (without("inject."),)),
    Trap("recurrent_tinyllama", "adapter halves swapped",
         edits=(changed("inject.weight", swap_halves),)),
    Trap("recurrent_tinyllama", "the state starts at zero", case="p40.L4.state",
         arguments={"init_state": None}),
    Trap("recurrent_tinyllama", "interleaved rotation", {"rope_style": 1}),
    Trap("recurrent_olmo", "norms before the block", {"norm_placement": 0},
         (renamed("_out_norm", "_norm"),)),
    Trap("recurrent_olmo", "no norm of queries and keys",
         {"qk_norm": 0, "qk_norm_eps": 0.0}, (without("q_norm", "k_norm"),)),
    Trap("recurrent_olmo", "queries and keys normed head by head", {"qk_norm": 1},
         (changed("q_norm", lambda weight: weight[:16]),
          changed("k_norm", lambda weight: weight[:16]))),
    Trap("recurrent_olmo", "queries and keys normed without weights", {"qk_norm_weightless": 1},
         (without("q_norm", "k_norm"),)),
    # Parcae
    Trap("parcae", "activation not halved", {"activation_scale": 1.0}),
    Trap("parcae", "another activation", {"activation": 0}),
    Trap("parcae", "half-split rotation", {"rope_style": 0}),
    Trap("parcae", "no norm of queries and keys",
         {"qk_norm": 0, "qk_norm_after_rope": 0, "qk_norm_weightless": 0, "qk_norm_eps": 0.0}),
    Trap("parcae", "no norm of the prelude", {"prelude_norm": 0}, (without("prelude_norm"),)),
    Trap("parcae", "no projection after the loop", {"state_out_proj": 0}, (without("state_out"),)),
    Trap("parcae", "no value embeddings", {"value_embed": 0, "value_embed_channels": 0},
         (without(".value_"),)),
    Trap("parcae", "value embeddings without the factor 2",
         edits=(changed("value_embed", lambda table: table / 2),)),
    Trap("parcae", "value gate on the last channels",
         edits=(changed("value_gate", lambda weight: weight[:, ::-1]),)),
    Trap("parcae", "prelude added as it is", {"inject": 1}, (without("inject."),)),
    Trap("parcae", "decay and step swapped", edits=(swapped("inject.a_log", "inject.dt_bias"),)),
    Trap("parcae", "the state starts at zero", case="p40.L1.state",
         arguments={"init_state": None}),
    # Nanbeige
    Trap("nanbeige", "the norm once at the end", NORM_AT_THE_END,
         (renamed("stages.0.norm", "final_norm"),)),
    Trap("nanbeige_skipnorm", "the norm after every pass", NORM_EACH_LOOP,
         (renamed("final_norm", "stages.0.norm"),)),
    Trap("nanbeige", "a single pass", arguments={"loops": 1}),
    # HRM-Text
    Trap("hrm_text", "the prefix taken as causal", case="p40.H2L3.prefix40",
         arguments={"prefix_len": 0}),
    Trap("hrm_text", "a prefix too long", case="p40.H2L3.prefix25", arguments={"prefix_len": 26}),
    Trap("hrm_text", "rows q, gate, k, v", edits=(swapped(".attn.gate.", ".attn.q."),)),
    Trap("hrm_text", "no output gate", {"attn_out_gate": 0}, (without(".attn.gate."),)),
    Trap("hrm_text", "stacks swapped",
         edits=(swapped("layers.0.", "layers.2."), swapped("layers.1.", "layers.3."))),
    Trap("hrm_text", "cycles swapped", arguments={"loops": (3, 2)}),
    Trap("hrm_text", "low state starts at zero", {"state_init": 2}, (without("state_init"),)),
    Trap("hrm_text", "no norm after a stack", {"stage0_end_norm": 0, "stage1_end_norm": 0}),
    Trap("hrm_text", "embedding not scaled", {"embed_scale": 1.0}),
    # IQuest-Loop
    Trap("iquest_loop", "window one too narrow", {"loop_window": 7}),
    Trap("iquest_loop", "window one too wide", {"loop_window": 9}),
    Trap("iquest_loop", "window also in the first loop", arguments={"cache_window": 8}),
    Trap("iquest_loop", "no window", {"loop_window": 0}),
    Trap("iquest_loop", "gate ignored", {"loop_attention": 0}, (without("loop_gate"),)),
    Trap("iquest_loop", "gate turned round", edits=(changed("loop_gate", np.negative),)),
    Trap("iquest_loop", "gate without its bias", edits=(changed("loop_gate.bias", np.zeros_like),)),
    # Plain models
    Trap("llama", "llama3 scaling left out",
         {"rope_scaling": 0, "rope_factor": 0.0, "rope_low_freq_factor": 0.0,
          "rope_high_freq_factor": 0.0, "rope_original_positions": 0}),
    Trap("llama", "the head taken as tied", {"tied_head": 1}, (without("head."),)),
    Trap("llama", "eps 1e-6", {"norm_eps": 1e-6}, least=2 * TOLERANCE),
    Trap("llama", "KV heads in another order",
         edits=(changed(".attn.k.", lambda weight: np.roll(weight, 16, axis=0)),
                changed(".attn.v.", lambda weight: np.roll(weight, 16, axis=0)))),
    Trap("llama_bf16_sharded", "interleaved rotation", {"rope_style": 1}),
    Trap("llama_bf16_sharded", "another theta", {"rope_theta": 10000.0}),
    Trap("qwen2", "no biases", {"q_bias": 0, "k_bias": 0, "v_bias": 0}, (without(".bias"),)),
    Trap("qwen2", "biases of queries and keys only", {"v_bias": 0}, (without(".attn.v.bias"),)),
    Trap("qwen3", "queries and keys normed after the rotation", {"qk_norm_after_rope": 1}),
    Trap("qwen3", "queries and keys normed without weights", {"qk_norm_weightless": 1},
         (without("q_norm", "k_norm"),)),
    Trap("qwen3", "no norm of queries and keys",
         {"qk_norm": 0, "qk_norm_eps": 0.0}, (without("q_norm", "k_norm"),)),
]  # fmt: skip


def case_of(trap):
    """The golden case that the trap is measured on."""
    for case in cases(trap.family):
        if case.id == trap.case or (trap.case is None and len(case.tokens) == 40):
            return case
    raise KeyError(trap.case)


def trapped(trap):
    """The config and tensors of the trap's wiring."""
    config, tensors = read_model(converted(trap.family))
    for edit in trap.edits:
        tensors = edit(tensors)
    return replace(config, **trap.fields), tensors


def difference(path, trap):
    """The largest difference of the logits from the golden ones."""
    case = case_of(trap)
    arguments = case.arguments(trap.family) | trap.arguments
    with tl.Model(path, 64, threads=2, kv_mode="fp32", init_scale=0) as model:
        logits = model.logits(case.tokens, **arguments)
    assert np.isfinite(logits).all()
    return float(np.abs(logits - golden(trap.family)[case.tensors["logits"]]).max())


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: f"{trap.family}: {trap.name}")
def test_trap(tmp_path, trap):
    write_model(tmp_path / "model.tinyloop", *trapped(trap))
    assert difference(tmp_path / "model.tinyloop", trap) > trap.least


@pytest.mark.parametrize("family", FAMILIES)
def test_no_trap(tmp_path, family):
    """Written anew without a change, every family is right; and every family has a trap."""
    nothing = Trap(family, "nothing")
    write_model(tmp_path / "model.tinyloop", *trapped(nothing))
    assert difference(tmp_path / "model.tinyloop", nothing) <= TOLERANCE
    assert family in {trap.family for trap in TRAPS}

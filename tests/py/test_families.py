"""Families: each tensor of a converted checkpoint is where it belongs, row for row.

The checkpoints are those of tests/data; that the results compute what the original code does is for
test_families_golden.py.
"""

import numpy as np
import pytest
from checkpoints import DATA, convert_small, golden_checkpoint, refused, without
from family_models import FAMILIES

from tinyloop_py import format as fmt
from tinyloop_py.convert import convert

DECODER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
} | {f"attn.{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"}
DECODER_ENDS = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
FINAL_NORM = {"final_norm.weight": "model.norm.weight"}
STAGE_NORM = {"stages.0.norm.weight": "model.norm.weight"}


def in_layers(layers, names):
    """Names of one layer, for layers with these prefixes."""
    return {
        f"layers.{n}.{own}": f"{layer}.{its}"
        for n, layer in enumerate(layers)
        for own, its in names.items()
    }


def decoder(n_layers, ends, **more):
    """Sources of a Llama-like decoder; `more` are names in a layer with "__" for "."."""
    names = DECODER_LAYER | {own.replace("__", "."): its for own, its in more.items()}
    return ends | in_layers([f"model.layers.{n}" for n in range(n_layers)], names)


def rows(name, first, end):
    return (name, first, end)


def recurrent(counts, ends, q, kv, ff, norms, bias=False):
    """Sources of huginn_raven: fused tensors are split into rows."""
    layers = [
        f"transformer.{stack}.{n}"
        for stack, count in zip(("prelude", "core_block", "coda"), counts, strict=True)
        for n in range(count)
    ]
    sources = {
        "embed.weight": "transformer.wte.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "inject.weight": "transformer.adapter.weight",
    } | ends
    for n, layer in enumerate(layers):
        qkv, fc = f"{layer}.attn.Wqkv.weight", f"{layer}.mlp.fc.weight"
        sources |= {
            f"layers.{n}.attn.q.weight": rows(qkv, 0, q),
            f"layers.{n}.attn.k.weight": rows(qkv, q, q + kv),
            f"layers.{n}.attn.v.weight": rows(qkv, q + kv, q + 2 * kv),
            f"layers.{n}.attn.o.weight": f"{layer}.attn.proj.weight",
            f"layers.{n}.mlp.gate.weight": rows(fc, 0, ff),
            f"layers.{n}.mlp.up.weight": rows(fc, ff, 2 * ff),
            f"layers.{n}.mlp.down.weight": f"{layer}.mlp.proj.weight",
        }
        sources |= {f"layers.{n}.{own}.weight": f"{layer}.{its}.weight" for own, its in norms}
        if bias:
            sources[f"layers.{n}.attn.q.bias"] = rows(f"{layer}.attn.qk_bias", 0, 1)
            sources[f"layers.{n}.attn.k.bias"] = rows(f"{layer}.attn.qk_bias", 1, 2)
    return sources


def hrm_layers():
    sources = {}
    layers = [f"model.{stack}_module.layers.{n}" for stack in "LH" for n in range(2)]
    for n, layer in enumerate(layers):
        gqkv, gate_up = f"{layer}.attn.gqkv_proj.weight", f"{layer}.mlp.gate_up_proj.weight"
        for i, part in enumerate(("gate", "q", "k", "v")):
            sources[f"layers.{n}.attn.{part}.weight"] = rows(gqkv, 64 * i, 64 * i + 64)
        sources |= {
            f"layers.{n}.attn.o.weight": f"{layer}.attn.o_proj.weight",
            f"layers.{n}.mlp.gate.weight": rows(gate_up, 0, 112),
            f"layers.{n}.mlp.up.weight": rows(gate_up, 112, 224),
            f"layers.{n}.mlp.down.weight": f"{layer}.mlp.down_proj.weight",
        }
    return sources


def parcae():
    layers = [f"transformer.{s}.{n}" for s in ("prelude", "core_block", "coda") for n in range(2)]
    names = {
        "attn_norm.weight": "norm_1.weight",
        "mlp_norm.weight": "norm_2.weight",
        "attn.o.weight": "attn.c_proj.weight",
        "mlp.up.weight": "mlp.fc.weight",
        "mlp.down.weight": "mlp.proj.weight",
    } | {f"attn.{part}.weight": f"attn.c_{part}.weight" for part in "qkv"}
    sources = in_layers(layers, names) | {
        "embed.weight": "transformer.wte.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "prelude_norm.weight": "transformer.ln_prelude.weight",
        "inject.a_log": "transformer.adapter.A_log",
        "inject.dt_bias": "transformer.adapter.dt_bias",
        "inject.b.weight": "transformer.adapter.B",
        "state_out.weight": "transformer.C.weight",
    }
    for n in (1, 3, 5):
        sources[f"layers.{n}.attn.value_gate.weight"] = f"{layers[n]}.attn.ve_gate.weight"
        sources[f"layers.{n}.attn.value_embed.weight"] = f"value_embeds.{n}.weight"
    return sources


UNTIED = {"head.weight": "lm_head.weight"}
LLAMA_NORMS = [("attn_norm", "norm_1"), ("mlp_norm", "norm_2")]
TIED_DECODER = {"embed.weight": "model.embed_tokens.weight"} | FINAL_NORM

# For each tensor of the file the checkpoint's, or its rows from .. to before.
SOURCES = {
    "hrm_text": {"state_init.weight": "model.z_L_init"} | DECODER_ENDS | hrm_layers(),
    "huginn": recurrent(
        (2, 3, 1),
        {},
        64,
        64,
        96,
        [
            ("attn_norm", "norm_1"),
            ("attn_out_norm", "norm_2"),
            ("mlp_norm", "norm_3"),
            ("mlp_out_norm", "norm_4"),
        ],
        bias=True,
    ),
    "iquest_loop": decoder(3, DECODER_ENDS | FINAL_NORM)
    | {
        f"layers.{n}.attn.loop_gate.{part}": f"model.gate_projections.{n}.{part}"
        for n in range(3)
        for part in ("weight", "bias")
    },
    "llama": decoder(4, DECODER_ENDS | FINAL_NORM),
    "nanbeige": decoder(3, DECODER_ENDS | STAGE_NORM),
    "nanbeige_skipnorm": decoder(2, DECODER_ENDS | FINAL_NORM),
    "ouro": decoder(
        3,
        DECODER_ENDS
        | STAGE_NORM
        | {f"exit.{part}": f"model.early_exit_gate.{part}" for part in ("weight", "bias")},
        attn_out_norm__weight="input_layernorm_2.weight",
        mlp_out_norm__weight="post_attention_layernorm_2.weight",
    ),
    "parcae": parcae(),
    "qwen2": decoder(
        3, TIED_DECODER, **{f"attn__{part}__bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
    ),
    "qwen3": decoder(
        3,
        TIED_DECODER,
        **{f"attn__{part}_norm__weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    ),
    "recurrent_llama": recurrent((2, 2, 1), UNTIED, 64, 32, 128, LLAMA_NORMS),
    "recurrent_olmo": recurrent(
        (1, 2, 1),
        UNTIED,
        64,
        64,
        128,
        [
            ("attn_out_norm", "norm_1"),
            ("mlp_out_norm", "norm_2"),
            ("attn.q_norm", "attn.q_norm"),
            ("attn.k_norm", "attn.k_norm"),
        ],
    ),
    "recurrent_tinyllama": recurrent((1, 2, 1), UNTIED, 64, 8, 112, LLAMA_NORMS),
}
NOT_NEEDED = {"freqs_cis"}


def test_every_family_of_the_data_is_here():
    assert set(SOURCES) == set(FAMILIES) - {"llama_bf16_sharded"}


@pytest.mark.parametrize("family", SOURCES)
def test_tensors_row_for_row(tmp_path, family):
    _, stored = golden_checkpoint(family)
    report = convert(DATA / family, tmp_path / "out.tinyloop")
    file = fmt.read_file(report.path)
    assert file.verify() == []
    assert file.tensors.keys() == SOURCES[family].keys()
    used = dict.fromkeys(stored, 0)
    for own, source in SOURCES[family].items():
        name, first, end = source if isinstance(source, tuple) else (source, 0, None)
        part = stored[name][1][first:end]
        assert np.array_equal(file.array(own), part.reshape(file.tensors[own].shape)), own
        used[name] += len(part)
    whole = {name: len(array) for name, (_, array) in stored.items()}
    assert used == {name: 0 if name in NOT_NEEDED else n for name, n in whole.items()}
    assert set(report.skipped) == NOT_NEEDED & stored.keys()
    assert report.unknown_keys == []


@pytest.mark.parametrize("family", SOURCES)
def test_each_missing_tensor_is_refused_by_name(tmp_path, family):
    config, tensors = golden_checkpoint(family)
    unneeded = {"freqs_cis"} | {name for name in tensors if "value_embeds" in name or "ve_" in name}
    whole_layers = [name for name in tensors if name not in unneeded]
    for name in whole_layers[:: max(1, len(whole_layers) // 12)]:
        if ".norm_3." not in name:  # one of several by which Huginn is known
            refused(tmp_path, f"tensors missing: {name}", config, without(tensors, name))


@pytest.mark.parametrize("family", SOURCES)
def test_each_misshaped_or_left_over_tensor_is_refused_by_name(tmp_path, family):
    """Of a fused tensor no row may be left over or missing."""
    config, tensors = golden_checkpoint(family)
    kinds = {name.split(".")[-2:][0]: name for name in tensors if name not in NOT_NEEDED}
    for name in kinds.values():
        _, array = tensors[name]
        for changed in (np.concatenate([array, array[:1]]), array[:-1]):
            if len(changed):
                other = tensors | {name: ("F32", changed)}
                refused(tmp_path, f"tensor {name} has shape {list(changed.shape)}", config, other)
    other = tensors | {"model.extra.bias": ("F32", np.zeros(3, "<f4"))}
    refused(tmp_path, "does not call for: model.extra.bias", config, other)


@pytest.mark.parametrize("family", ["huginn", "parcae", "qwen2", "qwen3"])
def test_tied_head_may_be_stored(tmp_path, family):
    config, tensors = golden_checkpoint(family)
    embed = tensors[next(n for n in tensors if n.endswith(("wte.weight", "embed_tokens.weight")))]
    _, lacking = convert_small(tmp_path, config, without(tensors, "lm_head.weight"))
    written = lacking.path.read_bytes()
    _, holding = convert_small(tmp_path, config, tensors | {"lm_head.weight": embed})
    assert holding.path.read_bytes() == written
    other = {"lm_head.weight": ("F32", embed[1] + 1)}
    refused(tmp_path, "tensor lm_head.weight differs from", config, tensors | other)


def test_value_embeddings_act_only_where_gate_and_table_are(tmp_path):
    config, tensors = golden_checkpoint("parcae")
    gate, table = "transformer.core_block.1.attn.ve_gate.weight", "value_embeds.5.weight"
    report, file = convert_small(tmp_path, config, without(tensors, gate, table))
    assert report.skipped == [
        "freqs_cis",
        "transformer.coda.1.attn.ve_gate.weight",
        "value_embeds.3.weight",
    ]
    assert {name for name in file.tensors if ".value_" in name} == {
        "layers.1.attn.value_gate.weight",
        "layers.1.attn.value_embed.weight",
    }
    names = [name for name in tensors if name.startswith("value_embeds.")]
    report, file = convert_small(tmp_path, config, without(tensors, *names))
    assert (file.config.value_embed, file.config.value_embed_channels) == (0, 0)
    assert len(report.skipped) == 4
    beyond = {"value_embeds.6.weight": tensors[table]}
    refused(tmp_path, "does not call for: value_embeds.6.weight", config, tensors | beyond)


def test_value_gate_takes_32_channels(tmp_path):
    config, tensors = golden_checkpoint("parcae")
    name = "transformer.prelude.1.attn.ve_gate.weight"
    other = tensors | {name: ("F32", tensors[name][1][:, :16].copy())}
    refused(tmp_path, f"tensor {name} has shape [4, 16]", config, other)


def test_lost_layers_of_hrm_are_missed(tmp_path):
    config, tensors = golden_checkpoint("hrm_text")
    fewer = {n: t for n, t in tensors.items() if "L_module.layers.1." not in n}
    refused(tmp_path, "L_module has 1 layers and H_module 2", config, fewer)
    fewer = {n: t for n, t in tensors.items() if ".layers.1." not in n}
    stated = config | {"num_layers_per_stack": 2}
    refused(tmp_path, "num_layers_per_stack is 2; supported: 1", stated, fewer)
    gap = {n: t for n, t in tensors.items() if "L_module.layers.0." not in n}
    refused(tmp_path, "tensors missing: model.L_module.layers.0.attn.gqkv", config, gap)


def test_layers_in_any_spelling_do_not_break_the_count(tmp_path):
    config, tensors = golden_checkpoint("hrm_text")
    for name in ("model.L_module.layers.x.weight", "model.L_module.layers.99999999.weight"):
        other = tensors | {name: ("F32", np.zeros(1, "<f4"))}
        refused(tmp_path, f"does not call for: {name}", config, other)
    many = tensors | {"model.L_module.layers.65535.weight": ("F32", np.zeros(1, "<f4"))}
    with pytest.raises(ValueError, match="layers"):
        convert_small(tmp_path, config, many)

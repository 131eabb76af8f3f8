"""Conversion of checkpoint folders: whole models, tensors by name, damaged folders."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    DATA,
    LLAMA,
    REFDESK,
    convert_small,
    end_ids,
    random_tensors,
    refused,
    save_checkpoint,
    small_refdesk,
    without,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tinyloop_py import checkpoint as checkpoints
from tinyloop_py import format as fmt
from tinyloop_py.convert import CheckpointError, convert
from tinyloop_py.export import to_safetensors

SHIPPED = Path(fmt.__file__).parent / "data/refdesk.tinyloop"

# ---- Whole models ---------------------------------------------------------------------------

REFDESK_LAYERS = ["prelude.0", "core.0", "core.1", "core.2", "coda.0"]


def test_shipped_model_is_what_its_checkpoint_converts_to(tmp_path):
    shipped = fmt.read_file(SHIPPED)
    assert shipped.verify() == []
    parts = {
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
    names = {
        "embed": "embed_tokens",
        "final_norm": "norm",
        "stages.1.norm": "loop_norm",
    } | {
        f"layers.{n}.{own}": f"{layer}.{its}"
        for n, layer in enumerate(REFDESK_LAYERS)
        for own, its in parts.items()
    }
    tensors = {
        f"model.{its}.weight": ("BF16", shipped.array(f"{own}.weight"))
        for own, its in names.items()
    }
    assert len(tensors) == len(shipped.tensors)
    template = shipped.blobs["chat_template"].decode()
    folder = save_checkpoint(
        tmp_path / "refdesk",
        REFDESK,
        dict(sorted(tensors.items())),
        tokenizer__json=shipped.blobs["tokenizer.json"],
        MODEL_CARD__md=shipped.blobs["card"],
        tokenizer_config__json={"eos_token": "<|end|>", "chat_template": template},
    )
    report = convert(folder, tmp_path / "again.tinyloop")
    assert (tmp_path / "again.tinyloop").read_bytes() == SHIPPED.read_bytes()
    assert report.family == "tinyloop_refdesk"
    assert report.size == SHIPPED.stat().st_size
    assert report.parameters == {"bfloat16": 11_014_656}
    assert report.unknown_keys == report.skipped == []


def test_shipped_model_is_described_in_full():
    config = fmt.read_file(SHIPPED).config
    assert config == fmt.Config(
        vocab_size=8192,
        hidden_size=384,
        n_heads=6,
        n_kv_heads=2,
        head_dim=64,
        ff_size=1024,
        max_positions=2048,
        pad_id=0,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rotary_dim=64,
        tied_head=1,
        n_stages=3,
        stage0_n_layers=1,
        stage1_first_layer=1,
        stage1_n_layers=3,
        stage1_looped=1,
        stage1_end_norm=1,
        stage2_first_layer=4,
        stage2_n_layers=1,
        loops_default=8,
        loops_max_trained=12,
        state_init=2,
        inject=1,
        inject_source=1,
    )


def test_llama_reference_checkpoint(tmp_path):
    report = convert(DATA / "llama", tmp_path / "llama.tinyloop")
    file = fmt.read_file(report.path)
    stored = load_file(DATA / "llama/model.safetensors")
    assert file.config == fmt.Config(
        vocab_size=288,
        hidden_size=64,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        ff_size=168,
        max_positions=2048,
        bos_id=1,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rotary_dim=16,
        rope_scaling=2,
        rope_factor=32.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_positions=64,
        stage0_n_layers=4,
    )
    assert np.array_equal(file.array("head.weight"), stored["lm_head.weight"])
    assert np.array_equal(
        file.array("layers.3.mlp_norm.weight"),
        stored["model.layers.3.post_attention_layernorm.weight"],
    )
    assert np.array_equal(
        file.array("layers.2.attn.v.weight"), stored["model.layers.2.self_attn.v_proj.weight"]
    )
    assert file.n_parameters == sum(array.size for array in stored.values())
    assert end_ids(file) == [2]
    assert set(file.blobs) == {"end_ids"}
    assert report.unknown_keys == []


def test_shards_convert_like_one_file(tmp_path):
    folder = DATA / "llama_bf16_sharded"
    sharded = fmt.read_file(convert(folder, tmp_path / "a.tinyloop").path)
    assert {tensor.dtype for tensor in sharded.tensors.values()} == {"bfloat16"}
    assert end_ids(sharded) == [2, 3, 4]

    tensors = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        data = shard.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                values = np.frombuffer(data[8 + size :][begin:end], "<u2")
                tensors[name] = ("BF16", values.reshape(entry["shape"]))
    config = json.loads((folder / "config.json").read_text())
    save_checkpoint(tmp_path / "whole", config, tensors)
    convert(tmp_path / "whole", tmp_path / "b.tinyloop")
    assert (tmp_path / "a.tinyloop").read_bytes() == (tmp_path / "b.tinyloop").read_bytes()


def test_files_of_the_safetensors_package_are_read(tmp_path):
    tensors = random_tensors(LLAMA)
    folder = save_checkpoint(tmp_path / "a", LLAMA, tensors)
    convert(folder, tmp_path / "a.tinyloop")
    save_file({name: array for name, (_, array) in tensors.items()}, folder / "model.safetensors")
    convert(folder, tmp_path / "b.tinyloop")
    assert (tmp_path / "a.tinyloop").read_bytes() == (tmp_path / "b.tinyloop").read_bytes()


SIZES = st.integers(1, 9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    hidden=SIZES,
    ff=SIZES,
    vocab=st.integers(3, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 6, 10, 256]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    dtype=st.sampled_from(["F32", "F16", "BF16"]),
)
def test_any_sizes(tmp_path, hidden, ff, vocab, kv_heads, group, head_dim, layers, tied, dtype):
    config = LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": ff,
        "vocab_size": vocab,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }
    tensors = random_tensors(config, dtype)
    _, file = convert_small(tmp_path, config, tensors)
    assert file.verify() == []
    assert len(file.tensors) == len(tensors)
    q = file.array(f"layers.{layers - 1}.attn.q.weight")
    assert np.array_equal(q, tensors[f"model.layers.{layers - 1}.self_attn.q_proj.weight"][1])
    assert q.shape == (kv_heads * group * head_dim, hidden)


@pytest.mark.parametrize(("prelude", "coda"), [(1, 1), (2, 0), (0, 2), (0, 0)])
def test_refdesk_stages(tmp_path, prelude, coda):
    config = small_refdesk(prelude, 3, coda)
    tensors = random_tensors(config)
    _, file = convert_small(tmp_path, config, tensors)
    parts = [(prelude, 0, 0), (3, 1, 1), (coda, 0, 0)]
    stages = file.config.stages
    assert [(s.n_layers, s.looped, s.end_norm) for s in stages] == [p for p in parts if p[0]]
    assert [s.first_layer for s in stages][-1] == file.config.n_layers - stages[-1].n_layers
    core = 1 if prelude else 0
    assert np.array_equal(
        file.array(f"stages.{core}.norm.weight"), tensors["model.loop_norm.weight"][1]
    )
    assert np.array_equal(
        file.array(f"layers.{prelude + 1}.attn.k.weight"),
        tensors["model.core.1.self_attn.k_proj.weight"][1],
    )


def test_refdesk_without_loop_norm(tmp_path):
    config = small_refdesk() | {"norm_each_loop": False}
    tensors = random_tensors(config)
    refused(tmp_path, "does not call for: model.loop_norm.weight", config, tensors)
    del tensors["model.loop_norm.weight"]
    _, file = convert_small(tmp_path, config, tensors)
    assert file.config.stage1_end_norm == 0


# ---- Tensors by name ------------------------------------------------------------------------


def test_missing_tensors_are_refused_by_name(tmp_path):
    tensors = random_tensors(LLAMA)
    for name in tensors:
        refused(tmp_path, f"tensors missing: {name}", LLAMA, without(tensors, name))
    refused(tmp_path, "and 16 more", LLAMA, {})


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "score"],
)
def test_extra_tensors_are_refused_by_name(tmp_path, name):
    tensors = random_tensors(LLAMA) | {name: ("F32", np.zeros(6, "<f4"))}
    refused(tmp_path, f"does not call for: {name}", LLAMA, tensors)


def test_wrongly_shaped_tensors_are_refused_by_name(tmp_path):
    tensors = random_tensors(LLAMA)
    for name, (dtype, array) in tensors.items():
        longer = np.zeros((array.shape[0] + 1, *array.shape[1:]), array.dtype)
        changed = tensors | {name: (dtype, longer)}
        refused(tmp_path, f"tensor {name} has shape {list(longer.shape)}", LLAMA, changed)
    name = "model.layers.0.mlp.up_proj.weight"
    turned = tensors | {name: ("F32", np.ascontiguousarray(tensors[name][1].T))}
    refused(tmp_path, f"tensor {name} has shape [6, 5]; config.json asks for [5, 6]", LLAMA, turned)


def test_other_dtypes_are_refused_by_name(tmp_path):
    tensors = random_tensors(LLAMA)
    name = "model.layers.1.mlp.down_proj.weight"
    changed = tensors | {name: ("I64", np.zeros((6, 5), "<i8"))}
    refused(
        tmp_path, f"tensor {name} has dtype I64; convertible are F32, F16, BF16", LLAMA, changed
    )


def test_rotary_buffers_are_skipped_and_reported(tmp_path):
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    tensors = random_tensors(LLAMA) | {name: ("F32", np.ones(1, "<f4"))}
    report, file = convert_small(tmp_path, LLAMA, tensors)
    assert report.skipped == [name]
    assert file.verify() == []


def test_tied_head_may_be_stored_or_not(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    _, lacking = convert_small(tmp_path, config, tensors)
    without_head = lacking.path.read_bytes()
    stored = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    _, holding = convert_small(tmp_path, config, stored)
    assert holding.path.read_bytes() == without_head
    assert lacking.config.tied_head == 1
    assert "head.weight" not in lacking.tensors


def test_untied_head_is_kept(tmp_path):
    tensors = random_tensors(LLAMA)
    _, file = convert_small(tmp_path, LLAMA, tensors)
    assert file.config.tied_head == 0
    assert np.array_equal(file.array("head.weight"), tensors["lm_head.weight"][1])


def test_tied_head_that_differs_is_refused(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    embed = tensors["model.embed_tokens.weight"][1]
    others = [
        ("F32", np.where(np.arange(embed.size).reshape(embed.shape) == 41, -embed, embed)),
        ("F32", embed[:-1]),
        ("F32", embed.reshape(6, 7)),
        ("F16", embed.astype("<f2")),
    ]
    for other in others:
        refused(
            tmp_path,
            "tensor lm_head.weight differs from model.embed_tokens.weight",
            config,
            tensors | {"lm_head.weight": other},
        )


# ---- Folders that are not right -------------------------------------------------------------


def test_folders_that_lack_something(tmp_path):
    out = tmp_path / "out.tinyloop"
    with pytest.raises(CheckpointError, match="is not a folder"):
        convert(tmp_path / "none", out)
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        convert(folder, out)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        convert(folder, out)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json holds no JSON object"):
        convert(folder, out)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        convert(folder, out)
    assert not out.exists()


def test_damaged_safetensors_files_are_refused(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    path = folder / "model.safetensors"
    sound = path.read_bytes()
    size = int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8 : 8 + size])

    def attempt(data, message):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            convert(folder, tmp_path / "out.tinyloop")

    def with_entry(**changes):
        entry = {"lm_head.weight": header["lm_head.weight"] | changes}
        text = json.dumps(header | entry).encode()
        return len(text).to_bytes(8, "little") + text + sound[8 + size :]

    attempt(b"", "is no safetensors file")
    attempt(b"\xff" * 8, "is no safetensors file")
    attempt(sound[: size // 2], "is no safetensors file")
    attempt(sound[:-1], "its tensors end at")
    attempt(sound + b"\0", "its tensors end at")
    attempt(b"\x02" + bytes(7) + b"{]", "is not JSON")
    attempt(with_entry(data_offsets=[0, 8]), "tensor")
    attempt(with_entry(data_offsets=[8, 0]), "the entry of tensor lm_head.weight is damaged")
    attempt(with_entry(data_offsets=[-8, 0]), "is damaged")
    attempt(with_entry(data_offsets="x"), "is damaged")
    overlapping = header["model.embed_tokens.weight"]["data_offsets"]
    attempt(with_entry(data_offsets=overlapping), "begins at")
    attempt(with_entry(shape=[7, -6]), "is damaged")
    attempt(with_entry(shape=[7, 7]), "tensor lm_head.weight has 168 bytes")
    attempt(with_entry(dtype=3), "is damaged")


def test_file_that_shrinks_while_it_is_read(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    opened = checkpoints.Checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    last = max(opened.tensors, key=lambda name: opened.tensors[name].begin)
    with pytest.raises(CheckpointError, match=f"ended inside tensor {last}"):
        list(opened.read(last))


def sharded(tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(DATA / "llama_bf16_sharded", folder)
    index = folder / "model.safetensors.index.json"
    return folder, index, json.loads(index.read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("model.norm.weight"), "tensor model.norm.weight is in model-00002"),
        (
            lambda m: m.__setitem__("lm_head.weight", "model-00002-of-00002.safetensors"),
            "tensor lm_head.weight is in model-00001",
        ),
        (
            lambda m: m.__setitem__("more", "model-00001-of-00002.safetensors"),
            "tensor more is not in model-00001",
        ),
        (lambda m: m.__setitem__("more", "model-3.safetensors"), "names model-3.safetensors"),
        (lambda m: m.__setitem__("more", "../model.safetensors"), "a file of the folder"),
        (lambda m: m.__setitem__("more", 1), "a file of the folder"),
    ],
)
def test_index_that_does_not_fit_is_refused(tmp_path, change, message):
    folder, index, content = sharded(tmp_path)
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "out.tinyloop")


def test_index_without_a_map_is_refused(tmp_path):
    folder, index, _ = sharded(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        convert(folder, tmp_path / "out.tinyloop")


def test_progress_names_each_tensor(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    seen = []
    convert(folder, tmp_path / "out.tinyloop", progress=lambda *row: seen.append(row))
    assert [name for name, _, _ in seen] == list(fmt.read_file(tmp_path / "out.tinyloop").tensors)
    assert seen[-1][1] == seen[-1][2]


def test_output_replaces_an_older_one_only_when_complete(tmp_path):
    out = tmp_path / "out.tinyloop"
    out.write_bytes(b"old")
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))

    def interrupt(name, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, out, progress=interrupt)
    assert out.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out.tinyloop"]


# ---- A single file, and files of `tinyloop export` ------------------------------------------


def test_path_of_the_weights(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    convert(folder, tmp_path / "a.tinyloop")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="neither model"):
        convert(folder, tmp_path / "b.tinyloop")
    convert(folder / "other.safetensors", tmp_path / "b.tinyloop")
    assert (tmp_path / "a.tinyloop").read_bytes() == (tmp_path / "b.tinyloop").read_bytes()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        convert(folder / "other.safetensors", tmp_path / "b.tinyloop")
    (folder / "other.safetensors").rename(folder / "other.bin")
    with pytest.raises(CheckpointError, match=r"not a \.safetensors file"):
        convert(folder / "other.bin", tmp_path / "b.tinyloop")


def test_one_shard_is_not_a_model(tmp_path):
    shard = DATA / "llama_bf16_sharded/model-00001-of-00002.safetensors"
    with pytest.raises(CheckpointError, match=r"tensors missing: .*model\.norm\.weight"):
        convert(shard, tmp_path / "out.tinyloop")


def exported(folder, **options):
    """A file of `tinyloop export`, and the .tinyloop file that it was made of."""
    folder.mkdir(exist_ok=True)
    source = folder / "source.tinyloop"
    convert(DATA / "parcae", source, **options)
    to_safetensors(source, folder / "model.safetensors")
    return folder / "model.safetensors", source


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"quantize": "int8-group"}])
def test_an_exported_file_gives_the_same_model(tmp_path, options):
    path, source = exported(tmp_path, **options)
    want = fmt.read_file(source)
    for src in (path, tmp_path):  # as a file, and as the weights of its folder
        report = convert(src, tmp_path / "again.tinyloop")
        again = fmt.read_file(report.path)
        assert (report.family, report.unknown_keys, again.verify()) == ("tinyloop", [], [])
        assert (again.config, again.blobs) == (want.config, want.blobs)
        assert again.tensors.keys() == want.tensors.keys()
        for name, tensor in want.tensors.items():
            assert again.tensors[name].dtype == tensor.dtype
            assert np.array_equal(again.array(name), want.array(name))


def test_options_reach_an_exported_file(tmp_path):
    path, _ = exported(tmp_path)
    convert(DATA / "parcae", tmp_path / "int8.tinyloop", dtype="bf16", quantize="int8")
    convert(path, tmp_path / "again.tinyloop", dtype="bf16", quantize="int8")
    wanted, again = (fmt.read_file(tmp_path / f"{n}.tinyloop") for n in ("int8", "again"))
    assert {n: again.array(n).tobytes() for n in again.tensors} == {
        n: wanted.array(n).tobytes() for n in wanted.tensors
    }


def test_int8_weights_stay_whatever_is_asked_for(tmp_path):
    path, source = exported(tmp_path, quantize="int8-group")
    convert(path, tmp_path / "again.tinyloop", dtype="fp16", quantize="int8")
    want, again = fmt.read_file(source), fmt.read_file(tmp_path / "again.tinyloop")
    for name in ("layers.0.mlp.down.weight", "layers.0.mlp.down.scale"):
        assert np.array_equal(again.array(name), want.array(name))
    assert again.tensors["final_norm.weight"].dtype == "float16"
    assert again.verify() == []


def change_header(path, change):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def renamed(old, new):
    return lambda header: header.__setitem__(new, header.pop(old))


def described(**fields):
    """A change of the described config."""

    def change(header):
        values = json.loads(header["__metadata__"]["tinyloop"])
        header["__metadata__"]["tinyloop"] = json.dumps(values | fields)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["__metadata__"].update(tinyloop="{"), "metadata tinyloop is not JSON"),
        (lambda h: h["__metadata__"].update(tinyloop="{}"), "must have every config field"),
        (described(blobs=3), "blobs must be an object of base64 texts"),
        (described(more=1), r"unknown are \['more'\]"),
        (described(vocab_size="x"), "vocab_size is 'x'"),
        (described(hidden_size=63), r"embed.weight: shape \[256, 64\]; it must be \[256, 63\]"),
        (described(stage0_n_layers=10**9), "the stages have"),
        (described(value_embed=0), "layers.1.attn.value_gate.weight: the configuration does not"),
        (renamed("layers.1.attn.value_gate.weight", "x"), "value_gate.weight: missing"),
        (renamed("layers.1.attn.value_embed.weight", "x"), "value_embed.weight: missing"),
        (renamed("embed.scale", "embed.scales"), "embed.scale: missing, the scales of the int8"),
        (lambda h: h["embed.scale"].update(shape=[1, 256]), "it must be float32"),
        (lambda h: h["embed.scale"].update(shape=[128, 2]), r"\[256, 1\] or \[256, 1\]"),
        (lambda h: h["embed.weight"].update(dtype="U8"), "embed.weight has dtype U8; convertible"),
    ],
)
def test_exported_files_that_do_not_fit_are_refused(tmp_path, change, message):
    path, _ = exported(tmp_path, quantize="int8")
    change_header(path, change)
    out = tmp_path / "out.tinyloop"
    with pytest.raises(ValueError, match=message):
        convert(path, out)
    assert not out.exists()


def test_metadata_of_others_is_no_description(tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", LLAMA, random_tensors(LLAMA))
    path = folder / "model.safetensors"
    for metadata in ({"tinyloop": 3}, {}, [], "tinyloop", None):
        change_header(path, lambda header, value=metadata: header.update(__metadata__=value))
        assert convert(path, tmp_path / "out.tinyloop").family == "llama"

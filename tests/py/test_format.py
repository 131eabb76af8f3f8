"""The container against docs/format.md: layout, every check of the reader, the atomic writer."""

import dataclasses
import os
import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyloop_py import config as schema
from tinyloop_py import format as fmt

DOCS = Path(__file__).resolve().parents[2] / "docs/format.md"
HEADER, CONFIG, TENSOR, BLOB = 64, 96 * 8, 160, 64
BLOBS = {"tokenizer.json": b"{}", "end_ids": struct.pack("<3i", 2, 5, 6), "card": b"text" * 23}


def small_config(**changes):
    values = {
        "vocab_size": 7,
        "hidden_size": 6,
        "n_heads": 3,
        "n_kv_heads": 1,
        "head_dim": 2,
        "ff_size": 5,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rotary_dim": 2,
        "stage0_n_layers": 1,
        "tied_head": 1,
    }
    return fmt.Config(**values | changes)


def random_arrays(config, dtype="float32", seed=0):
    """Arrays in the tensors' dtype; with int8 weights come float32 scales, vectors stay float32."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in fmt.tensor_shapes(config).items():
        own = "float32" if dtype == "int8" and len(shape) == 1 else dtype
        arrays[name] = rng.integers(0, 100, shape).astype(fmt.DTYPES[own])
        if own == "int8":
            arrays[schema.scale_name(name)] = np.ones((shape[0], 1), fmt.DTYPES["float32"])
    return arrays


def dtype_of(array):
    return next(name for name, dtype in fmt.DTYPES.items() if dtype == array.dtype)


def write(path, config, arrays, blobs=BLOBS):
    specs = [fmt.TensorSpec(name, dtype_of(array), array.shape) for name, array in arrays.items()]
    fmt.write_file(path, config, specs, lambda spec: [arrays[spec.name]], blobs)
    return path


@pytest.fixture
def small_file(tmp_path):
    config = small_config()
    return write(tmp_path / "small.tinyloop", config, random_arrays(config))


def reseal(data):
    """The bytes with the checksum of the meta part made right again."""
    meta_size = struct.unpack_from("<Q", data, 24)[0]
    struct.pack_into("<I", data, 12, zlib.crc32(data[16:meta_size]))
    return data


# ---- Schema against the page ----------------------------------------------------------------


def documented_fields():
    """Rows of the page's table by field: number, type, meaning, run here."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCS.read_text().splitlines()
        if re.match(r"\| \d+ \| \w+ \| [if] \|", line)
    ]
    return {name: (int(number), kind, meaning, run) for number, name, kind, meaning, run in rows}


def test_schema_is_the_documented_table():
    fields = dataclasses.fields(fmt.Config)
    ours = {f.name: (n, "i" if f.type is int else "f") for n, f in enumerate(fields)}
    assert ours == {name: row[:2] for name, row in documented_fields().items()}
    assert len(ours) == schema.N_FIELDS == 96


def test_named_variants_are_the_documented_ones():
    documented = documented_fields()
    for name, variants in schema.VARIANTS.items():
        # The page describes the parts of a stage at the first one only.
        _, _, meaning, run = documented[re.sub(r"^stage\d", "stage0", name)]
        described = re.findall(r"(?:^|[,:] )(\d) ([A-Za-z][\w' -]*)", meaning or run)
        assert [int(value) for value, _ in described] == list(range(len(variants))), name
        for (_, text), variant in zip(described, variants, strict=True):
            assert text.startswith(variant), name


def test_ranges_are_the_documented_ones():
    documented = {}
    for name, (_, _, _, run) in documented_fields().items():
        match = re.search(r"(\d+) \.\. (?:(\d+)(?:\^(\d+))?|n_heads)$", run)
        if match and name not in schema.VARIANTS:
            low, high, power = match.groups()
            documented[name] = (int(low), int(high or 4096) ** int(power or 1))
    assert documented == schema.RANGES


def test_plain_llama_is_the_default():
    loop_groups = list(fmt.Config().values().items())[61:]
    assert {name: value for name, value in loop_groups if value} == {"damping": 1.0}


# ---- Layout ---------------------------------------------------------------------------------


def parse_as_documented(data):
    """A second reader, written from docs/format.md alone: config values, tensors, blobs."""
    magic, version, crc, size, meta_size, n_fields, n_tensors, n_blobs, reserved = struct.unpack(
        "<8sIIQQQQQQ", data[:64]
    )
    assert (magic, version, size, n_fields, reserved) == (b"TINYLOOP", 1, len(data), 96, 0)
    assert crc == zlib.crc32(data[16:meta_size])
    kinds = [kind for _, kind, _, _ in documented_fields().values()]
    values = [
        struct.unpack_from("<q" if kind == "i" else "<d", data, 64 + 8 * n)[0]
        for n, kind in enumerate(kinds)
    ]
    covered = np.zeros(len(data), bool)
    at = 64 + 96 * 8
    covered[: at + n_tensors * 160 + n_blobs * 64] = True
    tensors, blobs = {}, {}
    for row in range(n_tensors):
        entry = data[at + row * 160 : at + (row + 1) * 160]
        name = entry[:96].rstrip(b"\0").decode()
        dtype, n_dims, *shape = struct.unpack("<II4Q", entry[96:136])
        offset, nbytes, crc, zero = struct.unpack("<QQII", entry[136:])
        assert offset % 64 == 0
        assert zero == 0
        assert crc == zlib.crc32(data[offset : offset + nbytes])
        assert not covered[offset : offset + nbytes].any()
        covered[offset : offset + nbytes] = True
        tensors[name] = (dtype, tuple(shape[:n_dims]), data[offset : offset + nbytes])
    for row in range(n_blobs):
        entry = data[at + n_tensors * 160 + row * 64 :][:64]
        offset, nbytes = struct.unpack("<QQ", entry[48:])
        assert offset % 8 == 0
        assert offset + nbytes <= meta_size
        covered[offset : offset + nbytes] = True
        blobs[entry[:48].rstrip(b"\0").decode()] = data[offset : offset + nbytes]
    assert not any(np.frombuffer(data, np.uint8)[~covered])
    return values, tensors, blobs


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "vocab_size": st.integers(1, 40),
            "hidden_size": st.integers(1, 9),
            "ff_size": st.integers(1, 9),
            "tied_head": st.integers(0, 1),
            "stage0_end_norm": st.integers(0, 2),
            "final_norm": st.integers(0, 2),
            "stage0_n_layers": st.integers(0, 3),
            "bos_id": st.integers(-(2**63), 2**63 - 1),
            "damping": st.floats(allow_nan=False, allow_infinity=False),
        },
    ),
    dtype=st.sampled_from(list(fmt.DTYPES)),
    blobs=st.dictionaries(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=11),
        st.binary(min_size=1, max_size=20),
        max_size=4,
    ),
)
def test_round_trip(tmp_path, changes, dtype, blobs):
    config = small_config(**changes)
    arrays = random_arrays(config, dtype)
    path = write(tmp_path / "model.tinyloop", config, arrays, blobs)

    file = fmt.read_file(path)
    assert file.config == config
    assert file.blobs == blobs
    assert list(file.tensors) == list(arrays)
    assert all(np.array_equal(file.array(name), array) for name, array in arrays.items())
    sizes = {name: array.size for name, array in arrays.items() if not name.endswith(".scale")}
    assert file.n_parameters == sum(sizes.values())
    assert file.size == path.stat().st_size
    assert file.verify() == []

    values, tensors, parsed_blobs = parse_as_documented(path.read_bytes())
    assert values == list(config.values().values())
    assert parsed_blobs == blobs
    codes = ["float32", "float16", "bfloat16", "int8"]
    assert tensors == {
        name: (codes.index(dtype_of(array)), array.shape, array.tobytes())
        for name, array in arrays.items()
    }


def test_documented_tensors():
    config = small_config(tied_head=0, stage0_end_norm=1)
    assert fmt.tensor_shapes(config) == {
        "embed.weight": (7, 6),
        "head.weight": (7, 6),
        "final_norm.weight": (6,),
        "stages.0.norm.weight": (6,),
        "layers.0.attn_norm.weight": (6,),
        "layers.0.mlp_norm.weight": (6,),
        "layers.0.attn.q.weight": (6, 6),
        "layers.0.attn.k.weight": (2, 6),
        "layers.0.attn.v.weight": (2, 6),
        "layers.0.attn.o.weight": (6, 6),
        "layers.0.mlp.gate.weight": (5, 6),
        "layers.0.mlp.up.weight": (5, 6),
        "layers.0.mlp.down.weight": (6, 5),
    }
    fewer = fmt.tensor_shapes(small_config(final_norm=0, norm_weightless=1, mlp_kind=1))
    assert not {name for name in fewer if "norm" in name or "gate" in name or "head" in name}


def documented_tensors():
    """Names of the page's table of tensors, and the shape of each as it is written there."""
    rows = {}
    for line in DOCS.read_text().splitlines():
        if match := re.match(r"\| (`.*`) \| `\[(.*) \| .* \|$", line):
            names = re.findall(r"`([\w.]+)`", match[1])
            shapes = re.findall(r"\[(.*?)\]", "[" + match[2])
            if len(shapes) != len(names):  # one shape for all; of two alternatives the first
                shapes = shapes[:1] * len(names)
            rows |= zip(names, shapes, strict=True)
    return rows


def test_every_documented_tensor_has_its_shape():
    """All of them, in configurations that together call for each."""
    sizes = {"hidden_size": 6, "vocab_size": 7, "ff_size": 5, "head_dim": 2, "n_heads": 3}
    sizes |= {"n_kv_heads": 1, "q_width": 6, "kv_width": 2, "value_embed_channels": 4}
    everything = dict.fromkeys(("prelude_norm", "state_out_proj", "exit_mode"), 1)
    everything |= {f"{part}_bias": 1 for part in ("q", "k", "v", "o", "mlp")}
    everything |= {"norm_placement": 1, "norm_after_last": 2, "state_init": 4, "qk_norm": 1}
    everything |= {"attn_out_gate": 1, "value_embed": 1, "value_embed_channels": 4, "tied_head": 0}
    everything |= {"loop_attention": 1, "stage0_looped": 1, "stage0_end_norm": 1}
    found = {}
    for inject in (2, 3):
        config = small_config(**everything, inject=inject)
        found |= fmt.tensor_shapes(config, value_embed_layers=[0])
    found = {re.sub(r"^layers\.0", "layers.N", name): shape for name, shape in found.items()}
    found = {re.sub(r"^stages\.0", "stages.S", name): shape for name, shape in found.items()}
    documented = {
        name: tuple(eval(part, {}, sizes) for part in shape.split(","))
        for name, shape in documented_tensors().items()
    }
    assert found == documented


# ---- Reader: every field --------------------------------------------------------------------

FIRST, SECOND = HEADER + CONFIG, HEADER + CONFIG + TENSOR
N_TENSORS = 11
FIRST_BLOB = HEADER + CONFIG + N_TENSORS * TENSOR

WRONG_FIELDS = {
    "magic": (0, "8s", b"TINYLOOQ", "not a .tinyloop file"),
    "version": (8, "I", 2, "version 2"),
    "file_size": (16, "Q", 1 << 40, "its header says"),
    "meta_size unaligned": (24, "Q", 65, "meta_size 65"),
    "meta_size small": (24, "Q", 64, "meta_size 64"),
    "meta_size large": (24, "Q", 1 << 60, "meta_size"),
    "n_fields": (32, "Q", 95, "95 config fields"),
    "n_tensors": (40, "Q", 65_537, "65537 tensors"),
    "n_tensors fewer": (40, "Q", N_TENSORS - 1, None),
    "n_tensors zero": (40, "Q", 0, None),
    "n_blobs": (48, "Q", 65, "65 blobs"),
    "n_blobs fewer": (48, "Q", 2, None),
    "n_blobs zero": (48, "Q", 0, None),
    "header reserved": (56, "Q", 1, "reserved header field is 1"),
    "config NaN": (64 + 8 * 11, "d", float("nan"), "norm_eps is nan"),
    "tensor name empty": (FIRST, "96s", b"", "is not a name"),
    "tensor name without zero": (FIRST, "96s", b"n" * 96, "is not a name"),
    "tensor name with rest": (FIRST, "96s", b"a\0b", "is not a name"),
    "tensor name not UTF-8": (FIRST, "96s", b"\xff", "not UTF-8"),
    "tensor name twice": (FIRST, "96s", b"final_norm.weight", "twice"),
    "dtype": (FIRST + 96, "I", 4, "dtype 4"),
    "dtype of another size": (FIRST + 96, "I", 1, "its shape and dtype take"),
    "n_dims zero": (FIRST + 100, "I", 0, "0 dimensions"),
    "n_dims five": (FIRST + 100, "I", 5, "5 dimensions"),
    "n_dims fewer": (FIRST + 100, "I", 1, "1 dimensions"),
    "n_dims more": (FIRST + 100, "I", 3, "3 dimensions"),
    "shape zero": (FIRST + 104, "Q", 0, "do not fit the shape"),
    "shape large": (FIRST + 104, "Q", 2**63, "its shape and dtype take"),
    "shape overflowing": (FIRST + 104, "Q", 2**62 + 7, "its shape and dtype take"),
    "shape unused": (FIRST + 120, "Q", 1, "do not fit the shape"),
    "tensor offset": (FIRST + 136, "Q", 0, "offset 0"),
    "tensor offset later": (SECOND + 136, "Q", 1 << 20, "offset 1048576"),
    "tensor size": (FIRST + 144, "Q", 169, "169 bytes"),
    "tensor size overflowing": (FIRST + 144, "Q", 2**64 - 1, "bytes"),
    "tensor reserved": (FIRST + 156, "I", 1, "reserved field is 1"),
    "blob name empty": (FIRST_BLOB, "48s", b"", "is not a name"),
    "blob name without zero": (FIRST_BLOB, "48s", b"n" * 48, "is not a name"),
    "blob name twice": (FIRST_BLOB, "48s", b"card", "twice"),
    "blob offset": (FIRST_BLOB + 48, "Q", 0, "offset 0"),
    "blob offset large": (FIRST_BLOB + 48, "Q", 2**64 - 8, "offset"),
    "blob size zero": (FIRST_BLOB + 56, "Q", 0, "0 bytes"),
    "blob size large": (FIRST_BLOB + 56, "Q", 2**64 - 1, "bytes"),
    "last blob size": (FIRST_BLOB + 2 * BLOB + 56, "Q", 1, "blobs end at"),
    "gap before a blob": (FIRST_BLOB + 3 * BLOB + 2, "B", 1, "gap before it is not zero"),
    "gap after the blobs": (FIRST_BLOB + 3 * BLOB + 24 + 92, "B", 1, "blobs end at"),
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_wrong_field_is_refused(small_file, case):
    offset, layout, value, message = WRONG_FIELDS[case]
    data = bytearray(small_file.read_bytes())
    struct.pack_into("<" + layout, data, offset, value)
    if "meta_size" not in case:
        reseal(data)
    small_file.write_bytes(data)
    with pytest.raises(fmt.FormatError, match=message) as caught:
        fmt.read_file(small_file)
    assert str(small_file) in str(caught.value)


def test_checksums_of_meta_and_tensors(small_file):
    sound = small_file.read_bytes()
    meta_size = fmt.read_file(small_file).meta_size
    data = bytearray(sound)
    data[FIRST_BLOB + 3 * BLOB] ^= 1
    small_file.write_bytes(data)
    with pytest.raises(fmt.FormatError, match="do not match their checksum"):
        fmt.read_file(small_file)

    data = bytearray(sound)
    data[meta_size] ^= 1
    data[fmt_offset(sound, "layers.0.mlp.up.weight")] ^= 0x80
    small_file.write_bytes(data)
    assert fmt.read_file(small_file).verify() == [
        "embed.weight: its bytes do not match its checksum",
        "layers.0.mlp.up.weight: its bytes do not match its checksum",
    ]


def fmt_offset(data, name):
    row = data.index(name.encode())
    return struct.unpack_from("<Q", data, row + 136)[0]


def is_sound(path):
    try:
        return not fmt.read_file(path).verify()
    except fmt.FormatError:
        return False


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_no_changed_byte_goes_unseen(small_file, flip):
    data = bytearray(small_file.read_bytes())
    for position in range(0, len(data), 7):
        data[position] ^= flip
        small_file.write_bytes(data)
        assert not is_sound(small_file), position
        data[position] ^= flip
    small_file.write_bytes(data)
    assert is_sound(small_file)


def test_every_other_size_is_refused(small_file):
    sound = small_file.read_bytes()
    for size in {0, 1, 63, 64, 65, 831, 832, *range(100, len(sound), 97), len(sound) - 1}:
        small_file.write_bytes(sound[:size])
        with pytest.raises(fmt.FormatError):
            fmt.read_file(small_file)
    small_file.write_bytes(sound + b"\0")
    with pytest.raises(fmt.FormatError, match="its header says"):
        fmt.read_file(small_file)
    longer = bytearray(sound + b"\0")
    struct.pack_into("<Q", longer, 16, len(longer))
    small_file.write_bytes(reseal(longer))
    with pytest.raises(fmt.FormatError, match="the last tensor ends at"):
        fmt.read_file(small_file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=2000), n_tensors=st.integers(0, 5), n_blobs=st.integers(0, 5))
def test_random_directories_raise_only_format_errors(tmp_path, tail, n_tensors, n_blobs):
    body = bytes(CONFIG) + tail
    meta_size = (HEADER + len(body)) // 64 * 64
    data = bytearray(64) + body
    struct.pack_into(
        "<8s2I6Q", data, 0, b"TINYLOOP", 1, 0, len(data), meta_size, 96, n_tensors, n_blobs, 0
    )
    path = tmp_path / "random.tinyloop"
    path.write_bytes(reseal(data))
    try:
        file = fmt.read_file(path)
    except fmt.FormatError:
        return
    assert not file.tensors
    assert not file.blobs


def test_verify_finds_wrong_tensors_and_gaps(small_file):
    sound = small_file.read_bytes()
    data = bytearray(sound)
    struct.pack_into("<96s", data, FIRST, b"embed.weights")
    small_file.write_bytes(reseal(data))
    assert fmt.read_file(small_file).verify() == [
        "embed.weight: missing",
        "embed.weights: the configuration does not call for it",
    ]
    data = bytearray(sound)
    data[fmt_offset(sound, "final_norm.weight") - 1] = 1
    small_file.write_bytes(data)
    assert fmt.read_file(small_file).verify() == [
        "final_norm.weight: the gap before it is not zero"
    ]


def test_absurd_layer_counts_are_refused(small_file):
    data = bytearray(small_file.read_bytes())
    struct.pack_into("<q", data, 64 + 8 * 46, 2**62)
    small_file.write_bytes(reseal(data))
    with pytest.raises(fmt.FormatError, match="layers"):
        fmt.read_file(small_file).verify()


# ---- Config ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**63}, "vocab_size is 9223372036854775808; it is a 64-bit integer"),
        ({"vocab_size": 1.0}, "vocab_size is 1.0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"norm_eps": float("inf")}, "norm_eps is inf; it must be finite"),
        ({"norm_eps": 10**400}, "it must be finite"),
        ({"norm_eps": "1"}, "norm_eps is '1'; it is a number"),
    ],
)
def test_config_refuses_what_its_fields_cannot_hold(changes, message):
    with pytest.raises(fmt.FormatError, match=re.escape(message)):
        small_config(**changes)


def test_config_loops_and_stages():
    stages = {"n_stages": 2, "stage1_first_layer": 1, "stage1_n_layers": 3, "stage1_looped": 1}
    looped = small_config(**stages)
    assert looped.loops == 8
    assert small_config(**stages, loops_max=3).loops == 3
    assert small_config(**stages, loops_default=4).loops == 4
    assert looped.n_layers == 4
    assert [stage.n_layers for stage in looped.stages] == [1, 3]
    assert small_config().loops == 1
    assert small_config(loops_default=4).loops == 1  # without a looped stage
    assert looped.variant("state_init") == "the stage's input"
    assert small_config(state_init=9).variant("state_init") == "unknown (9)"


# ---- Writer ---------------------------------------------------------------------------------


def failing_read(arrays, error):
    """Gives the first two tensors, then fails."""
    names = list(arrays)[:2]

    def read(spec):
        if spec.name not in names:
            raise error
        return [arrays[spec.name]]

    return read


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("value"), KeyboardInterrupt()])
def test_failure_half_way_leaves_the_old_file(small_file, error):
    before = small_file.read_bytes()
    config = small_config()
    arrays = random_arrays(config, seed=1)
    specs = [fmt.TensorSpec(name, "float32", array.shape) for name, array in arrays.items()]
    with pytest.raises(type(error)):
        fmt.write_file(small_file, config, specs, failing_read(arrays, error), {})
    assert small_file.read_bytes() == before
    assert list(small_file.parent.iterdir()) == [small_file]


def test_file_appears_only_after_it_is_on_disk(small_file, monkeypatch):
    before = small_file.read_bytes()
    config = small_config()

    def fsync(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="no space left"):
        write(small_file, config, random_arrays(config, seed=1))
    assert small_file.read_bytes() == before
    assert list(small_file.parent.iterdir()) == [small_file]


def test_file_has_the_usual_permissions(tmp_path):
    old = os.umask(0o027)
    try:
        config = small_config()
        path = write(tmp_path / "model.tinyloop", config, random_arrays(config))
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


def test_target_that_cannot_be_is_refused_before_work(tmp_path):
    config = small_config()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write(tmp_path / "none" / "model.tinyloop", config, random_arrays(config))
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write(tmp_path, config, random_arrays(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda specs: specs.pop(), "layers.0.mlp.down.weight: missing"),
        (lambda specs: specs.append(specs[0]), "there twice"),
        (lambda specs: specs.append(fmt.TensorSpec("more", "int8", (1,))), "more: the config"),
        (
            lambda specs: specs.__setitem__(0, specs[0]._replace(shape=(6, 7))),
            r"embed.weight: shape \[6, 7\]; it must be \[7, 6\]",
        ),
        (lambda specs: specs.__setitem__(0, specs[0]._replace(dtype="int64")), "dtype int64"),
    ],
)
def test_writer_refuses_wrong_tensors(tmp_path, change, message):
    config = small_config()
    arrays = random_arrays(config)
    specs = [fmt.TensorSpec(name, "float32", array.shape) for name, array in arrays.items()]
    change(specs)
    with pytest.raises(fmt.FormatError, match=message):
        fmt.write_file(tmp_path / "x", config, specs, lambda spec: [arrays[spec.name]], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("blobs", [{"card": b""}, {"": b"1"}, {"n" * 48: b"1"}, {"a\0b": b"1"}])
def test_writer_refuses_wrong_blobs(tmp_path, blobs):
    config = small_config()
    with pytest.raises(fmt.FormatError, match="blob"):
        write(tmp_path / "x", config, random_arrays(config), blobs=blobs)


def test_writer_refuses_what_the_reader_would(tmp_path, monkeypatch):
    config = small_config()
    meta_size = fmt.read_file(write(tmp_path / "x", config, random_arrays(config))).meta_size
    monkeypatch.setattr(fmt, "MAX_META_SIZE", meta_size)
    write(tmp_path / "y", config, random_arrays(config))
    monkeypatch.setattr(fmt, "MAX_META_SIZE", meta_size - 1)
    message = f"meta_size is {meta_size}; at most {meta_size - 1} are allowed"
    with pytest.raises(fmt.FormatError, match=message):
        write(tmp_path / "z", config, random_arrays(config))
    assert not (tmp_path / "z").exists()


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([np.zeros(41, "<f4")], "164 bytes came; it takes 168"),
        ([np.zeros(42, "<f4"), np.zeros(1, "<f4")], "172 bytes came; it takes 168"),
        ([np.zeros(42, "<f8")], "elements of float64 came"),
    ],
)
def test_writer_refuses_wrong_elements(tmp_path, chunks, message):
    config = small_config()
    specs = [fmt.TensorSpec(*item) for item in shapes_as_specs(config)]
    with pytest.raises(fmt.FormatError, match=message):
        fmt.write_file(tmp_path / "x", config, specs, lambda spec: chunks, {})


def shapes_as_specs(config):
    return [(name, "float32", shape) for name, shape in fmt.tensor_shapes(config).items()]


def test_writer_takes_any_chunking_and_strides(tmp_path):
    config = small_config()
    arrays = random_arrays(config)
    specs = [fmt.TensorSpec(*item) for item in shapes_as_specs(config)]

    def read(spec):
        doubled = np.repeat(arrays[spec.name].reshape(-1), 2)
        return iter(np.array_split(doubled[::2], 3))

    fmt.write_file(tmp_path / "x", config, specs, read, BLOBS)
    whole = write(tmp_path / "y", config, arrays)
    assert (tmp_path / "x").read_bytes() == whole.read_bytes()


def test_writer_holds_one_chunk(tmp_path):
    config = small_config(vocab_size=2**20)
    embed_bytes = 2**20 * 6 * 4
    n_chunks = 64

    def read(spec):
        n = int(np.prod(spec.shape))
        parts = n_chunks if spec.name == "embed.weight" else 1
        return (np.zeros(n // parts, "<f4") for _ in range(parts))

    specs = [fmt.TensorSpec(*item) for item in shapes_as_specs(config)]
    tracemalloc.start()
    try:
        fmt.write_file(tmp_path / "x", config, specs, read, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < embed_bytes / n_chunks * 3


def test_progress_ends_at_the_total(tmp_path):
    config = small_config()
    arrays = random_arrays(config)
    specs = [fmt.TensorSpec(*item) for item in shapes_as_specs(config)]
    seen = []
    fmt.write_file(
        tmp_path / "x",
        config,
        specs,
        lambda spec: [arrays[spec.name]],
        {},
        lambda *row: seen.append(row),
    )
    assert [name for name, _, _ in seen] == list(arrays)
    size = (tmp_path / "x").stat().st_size
    assert {total for _, _, total in seen} == {size}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == size

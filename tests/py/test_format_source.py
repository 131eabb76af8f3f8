"""How the reader gets its bytes: bounded, in pieces, from files that others cut or replace."""

import gc
import os
import re
import struct
import tracemalloc

import numpy as np
import pytest
from test_format import random_arrays, small_config, write

from tinyloop_py import format as fmt


@pytest.fixture
def small_file(tmp_path):
    config = small_config()
    return write(tmp_path / "small.tinyloop", config, random_arrays(config))


@pytest.mark.parametrize("meta_size", [fmt.MAX_META_SIZE + 64, 2**40])
def test_a_large_meta_part_is_refused_unread(small_file, meta_size):
    data = bytearray(small_file.read_bytes())
    struct.pack_into("<2Q", data, 16, meta_size + 64, meta_size)
    small_file.write_bytes(data)
    os.truncate(small_file, meta_size + 64)
    message = f"meta_size is {meta_size}; at most 268435456 are allowed"
    tracemalloc.start()
    try:
        with pytest.raises(fmt.FormatError, match=message):
            fmt.read_file(small_file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_file_that_is_cut_after_it_was_opened(small_file):
    """Inside a tensor, where one begins, and before all: what is left can still be read."""
    arrays = random_arrays(small_config())
    size = small_file.stat().st_size
    file = fmt.read_file(small_file)
    last = list(arrays)[-1]
    for end in (size - 1, file.tensors[last].offset, file.tensors["embed.weight"].offset, 0):
        os.truncate(small_file, end)
        shorter = rf"{re.escape(str(small_file))}: {end} bytes; it had {size} when it was opened"
        with pytest.raises(fmt.FormatError, match=shorter):
            file.array(last)
        with pytest.raises(fmt.FormatError, match=shorter):
            file.verify()
        if end > file.meta_size:
            np.testing.assert_array_equal(file.array("embed.weight"), arrays["embed.weight"])


def test_a_file_that_is_replaced_stays_readable(small_file):
    file = fmt.read_file(small_file)
    before = file.array("embed.weight")
    write(small_file, small_config(), random_arrays(small_config(), seed=1))
    np.testing.assert_array_equal(file.array("embed.weight"), before)
    assert not np.array_equal(fmt.read_file(small_file).array("embed.weight"), before)
    assert file.verify() == []


def test_a_file_is_closed_with_its_last_reference(small_file):
    def n_open():
        return sum(os.path.samefile(f"/proc/self/fd/{fd}", small_file) for fd in open_files())

    def open_files():
        return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]

    file = fmt.read_file(small_file)
    assert n_open() == 1
    del file
    assert n_open() == 0
    os.truncate(small_file, 100)
    with pytest.raises(fmt.FormatError):
        fmt.read_file(small_file)
    gc.collect()
    assert n_open() == 0


def test_a_tensor_of_several_pieces(tmp_path):
    """Read and checked whole, to its last byte."""
    config = small_config(vocab_size=100_000)
    arrays = random_arrays(config)
    path = write(tmp_path / "model.tinyloop", config, arrays)
    file = fmt.read_file(path)
    np.testing.assert_array_equal(file.array("embed.weight"), arrays["embed.weight"])
    assert file.verify() == []
    embed = file.tensors["embed.weight"]
    assert embed.size > 2 << 20
    for position in (0, (1 << 20) - 1, 1 << 20, embed.size - 1):
        with path.open("r+b") as stream:
            stream.seek(embed.offset + position)
            byte = stream.read(1)[0]
            stream.seek(embed.offset + position)
            stream.write(bytes([byte ^ 1]))
            stream.flush()
            assert file.verify() == ["embed.weight: its bytes do not match its checksum"]
            stream.seek(embed.offset + position)
            stream.write(bytes([byte]))
    assert file.verify() == []


def test_arrays_are_the_callers_own(small_file):
    file = fmt.read_file(small_file)
    array = file.array("embed.weight")
    array[:] = -1
    np.testing.assert_array_equal(
        file.array("embed.weight"), random_arrays(small_config())["embed.weight"]
    )
    with pytest.raises(KeyError, match="none"):
        file.array("none")

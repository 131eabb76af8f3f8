"""What a token costs, against numbers worked out by hand from the sizes of public models."""

from dataclasses import replace

import public_models as public
import pytest
from public_models import config

from tinyloop_py import format as fmt
from tinyloop_py.config import Stage
from tinyloop_py.costs import (
    KvBytes,
    attention_flops,
    default_loops,
    kv_bytes,
    layer_runs,
    matmul_flops,
)

KIB = 1024
# With ff_size and vocab_size so small that attention's matrices are all that counts.
ODD = {"shape": (7, 6, 5), "heads": (4, 3, 10)}


@pytest.mark.parametrize(
    ("model", "loops", "gflops"),
    [
        # 96 layer runs of 51.4 M weights, and a head of 100.7 M.
        (public.OURO_1B, 4, 2 * (96 * (4 * 2048**2 + 3 * 2048 * 5632) + 49152 * 2048) / 1e9),
        (public.OURO_1B, 4, 10.1),
        (public.OURO_3B, 4, 19.9),
        (public.HUGINN, 32, 108.6),
        (public.IQUEST_40B, 2, 156.8),
    ],
)
def test_matmul_flops(model, loops, gflops):
    assert matmul_flops(model, loops) / 1e9 == pytest.approx(gflops, abs=0.05)


def test_matmul_flops_of_each_part():
    d, q, kv, ff, vocab = 1536, 1536, 1536, 6144, 32768
    layer = 2 * d * q + 2 * d * kv + 2 * d * ff
    weights = (16 + 8 * 5) * layer + 5 * d * d + d * d + vocab * d
    assert matmul_flops(public.PARCAE_1B, 5) == 2 * weights
    d, ff, vocab = 1536, 4096, 65536
    layer = 5 * d * d + 3 * d * ff  # q, k, v, o and the output gate are all d x d
    assert matmul_flops(public.HRM_TEXT_1B, (2, 3)) == 2 * (128 * layer + vocab * d)
    plain = config([Stage(0, 1, 0, 0)], **ODD)
    assert matmul_flops(plain, 1) == 2 * (6 * (2 * 40 + 2 * 30 + 3 * 5) + 7 * 6)


@pytest.mark.parametrize(
    ("model", "loops", "kib"),
    [
        (public.OURO_1B, 4, 768),
        (public.OURO_1B, 1, 192),
        (public.OURO_3B, 4, 1536),
        (public.HUGINN, 32, 2722.5),
        (public.HUGINN, 1, 165),
        (public.HRM_TEXT_1B, (2, 3), 768),
        (public.RECURRENT_OLMO, 8, 448),
        (public.RECURRENT_OLMO, 32, 1600),
        (public.RECURRENT_LLAMA, 8, 112),
        (public.RECURRENT_LLAMA, 1, 28),
        (public.RECURRENT_TINYLLAMA, 32, 264),
        (public.PARCAE_1B, 8, 480),
        (public.NANBEIGE_3B, 2, 176),
    ],
)
def test_kv_bytes(model, loops, kib):
    assert kv_bytes(model, loops) == KvBytes(kib * KIB, 0)
    assert kv_bytes(model, loops, "fp32") == KvBytes(2 * kib * KIB, 0)


@pytest.mark.parametrize(("window", "mib"), [(64, 20), (8192, 2560)])
def test_loop_window_is_a_constant(window, mib):
    model = replace(public.IQUEST_40B, loop_window=window)
    assert kv_bytes(model, 2) == KvBytes(320 * KIB, mib * KIB**2)
    assert kv_bytes(model, 1) == KvBytes(320 * KIB, 0)
    assert kv_bytes(model, 3).constant == 2 * mib * KIB**2


def test_values_are_padded_to_16_channels():
    position = 3 * (10 + 16) * 2
    assert kv_bytes(config([Stage(0, 5, 0, 0)], **ODD), 1).growing == 5 * position
    assert kv_bytes(config([Stage(0, 5, 1, 0)], **ODD), 4).growing == 20 * position
    assert kv_bytes(config(public.core(1, 3, 2), **ODD), 7).growing == 24 * position


def test_kv_bytes_are_the_librarys(tiny, tiny_path):
    model, info = fmt.read_file(tiny_path).config, tiny.info
    for loops in (1, 3, 12):
        expected = info["kv_bytes_fixed"] + loops * info["kv_bytes_loop"]
        assert kv_bytes(model, loops, info["kv_mode"]) == KvBytes(expected, 0)


def test_attention_flops():
    assert attention_flops(public.OURO_1B, 4) == 4 * 2048 * 96
    # Both loops attend to the first one's KV; the window on the second's own is a constant.
    assert attention_flops(public.IQUEST_40B, 2) == 4 * 5120 * 160
    # Without the window it grows too.
    assert attention_flops(replace(public.IQUEST_40B, loop_window=0), 2) == 4 * 5120 * 240
    # Without the gate, loops after the first see a window only.
    assert attention_flops(replace(public.IQUEST_40B, loop_attention=0), 2) == 4 * 5120 * 80


def test_loops_must_fit_the_schedule():
    assert default_loops(public.HRM_TEXT_1B) == (2, 3)
    assert default_loops(public.HUGINN) == 32
    assert layer_runs(public.HRM_TEXT_1B, (1, 2)) == (48, 0)
    with pytest.raises(ValueError, match="nested"):
        layer_runs(public.HRM_TEXT_1B, 2)
    with pytest.raises(ValueError, match="flat"):
        layer_runs(public.HUGINN, (2, 3))

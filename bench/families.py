"""Speed of each family's wiring for the work that it asks for, beside that of refdesk.

    python bench/families.py --out FOLDER

takes the wiring of each checkpoint of tests/data and of the demo model, widens all of them to one
size, gives them random bfloat16 weights, and measures prefill and decode in FLOPs a second: the
FLOPs of `tinyloop inspect`, attention included. A ratio of 1 is refdesk's own speed.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import Clock, timed
from report import environment, write_records

import tinyloop_py as tl
from tinyloop_py.arrays import bfloat16
from tinyloop_py.config import Config, tensor_shapes, value_embed_layers
from tinyloop_py.convert import convert
from tinyloop_py.costs import attention_flops, default_loops, matmul_flops
from tinyloop_py.format import read_file

DATA = Path(__file__).resolve().parents[1] / "tests/data"
N_PREFILL, N_DECODE, N_CONTEXT = 512, 64, 64
SIZES = {"vocab_size": 8192, "hidden_size": 512, "head_dim": 64, "ff_size": 1408}
HEADS = {"n_heads": 8, "n_kv_heads": 8}
THREADS = len(os.sched_getaffinity(0))


def widened(config: Config) -> Config:
    """The same wiring at the common size, with as many loops as make about eight stage runs."""
    changes = SIZES | HEADS | {"rotary_dim": SIZES["head_dim"], "max_positions": 0, "pad_id": -1}
    changes |= {"bos_id": -1, "loops_max_trained": 0}
    if config.loops_default > 4 and config.loops_max == 0:
        changes["loops_default"] = 4
    if config.value_embed:
        changes["value_embed_channels"] = 32
    return replace(config, **changes)


def wirings(folder: Path) -> Iterator[tuple[str, Config, list[int]]]:
    """Name, widened config and layers with value embeddings; refdesk's first."""
    yield "refdesk", widened(read_file(tl.default_model_path()).config), []
    for path in sorted(DATA.glob("*/config.json")):
        family = path.parent.name
        convert(path.parent, folder / "small.tinyloop")
        file = read_file(folder / "small.tinyloop")
        yield family, widened(file.config), value_embed_layers(file.config, file.tensors)


def random_model(config: Config, value_layers: list[int]) -> tl.Model:
    """Random weights: the first half of a normal number's bits is one in bfloat16."""
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in tensor_shapes(config, value_layers).items():
        values = rng.standard_normal(shape, np.float32) * np.float32(0.5 / np.sqrt(shape[-1]))
        if len(shape) == 1:
            values += 1
        tensors[name] = (values.view("<u4") >> 16).astype("<u2").view(bfloat16)
    return tl.Model.from_arrays(config, tensors, max_seq_len=1024, threads=THREADS)


def flops(config: Config, n_tokens: int, n_before: int) -> float:
    """Of n_tokens after n_before others."""
    loops = default_loops(config)
    positions = n_tokens * (n_before + n_tokens / 2)
    return n_tokens * matmul_flops(config, loops) + positions * attention_flops(config, loops)


def calls(config: Config, model: tl.Model) -> dict[str, tuple[float, Callable[[], float]]]:
    """FLOPs and the timed call of prefill (which ends before the head) and of decode."""
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, N_PREFILL)
    cache = model.build_prefix_cache(tokens[:N_CONTEXT], prefix_len=0)
    greedy = {"temperature": 0, "stop_token_ids": (), "prefix_len": 0}
    head = 2 * config.vocab_size * config.hidden_size
    return {
        "prefill": (
            flops(config, N_PREFILL, 0) - N_PREFILL * head,
            timed(lambda: model.build_prefix_cache(tokens, prefix_len=0)),
        ),
        "decode": (
            flops(config, N_DECODE, N_CONTEXT),
            timed(lambda: model.generate_from_prefix_cache(cache, (), N_DECODE + 1, **greedy)),
        ),
    }


def compared(
    clock: Clock,
    own: dict[str, tuple[float, Callable[[], float]]],
    peer: dict[str, tuple[float, Callable[[], float]]],
) -> dict[str, float]:
    """GFLOP/s, and their ratios to the peer's; the two take turns."""
    row = {}
    for what in own:
        seconds = clock.medians({"own": own[what][1], "peer": peer[what][1]})
        speed = own[what][0] / seconds["own"]
        row[f"{what}_gflops"] = speed / 1e9
        row[f"{what}_ratio"] = speed / (peer[what][0] / seconds["peer"])
    return row


def rows(clock: Clock) -> Iterator[dict[str, Any]]:
    """One for each wiring."""
    with tempfile.TemporaryDirectory() as folder:
        (_, standard, _), *others = wirings(Path(folder))
    with random_model(standard, []) as peer:
        beside = calls(standard, peer)
        for name, config, value_layers in others:
            with random_model(config, value_layers) as model:
                yield {"name": name, **compared(clock, calls(config, model), beside)}


def main() -> None:
    """Measures and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write a JSON file into a folder")
    arguments = parser.parse_args()
    about = environment() | {"load_average_before": os.getloadavg()}
    measured = []
    for row in rows(Clock(arguments.rounds)):
        measured.append(row)
        print(
            f"{row['name']:<20} prefill {row['prefill_gflops']:6.1f} GFLOP/s, "
            f"{row['prefill_ratio']:.2f} of refdesk; decode {row['decode_gflops']:5.1f}, "
            f"{row['decode_ratio']:.2f}"
        )
    about["load_average_after"] = os.getloadavg()
    write_records(arguments.out, about, "families", measured)


if __name__ == "__main__":
    main()

"""Conversion and load of a large checkpoint beside a plain copy of it: seconds and peak memory.

    python bench/convert.py --out FOLDER

makes a Llama-like bfloat16 checkpoint of 2.9 GB in a temporary folder, which takes three times that
in disk space. Copy, conversion and load are whole programs, run in turns; the first two end when
their data is on the disk, a load has its weights packed in memory. Files are in the page cache.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from report import environment, write_records

N_SHARDS = 4
N_LAYERS = 24
CONFIG = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "num_hidden_layers": N_LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
MODES = {"convert": [], "convert to int8": ["--quantize", "int8"]}


# Programs that end with how many KiB of memory they held at most. What the kernel tells a parent
# would be no less than the parent itself had.
CONVERT = "from tinyloop_py.cli import main; status = main()"
LOAD = "import sys, tinyloop_py; tinyloop_py.Model(sys.argv[1]); status = 0"
ENDING = """
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
raise SystemExit(status)
"""


class Measured(NamedTuple):
    """Seconds of a program, and the most memory that it held, in bytes (None: not asked)."""

    seconds: float
    peak_bytes: int | None


def shapes() -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors; their bytes add up to those of a model with 1.4 G parameters."""
    hidden, ff, vocab = (CONFIG[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    tensors = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    tensors["model.norm"] = (hidden,)
    for n in range(N_LAYERS):
        layer = f"model.layers.{n}"
        tensors |= {f"{layer}.self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
        tensors |= {f"{layer}.mlp.{part}_proj": (ff, hidden) for part in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj"] = (hidden, ff)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}"] = (hidden,)
    return {f"{name}.weight": shape for name, shape in tensors.items()}


def make_checkpoint(folder: Path) -> int:
    """Writes the checkpoint with numbers of about the usual size; returns its bytes."""
    folder.mkdir()
    normal = np.random.default_rng(1).standard_normal(1 << 22, np.float32) * 0.02
    block = (normal.view("<u4") >> 16).astype("<u2").tobytes()
    names = list(shapes().items())
    weight_map, total = {}, 0
    for shard in range(N_SHARDS):
        file = f"model-{shard + 1:05}-of-{N_SHARDS:05}.safetensors"
        header, end = {}, 0
        for name, shape in names[shard::N_SHARDS]:
            begin, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for begin in range(0, end, len(block)):
                stream.write(block[: end - begin])
        total += end
    (folder / "config.json").write_text(json.dumps(CONFIG))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def copy(source: Path, target: Path) -> Measured:
    """cp, and the wait until its files are on the disk."""
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return Measured(seconds, None)


def run(program: str, *arguments: str | Path) -> Measured:
    """A Python program, as people start it."""
    command = [sys.executable, "-P", "-c", f"{program}\n{ENDING}", *arguments]
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - begin
    return Measured(seconds, 1024 * int(done.stdout.split()[-1]))


def convert(source: Path, target: Path, options: list[str]) -> Measured:
    """The command; what it made is removed."""
    measured = run(CONVERT, "convert", source, target, *options)
    target.unlink()
    return measured


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Rows: medians of `rounds` rounds, after one that warms up."""
    source = folder / "checkpoint"
    size = make_checkpoint(source)
    print(f"checkpoint: {size / 1e9:.2f} GB in {N_SHARDS} shards", file=sys.stderr)
    calls = {"copy": lambda: copy(source, folder / "copy")} | {
        name: lambda options=options: convert(source, folder / "model.tinyloop", options)
        for name, options in MODES.items()
    }
    run(CONVERT, "convert", source, folder / "loaded.tinyloop")
    calls["load"] = lambda: run(LOAD, folder / "loaded.tinyloop")
    measured: dict[str, list[Measured]] = {name: [] for name in calls}
    for n in range(rounds + 1):
        os.sync()  # what others, and the rounds before, have still to write
        for name, call in calls.items():
            result = call()
            print(f"  {name}: {result.seconds:.2f} s", file=sys.stderr)
            if n:
                measured[name].append(result)
    seconds = {name: statistics.median(m.seconds for m in runs) for name, runs in measured.items()}
    return [
        {
            "name": name,
            "bytes": size,
            "seconds": seconds[name],
            "times_copy": seconds[name] / seconds["copy"],
            "peak_bytes": max((m.peak_bytes for m in runs if m.peak_bytes), default=None),
        }
        for name, runs in measured.items()
    ]


def main() -> None:
    """Measures and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one")
    parser.add_argument("--out", type=Path, help="also write a JSON file into a folder")
    arguments = parser.parse_args()
    about = environment() | {"load_average_before": os.getloadavg()}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = measure(Path(folder), arguments.rounds)
    about["load_average_after"] = os.getloadavg()
    for row in rows:
        peak = f", {row['peak_bytes'] / 1e6:.0f} MB at most" if row["peak_bytes"] else ""
        print(f"{row['name']:<16}{row['seconds']:6.2f} s,{row['times_copy']:5.2f} x copy{peak}")
    write_records(arguments.out, about, "convert", rows)


if __name__ == "__main__":
    main()

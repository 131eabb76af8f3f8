"""What the group size of sums (CPU_KG, docs/numerics.md) brings and costs, as a Markdown table.

Builds the library once for each value, in a temporary folder, and loads each build into the
installed package. Errors: root mean square and largest, as bench/accuracy.py measures them, over
all its loops with fp32 KV. Speeds: tokens in a second of CPU time, in a prefill of 240 tokens on
one thread; the best of several rounds.

    python bench/kg.py 32 128 512 2048
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import accuracy

import tinyloop_py as tl

ROOT = Path(__file__).resolve().parents[1]
ISAS = ("avx512", "avx2")
ROUNDS = 5
N_TOKENS = 240


def build(value, folder):
    """Makes the library with groups of `value` columns; returns the folder that holds it."""
    for name in ("include", "libtinyloop"):
        shutil.copytree(ROOT / name, folder / name)
    # Scales of int8 weights go by the same groups.
    for name, constant in (("backend/cpu/cpu.h", "CPU_KG"), ("model/weights.h", "WEIGHT_GROUP")):
        header = folder / "libtinyloop" / name
        text, n = re.subn(rf"(?m)^(#define {constant}) \d+", rf"\1 {value}", header.read_text())
        if n != 1:
            raise SystemExit(f"{header} has {n} definitions of {constant}, not 1")
        header.write_text(text)
    command = ["make", "-s", "-C", folder / "libtinyloop", "-j2", "lib", f"BUILD={folder / 'out'}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "out"


def errors():
    """Returns (root mean square, largest) of the library in use."""
    meta, arrays = accuracy.load_golden()
    with tl.Model(tl.default_model_path(), kv_mode="fp32") as model:
        found = [accuracy.logit_errors(model, meta, arrays, loops) for loops in meta["loops"]]
    return [math.sqrt(sum(rms**2 for _, rms, _ in found) / len(found)), max(e[0] for e in found)]


def speed():
    """Returns tokens in a second, the best of three runs, of the library in use."""
    times = []
    with tl.Model(tl.default_model_path(), threads=1) as model:
        for _ in range(3):
            start = time.process_time()
            model.build_prefix_cache(range(N_TOKENS))
            times.append(time.process_time() - start)
    return N_TOKENS / min(times)


def measure(library, what, isa=""):
    """Runs errors() or speed() in a process that has loaded the library of that folder."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", what],
        env={**os.environ, "LD_LIBRARY_PATH": str(library), "TINYLOOP_CPU_ISA": isa},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def compare(values):
    """Prints the table; rounds go through all builds in turn, so that all see the same noise."""
    with tempfile.TemporaryDirectory() as folder:
        builds = {value: build(value, Path(folder) / str(value)) for value in values}
        best = {(value, isa): 0.0 for value in values for isa in ISAS}
        for _ in range(ROUNDS):
            for value, isa in best:
                best[value, isa] = max(best[value, isa], measure(builds[value], "speed", isa))
        print("| KG | RMS error | largest error |" + "".join(f" {isa} |" for isa in ISAS))
        print("|---" * (3 + len(ISAS)) + "|")
        for value in values:
            rms, largest = measure(builds[value], "errors")
            cells = "".join(f" {best[value, isa]:.0f} |" for isa in ISAS)
            print(f"| {value} | {rms:.1e} | {largest:.1e} |{cells}", flush=True)


def main():
    """Compares builds, or measures the loaded one for the process that does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("values", type=int, nargs="*", default=[32, 128, 512, 2048])
    parser.add_argument("--measure", choices=["errors", "speed"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(errors() if options.measure == "errors" else speed()))
    else:
        compare(options.values)


if __name__ == "__main__":
    main()

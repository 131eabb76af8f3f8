"""Times the demo model on this machine and prints one table; with --out also writes JSON.

    python bench/bench.py [--threads 1 2] [--out bench/results/NAME.json]

Each number is the median of several runs. Timings on a machine that is busy with other things say
little: the load average is printed and written along.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

import tinyloop_py as tl

PREFIXES = (256, 1024, 1900)
SUFFIX = 16


def timed(call, runs):
    """Median seconds of `runs` calls, after one that warms up."""
    call()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def decode_seconds(model, prompt, n=64):
    """Median seconds of a decode step after the prompt."""
    stream = model.generate_stream(prompt, n, temperature=0.0, stop_token_ids=())
    next(stream)
    times = []
    for _ in range(n - 1):
        begin = time.perf_counter()
        next(stream)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rows_of_prefix(model, tokens, length):
    """Seconds to the first token of a miss, a full hit, and a hit with SUFFIX new tokens."""
    pool = tl.PrefixPool()
    prefix, prompt = tokens[:length], tokens[: length + SUFFIX]
    model.register_prefix(pool, prefix)
    first = {"max_tokens": 1, "temperature": 0.0}
    yield f"first token, miss, prefix {length}", timed(lambda: model.generate(prefix, **first), 3)
    yield (
        f"first token, full hit, prefix {length}",
        timed(lambda: model.generate_with_pool(pool, prefix, **first), 15),
    )
    yield (
        f"first token, partial hit + {SUFFIX} tokens, prefix {length}",
        timed(lambda: model.generate_with_pool(pool, prompt, **first), 5),
    )


def rows(model, tokens):
    """(name, seconds) of each row."""
    yield "prefill 512 tokens", timed(lambda: model.build_prefix_cache(tokens[:512]), 5)
    for context in (128, 1024):
        yield f"decode step, context {context}", decode_seconds(model, tokens[:context])
    for length in PREFIXES:
        yield from rows_of_prefix(model, tokens, length)
    kv = tl.RuntimeKVCache(model)
    tl.decode_with_kv_cache_capture(kv, tokens[:1900])
    yield "clone of 1,900 tokens", timed(kv.clone, 200)


def import_seconds():
    """Seconds that importing the package takes beyond NumPy's own import."""
    code = "import numpy, time; t = time.perf_counter(); import tinyloop_py; "
    code += "print(time.perf_counter() - t)"
    return timed_program(code)


def timed_program(code, runs=5):
    """Median of the number that the program prints, each time in a fresh interpreter."""
    times = []
    for _ in range(runs):
        result = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
        )
        times.append(float(result.stdout))
    return statistics.median(times)


def processor():
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.machine()


def main():
    """Runs all rows and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", help="also write the results to this JSON file")
    arguments = parser.parse_args()
    tokens = np.random.default_rng(0).integers(5, 8192, 2048).astype(np.int32)
    results = {
        "load a model": timed(lambda: tl.Model(tl.default_model_path()).close(), 5),
        "import tinyloop_py": import_seconds(),
    }
    table = {name: {"": seconds} for name, seconds in results.items()}
    for threads in arguments.threads:
        with tl.Model(tl.default_model_path(), threads=threads) as model:
            for name, seconds in rows(model, tokens):
                print(f"  {threads} threads: {name}", file=sys.stderr)
                table.setdefault(name, {})[str(threads)] = seconds
    columns = [str(threads) for threads in arguments.threads]
    print(f"{processor()}, load average {os.getloadavg()[0]:.2f}; refdesk, loops 8; milliseconds")
    print(f"{'':58}" + "".join(f"{column + ' threads':>12}" for column in columns))
    for name, times in table.items():
        cells = [times.get(column, times.get("")) for column in columns]
        print(f"{name:58}" + "".join(f"{seconds * 1e3:12.3f}" for seconds in cells))
    if arguments.out:
        record = {
            "date": datetime.date.today().isoformat(),
            "version": tl.__version__,
            "processor": processor(),
            "load_average": os.getloadavg()[0],
            "seconds": table,
        }
        with open(arguments.out, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()

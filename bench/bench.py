"""Benchmarks of tinyloop, its peers and the machine's limits, in one table.

    python bench/bench.py --out FOLDER

takes some minutes on two cores. Peers are PyTorch and llama.cpp (the extra `bench` installs them);
one that is missing is named and left out. docs/performance.md says what each row means. On a
machine that is busy with other things the numbers say little: the load average and the share of
the processors' time that others took are printed and written along.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
from limits import Limits, Probe, Rates
from lookup import lookup_rows
from measure import Clock, wait_for_quiet
from models import BenchModel, d512, refdesk
from peers import Peers, llama_cpp, missing, peers_of, torch
from report import (
    environment,
    file_stem,
    rates_text,
    table,
    write_json,
    write_plot,
)
from rows import Row, Rows, fixed_rows, import_row, random_tokens

import tinyloop_py as tl

# Largest difference of a peer's logits from ours, in standard deviations of ours.
TOLERANCES = {"torch float32": 0.02, "torch bfloat16": 0.3, "llama.cpp": 0.1}


def check_peers(bench: BenchModel, peers: Peers) -> None:
    """Raises SystemExit unless every peer computes what tinyloop does, whole and in steps."""
    tokens = random_tokens(96, 7)
    with tl.Model(bench.path) as model:
        ours = model.logits(tokens)[-1]
    for peer in peers:
        whole = peer.run(tokens, 0)
        peer.run(tokens[:64], 0)
        peer.run(tokens[64:95], 64)
        for kind, theirs in (("whole", whole), ("in steps", peer.run(tokens[95:], 95))):
            error = np.abs(theirs - ours).max() / ours.std()
            progress(f"{bench.name}: {peer.name}, {kind}: logits differ by {error:.4f} deviations")
            if not error <= TOLERANCES[peer.name]:
                raise SystemExit(
                    f"{peer.name} does not compute what tinyloop does for {bench.name}: logits "
                    f"differ by {error:.3f} deviations; allowed are {TOLERANCES[peer.name]}"
                )


def progress(text: str) -> None:
    """Says on standard error what goes on."""
    print(f"  {text}", file=sys.stderr, flush=True)


def measure(
    benches: list[BenchModel], arguments: argparse.Namespace, clock: Clock, folder: Path
) -> tuple[list[Row], list[tuple[str, Rates]]]:
    """All rows, and the measured rates of each model and number of threads."""
    rows: list[Row] = []
    rates: list[tuple[str, Rates]] = []

    def add(row: Row) -> None:
        rows.append(row)
        progress(f"{row.model} {row.threads or ''} {row.name}: {row.ours:.6g} {row.unit}")

    probe = Probe(folder)
    for bench in benches:
        peers = peers_of(bench)
        check_peers(bench, peers)
        for threads in arguments.threads:
            limits = Limits(bench, probe, threads)
            rates.append((bench.name, limits.rates))
            with tl.Model(bench.path, threads=threads) as model:
                measured = Rows(bench, model, peers, limits, clock)
                for row in measured.all():
                    add(row)
                if bench.name == "refdesk" and threads == max(arguments.threads):
                    for row in measured.rag(arguments.requests):
                        add(row)
        for row in fixed_rows(bench, peers, limits, clock):
            add(row)
    for row in lookup_rows(folder, clock):
        add(row)
    modules = {"torch": "torch"} if torch else {}
    modules |= {"llama.cpp": "llama_cpp"} if llama_cpp else {}
    add(import_row(clock, modules))
    return rows, rates


def main() -> None:
    """Runs all rows and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", default=["refdesk", "d512"])
    parser.add_argument("--rounds", type=int, default=3, help="quiet rounds of each row")
    parser.add_argument("--requests", type=int, default=24, help="of the RAG-like load")
    parser.add_argument("--wait", type=float, default=0, help="minutes to wait for a quiet machine")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--out", type=Path, help="also write a JSON file and a plot into a folder")
    arguments = parser.parse_args()
    wait_for_quiet(0.5, arguments.wait)
    about = environment() | {"load_average_before": os.getloadavg(), "missing": missing()}
    clock = Clock(arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        makers = {"refdesk": refdesk, "d512": lambda: d512(Path(folder))}
        benches = [makers[name]() for name in arguments.models]
        rows, rates = measure(benches, arguments, clock, Path(folder))
    about |= {
        "load_average_after": os.getloadavg(),
        "others_share": clock.bystanders.overall,
    }
    print(f"{about['date']}, {about['processor']}, {about['cpus']} CPUs, commit {about['commit']}")
    print(", ".join(f"{name} {number}" for name, number in about["versions"].items() if number))
    print(
        f"load average before {about['load_average_before'][0]:.2f}; "
        f"others took {about['others_share']:.1%} of the processors' time"
    )
    for name in about["missing"]:
        print(f"missing: {name}")
    for name, rate in rates:
        print(rates_text(rate, name))
    print(table(rows, arguments.markdown))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        stem = arguments.out / file_stem(about)
        records = [{"model": name} | asdict(rate) for name, rate in rates]
        write_json(stem.with_suffix(".json"), about, records, rows)
        try:
            write_plot(stem.with_suffix(".png"), about, rows)
        except ImportError:
            print("missing: matplotlib, which draws the plot")


if __name__ == "__main__":
    main()

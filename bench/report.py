"""What the benchmark prints and writes: a table, a JSON file and a plot."""

import datetime
import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from limits import Rates
from rows import Row

SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def environment() -> dict[str, Any]:
    """Where and of what the numbers are."""
    packages = ("tinyloop-py", "numpy", "torch", "llama-cpp-python")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in packages},
    }


def processor() -> str:
    """The processor's name, with family and model where the name alone says little."""
    fields = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    except OSError:
        return platform.machine()
    name = fields.get("model name", platform.machine())
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name


def commit() -> str:
    """The checked-out commit, marked if files differ from it."""
    here = Path(__file__).parent
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=here,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip() or "unknown"


def installed_version(package: str) -> str | None:
    """The version of a package, or None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def seconds_text(seconds: float) -> str:
    """Three digits with a unit that fits."""
    scale, unit = next((s for s in SCALES if seconds >= s[0]), SCALES[-1])
    value = seconds / scale
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def value_text(value: float, unit: str) -> str:
    """A value of a row."""
    return seconds_text(value) if unit == "s" else f"{value:,.0f} {unit}"


def best_torch(row: Row) -> tuple[str, float] | None:
    """Name and value of PyTorch's better dtype."""
    torch = {name: value for name, value in row.peers.items() if name.startswith("torch")}
    return min(torch.items(), key=lambda item: item[1]) if torch else None


def cells(row: Row) -> list[str]:
    """The row's cells, in the order of HEADINGS."""
    torch, llama = best_torch(row), row.peers.get("llama.cpp")
    dtype = {"torch bfloat16": " bf16", "torch float32": " f32"}
    return [
        row.model,
        row.name,
        str(row.threads or ""),
        value_text(row.ours, row.unit),
        value_text(torch[1], row.unit) + dtype.get(torch[0], "") if torch else "",
        f"{torch[1] / row.ours:.2f}x" if torch else "",
        value_text(llama, row.unit) if llama else "",
        f"{llama / row.ours:.2f}x" if llama else "",
        value_text(row.limit, row.unit) if row.limit else "",
        f"{row.limit / row.ours:.0%}" if row.limit else "",
        row.note,
    ]


HEADINGS = (
    "model",
    "row",
    "threads",
    "tinyloop",
    "PyTorch, best",
    "ratio",
    "llama.cpp",
    "ratio",
    "limit",
    "of it",
    "",
)


def table(rows: list[Row], markdown: bool = False) -> str:
    """All rows as text."""
    lines = [list(HEADINGS)] + [cells(row) for row in rows]
    if markdown:
        rule = "|" + "---|" * len(HEADINGS)
        text = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([text[0], rule, *text[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0, 1, len(HEADINGS) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def rates_text(rates: Rates, model: str) -> str:
    """One line of measured limits."""
    bf16 = f", bf16 dot products {rates.bfloat16 / 1e9:.0f}" if rates.bfloat16 else ""
    return (
        f"{model}, {rates.threads} threads: reading its core {rates.cache / 1e9:.0f} GB/s, "
        f"DRAM {rates.dram / 1e9:.0f} GB/s; float32 {rates.float32 / 1e9:.0f} GFLOP/s{bf16}"
    )


def write_records(folder: Path | None, about: dict[str, Any], what: str, rows: list[Any]) -> None:
    """Writes the JSON file of a benchmark named `what`, unless the folder is None."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(about)}-{what}.json"
    path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def file_stem(about: dict[str, Any]) -> str:
    """<date>-<processor>, of characters that any file system takes."""
    slug = re.sub(r"[^a-z0-9]+", "-", about["processor"].lower()).strip("-")
    return f"{about['date']}-{slug}"


def write_json(path: Path, about: dict[str, Any], rates: list[Any], rows: list[Row]) -> None:
    """Everything that was measured."""
    record = about | {"rates": rates, "rows": [row.as_dict() for row in rows]}
    path.write_text(json.dumps(record, indent=1) + "\n")


def write_plot(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """How much longer the peers take, at the most threads; ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    threads = max(row.threads for row in rows)
    rows = [row for row in rows if row.threads == threads and row.peers]
    series = {
        "PyTorch, better of bf16 and f32": [(best_torch(row) or ("", 0))[1] for row in rows],
        "llama.cpp": [row.peers.get("llama.cpp", 0) for row in rows],
        "tinyloop": [row.ours for row in rows],
        "limit of the machine": [row.limit or 0 for row in rows],
    }
    height = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(10, 0.9 * len(rows) + 1.5), layout="constrained")
    for i, (name, values) in enumerate(series.items()):
        places = [y + (i - (len(series) - 1) / 2) * height for y in range(len(rows))]
        milliseconds = [value * 1e3 if value else float("nan") for value in values]
        bars = axes.barh(places, milliseconds, height, label=name)
        labels = [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in milliseconds]
        axes.bar_label(bars, [label.replace("nan", "") for label in labels], fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{row.model}: {row.name}" for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.01)
    axes.set_xlabel("milliseconds (logarithmic)")
    axes.set_title(f"{about['processor']}, {threads} threads, {about['date']}, {about['commit']}")
    figure.legend(loc="outside lower center", ncols=len(series))
    figure.savefig(path, dpi=120)

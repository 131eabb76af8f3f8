"""Distance of the demo model's logits from float64 arithmetic, as a Markdown table.

The reference values were computed in float64 from the same weights (tests/data/golden_refdesk).
Columns: the largest and the root-mean-square error over the vocabulary at the last position of six
prompts of 1 to 1500 tokens, the largest one again in standard deviations of its logits, and by how
much the mean negative log-likelihood of twenty held-out documents differs.

    python bench/accuracy.py
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import tinyloop_py as tl

GOLDEN = Path(__file__).resolve().parents[1] / "tests/data/golden_refdesk"


def load_golden():
    """Returns the description of the reference values, and their arrays by name."""
    meta = json.loads((GOLDEN / "golden.json").read_text())
    return meta, load_file(GOLDEN / "golden.safetensors")


def logit_errors(model, meta, arrays, loops):
    """Returns (largest, root mean square, largest in standard deviations) over all prompts."""
    largest, squares, relative = 0.0, [], 0.0
    for prompt in meta["prompts"]:
        reference = arrays[f"logits.last.{prompt['name']}.loops{loops}"].astype(np.float64)
        error = np.abs(model.logits(prompt["tokens"], loops=loops)[-1] - reference)
        largest = max(largest, error.max())
        relative = max(relative, error.max() / reference.std())
        squares.append((error**2).mean())
    return largest, math.sqrt(np.mean(squares)), relative


def mean_nll(model, documents, loops):
    """Returns the mean negative log-likelihood of all tokens but each document's first."""
    total, n = 0.0, 0
    for document in documents:
        tokens = np.array(document["tokens"])
        logits = model.logits(tokens, loops=loops)[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits).sum(axis=1))
        total += (log_sums - logits[np.arange(len(logits)), tokens[1:]]).sum()
        n += len(logits)
    return total / n


def nll_difference(model, meta, arrays):
    """Returns the relative difference of the mean at loops 8, the reference's only depth."""
    reference = np.concatenate([arrays[f"nll.doc{i}"] for i in range(len(meta["documents"]))])
    expected = reference.astype(np.float64).mean()
    return mean_nll(model, meta["documents"], 8) / expected - 1


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, help="default: one for each CPU")
    threads = parser.parse_args().threads
    meta, arrays = load_golden()
    print("| KV | loops | largest error | RMS error | largest / std of logits | NLL |")
    print("|---|---|---|---|---|---|")
    for kv_mode in ("fp16", "fp32"):
        with tl.Model(tl.default_model_path(), kv_mode=kv_mode, threads=threads) as model:
            for loops in meta["loops"]:
                largest, rms, relative = logit_errors(model, meta, arrays, loops)
                nll = f"{nll_difference(model, meta, arrays):+.1e}" if loops == 8 else ""
                print(
                    f"| {kv_mode} | {loops} | {largest:.1e} | {rms:.1e} | {relative:.1e} | {nll} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

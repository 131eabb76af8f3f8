"""The demo: sixteen tenants' system prompts in one pool, answered with and without it."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import tinyloop_py as tl

from .text import Tokenizer

_TENANTS = Path(__file__).with_name("data") / "tenants.json"


@dataclass
class _Answer:
    """One generation: its token ids, and seconds from the call to the first of them."""

    tokens: list[int] = field(default_factory=list)
    first_token_s: float = 0.0


@dataclass
class _Result:
    """One question, both ways; `reused` counts prompt tokens that the pool run did not prefill."""

    prompt_tokens: int
    reused: int
    plain: _Answer
    pooled: _Answer


def run(questions: int = 1, max_tokens: int = 48, threads: int | None = None) -> int:
    """Answers `questions` of each tenant's sample questions and prints a table at the end.

    Returns the exit status: 0 if both ways gave the same tokens everywhere, else 1.
    """
    if questions < 1 or max_tokens < 1:
        raise ValueError(
            f"questions is {questions} and max_tokens {max_tokens}; both must be at least 1"
        )
    tenants = json.loads(_TENANTS.read_text(encoding="utf-8"))
    path = tl.default_model_path()
    print(f"Loading {Path(path).name} ...", flush=True)
    with tl.Model(path, threads=threads) as model:
        tokenizer = Tokenizer(model.blob)
        pool = tl.PrefixPool(capacity=len(tenants))
        _register(model, tokenizer, pool, tenants)
        results = {
            tenant["name"]: [
                _ask(model, tokenizer, pool, tenant, sample["question"], max_tokens)
                for sample in tenant["sample_questions"][:questions]
            ]
            for tenant in tenants
        }
    print("\n".join(_table(results)), flush=True)
    return 0 if all(_identical(rows) for rows in results.values()) else 1


def _register(model: Any, tokenizer: Tokenizer, pool: Any, tenants: list[dict[str, Any]]) -> None:
    start = time.perf_counter()
    for number, tenant in enumerate(tenants, 1):
        prefix = tokenizer.encode_chat([_system(tenant)], add_generation_prompt=False)
        length = model.register_prefix(pool, prefix)
        print(
            f"[{number}/{len(tenants)}] registered the system prompt of {tenant['name']}: "
            f"{length} tokens",
            flush=True,
        )
    seconds = time.perf_counter() - start
    print(
        f"The pool holds {pool.size()} prefixes, {pool.total_cached_tokens()} tokens, "
        f"built in {seconds:.1f} s.\n"
    )


def _system(tenant: dict[str, Any]) -> dict[str, str]:
    return {"role": "system", "content": tenant["system_prompt"]}


def _ask(
    model: Any,
    tokenizer: Tokenizer,
    pool: Any,
    tenant: dict[str, Any],
    question: str,
    max_tokens: int,
) -> _Result:
    prompt = tokenizer.encode_chat([_system(tenant), {"role": "user", "content": question}])
    print(f"{tenant['name']}: {question}")
    plain = _generate(model, tokenizer, prompt, max_tokens, None)
    before = model.counters()["tokens_prefilled"]
    pooled = _generate(model, tokenizer, prompt, max_tokens, pool)
    prefilled = model.counters()["tokens_prefilled"] - before
    print()
    return _Result(len(prompt), len(prompt) - prefilled, plain, pooled)


def _generate(
    model: Any, tokenizer: Tokenizer, prompt: list[int], max_tokens: int, pool: Any
) -> _Answer:
    """Generates greedily and prints the text as it comes."""
    answer = _Answer()

    def tokens() -> Iterator[int]:
        start = time.perf_counter()
        for token in model.generate_stream(prompt, max_tokens, temperature=0.0, pool=pool):
            if not answer.tokens:
                answer.first_token_s = time.perf_counter() - start
            answer.tokens.append(token)
            yield token

    sys.stdout.write("  without pool: " if pool is None else "  with pool:    ")
    sys.stdout.flush()
    for piece in tokenizer.decode_stream(tokens()):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return answer


def _identical(results: list[_Result]) -> bool:
    return all(result.plain.tokens == result.pooled.tokens for result in results)


def _table(results: dict[str, list[_Result]]) -> list[str]:
    """The lines of the table: tokens are sums over a tenant's questions, times are means."""
    width = max(len(name) for name in ["tenant", *results])
    lines = [
        "Time to the first token, without and with the pool:",
        f"{'tenant':<{width}}  {'prompt tokens':>13}  {'reused':>6}  {'without ms':>10}"
        f"  {'with ms':>8}  {'ratio':>6}  identical",
    ]
    for name, rows in results.items():
        plain = fmean(row.plain.first_token_s for row in rows) * 1e3
        pooled = fmean(row.pooled.first_token_s for row in rows) * 1e3
        lines.append(
            f"{name:<{width}}  {sum(row.prompt_tokens for row in rows):>13}"
            f"  {sum(row.reused for row in rows):>6}  {plain:>10.1f}  {pooled:>8.1f}"
            f"  {plain / pooled:>6.1f}  {'yes' if _identical(rows) else 'no'}"
        )
    return lines

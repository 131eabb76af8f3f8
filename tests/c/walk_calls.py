"""Writes C code that calls every function of tinyloop.h with one hostile argument at a time.

    python3 walk_calls.py tinyloop.h > hostile_calls.h

Each call is one of the macros of test_hostile.c, which says what must come of it:

    NULL_IN(call, function, parameter)    a pointer is NULL that must not be
    NULL_FOR(call, function)              a pointer is NULL that may be
    NULLS_IN(call, function)              all pointers are NULL
    DEAD_IN(call, function, parameter)    a handle that was released
    OTHER_IN(call, function, parameter)   a handle of another type

``call`` uses the members of `s`, a set of valid arguments. A parameter of a new type ends this
program with its name: then VALUES must learn it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "abi"))

import header

HANDLES = ("tl_model", "tl_kv_cache", "tl_prefix_cache", "tl_prefix_pool", "tl_stream")
# What is valid for a parameter of this type, by (name or type).
VALUES = {
    "capacity": "128",
    "length": "1",
    "n_tokens": "3",
    "n_prompt": "3",
    "n_suffix": "3",
    "name": '"card"',
    "path": "s.path",
    "size_t *": "&s.size",
    "int64_t *": "&s.length",
    "int32_t *": "s.ids",
    "float *": "s.numbers",
    "const float *": "s.state",
    "const void **": "&s.data",
    "const int32_t *": "thing_tokens",
    "void *": "&s",
    "tl_log_callback": "s.log",
    "tl_interrupt_callback": "s.interrupt",
    **{f"{name} **": f"&s.made.{name.removeprefix('tl_')}" for name in HANDLES},
    **{f"{name} *": f"s.held.{name.removeprefix('tl_')}" for name in HANDLES},
    **{f"const {name} *": f"s.held.{name.removeprefix('tl_')}" for name in HANDLES},
    "const tl_model_options *": "&s.model_options",
    "const tl_cache_options *": "&s.cache_options",
    "const tl_generate_options *": "&s.generate_options",
    "const tl_prefix_pool_options *": "&s.pool_options",
    "tl_model_info *": "&s.model_info",
    "tl_counters *": "&s.counters",
    "tl_prefix_cache_info *": "&s.cache_info",
}
# Pointers that may be NULL, besides options and what is released.
OPTIONAL = {
    ("tl_model_logits", "init_state"),
    ("tl_model_states", "init_state"),
    ("tl_stream_create", "pool"),
    ("tl_set_log_callback", "callback"),
    ("tl_set_log_callback", "user"),
    ("tl_set_interrupt_callback", "callback"),
    ("tl_set_interrupt_callback", "user"),
}


def value(function, kind, name):
    """Returns the C expression of a valid argument."""
    for key in (name if not kind.endswith("*") or name in ("name", "path") else kind, kind):
        if key in VALUES:
            return VALUES[key]
    sys.exit(f"{__file__}: {function} has a parameter '{kind} {name}'; VALUES lacks its type")


def handle_type(kind):
    """The handle's type that a parameter points to, or None."""
    handle = kind.removeprefix("const ").removesuffix(" *")
    return handle if handle in HANDLES else None


def is_pointer(kind):
    """Callbacks are pointers too."""
    return "*" in kind or kind.endswith("_callback")


def may_be_null(function, result, kind, name):
    """Options have defaults; what has no status to return takes NULL for nothing."""
    return (
        kind.endswith("_options *")
        or (function, name) in OPTIONAL
        or (result != "tl_status" and handle_type(kind) is not None)
    )


def calls(result, function, parameters):
    """Yields the lines of one function."""
    valid = [value(function, kind, name) for kind, name in parameters]
    pairs = zip(parameters, valid, strict=True)

    def call(at, argument):
        return f"{function}({', '.join([*valid[:at], argument, *valid[at + 1 :]])})"

    suffix = "" if result == "tl_status" else "_WITHOUT_STATUS"
    for at, (kind, name) in enumerate(parameters):
        if is_pointer(kind):
            if may_be_null(function, result, kind, name):
                yield f"NULL_FOR{suffix}({call(at, 'NULL')}, {function})"
            else:
                yield f"NULL_IN{suffix}({call(at, 'NULL')}, {function}, {name})"
        handle = handle_type(kind)
        if handle:
            other = HANDLES[(HANDLES.index(handle) + 1) % len(HANDLES)].removeprefix("tl_")
            dead = f"s.dead.{handle.removeprefix('tl_')}"
            wrong = f"({handle} *)(void *)s.held.{other}"
            yield f"DEAD_IN{suffix}({call(at, dead)}, {function}, {name})"
            yield f"OTHER_IN{suffix}({call(at, wrong)}, {function}, {name})"
    if sum(is_pointer(kind) for kind, _ in parameters) > 1:
        nulls = ["NULL" if is_pointer(kind) else v for (kind, _), v in pairs]
        everything = f"{function}({', '.join(nulls)})"
        needed = any(
            is_pointer(k) and not may_be_null(function, result, k, n) for k, n in parameters
        )
        yield f"{'NULLS_IN' if needed else 'NULL_FOR'}{suffix}({everything}, {function})"


def main(path):
    declared = header.read(Path(path).read_text())
    if set(declared.handles) != set(HANDLES):
        sys.exit(f"{__file__}: HANDLES is {HANDLES}; {path} has {declared.handles}")
    print("/* Generated by walk_calls.py. */")
    for result, name, parameters in declared.functions:
        print("\n".join(calls(result, name, parameters)))


if __name__ == "__main__":
    main(sys.argv[1])

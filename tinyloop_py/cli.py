"""The `tinyloop` command. Each subcommand imports what it needs, so that `--help` is quick."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

_EXIT_ERROR = 1
_EXIT_INTERRUPTED = 130
_EXIT_CLOSED_PIPE = 141  # as a program ends that SIGPIPE stops


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0 success, 1 an error (one line on stderr), 2 wrong usage, 130 interrupted, 141 closed pipe.
    """
    options = _parse(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status: int = options.run(options)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_CLOSED_PIPE
    except (OSError, ValueError, RuntimeError, MemoryError, ImportError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"tinyloop: error: {message}", file=sys.stderr)
        return _EXIT_ERROR
    return status


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"tinyloop: warning: {message}", file=sys.stderr)


# ---- Options --------------------------------------------------------------------------------


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command and options.show:
        parser.error(
            f"--{options.show[0]} and the command {options.command} were given; "
            "give a command or options that print, not both"
        )
    if not options.command and not options.show:
        parser.error("nothing was given; give a COMMAND or one or more options")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinyloop", description="A runtime for looped decoder language models."
    )
    _add_show(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands)
    _add_generate(commands)
    _add_convert(commands)
    _add_inspect(commands)
    _add_export(commands)
    info = commands.add_parser("info", help="print version and build")
    info.set_defaults(run=_info)
    return parser


def _add_show(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "options that print what C programs are built with, together or alone",
        "cc main.c $(tinyloop --cflags --libs)",
    )
    for name, what in (
        ("version", "the version, on a line of its own"),
        ("pkgconfigdir", "the folder of tinyloop.pc, on a line of its own"),
        ("cflags", "the compiler's options"),
        ("libs", "the linker's options, after those of --cflags on one line"),
    ):
        group.add_argument(f"--{name}", dest="show", action="append_const", const=name, help=what)
    parser.set_defaults(run=_show)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="answer sample questions with and without a pool")
    demo.add_argument("--questions", type=int, default=1, metavar="N", help="for each tenant (1)")
    demo.add_argument("--max-tokens", type=int, default=48, metavar="N", help="of an answer (48)")
    demo.add_argument("--threads", type=int, metavar="N", help="one for each CPU")
    demo.set_defaults(run=_demo)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="continue a text")
    add = generate.add_argument
    add("prompt", metavar="PROMPT", help="the text, or - for standard input")
    add("--model", metavar="PATH", help="a .tinyloop file; without it, the one that comes along")
    add("--chat", action="store_true", help="PROMPT is a user's message in the chat template")
    add("--system", metavar="TEXT", help="a system message before it; implies --chat")
    add("--max-tokens", type=int, default=128, metavar="N", help="new tokens at most (128)")
    add("--max-seq-len", type=int, default=2048, metavar="N", help="prompt and new tokens (2048)")
    add("--loops", type=int, metavar="N", help="times the core runs; the file's default")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest (1)")
    add("--top-k", type=int, default=50, metavar="K", help="0 takes all (50)")
    add("--top-p", type=float, default=1.0, metavar="P", help="above 0, at most 1 (1)")
    add("--min-p", type=float, default=0.0, metavar="P", help="from 0 to 1 (0)")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 0 (1)")
    add("--seed", type=int, metavar="S", help="a fresh one each time")
    add("--cache-window", type=int, default=0, metavar="W", help="positions attended to; 0 all")
    add("--kv-mode", metavar="M", help="fp16 or fp32; without it, as the environment says")
    add("--threads", type=int, metavar="N", help="one for each CPU")
    generate.set_defaults(run=_generate)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser("convert", help="make a .tinyloop file from a checkpoint")
    add = convert.add_argument
    add("src", metavar="SRC", help="a folder with config.json and safetensors weights, or the file")
    add("out", metavar="OUT", help="the .tinyloop file to write")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="without it, each tensor keeps its own")
    add(
        "--quantize",
        choices=("int8", "int8-group"),
        help="matrices as int8, with a scale for each row or for each 128 columns of it",
    )
    convert.set_defaults(run=_convert)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="draw and describe a .tinyloop file")
    inspect.add_argument("file", metavar="FILE")
    inspect.add_argument("--tensors", action="store_true", help="list the tensors too")
    inspect.add_argument(
        "--verify", action="store_true", help="check the tensors' checksums and the gaps too"
    )
    inspect.set_defaults(run=_inspect)


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="write a .tinyloop file as safetensors")
    export.add_argument("file", metavar="FILE")
    export.add_argument("out", metavar="OUT", help="the safetensors file; convert reads it again")
    export.set_defaults(run=_export)


# ---- Commands -------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    import tinyloop_py as tl

    from . import linking

    if "version" in options.show:
        print(tl.__version__)
    if "pkgconfigdir" in options.show:
        print(linking.pkgconfig_dir())
    flags = {"cflags": linking.cflags, "libs": linking.libs}
    line = [text() for name, text in flags.items() if name in options.show]
    if line:
        print(*line)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from . import demo

    return demo.run(options.questions, options.max_tokens, options.threads)


def _generate(options: argparse.Namespace) -> int:
    import tinyloop_py as tl

    from .text import Tokenizer

    prompt = options.prompt
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    path = options.model or tl.default_model_path()
    with tl.Model(
        path, options.max_seq_len, kv_mode=options.kv_mode, threads=options.threads
    ) as model:
        tokenizer = Tokenizer(model.blob)
        if options.chat or options.system is not None:
            messages = [{"role": "user", "content": prompt}]
            if options.system is not None:
                messages.insert(0, {"role": "system", "content": options.system})
            ids = tokenizer.encode_chat(messages)
        else:
            ids = tokenizer.encode(prompt)
        tokens = model.generate_stream(
            ids,
            options.max_tokens,
            loops=options.loops,
            temperature=options.temperature,
            top_k=options.top_k,
            cache_window=options.cache_window,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
        )
        for piece in tokenizer.decode_stream(tokens):
            sys.stdout.write(piece)
            sys.stdout.flush()
    print()
    return 0


def _convert(options: argparse.Namespace) -> int:
    from .convert import convert

    report = convert(
        options.src,
        options.out,
        dtype=options.dtype,
        quantize=options.quantize,
        progress=_show_progress,
    )
    for key in report.unknown_keys:
        print(f"tinyloop: warning: config.json: unknown key {key} was ignored", file=sys.stderr)
    for note in report.notes:
        print(f"tinyloop: warning: config.json: {note}", file=sys.stderr)
    for name in report.skipped:
        print(f"not needed: tensor {name}")
    parameters = ", ".join(f"{count:,} {dtype}" for dtype, count in report.parameters.items())
    blobs = ", ".join(report.blobs) or "none"
    print(
        f"{report.path}: {report.family}, {report.size:,} bytes\n"
        f"parameters: {parameters}\n"
        f"blobs: {blobs}"
    )
    return 0


def _show_progress(name: str, done: int, total: int) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r\x1b[K{done / total:4.0%} {name}", end=end, file=sys.stderr, flush=True)


def _inspect(options: argparse.Namespace) -> int:
    from .describe import describe
    from .format import read_file

    file = read_file(options.file)
    print(describe(file, tensors=options.tensors))
    if not options.verify:
        return 0
    problems = file.verify()
    for problem in problems:
        print(f"tinyloop: error: {problem}", file=sys.stderr)
    print(f"verified: {'damaged' if problems else 'all tensors are as they were written'}")
    return _EXIT_ERROR if problems else 0


def _export(options: argparse.Namespace) -> int:
    from .export import to_safetensors

    to_safetensors(options.file, options.out, progress=_show_progress)
    return 0


def _info(options: argparse.Namespace) -> int:
    import tinyloop_py as tl

    rows = {"tinyloop": tl.__version__, **tl.build_info()}
    width = max(map(len, rows)) + 2
    for key, value in rows.items():
        print(f"{key:<{width}}{value}")
    return 0

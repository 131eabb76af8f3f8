"""The checks of the ABI gate, each of which raises AssertionError with what its tool said.

test_abi.py runs them on the project, test_copies.py on copies that break the ABI.
"""

import difflib
import re
import subprocess
import tempfile
from pathlib import Path

import header

HERE = Path(__file__).resolve().parent
SYMBOLS = HERE / "symbols.txt"
PIN = HERE / "pin.c"
BASELINE = HERE / "tinyloop-0.abi"

PIN_COMPILER = ["gcc", "-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror"]


def run(*command, **options):
    """Returns the standard output of a command that must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def assert_listed(names, wanted, what):
    lines = difflib.unified_diff(wanted, sorted(names), SYMBOLS.name, what, lineterm="", n=0)
    difference = "\n".join(lines)
    assert not difference, difference


def listed():
    return SYMBOLS.read_text().split()


def library_symbols(library):
    """The library exports what symbols.txt lists."""
    lines = run("nm", "-D", "--defined-only", "--with-symbol-versions", library).splitlines()
    # "A" marks the nodes of the version script.
    names = [name for _, kind, name in map(str.split, lines) if kind != "A"]
    assert_listed(names, listed(), library.name)


def map_symbols(version_script):
    """The version script names what symbols.txt lists."""
    text = header.without_comments(version_script.read_text())
    nodes = re.findall(r"(\w+)\s*\{(.*?)\}", text, re.DOTALL)
    names = [f"{name}@@{node}" for node, body in nodes for name in re.findall(r"\btl_\w+", body)]
    assert_listed(names, listed(), version_script.name)


def header_symbols(include):
    """The header declares what symbols.txt lists, whatever the node."""
    names = [function.name for function in read_header(include).functions]
    assert_listed(names, [name.split("@@")[0] for name in listed()], "tinyloop.h")


def read_header(include):
    return header.read((include / "tinyloop.h").read_text())


def pin_is_complete(include):
    """pin.c has a line for everything that the header declares."""
    pin = header.without_comments(PIN.read_text())
    missing = [name for name, line in pins(read_header(include)) if not re.search(line, pin)]
    assert not missing, f"pin.c lacks {', '.join(missing)}"


def pins(declared):
    """Yields everything that pin.c must have: its name, and the form of its line."""
    for _, name, _ in declared.functions:
        yield name, rf"\(\*const pin_{name}\)\([^;]*\)\s*=\s*{name};"
    for struct, fields in declared.structs.items():
        yield struct, rf"\bSTRUCT\({struct}, "
        for _, field in fields:
            yield f"{struct}.{field}", rf"\bFIELD\({struct}, .*, {field}\);"
    for name in declared.constants:
        yield name, rf"\bCONSTANT\({name}, "
    for name in [*(callback.name for callback in declared.callbacks), *declared.scalars]:
        yield name, rf"\bTYPE\({name}, "


def pin_compiles(include):
    """The header's types and numbers are those of pin.c."""
    run(*PIN_COMPILER, "-fsyntax-only", f"-I{include}", PIN)


def pin_links(include, library):
    """The library has every function of pin.c."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*PIN_COMPILER, "-fPIC", "-shared", "-Wl,-z,defs", f"-I{include}"]
        run(*command, PIN, library, "-o", f"{folder}/pin.so")


def has_debug_information(library):
    """Without it, abidiff compares names alone and finds all types as they were."""
    sections = run("readelf", "-SW", library)
    assert ".debug_info" in sections, f"{library.name} has no debug information: build it with -g"


def abidiff(include, library):
    """Programs that were built against the baseline's library still run with this one.

    Two descriptions are compared: given a library with its headers, abidiff takes the types of
    system headers, such as int64_t, for private ones and lets a change to int32_t pass.
    """
    with tempfile.TemporaryDirectory() as folder:
        description = Path(folder, library.name)
        description.write_text(describe(include, library))
        run("abidiff", "--no-added-syms", BASELINE, description)


def describe(include, library):
    """Returns the library's public interface in abidw's XML, with nothing of lines or machines."""
    has_debug_information(library)
    public = ["--headers-dir", include, "--drop-private-types", "--exported-interfaces-only"]
    no_places = ["--no-corpus-path", "--no-comp-dir-path", "--no-show-locs"]
    no_machine = ["--no-architecture", "--no-elf-needed", "--no-write-default-sizes"]
    return run("abidw", *public, *no_places, *no_machine, library)

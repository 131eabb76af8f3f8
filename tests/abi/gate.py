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


# Every standard that programs may be written in, with the warnings that their authors may want.
WARNINGS = ["-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wundef"]
C_STANDARDS = ("c99", "c11", "c17", "c2x", "gnu99", "gnu11", "gnu17", "gnu2x")
CPP_STANDARDS = ("c++98", "c++11", "c++14", "c++17", "c++20")
COMPILERS = [
    *(["gcc", "-xc", f"-std={std}", "-Wstrict-prototypes"] for std in C_STANDARDS),
    *(["g++", "-xc++", f"-std={std}"] for std in CPP_STANDARDS),
]

# The parts of the C library; on x86-64 the loader brings thread-local variables.
C_LIBRARY = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}


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


# ---- the header ---------------------------------------------------------------------------------


def check_syntax(compiler, include, *lines):
    source = "\n".join(['#include "tinyloop.h"', *lines, ""])
    run(*compiler, "-fsyntax-only", f"-I{include}", "-", input=source)


def header_compiles(include, compiler):
    """Alone, and included twice."""
    check_syntax([*compiler, *WARNINGS], include, '#include "tinyloop.h"')


def macros_start_options(include, compiler):
    """Every options struct has an INIT macro, with a value for each of its fields."""
    structs = [name for name in read_header(include).structs if name.endswith("_options")]
    assert structs
    lines = (
        f"extern const {name} check_{name};\nconst {name} check_{name} = {name.upper()}_INIT;"
        for name in structs
    )
    check_syntax([*compiler, *WARNINGS], include, *lines)


def header_is_documented(include):
    """A comment stands before everything that is declared."""
    lines = (include / "tinyloop.h").read_text().splitlines()
    declared = [n for n, line in enumerate(lines) if re.match(r"(TL_API|typedef|enum)\b", line)]
    assert len(declared) > len(listed())
    bare = [lines[n] for n in declared if not lines[n - 1].endswith("*/")]
    assert not bare, "\n".join(bare)


def no_struct_ends_in_padding(include):
    """An older program's padding is not zero, so no later version's field may take its place."""
    lines = (
        f"_Static_assert(offsetof({struct}, {fields[-1][1]}) + sizeof((({struct} *)0)->"
        f'{fields[-1][1]}) == sizeof({struct}), "{struct} ends in padding");'
        for struct, fields in read_header(include).structs.items()
    )
    check_syntax([*PIN_COMPILER, "-xc"], include, *lines)


# ---- what files link to -------------------------------------------------------------------------


def dynamic_entries(path, tag):
    """Returns the values of a tag (such as NEEDED) in an ELF file's dynamic section."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "-dW", path))


def library_names_itself(library):
    name = dynamic_entries(library, "SONAME")
    assert name == ["libtinyloop.so.0"], f"{library.name} is named {name}"


def library_needs_the_c_library_alone(library):
    others = set(dynamic_entries(library, "NEEDED")) - C_LIBRARY
    assert not others, f"{library.name} needs {', '.join(sorted(others))}"


def no_run_path(library):
    paths = dynamic_entries(library, "RPATH") + dynamic_entries(library, "RUNPATH")
    assert not paths, f"{library.name} has run paths {paths}"

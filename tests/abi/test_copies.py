"""Copies of the library whose ABI was changed on purpose.

The gate must name what broke. Where things were only added, programs and libraries of both versions
must get along.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import gate
import pytest

import tinyloop_py as tl

ROOT = gate.HERE.parents[1]
INSTALLED = Path(tl.__file__).parent / "lib"


class Copy:
    """The sources of the library in a folder of their own, and the library built from them."""

    def __init__(self, folder):
        self.folder = folder
        self.include = folder / "include"
        self.source = folder / "libtinyloop"
        self.version_script = self.source / "tinyloop.map"
        self.library = folder / "build/libtinyloop/libtinyloop.so.0"

    def edit(self, old, new):
        """Replaces a text wherever the interface has it: header, version script and api/."""
        files = [self.include / "tinyloop.h", self.version_script, *self.source.glob("api/*.c")]
        found = [path for path in files if old in path.read_text()]
        assert found, f"no file has {old!r}"
        for path in found:
            path.write_text(path.read_text().replace(old, new))

    def build(self, *options):
        # An outer make's flags are not meant for this one; -w lets build what is broken on purpose.
        make = ["env", "-u", "MAKEFLAGS", "make", f"-j{len(os.sched_getaffinity(0))}"]
        gate.run(*make, "-C", self.source, "lib", "CFLAGS=-O0 -g -w", *options)

    def build_interface(self):
        """Compiles api/ alone: it defines all exported functions, and nothing here is ever run."""
        for path in self.source.glob("api/*.c"):
            path.touch()
        self.build("-o", self.library.parent / "command", "-o", "../include/tinyloop.h")


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    whole = Copy(tmp_path_factory.mktemp("whole"))
    shutil.copytree(ROOT / "include", whole.include)
    shutil.copytree(ROOT / "libtinyloop", whole.source)
    whole.build()
    return whole


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    return Copy(tmp_path)


def names(name):
    """Expects an AssertionError that has ``name`` in it, as a word of its own."""
    return pytest.raises(AssertionError, match=rf"(?<!\w){re.escape(name)}\b")


def test_nothing_is_found_in_a_copy_that_is_whole(copy):
    copy.build_interface()
    gate.library_symbols(copy.library)
    gate.map_symbols(copy.version_script)
    gate.header_symbols(copy.include)
    gate.pin_is_complete(copy.include)
    gate.pin_compiles(copy.include)
    gate.pin_links(copy.include, copy.library)
    gate.abidiff(copy.include, copy.library)


def test_reordered_constants(copy):
    copy.edit("TL_DEVICE_CPU = 1, TL_DEVICE_CUDA = 2", "TL_DEVICE_CUDA = 1, TL_DEVICE_CPU = 2")
    for name in ("TL_DEVICE_CPU", "TL_DEVICE_CUDA"):
        with names(name):
            gate.pin_compiles(copy.include)


def test_field_inserted_in_the_middle(copy):
    copy.edit("int64_t vocab_size;", "int64_t vocab_size; int64_t inserted;")
    copy.build_interface()
    with names("tl_model_info.hidden_size"):
        gate.pin_compiles(copy.include)
    with names("tl_model_info.inserted"):
        gate.pin_is_complete(copy.include)
    with names("struct tl_model_info"):
        gate.abidiff(copy.include, copy.library)


def test_field_of_another_type_with_the_same_size(copy):
    copy.edit("uint64_t tokens_decoded;", "int64_t tokens_decoded;")
    copy.build_interface()
    with names("tl_counters.tokens_decoded"):
        gate.pin_compiles(copy.include)
    with names("uint64_t tokens_decoded"):
        gate.abidiff(copy.include, copy.library)


def test_field_appended_to_every_struct(copy):
    """No program breaks, but the new sizes and fields are to be written down."""
    structs = gate.read_header(copy.include).structs
    for struct in structs:
        copy.edit(f"}} {struct};", f"int64_t appended; }} {struct};")
    copy.build_interface()
    for struct in structs:
        with names(f'"{struct}'):
            gate.pin_compiles(copy.include)
        with names(f"{struct}.appended"):
            gate.pin_is_complete(copy.include)
        with names(f"struct {struct}"):
            gate.abidiff(copy.include, copy.library)


def test_parameter_of_another_type(copy):
    copy.edit("(tl_kv_cache *kv, int64_t length)", "(tl_kv_cache *kv, int32_t length)")
    copy.build_interface()
    with names("tl_kv_cache_truncate"):
        gate.pin_compiles(copy.include)
    with names("tl_kv_cache_truncate"):
        gate.abidiff(copy.include, copy.library)


def test_result_of_another_type(copy):
    copy.edit("int64_t tl_kv_cache_bytes(", "int32_t tl_kv_cache_bytes(")
    copy.build_interface()
    with names("tl_kv_cache_bytes"):
        gate.pin_compiles(copy.include)
    with names("tl_kv_cache_bytes"):
        gate.abidiff(copy.include, copy.library)


def test_callback_of_another_type(copy):
    copy.edit("(void *user, int32_t token)", "(void *user, int64_t token)")
    with names("tl_token_callback"):
        gate.pin_compiles(copy.include)


def test_status_of_another_type(copy):
    """A function pointer spells it by name, so it needs a pin of its own."""
    copy.edit("typedef int32_t tl_status;", "typedef uint32_t tl_status;")
    with names("tl_status"):
        gate.pin_compiles(copy.include)


def test_symbol_removed(copy):
    copy.edit("        tl_kv_cache_bytes;\n", "")
    copy.build_interface()
    with names("tl_kv_cache_bytes@@TINYLOOP_0"):
        gate.library_symbols(copy.library)
    with names("tl_kv_cache_bytes@@TINYLOOP_0"):
        gate.map_symbols(copy.version_script)
    with names("tl_kv_cache_bytes"):
        gate.pin_links(copy.include, copy.library)
    with names("tl_kv_cache_bytes"):
        gate.abidiff(copy.include, copy.library)


def test_declaration_removed(copy):
    copy.edit("TL_API int64_t tl_kv_cache_bytes(const tl_kv_cache *kv);", "")
    with names("tl_kv_cache_bytes"):
        gate.header_symbols(copy.include)
    with names("tl_kv_cache_bytes"):
        gate.pin_compiles(copy.include)


def test_symbol_added(copy):
    """Every list asks for it, and abidiff does not: an addition needs no new baseline."""
    declaration = "uint32_t tl_version(void)"
    added = "uint32_t tl_added(void)"
    copy.edit(f"TL_API {declaration};", f"TL_API {declaration};\nTL_API {added};")
    copy.edit(f"{declaration}\n{{", f"{added}\n{{ return 0; }}\n{declaration}\n{{")
    copy.edit("tl_version;\n", "tl_version; tl_added;\n")
    copy.build_interface()
    with names("tl_added@@TINYLOOP_0"):
        gate.library_symbols(copy.library)
    with names("tl_added@@TINYLOOP_0"):
        gate.map_symbols(copy.version_script)
    with names("tl_added"):
        gate.header_symbols(copy.include)
    with names("tl_added"):
        gate.pin_is_complete(copy.include)
    gate.abidiff(copy.include, copy.library)


def test_constant_added(copy):
    copy.edit("TL_STATUS_BUSY = 9,", "TL_STATUS_BUSY = 9, TL_STATUS_ADDED = 10,")
    with names("TL_STATUS_ADDED"):
        gate.pin_is_complete(copy.include)


def test_library_without_debug_information(copy):
    gate.run("strip", "--strip-debug", copy.library)
    with names("no debug information"):
        gate.abidiff(copy.include, copy.library)


# ---- breaks of what a compiler or linker sees ----------------------------------------------------

C99 = next(compiler for compiler in gate.COMPILERS if "-std=c99" in compiler)
CPP98 = next(compiler for compiler in gate.COMPILERS if "-std=c++98" in compiler)


def test_header_of_a_newer_standard(copy):
    copy.edit("typedef struct tl_model tl_model;", "typedef struct tl_model tl_model;;")
    with names("tl_model"):
        gate.header_compiles(copy.include, C99)
    with names("extra"):
        gate.header_compiles(copy.include, CPP98)


def test_header_that_cannot_come_twice(copy):
    copy.edit("#ifndef TINYLOOP_H", "#ifndef TINYLOOP_OTHER_H")
    with names("tl_model_options"):
        gate.header_compiles(copy.include, C99)


def test_macro_without_a_value_for_a_field(copy):
    copy.edit("    int64_t capacity;", "    int64_t capacity;\n    int64_t appended;")
    with names("appended"):
        gate.macros_start_options(copy.include, CPP98)


def test_declaration_without_a_comment(copy):
    declaration = "TL_API int64_t tl_prefix_pool_size("
    copy.edit(declaration, f"\n{declaration}")
    with names("tl_prefix_pool_size"):
        gate.header_is_documented(copy.include)


def test_struct_that_ends_in_padding(copy):
    copy.edit("} tl_counters;", "int32_t appended; } tl_counters;")
    with names("tl_counters ends in padding"):
        gate.no_struct_ends_in_padding(copy.include)


def test_library_that_links_otherwise(copy):
    makefile = copy.source / "Makefile"
    makefile.write_text(
        makefile.read_text()
        .replace("-soname,libtinyloop.so.0", "-soname,libtinyloop.so.9")
        .replace("-z,relro", "-z,relro -Wl,-rpath,/somewhere -Wl,--no-as-needed -lstdc++")
    )
    copy.build_interface()
    with names("libtinyloop.so.9"):
        gate.library_names_itself(copy.library)
    with names("somewhere"):
        gate.no_run_path(copy.library)
    with names("needs libstdc++.so.6"):
        gate.library_needs_the_c_library_alone(copy.library)


# ---- a newer version and this one ---------------------------------------------------------------

ADDED_FIELD = """
#include <stdio.h>
#include <stdlib.h>
#include <tinyloop.h>

int main(int argc, char **argv)
{
    const int32_t prompt[] = {1, 2, 3};
    int32_t token;
    size_t n;
    tl_model *model;
    tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
    options.max_tokens = 1;
    if (argc != 3 || tl_model_load(&model, argv[1], NULL))
        return 9;
    options.added = atoi(argv[2]);
    tl_status status = tl_generate(&token, 1, &n, model, prompt, 3, &options);
    if (status)
        puts(tl_last_error());
    tl_model_release(model);
    return status;
}
"""
UNSUPPORTED = gate.read_header(ROOT / "include").constants["TL_STATUS_UNSUPPORTED"]
ADDED_FUNCTION = "#include <tinyloop.h>\nint main(void) { return (int)tl_added(); }\n"


@pytest.fixture(scope="module")
def newer(whole, tmp_path_factory):
    """The next version: a field more in three structs, and a function more in a node of its own."""
    folder = tmp_path_factory.mktemp("newer")
    shutil.copytree(whole.folder, folder, dirs_exist_ok=True)
    newer = Copy(folder)
    patch = gate.read_header(newer.include).version[2]
    newer.edit(f"#define TL_VERSION_PATCH {patch}", f"#define TL_VERSION_PATCH {patch + 1}")
    for struct in ("tl_generate_options", "tl_model_info", "tl_counters"):
        newer.edit(f"}} {struct};", f"int64_t added; }} {struct};")
    newer.edit(
        "TL_API uint32_t tl_version(",
        "TL_API uint32_t tl_added(void);\nTL_API uint32_t tl_version(",
    )
    newer.edit(
        "uint32_t tl_version(void)\n{",
        "uint32_t tl_added(void) { return 0; }\nuint32_t tl_version(void)\n{",
    )
    newer.edit(
        "local:\n        *;\n};",
        "local:\n        *;\n};\nTINYLOOP_0_1 { global: tl_added; } TINYLOOP_0;",
    )
    newer.build_interface()
    return newer


def build_program(folder, source, include, library):
    """Returns a program that was built with a version's header and its library's folder."""
    (folder / "program.c").write_text(source)
    flags = ["-std=c99", "-w", f"-I{include}", f"-L{library}", f"-Wl,-rpath,{library}"]
    gate.run("gcc", *flags, folder / "program.c", "-ltinyloop", "-o", folder / "program")
    return folder / "program"


def run_on(library, program, *arguments):
    """Runs a program with another library than that which it was built with."""
    return subprocess.run(
        [program, *arguments],
        env=os.environ | {"LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
    )


def test_an_old_program_runs_on_a_newer_library(newer, tmp_path):
    source = (ROOT / "examples/quickstart.c").read_text()
    program = build_program(tmp_path, source, INSTALLED.parent / "include", INSTALLED)
    old = run_on(INSTALLED, program, tl.default_model_path())
    new = run_on(newer.library.parent, program, tl.default_model_path())
    assert (old.returncode, new.returncode, new.stderr) == (0, 0, "")
    major, minor, patch = gate.read_header(ROOT / "include").version
    assert old.stdout.startswith(f"tinyloop {major}.{minor}.{patch}:")
    assert new.stdout.startswith(f"tinyloop {major}.{minor}.{patch + 1}:")
    assert new.stdout.partition(":")[2] == old.stdout.partition(":")[2]


@pytest.mark.parametrize(("value", "status"), [(0, 0), (1, UNSUPPORTED)])
def test_a_new_programs_option_on_an_old_library(newer, tmp_path, value, status):
    """At its default the old library has what the program wants; else it says that it has not."""
    program = build_program(tmp_path, ADDED_FIELD, newer.include, newer.library.parent)
    path = tl.default_model_path()
    assert run_on(newer.library.parent, program, path, str(value)).returncode == 0
    old = run_on(INSTALLED, program, path, str(value))
    assert old.returncode == status
    assert ("tl_generate_options has a field at byte" in old.stdout) == (value != 0)


def test_a_new_programs_function_on_an_old_library(newer, tmp_path):
    """The program doesn't start: not at the call, in the middle of its work."""
    program = build_program(tmp_path, ADDED_FUNCTION, newer.include, newer.library.parent)
    assert run_on(newer.library.parent, program).returncode == 0
    old = run_on(INSTALLED, program)
    assert old.returncode != 0
    assert "TINYLOOP_0_1" in old.stderr

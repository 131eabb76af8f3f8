"""The gate on copies of the library whose ABI was broken on purpose: it must name what broke."""

import os
import re
import shutil

import gate
import pytest

ROOT = gate.HERE.parents[1]


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

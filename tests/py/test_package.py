"""What the installed package holds, and the switches of its build."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tinyloop_py as tl
from tinyloop_py import linking

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(tl.__file__).parent


def header_version():
    text = (ROOT / "include/tinyloop.h").read_text()
    return ".".join(re.findall(r"^#define TL_VERSION_\w+ (\d+)$", text, re.MULTILINE))


def test_one_version_everywhere():
    assert importlib.metadata.version("tinyloop-py") == header_version()
    pc_file = (PACKAGE / "lib/pkgconfig/tinyloop.pc").read_text()
    assert f"Version: {header_version()}\n" in pc_file
    assert f"## {header_version()}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_folders_for_c_programs():
    assert (Path(tl.get_include()) / "tinyloop.h").is_file()
    assert (Path(tl.get_library_dir()) / "libtinyloop.so.0").is_file()
    assert (Path(linking.pkgconfig_dir()) / "tinyloop.pc").is_file()


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").exists()
    for module in PACKAGE.glob("*.abi3.so"):
        assert module.with_name(module.name.split(".")[0] + ".pyi").exists()


def test_licences_are_shipped():
    shipped = {path.name for path in importlib.metadata.files("tinyloop-py") or []}
    assert {"LICENSE", "NOTICE"} <= shipped


def test_no_generated_c_is_shipped():
    assert list(PACKAGE.rglob("*.c")) == []


def test_demo_model_is_the_repositorys():
    shipped = Path(tl.default_model_path())
    assert shipped.parent == PACKAGE / "data"
    assert shipped.read_bytes() == (ROOT / "tinyloop_py/data" / shipped.name).read_bytes()


@pytest.mark.parametrize("without", ["0", "1"])
def test_demo_model_can_be_left_out(tmp_path, without):
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TINYLOOP_NO_DEMO_MODEL": without},
        check=True,
        capture_output=True,
    )
    package = tmp_path / "tinyloop_py"
    assert (package / "__init__.py").exists()
    assert bool(list(package.rglob("*.tinyloop"))) == (without == "0")


def test_what_is_imported_later():
    """Serving needs none of it; all public names are there all the same."""
    code = (
        "import sys, tinyloop_py as tl\n"
        "assert not {'tinyloop_py.config', 'tinyloop_py.arrays'} & sys.modules.keys()\n"
        "assert set(tl.__all__) <= set(dir(tl))\n"
        "assert all(getattr(tl, name) is not None for name in tl.__all__)\n"
        "assert tl.Config is sys.modules['tinyloop_py.config'].Config\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tl.nothing

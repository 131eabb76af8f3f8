"""The wheel: what is in it, what its binaries ask for, and C programs built from where it lies."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import abi3info
import pytest
from abi3info.models import PyVersion

ROOT = Path(__file__).resolve().parents[2]
OLDEST_PYTHON = PyVersion(3, 11)

# In the package beside its Python files, and nothing else.
NATIVE_AND_DATA = {
    "_caches.abi3.so",
    "_caches.pyi",
    "_core.abi3.so",
    "_core.pyi",
    "data/refdesk.tinyloop",
    "data/tenants.json",
    "include/tinyloop.h",
    "lib/libtinyloop.so",
    "lib/libtinyloop.so.0",
    "lib/pkgconfig/tinyloop.pc",
    "py.typed",
}

# Bytes in the archive, about 30 % above what they were when this was written (17.6 MB and 1.4 MB):
# the demo model, which changes with a new model only, and all the rest.
MAX_MODEL = 23_000_000
MAX_REST = 1_850_000

# What a shell runs to learn the options; `python` stands for this interpreter.
PRINT_OPTIONS = {
    "python": "python -m tinyloop_py --cflags --libs",
    "pkg-config": (
        'PKG_CONFIG_PATH="$(python -m tinyloop_py --pkgconfigdir)" '
        "pkg-config --cflags --libs tinyloop"
    ),
}


def run(*command, **options):
    """Returns the standard output of a command that must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def members(wheel):
    """Returns each file's content by its name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def files(wheel):
    return members(wheel)


@pytest.fixture(scope="module")
def binaries(files, tmp_path_factory):
    """The ELF files, unpacked, by their names in the wheel."""
    folder = tmp_path_factory.mktemp("binaries")
    paths = {}
    for name, content in files.items():
        if content.startswith(b"\x7fELF"):
            paths[name] = folder / PurePosixPath(name).name
            paths[name].write_bytes(content)
    return paths


# ---- What is in it --------------------------------------------------------------------------


def test_package_has_its_files_and_no_others(files):
    python = {str(path.relative_to(ROOT)) for path in (ROOT / "tinyloop_py").rglob("*.py")}
    expected = python | {f"tinyloop_py/{name}" for name in NATIVE_AND_DATA}
    assert {name for name in files if ".dist-info/" not in name} == expected


def test_licences_are_the_repositorys(files):
    for name in ("LICENSE", "NOTICE"):
        (content,) = [files[path] for path in files if path.endswith(f"/licenses/{name}")]
        assert content == (ROOT / name).read_bytes()


def test_one_file_serves_every_python(wheel):
    assert re.fullmatch(r"tinyloop_py-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)


def test_size(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.compress_size for info in archive.infolist()}
    model = sizes.pop("tinyloop_py/data/refdesk.tinyloop")
    assert model <= MAX_MODEL
    assert sum(sizes.values()) <= MAX_REST, sorted(sizes.items(), key=lambda item: -item[1])[:5]


def test_source_archive_gives_the_same_files(sdist_wheel, wheel):
    from_sdist, shipped = members(sdist_wheel), members(wheel)
    assert from_sdist.keys() == shipped.keys()
    # Of what is compiled, the library alone: another Cython writes another extension.
    same = [name for name in shipped if not name.endswith((".abi3.so", "/RECORD", "/WHEEL"))]
    assert [name for name in same if from_sdist[name] != shipped[name]] == []


def test_source_archive_has_sources_alone(sdist):
    with tarfile.open(sdist) as archive:
        paths = [PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()]
    written = {str(path) for path in paths if path.suffix in (".c", ".cpp", ".cu")}
    assert written == {name for name in written if (ROOT / name).is_file()}
    assert [name for name in written if name.startswith("tinyloop_py/")] == []
    assert [path for path in paths if path.suffix in (".o", ".so", ".pyc", ".whl")] == []
    assert {PurePosixPath(f"tinyloop_py/{name}.pyx") for name in ("_caches", "_core")} <= {*paths}


# ---- Its binaries ---------------------------------------------------------------------------


def test_no_file_names_the_folder_it_was_built_in(wheel, sdist_wheel, build_folder):
    for path, folder in ((wheel, ROOT), (sdist_wheel, build_folder)):
        here = str(folder).encode()
        assert [name for name, content in members(path).items() if here in content] == []


def test_run_paths_are_relative_to_the_file(binaries):
    run_paths = {
        name: re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", run("readelf", "-dW", path))
        for name, path in binaries.items()
    }
    assert run_paths == {
        "tinyloop_py/_caches.abi3.so": ["$ORIGIN/lib"],
        "tinyloop_py/_core.abi3.so": ["$ORIGIN/lib"],
        "tinyloop_py/lib/libtinyloop.so.0": [],
    }


@pytest.mark.parametrize("module", ["_caches", "_core"])
def test_extensions_use_the_stable_abi_of_the_oldest_python(binaries, module):
    stable = {
        symbol.name
        for table in (abi3info.FUNCTIONS, abi3info.DATAS)
        for symbol, entry in table.items()
        if entry.added <= OLDEST_PYTHON
    }
    lines = run("nm", "-D", "--undefined-only", binaries[f"tinyloop_py/{module}.abi3.so"])
    used = set(re.findall(r"\b_?Py\w+", lines))
    assert "PyModuleDef_Init" in used
    assert used - stable == set()


# ---- Programs that are built with it --------------------------------------------------------


@pytest.fixture(scope="module")
def moved(wheel, tmp_path_factory):
    """A folder that the wheel was installed in, before it got this name."""
    base = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", base / "a", wheel)
    return (base / "a").rename(base / "another place")


@pytest.fixture
def shell(moved, tmp_path):
    """Runs a script where `python` imports the moved package; nothing else helps to find it."""
    python = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    (tmp_path / "python").write_text(python)
    (tmp_path / "python").chmod(0o755)
    hidden = ("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PKG_CONFIG_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {
        "PATH": f"{tmp_path}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": str(moved),
        "SOURCE": str(ROOT / "examples/quickstart.c"),
        "MODEL": str(moved / "tinyloop_py/data/refdesk.tinyloop"),
    }
    return lambda script: run("sh", "-euc", script, env=environment, cwd=tmp_path)


@pytest.mark.parametrize("options", PRINT_OPTIONS.values(), ids=PRINT_OPTIONS)
def test_programs_run_as_they_are(shell, options):
    """eval: this folder's name has a space, which the options escape."""
    output = shell(
        f'eval "cc -std=c99 \\"$SOURCE\\" $({options}) -o quickstart"\n./quickstart "$MODEL"'
    )
    version = shell("python -m tinyloop_py --version").strip()
    assert output.startswith(f"tinyloop {version}: ")
    assert "after the second prompt: " in output


def test_the_command_that_is_documented(shell, moved, tmp_path):
    """Without eval, where no name has a space."""
    (tmp_path / "link").symlink_to(moved)
    shell(
        f"export PYTHONPATH={tmp_path / 'link'}\n"
        'cc "$SOURCE" $(python -m tinyloop_py --cflags --libs) -o quickstart\n'
        './quickstart "$MODEL"'
    )


def test_pkg_config_entry_point_leads_to_the_file(shell):
    """Tools that collect the folders of installed packages import the entry point's value."""
    folder = shell(
        "python -c '\n"
        "import importlib.metadata, importlib.resources\n"
        '(entry,) = importlib.metadata.entry_points(group="pkg_config", name="tinyloop")\n'
        'print(importlib.resources.files(entry.value).joinpath("tinyloop.pc").read_text())\n'
        "'"
    )
    assert "\nName: tinyloop\n" in folder

"""The one wheel under every other CPython that this machine has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = (3, 11)

# Of each part of the interface something, none of it slow: golden values, pools, streams, objects
# in every order of release, arrays, files, text.
TESTS = [
    "tests/py/test_golden.py::test_states_after_each_loop",
    "tests/py/test_golden.py::test_llama",
    "tests/py/test_pool.py",
    "tests/py/test_generation.py",
    "tests/py/test_lifetimes.py",
    "tests/py/test_arrays.py",
    "tests/py/test_text.py",
]

DESCRIBE = """
import json, sys, sysconfig
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print(json.dumps([sys.implementation.name, sys.version_info[:2], free_threaded]))
"""


def interpreters():
    """Returns the programs that may be a Python: those on the path, and pyenv's."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += (Path.home() / ".pyenv/versions").glob("*/bin")
    return [
        path
        for folder in folders
        for path in sorted(folder.glob("python3*"))
        if re.fullmatch(r"python3(\.\d+)?", path.name)
    ]


def describe(path):
    """Returns implementation, version and whether it is free-threaded; None if it does not run."""
    done = subprocess.run([path, "-c", DESCRIBE], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def other_pythons():
    """Returns one interpreter for each version that the wheel is for, but not this one's."""
    found = {}
    for path in interpreters():
        implementation, version, free_threaded = describe(path) or ("", (0,), False)
        version = tuple(version)
        fits = implementation == "cpython" and not free_threaded and version >= OLDEST
        if fits and version != sys.version_info[:2]:
            found.setdefault(version, path)
    return [pytest.param(found[version], id="{}.{}".format(*version)) for version in sorted(found)]


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("python", other_pythons() or [pytest.param(None, id="none")])
def test_interface_under_another_python(python, wheel, tmp_path):
    if python is None:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(
            "no CPython 3.11 or later of another version than {}.{} is on the path or among "
            "pyenv's; install one to test that the wheel serves it".format(*sys.version_info)
        )
    run(python, "-m", "venv", "--without-pip", tmp_path)
    inside = tmp_path / "bin/python"
    install = ["install", "-q", "--no-compile", f"{wheel}[test]"]
    run(sys.executable, "-m", "pip", "--python", inside, *install)
    outcome = run(inside, "-m", "pytest", "-p", "no:cacheprovider", *TESTS, cwd=ROOT)
    assert re.search(r"^\d+ passed in ", outcome, re.MULTILINE), outcome

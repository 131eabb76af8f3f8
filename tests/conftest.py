"""The tests are about the installed package, and about the wheel that it is installed from.

The checkout's folder tinyloop_py has no built module, so no Python that a test starts in the
checkout may find that folder first.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ["PYTHONSAFEPATH"] = "1"


def _run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


# Here and not in tests/wheel: of two conftest.py in sibling folders, the tests of one would import
# the other's.
@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """The source archive, made from the checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    metadata = ["egg_info", "--egg-base", folder]
    _run(sys.executable, "setup.py", "-q", *metadata, "sdist", "--dist-dir", folder, cwd=ROOT)
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory):
    """Where sdist_wheel is built, to look for this name in what was built."""
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="session")
def sdist_wheel(sdist, build_folder, tmp_path_factory):
    """The wheel that the source archive gives without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"TMPDIR": str(build_folder)}
    _run(
        *(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, sdist),
        env=environment,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def wheel(request):
    """The wheel that `make test` has built and installed; without make, the source archive's."""
    given = os.environ.get("TINYLOOP_WHEEL")
    return Path(given).resolve() if given else request.getfixturevalue("sdist_wheel")

"""Says what this machine lacks to build tinyloop, and which package brings it.

    python3 tools/check_machine.py [--packages] [build] [venv] [test] [sanitize] [fuzz]

Exits with 0 if everything named is there, else with 1 after one line per missing thing. With
--packages it prints nothing but Debian package names, for apt-get, and exits with 0. Uses the
standard library alone and runs on old Pythons too, whose age it can then report. setup.py calls
``missing`` so that a plain ``pip install`` gives the same answer.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import namedtuple

OLDEST_PYTHON = (3, 11)

Need = namedtuple("Need", "what debian fedora is_there")


def _has_program(name):
    return lambda: shutil.which(name) is not None


def _has_c_compiler():
    """Both compilers are used: the library's ($CC or cc) and the one this Python was built with."""
    compilers = (os.environ.get("CC") or "cc", sysconfig.get_config_var("CC") or "cc")
    return all(shutil.which(shlex.split(compiler)[0]) for compiler in compilers)


def _has_python_headers():
    include = sysconfig.get_path("include")
    return include is not None and os.path.exists(os.path.join(include, "Python.h"))


def _has_venv():
    return all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))


def _can_link_with(sanitizer, variable="CC", default="cc", function="main(void)"):
    def probe():
        compiler = shlex.split(os.environ.get(variable) or default)
        with tempfile.TemporaryDirectory() as folder:
            options = ["-fsanitize=" + sanitizer, "-x", "c", "-", "-o", os.path.join(folder, "a")]
            try:
                done = subprocess.run(
                    compiler + options,
                    input="int {} {{ return 0; }}".format(function).encode(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError:
                return False
            return done.returncode == 0

    return probe


COMPILER = Need("a C compiler (cc)", "gcc libc6-dev", "gcc", _has_c_compiler)
NEEDS = {
    "build": [
        Need("make", "make", "make", _has_program("make")),
        COMPILER,
        Need("Python's headers (Python.h)", "python3-dev", "python3-devel", _has_python_headers),
    ],
    "venv": [Need("Python's venv module", "python3-venv", "python3", _has_venv)],
    "test": [
        Need("a C++ compiler (g++)", "g++", "gcc-c++", _has_program("g++")),
        Need("nm and readelf", "binutils", "binutils", _has_program("readelf")),
        Need("abidiff and abidw", "abigail-tools", "libabigail", _has_program("abidiff")),
        Need("pkg-config", "pkg-config", "pkgconf-pkg-config", _has_program("pkg-config")),
    ],
    "sanitize": [
        COMPILER,
        Need("AddressSanitizer", "gcc", "libasan", _can_link_with("address")),
        Need("UndefinedBehaviorSanitizer", "gcc", "libubsan", _can_link_with("undefined")),
        Need("ThreadSanitizer", "gcc", "libtsan", _can_link_with("thread")),
    ],
    "fuzz": [
        Need("make", "make", "make", _has_program("make")),
        Need(
            "clang with libFuzzer",
            "clang libclang-rt-dev",
            "clang compiler-rt",
            _can_link_with(
                "fuzzer,address,undefined",
                variable="CLANG",
                default="clang",
                function="LLVMFuzzerTestOneInput(const unsigned char *p, unsigned long n)",
            ),
        ),
    ],
}


def missing(groups):
    """Returns the Needs of ``groups`` (keys of NEEDS) that this machine does not meet."""
    needs = [need for group in groups for need in NEEDS[group]]
    return [need for need in dict.fromkeys(needs) if not need.is_there()]


def describe(needs):
    """Returns one line per Need, with the package that brings it."""
    return "\n".join(
        "  missing: {} (Debian, Ubuntu: apt-get install {}; Fedora: dnf install {})".format(
            need.what, need.debian, need.fedora
        )
        for need in needs
    )


def main(arguments):
    groups = [argument for argument in arguments if argument != "--packages"]
    unknown = [group for group in groups if group not in NEEDS]
    if unknown:
        sys.exit("unknown group {}; there are {}".format(unknown[0], ", ".join(NEEDS)))
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            "tinyloop needs Python {}.{} or later, and {} is {}.{}. Where a newer one is installed "
            "beside it, say so: make PYTHON=python3.12 ...".format(
                *OLDEST_PYTHON, sys.executable, *sys.version_info[:2]
            )
        )
    needs = missing(groups)
    if "--packages" in arguments:
        packages = " ".join(need.debian for need in needs).split()
        print(" ".join(dict.fromkeys(packages)))
    elif needs:
        sys.exit("This machine lacks something that tinyloop needs:\n" + describe(needs))


if __name__ == "__main__":
    main(sys.argv[1:])

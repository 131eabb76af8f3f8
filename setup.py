"""Builds libtinyloop with its own Makefile, and the Cython extension that links to it."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
HEADER = "include/tinyloop.h"

# What the package holds beside Python: path in the package -> where it lies, or in the library's
# build folder (a path that begins with BUILD).
NATIVE_FILES = {
    "lib/libtinyloop.so.0": "BUILD/libtinyloop.so.0",
    "lib/libtinyloop.so": "BUILD/libtinyloop.so",
    "lib/pkgconfig/tinyloop.pc": "BUILD/pkgconfig/tinyloop.pc",
    "include/tinyloop.h": HEADER,
}


def read_version():
    """Returns "major.minor.patch" as the header defines it."""
    text = (ROOT / HEADER).read_text()
    return ".".join(
        re.search(rf"^#define TL_VERSION_{part} (\d+)$", text, re.MULTILINE)[1]
        for part in ("MAJOR", "MINOR", "PATCH")
    )


def check_machine():
    """Raises SetupError if make, a compiler or Python.h is missing."""
    machine = runpy.run_path(str(ROOT / "tools/check_machine.py"))
    needs = machine["missing"](["build"])
    if needs:
        raise SetupError(
            "this machine lacks something that tinyloop needs:\n" + machine["describe"](needs)
        )


class BuildExt(build_ext):
    """Makes libtinyloop first, puts it beside the extension's place, and links against it there."""

    def run(self):
        check_machine()
        self.make_library()
        super().run()

    def make_library(self):
        folder = ROOT / "build/libtinyloop"
        jobs = len(os.sched_getaffinity(0))
        # An outer make's flags are not meant for this one, and its job server is out of reach.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
        }
        command = ["make", "-C", str(ROOT / "libtinyloop"), f"-j{jobs}", "lib", f"BUILD={folder}"]
        print(shlex.join(command), flush=True)
        if subprocess.run(command, env=environment).returncode:
            raise SetupError("libtinyloop did not build; the compiler's messages are above")
        for name, source in NATIVE_FILES.items():
            target = self.package_folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.replace("BUILD", str(folder)), target)

    @property
    def package_folder(self):
        return Path(self.build_lib) / "tinyloop_py"

    def build_extensions(self):
        # The interpreter's own link flags may hold run paths of the machine that it was built on.
        self.compiler.linker_so = [
            flag for flag in self.compiler.linker_so if not flag.startswith("-Wl,-rpath,")
        ]
        for extension in self.extensions:
            extension.library_dirs.append(str(self.package_folder / "lib"))
        super().build_extensions()

    def copy_extensions_to_source(self):
        """For editable installs, whose package is the source folder."""
        super().copy_extensions_to_source()
        for name in NATIVE_FILES:
            target = ROOT / "tinyloop_py" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.package_folder / name, target)

    def get_outputs(self):
        native = (str(self.package_folder / name) for name in NATIVE_FILES)
        return sorted({*super().get_outputs(), *native})

    def get_output_mapping(self):
        mapping = super().get_output_mapping()
        if self.inplace:
            for name in NATIVE_FILES:
                mapping[str(self.package_folder / name)] = os.path.join("tinyloop_py", name)
        return mapping


class Build(build):
    """Drops what an earlier build left in the build folder, so that no wheel holds it."""

    def run(self):
        super().run()
        outputs = {
            os.path.abspath(path)
            for name in self.get_sub_commands()
            for path in self.get_finalized_command(name).get_outputs()
        }
        for path in (Path(self.build_lib) / "tinyloop_py").rglob("*"):
            if path.is_file() and os.path.abspath(path) not in outputs:
                path.unlink()


def extension(name):
    """One of the Cython modules, all built alike."""
    module = Extension(
        f"tinyloop_py.{name}",
        sources=[f"tinyloop_py/{name}.pyx"],
        depends=[HEADER, "tinyloop_py/libtinyloop.pxd", "tinyloop_py/_caches.pxd"],
        include_dirs=["include"],
        libraries=["tinyloop"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        extra_compile_args=[
            "-g0",
            "-fvisibility=hidden",
            "-Werror=incompatible-pointer-types",
            "-Werror=int-conversion",
        ],
        extra_link_args=["-Wl,--enable-new-dtags,-rpath,$ORIGIN/lib"],
    )
    module.cython_c_in_temp = True
    return module


without_demo_model = os.environ.get("TINYLOOP_NO_DEMO_MODEL") == "1"

setup(
    version=read_version(),
    ext_modules=[extension("_caches"), extension("_core")],
    exclude_package_data={"tinyloop_py": ["data/*.tinyloop"] if without_demo_model else []},
    cmdclass={"build": Build, "build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

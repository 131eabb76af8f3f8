"""Where the package keeps the C library, and what a compiler must be told to build against it.

`python -m tinyloop_py --cflags --libs` prints it for a shell, and pkg-config prints the same where
PKG_CONFIG_PATH names its folder. Quotes, which only unusual paths need, are read by `eval`.
"""

import shlex
from pathlib import Path

_PACKAGE = Path(__file__).parent


def get_include() -> str:
    """Returns the folder with tinyloop.h, for an include_dirs."""
    return str(_PACKAGE / "include")


def get_library_dir() -> str:
    """Returns the folder with libtinyloop, for a library_dirs and a run path."""
    return str(_PACKAGE / "lib")


def pkgconfig_dir() -> str:
    """Returns the folder with tinyloop.pc, for PKG_CONFIG_PATH."""
    return str(_PACKAGE / "lib" / "pkgconfig")


def cflags() -> str:
    """Returns the compiler's options as one string, quoted for a shell where they need it."""
    return shlex.join([f"-I{get_include()}"])


def libs() -> str:
    """Returns the linker's options likewise; with their run path a program runs as it is."""
    folder = get_library_dir()
    return shlex.join([f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltinyloop"])

"""Writes tinyloop-0.abi, which the ABI gate compares libraries with, anew from a library.

    python3 tests/abi/baseline.py build/libtinyloop/libtinyloop.so.0

For a change that abidiff reports and that is meant, such as a field at the end of a struct. Added
functions need no new baseline until a version is released.
"""

import sys
from pathlib import Path

import gate

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    description = gate.describe(gate.HERE.parents[1] / "include", Path(sys.argv[1]))
    gate.BASELINE.write_text(description)

"""The tests are about the installed package.

The checkout's folder tinyloop_py has no built module, so no Python that a test starts in the
checkout may find that folder first.
"""

import os

os.environ["PYTHONSAFEPATH"] = "1"

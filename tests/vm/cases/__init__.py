"""The cases, in the order in which they are run; importing a module registers its cases."""

from . import selftest  # noqa: F401
from . import connect  # noqa: F401

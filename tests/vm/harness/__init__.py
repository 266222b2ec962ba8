"""Boots a QEMU guest with the distribution's kernel, and controls the guest and the target.

Modules, bottom up: `apt` downloads packages, `elf` reads the dependencies of binaries and kernel
modules, `image` builds the initramfs, `guest` runs QEMU and commands in it, `rpc` and `targets`
control the target under test, `case` is the API of the test cases.
"""


class Unavailable(Exception):
    """This machine cannot run a guest, with the reason: cases are skipped, not failed."""

"""Boots a QEMU guest with the distribution's kernel, and talks to it and to the target.

Modules, from the ground up: `apt` fetches packages, `elf` reads what a binary or a kernel module
needs, `image` makes the initramfs, `guest` runs QEMU and commands in it, `rpc` and `targets` run
what is tested, `case` is what a test case sees.
"""


class Unavailable(Exception):
    """This machine cannot run a guest, and why: the cases are skipped, not failed."""

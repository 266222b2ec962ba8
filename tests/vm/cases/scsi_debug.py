"""A disk of the guest's kernel with atomic writes: scsi_debug's."""


class AtomicDisk:
    """The disk, from its creation until `remove`."""

    DRIVER = "/sys/bus/pseudo/drivers/scsi_debug"

    def __init__(self, guest):
        self.guest = guest
        guest.check(f"echo 1 > {self.DRIVER}/add_host")
        self.name = guest.until("cd /sys/block && ls -d sd?", 30).strip()

    def start_log(self):
        """From now on, the kernel logs each command."""
        self.guest.check(f"echo 1 > {self.DRIVER}/opts && dmesg -c > /dev/null")

    def atomic_writes(self):
        """How many WRITE ATOMIC were logged since the last call."""
        return int(self.guest.check("dmesg -c | grep scsi_debug | grep -c 'cmd 9c ' || true"))

    def remove(self):
        """Ends the log and the disk, which is not in use."""
        self.guest.check(f"echo 0 > {self.DRIVER}/opts; echo -1 > {self.DRIVER}/add_host")
        self.guest.until(f"[ ! -e /sys/block/{self.name} ]", 30)

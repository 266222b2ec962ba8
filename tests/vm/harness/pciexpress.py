"""PCI Express slot control, through the configuration registers of the guest's ports."""

# Offsets and bits of PCI Express Base Specification 5.0, sections 7.5.1.1.11 and 7.5.3.10.
CAPABILITIES_POINTER = 0x34
PCI_EXPRESS = 0x10
SLOT_CONTROL = 0x18
POWER_INDICATOR_OFF = 3 << 8
POWER_INDICATOR_ON = 1 << 8
POWER_OFF = 1 << 10


class Slot:
    """The hot-plug slot of a function."""

    def __init__(self, guest, address):
        self.guest, self.function = guest, f"/sys/bus/pci/devices/{address}"
        self.port = guest.check(f"dirname $(readlink -f {self.function})").strip() + "/config"
        config = bytes.fromhex(guest.check(f"od -An -v -tx1 {self.port}"))
        at = config[CAPABILITIES_POINTER]
        while at and config[at] != PCI_EXPRESS:
            at = config[at + 1]
        assert at, f"{address} is not behind a PCI Express port"
        self.control_at = at + SLOT_CONTROL
        self.control = int.from_bytes(config[self.control_at : self.control_at + 2], "little")

    def _write(self, bits):
        value = self.control & ~(POWER_INDICATOR_OFF | POWER_OFF) | bits
        text = "".join(f"\\{byte:03o}" for byte in value.to_bytes(2, "little"))
        seek = f"bs=2 seek={self.control_at // 2} conv=notrunc"
        self.guest.check(f"printf '{text}' | dd of={self.port} {seek} status=none")

    def power_off(self):
        """Cuts the slot's power without notice to the driver: a surprise removal."""
        self._write(POWER_INDICATOR_OFF | POWER_OFF)

    def replace(self):
        """Removes the function from the kernel, powers the slot on and rescans the bus."""
        self.guest.check(f"echo 1 > {self.function}/remove")
        self._write(POWER_INDICATOR_ON)
        self.guest.check("echo 1 > /sys/bus/pci/rescan")

//! PCI IDs of I/OAT DMA engines: they have no class code of their own.

/// Intel's vendor ID.
const INTEL: u16 = 0x8086;

/// First and last device IDs by processor, as in the Linux kernel's `ioatdma` (`drivers/dma/ioat/hw.h`,
/// `include/linux/pci_ids.h`), of versions 3.x.
const DEVICES: [(u16, u16); 15] = [
    // Tylersburg.
    (0x3429, 0x342c),
    (0x3430, 0x3433),
    // Jasper Forest.
    (0x3710, 0x3719),
    // Sandy Bridge.
    (0x3c20, 0x3c27),
    (0x3c2e, 0x3c2f),
    // Ivy Bridge.
    (0x0e20, 0x0e27),
    (0x0e2e, 0x0e2f),
    // Haswell.
    (0x2f20, 0x2f27),
    (0x2f2e, 0x2f2f),
    // Atom S1200.
    (0x0c50, 0x0c53),
    // Broadwell, and Broadwell-DE.
    (0x6f20, 0x6f27),
    (0x6f2e, 0x6f2f),
    (0x6f50, 0x6f53),
    // Skylake.
    (0x2021, 0x2021),
    // Ice Lake.
    (0x0b00, 0x0b00),
];

/// Whether a function with these vendor and device IDs is a channel of Intel's I/OAT DMA engine.
pub fn is_ioat(vendor: u16, device: u16) -> bool {
    vendor == INTEL && DEVICES.iter().any(|(first, last)| (*first..=*last).contains(&device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_known_by_vendor_and_device() {
        for device in [0x3429, 0x3719, 0x3c2f, 0x0e20, 0x2f27, 0x0c53, 0x6f50, 0x2021, 0x0b00] {
            assert!(is_ioat(0x8086, device), "{device:#06x}");
        }
        // Between two ranges, an older version, DSA, and another vendor.
        for (vendor, device) in [(0x8086, 0x3c28), (0x8086, 0x402f), (0x8086, 0x0b25), (0x1b36, 0x2021)] {
            assert!(!is_ioat(vendor, device), "{vendor:04x}:{device:04x}");
        }
    }
}

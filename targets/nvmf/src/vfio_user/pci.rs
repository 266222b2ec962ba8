//! PCI configuration space of an NVMe controller (PCIe Transport 1.0, section 2.1).

/// Bytes of configuration space, the extended part included.
pub(super) const CONFIG_BYTES: usize = 4096;
/// Index of the base address register of the MSI-X table; BAR 0 has the registers and doorbells.
pub(super) const BAR_TABLE: u32 = 4;
/// Index of the base address register of the MSI-X pending bit array.
pub(super) const BAR_PENDING: u32 = 5;

/// Vendor and device identifier of SPDK's vfio-user target, for which drivers apply no quirks.
pub(super) const VENDOR: u16 = 0x4e58;
const DEVICE: u16 = 0x0001;
/// Mass storage, non-volatile memory, NVM Express I/O controller.
const CLASS: [u8; 3] = [0x02, 0x08, 0x01];

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BARS: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const POWER: usize = 0x40;
const MSIX: usize = 0x50;
const EXPRESS: usize = 0x60;
const DEVICE_CONTROL: usize = EXPRESS + 8;

/// Function Level Reset, in the upper byte of Device Control.
const INITIATE_RESET: u8 = 0x80;

/// The PCI configuration space of a function: its content, and a mask of writable bits.
pub(super) struct PciConfigSpace {
    bytes: [u8; CONFIG_BYTES],
    writable: [u8; CONFIG_BYTES],
}

impl PciConfigSpace {
    /// Configuration space of a function with a BAR 0 of `bar0_bytes` bytes, and MSI-X with `vectors` vectors, a
    /// table of `table_bytes` bytes and a pending bit array of `pending_bytes` bytes.
    pub(super) fn new(bar0_bytes: u32, vectors: u16, table_bytes: u32, pending_bytes: u32) -> PciConfigSpace {
        let mut config = PciConfigSpace { bytes: [0; CONFIG_BYTES], writable: [0; CONFIG_BYTES] };
        config.set(0x00, &VENDOR.to_le_bytes());
        config.set(0x02, &DEVICE.to_le_bytes());
        // Writable: I/O and memory space enable, bus master enable, interrupt disable.
        config.set_writable(COMMAND, &0x0407u16.to_le_bytes());
        // Capabilities list present.
        config.set(STATUS, &0x0010u16.to_le_bytes());
        config.set(0x09, &CLASS);
        config.set(0x2c, &VENDOR.to_le_bytes());
        config.set(0x2e, &DEVICE.to_le_bytes());
        // BAR 0 is a 64-bit BAR and takes two registers.
        config.add_bar(0, bar0_bytes, 0x4);
        config.set_writable(BARS + 4, &u32::MAX.to_le_bytes());
        config.add_bar(BAR_TABLE, table_bytes, 0);
        config.add_bar(BAR_PENDING, pending_bytes, 0);
        config.set(CAPABILITIES, &[POWER as u8]);
        config.set_writable(INTERRUPT_LINE, &[0xff]);
        // Power management, version 3; no soft reset on the transition from D3hot to D0.
        config.set(POWER, &[0x01, MSIX as u8, 0x03, 0x00, 0x08, 0x00]);
        config.set_writable(POWER + 4, &[0x03]);
        // MSI-X: table size (0's based); enable and function mask are writable.
        config.set(MSIX, &[0x11, EXPRESS as u8]);
        config.set(MSIX + 2, &(vectors - 1).to_le_bytes());
        config.set_writable(MSIX + 3, &[0xc0]);
        config.set(MSIX + 4, &BAR_TABLE.to_le_bytes());
        config.set(MSIX + 8, &BAR_PENDING.to_le_bytes());
        // PCI Express endpoint, version 2: role-based error reporting, function level reset, maximum payload
        // size 256 bytes, link width x1.
        config.set(EXPRESS, &[0x10, 0x00, 0x02, 0x00]);
        config.set(EXPRESS + 4, &(1u32 << 28 | 1 << 15 | 1).to_le_bytes());
        config.set_writable(DEVICE_CONTROL, &0x7fffu16.to_le_bytes());
        config.set(EXPRESS + 12, &0x0000_0011u32.to_le_bytes());
        config.set_writable(EXPRESS + 16, &0x0fffu16.to_le_bytes());
        config.set(EXPRESS + 18, &0x0011u16.to_le_bytes());
        // Completion timeout disable is supported.
        config.set(EXPRESS + 36, &0x0000_0010u32.to_le_bytes());
        config.set_writable(EXPRESS + 40, &0x001fu16.to_le_bytes());
        config
    }

    fn add_bar(&mut self, index: u32, bytes: u32, flags: u32) {
        assert!(bytes.is_power_of_two() && bytes >= 16, "a region of {bytes} bytes");
        let at = BARS + 4 * index as usize;
        self.set(at, &flags.to_le_bytes());
        // The writable bits encode the size.
        self.set_writable(at, &(!(bytes - 1)).to_le_bytes());
    }

    fn set(&mut self, at: usize, value: &[u8]) {
        self.bytes[at..at + value.len()].copy_from_slice(value);
    }

    fn set_writable(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// Reads a range, which must be within the space.
    pub(super) fn read(&self, offset: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes[offset..offset + out.len()]);
    }

    /// Writes the writable bits of a range, which must be within the space. Returns whether this initiates a
    /// function level reset.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let mut reset = false;
        for (at, value) in (offset..).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
            reset |= at == DEVICE_CONTROL + 1 && value & INITIATE_RESET != 0;
        }
        reset
    }

    /// Whether bus mastering is enabled.
    #[cfg(test)]
    fn is_bus_master_enabled(&self) -> bool {
        self.bytes[COMMAND] & 4 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> PciConfigSpace {
        PciConfigSpace::new(0x2000, 128, 0x1000, 0x1000)
    }

    fn word(config: &PciConfigSpace, at: usize) -> u32 {
        let mut bytes = [0; 4];
        config.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn the_capability_list_is_complete_and_terminated() {
        let config = config();
        let mut at = word(&config, CAPABILITIES) as u8;
        let mut ids = Vec::new();
        while at != 0 {
            ids.push(word(&config, at.into()) as u8);
            at = (word(&config, at.into()) >> 8) as u8;
            assert!(ids.len() < 8, "the list does not end");
        }
        assert_eq!(ids, [0x01, 0x11, 0x10]);
        assert_eq!(word(&config, 8) >> 8, 0x01_0802);
    }

    #[test]
    fn bars_report_their_size() {
        let mut config = config();
        for (index, mask) in
            [(0, 0xffff_e004u32), (1, 0xffff_ffff), (2, 0), (4, 0xffff_f000), (5, 0xffff_f000)]
        {
            let at = BARS + 4 * index;
            config.write(at, &u32::MAX.to_le_bytes());
            assert_eq!(word(&config, at), mask, "region {index}");
        }
    }

    #[test]
    fn read_only_bits_are_preserved_and_a_function_level_reset_is_detected() {
        let mut config = config();
        let before = config.bytes;
        assert!(!config.write(0, &[0xff; 4]));
        assert_eq!(config.bytes[..4], before[..4]);
        assert!(!config.is_bus_master_enabled());
        assert!(!config.write(COMMAND, &[0x06, 0x04]));
        assert!(config.is_bus_master_enabled());
        assert!(config.write(DEVICE_CONTROL, &[0x00, 0x80]));
        assert_eq!(config.bytes[DEVICE_CONTROL + 1] & 0x80, 0, "it reads as 0");
        let all = [0xff; CONFIG_BYTES];
        config.write(0, &all);
        // The table size is read-only.
        assert_eq!(word(&config, MSIX) >> 16 & 0x7ff, 127);
    }
}

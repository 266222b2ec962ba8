//! PCI configuration space of an NVMe controller (PCIe Transport 1.0, section 2.1).

/// Bytes of configuration space, the extended part included.
pub(super) const CONFIG_BYTES: usize = 4096;
/// Base address registers, by index: registers and doorbells, MSI-X table, MSI-X pending bits.
pub(super) const BAR_TABLE: u32 = 4;
/// See [`BAR_TABLE`].
pub(super) const BAR_PENDING: u32 = 5;

/// Vendor and device as SPDK's vfio-user target has them: known to be without quirks to drivers.
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

/// Configuration space: what it is, and which of its bits can be written.
pub(super) struct Config {
    bytes: [u8; CONFIG_BYTES],
    writable: [u8; CONFIG_BYTES],
}

impl Config {
    /// The space of a function with a first region of `bar0_bytes` bytes and so many MSI-X vectors, the
    /// table of which takes `table_bytes` and the pending bits of which take `pending_bytes`.
    pub(super) fn new(bar0_bytes: u32, vectors: u16, table_bytes: u32, pending_bytes: u32) -> Config {
        let mut config = Config { bytes: [0; CONFIG_BYTES], writable: [0; CONFIG_BYTES] };
        config.put(0x00, &VENDOR.to_le_bytes());
        config.put(0x02, &DEVICE.to_le_bytes());
        // I/O and memory space, bus master, interrupt disable.
        config.allow(COMMAND, &0x0407u16.to_le_bytes());
        // There is a list of capabilities.
        config.put(STATUS, &0x0010u16.to_le_bytes());
        config.put(0x09, &CLASS);
        config.put(0x2c, &VENDOR.to_le_bytes());
        config.put(0x2e, &DEVICE.to_le_bytes());
        // The first is 64 bits wide and takes two registers.
        config.bar(0, bar0_bytes, 0x4);
        config.allow(BARS + 4, &u32::MAX.to_le_bytes());
        config.bar(BAR_TABLE, table_bytes, 0);
        config.bar(BAR_PENDING, pending_bytes, 0);
        config.put(CAPABILITIES, &[POWER as u8]);
        config.allow(INTERRUPT_LINE, &[0xff]);
        // Power management, version 3; the state is kept over a reset of it.
        config.put(POWER, &[0x01, MSIX as u8, 0x03, 0x00, 0x08, 0x00]);
        config.allow(POWER + 4, &[0x03]);
        // MSI-X: vectors less one; enable and mask all can be written.
        config.put(MSIX, &[0x11, EXPRESS as u8]);
        config.put(MSIX + 2, &(vectors - 1).to_le_bytes());
        config.allow(MSIX + 3, &[0xc0]);
        config.put(MSIX + 4, &BAR_TABLE.to_le_bytes());
        config.put(MSIX + 8, &BAR_PENDING.to_le_bytes());
        // PCI Express, version 2, an endpoint: role-based errors and function level reset; 256-byte
        // payloads at most; a link of one lane.
        config.put(EXPRESS, &[0x10, 0x00, 0x02, 0x00]);
        config.put(EXPRESS + 4, &(1u32 << 28 | 1 << 15 | 1).to_le_bytes());
        config.allow(DEVICE_CONTROL, &0x7fffu16.to_le_bytes());
        config.put(EXPRESS + 12, &0x0000_0011u32.to_le_bytes());
        config.allow(EXPRESS + 16, &0x0fffu16.to_le_bytes());
        config.put(EXPRESS + 18, &0x0011u16.to_le_bytes());
        // Completion timeouts can be disabled.
        config.put(EXPRESS + 36, &0x0000_0010u32.to_le_bytes());
        config.allow(EXPRESS + 40, &0x001fu16.to_le_bytes());
        config
    }

    fn bar(&mut self, index: u32, bytes: u32, flags: u32) {
        assert!(bytes.is_power_of_two() && bytes >= 16, "a region of {bytes} bytes");
        let at = BARS + 4 * index as usize;
        self.put(at, &flags.to_le_bytes());
        // What can be written of it says how large it is.
        self.allow(at, &(!(bytes - 1)).to_le_bytes());
    }

    fn put(&mut self, at: usize, value: &[u8]) {
        self.bytes[at..at + value.len()].copy_from_slice(value);
    }

    fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// The bytes of a range inside.
    pub(super) fn read(&self, offset: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes[offset..offset + out.len()]);
    }

    /// Writes what can be written of a range inside; whether that asks for a reset.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let mut reset = false;
        for (at, value) in (offset..).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
            reset |= at == DEVICE_CONTROL + 1 && value & INITIATE_RESET != 0;
        }
        reset
    }

    /// Whether the device may reach memory.
    #[cfg(test)]
    fn is_master(&self) -> bool {
        self.bytes[COMMAND] & 4 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config::new(0x2000, 128, 0x1000, 0x1000)
    }

    fn word(config: &Config, at: usize) -> u32 {
        let mut bytes = [0; 4];
        config.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn capabilities_form_a_list_that_ends() {
        let config = config();
        let mut at = word(&config, CAPABILITIES) as u8;
        let mut ids = Vec::new();
        while at != 0 {
            ids.push(word(&config, at.into()) as u8);
            at = (word(&config, at.into()) >> 8) as u8;
            assert!(ids.len() < 8, "the list goes on and on");
        }
        assert_eq!(ids, [0x01, 0x11, 0x10]);
        assert_eq!(word(&config, 8) >> 8, 0x01_0802);
    }

    #[test]
    fn regions_tell_their_size() {
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
    fn what_is_read_only_stays_and_a_reset_is_noticed() {
        let mut config = config();
        let before = config.bytes;
        assert!(!config.write(0, &[0xff; 4]));
        assert_eq!(config.bytes[..4], before[..4]);
        assert!(!config.is_master());
        assert!(!config.write(COMMAND, &[0x06, 0x04]));
        assert!(config.is_master());
        assert!(config.write(DEVICE_CONTROL, &[0x00, 0x80]));
        assert_eq!(config.bytes[DEVICE_CONTROL + 1] & 0x80, 0, "it reads as 0");
        let all = [0xff; CONFIG_BYTES];
        config.write(0, &all);
        // 128 vectors, whatever is written.
        assert_eq!(word(&config, MSIX) >> 16 & 0x7ff, 127);
    }
}

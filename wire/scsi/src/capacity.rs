//! Parameter data of READ CAPACITY (SBC-4, sections 5.19 and 5.20).

/// What READ CAPACITY reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// The last block.
    pub last_lba: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT, 0 to 15.
    pub physical_exponent: u8,
    /// LBPME: blocks can be deallocated.
    pub provisioning: bool,
    /// LBPRZ: deallocated blocks read as zeroes.
    pub reads_zeroes: bool,
}

impl Capacity {
    /// Bytes of READ CAPACITY(16).
    pub const LONG_BYTES: usize = 32;

    /// Parameter data of READ CAPACITY(10). A last block that has no room is `0xffff_ffff`.
    pub fn encode_short(&self) -> [u8; 8] {
        let mut bytes = [0; 8];
        let last = u32::try_from(self.last_lba).unwrap_or(u32::MAX);
        bytes[..4].copy_from_slice(&last.to_be_bytes());
        bytes[4..].copy_from_slice(&self.block_bytes.to_be_bytes());
        bytes
    }

    /// Parameter data of READ CAPACITY(16).
    pub fn encode_long(&self) -> [u8; Self::LONG_BYTES] {
        let mut bytes = [0; Self::LONG_BYTES];
        bytes[..8].copy_from_slice(&self.last_lba.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.block_bytes.to_be_bytes());
        bytes[13] = self.physical_exponent & 0xf;
        bytes[14] = u8::from(self.provisioning) << 7 | u8::from(self.reads_zeroes) << 6;
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_have_the_fields_of_sbc_4() {
        let capacity = Capacity {
            last_lba: 0x1_0000_0001,
            block_bytes: 512,
            physical_exponent: 3,
            provisioning: true,
            reads_zeroes: true,
        };
        assert_eq!(capacity.encode_short(), [0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]);
        let mut expected = [0; 32];
        expected[..16].copy_from_slice(&[0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 2, 0, 0, 3, 0xc0, 0]);
        assert_eq!(capacity.encode_long(), expected);
        let small = Capacity { last_lba: 9, block_bytes: 4096, ..Capacity::default() };
        assert_eq!(small.encode_short(), [0, 0, 0, 9, 0, 0, 16, 0]);
    }
}

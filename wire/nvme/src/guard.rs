//! Guards of protection information: the CRCs of 16, 32 and 64 bits (NVM 1.0, section 5.2.1).

use codec::{Crc32c, Crc64};

/// Width and code of the guard (PIF, NVM 1.0, figure 98).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuardFormat {
    /// CRC-16/T10-DIF; eight bytes of protection information.
    #[default]
    Crc16,
    /// CRC-32C; sixteen bytes.
    Crc32,
    /// The CRC of 64 bits of NVMe; sixteen bytes.
    Crc64,
}

impl GuardFormat {
    /// From PIF of the extended LBA format; `None` for a reserved value.
    pub const fn from_wire(pif: u8) -> Option<GuardFormat> {
        match pif {
            0 => Some(GuardFormat::Crc16),
            1 => Some(GuardFormat::Crc32),
            2 => Some(GuardFormat::Crc64),
            _ => None,
        }
    }

    /// PIF.
    pub const fn to_wire(self) -> u8 {
        match self {
            GuardFormat::Crc16 => 0,
            GuardFormat::Crc32 => 1,
            GuardFormat::Crc64 => 2,
        }
    }

    /// Bytes of the guard.
    pub(crate) const fn guard_bytes(self) -> usize {
        match self {
            GuardFormat::Crc16 => 2,
            GuardFormat::Crc32 => 4,
            GuardFormat::Crc64 => 8,
        }
    }

    /// Bytes of the protection information: guard, application tag, and the space of storage and reference
    /// tags.
    pub const fn bytes(self) -> usize {
        match self {
            GuardFormat::Crc16 => 8,
            GuardFormat::Crc32 | GuardFormat::Crc64 => 16,
        }
    }

    /// Bits of the space that storage and reference tags share: 32, 80 or 48.
    pub const fn space_bits(self) -> u8 {
        ((self.bytes() - self.guard_bytes() - 2) * 8) as u8
    }

    /// The least and the most bits of a storage tag (STS, NVM 1.0, figure 98).
    pub const fn storage_tag_bits(self) -> (u8, u8) {
        match self {
            GuardFormat::Crc16 => (0, 32),
            // The reference tag has at most 64 bits.
            GuardFormat::Crc32 => (16, 64),
            GuardFormat::Crc64 => (0, 48),
        }
    }

    /// The guard over `data` and the `metadata` before the protection information.
    pub(crate) fn guard(self, data: &[u8], metadata: &[u8]) -> u64 {
        match self {
            GuardFormat::Crc16 => crc16(crc16(0, data), metadata).into(),
            GuardFormat::Crc32 => {
                let mut crc = Crc32c::new();
                crc.update(data);
                crc.update(metadata);
                crc.value().into()
            }
            GuardFormat::Crc64 => {
                let mut crc = Crc64::new();
                crc.update(data);
                crc.update(metadata);
                crc.value()
            }
        }
    }
}

/// CRC-16/T10-DIF polynomial.
const POLYNOMIAL: u16 = 0x8bb7;

/// Slicing-by-8 tables: 4 KiB, computed at compile time.
const TABLES: [[u16; 256]; 8] = {
    let mut tables = [[0u16; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { crc << 1 ^ POLYNOMIAL } else { crc << 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before << 8 ^ tables[0][(before >> 8) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
};

/// CRC-16/T10-DIF of `data`, continued from `crc`; the initial value is 0.
pub fn crc16(crc: u16, data: &[u8]) -> u16 {
    let (words, rest) = data.as_chunks::<8>();
    let crc = words.iter().fold(crc, |crc, word| {
        let [high, low] = crc.to_be_bytes();
        let at = |table: usize, byte: u8| TABLES[table][usize::from(byte)];
        at(7, word[0] ^ high)
            ^ at(6, word[1] ^ low)
            ^ at(5, word[2])
            ^ at(4, word[3])
            ^ at(3, word[4])
            ^ at(2, word[5])
            ^ at(1, word[6])
            ^ at(0, word[7])
    });
    rest.iter().fold(crc, |crc, byte| crc << 8 ^ TABLES[0][usize::from((crc >> 8) as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc16_matches_t10_dif_vectors() {
        // The check value of the CRC catalogue, and the 32-byte test patterns of SCSI Block Commands.
        assert_eq!(crc16(0, b"123456789"), 0xd0db);
        assert_eq!(crc16(0, &[0; 32]), 0);
        assert_eq!(crc16(0, &[0xff; 32]), 0xa293);
        let rising: [u8; 32] = std::array::from_fn(|index| index as u8);
        assert_eq!(crc16(0, &rising), 0x0224);
        for cut in 0..32 {
            assert_eq!(crc16(crc16(0, &rising[..cut]), &rising[cut..]), 0x0224, "cut at {cut}");
        }
    }
}

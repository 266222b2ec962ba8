//! Big-endian fields at fixed places of slices whose length was checked.

/// The 16 bits at `at`.
pub(crate) const fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// The 24 bits at `at`.
pub(crate) const fn be24(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([0, bytes[at], bytes[at + 1], bytes[at + 2]])
}

/// The 32 bits at `at`.
pub(crate) const fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The 64 bits at `at`.
pub(crate) const fn be64(bytes: &[u8], at: usize) -> u64 {
    ((be32(bytes, at) as u64) << 32) | be32(bytes, at + 4) as u64
}

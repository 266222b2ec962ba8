//! What a channel needs of its function.

use wire_ioat::DESCRIPTOR_WORDS;

/// Registers of a function, and the memory that it shares with the driver.
///
/// Offsets are those of [`wire_ioat::registers`]. Accesses to registers have the width of the register, and
/// are not reordered with each other; a write of one becomes visible to the engine after all writes of
/// descriptors before it. Registers of a function that is gone read as ones.
pub trait IoatDevice {
    /// Reads 8 bits.
    fn read_u8(&self, register: u32) -> u8;
    /// Reads 32 bits.
    fn read_u32(&self, register: u32) -> u32;
    /// Reads 64 bits.
    fn read_u64(&self, register: u32) -> u64;
    /// Writes 8 bits.
    fn write_u8(&mut self, register: u32, value: u8);
    /// Writes 16 bits.
    fn write_u16(&mut self, register: u32, value: u16);
    /// Writes 32 bits.
    fn write_u32(&mut self, register: u32, value: u32);
    /// Writes 64 bits.
    fn write_u64(&mut self, register: u32, value: u64);

    /// Entries of the ring, a power of two.
    fn ring_entries(&self) -> u32;
    /// Device address of the first, a multiple of 64; others follow.
    fn ring_address(&self) -> u64;
    /// Writes an entry that the engine does not own, or of which it may see the old or the new words.
    fn write_descriptor(&mut self, index: u32, words: &[u64; DESCRIPTOR_WORDS]);

    /// Device address of the word that the engine writes, a multiple of 8.
    fn completion_address(&self) -> u64;
    /// Loads it, before any load of what the engine has written to memory before.
    fn completion(&self) -> u64;
    /// Sets it to 0, when the engine does not write it.
    fn clear_completion(&mut self);
}

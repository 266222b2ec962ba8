//! The software model as a device: its registers, with the ring and the data in memory that has addresses.

use std::ops::{Deref, DerefMut, Range};

use ioat_model::{IoatModel, ModelMemory};
use wire_ioat::{DESCRIPTOR_BYTES, DESCRIPTOR_WORDS};

use crate::IoatDevice;

/// Address of the memory; less is nothing.
pub(super) const MEMORY_AT: u64 = 0x10_0000;
pub(super) const DATA_BYTES: u64 = 64 << 10;
const COMPLETION_AT: u64 = MEMORY_AT + DATA_BYTES;
pub(super) const RING_AT: u64 = COMPLETION_AT + 64;

/// Data, the completion word and the ring.
pub(super) struct Memory(Vec<u8>);

pub(super) struct Model {
    pub(super) memory: Memory,
    pub(super) engine: IoatModel,
    entries: u32,
    /// All registers read as ones.
    pub(super) is_gone: bool,
    /// The word of a hostile engine.
    pub(super) forged: Option<u64>,
}

fn range(address: u64, bytes: usize, size: usize) -> Option<Range<usize>> {
    let start = usize::try_from(address.checked_sub(MEMORY_AT)?).ok()?;
    let end = start.checked_add(bytes)?;
    (end <= size).then_some(start..end)
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl ModelMemory for Memory {
    fn read(&mut self, address: u64, out: &mut [u8]) -> bool {
        let found = range(address, out.len(), self.len());
        found.map(|range| out.copy_from_slice(&self[range])).is_some()
    }

    fn write(&mut self, address: u64, data: &[u8]) -> bool {
        let found = range(address, data.len(), self.len());
        found.map(|range| self[range].copy_from_slice(data)).is_some()
    }

    fn write_word(&mut self, address: u64, word: u64) -> bool {
        self.write(address, &word.to_le_bytes())
    }
}

impl Model {
    pub(super) fn new(entries: u32) -> Model {
        let bytes = RING_AT - MEMORY_AT + u64::from(entries) * DESCRIPTOR_BYTES as u64;
        let memory = Memory(vec![0; bytes as usize]);
        Model { memory, engine: IoatModel::new(), entries, is_gone: false, forged: None }
    }

    /// Takes the next step of commands, or executes `descriptors` at most.
    pub(super) fn step(&mut self, descriptors: u32) {
        self.engine.step(descriptors, &mut self.memory);
    }

    fn read(&self, register: u32, bytes: usize) -> u64 {
        if self.is_gone { u64::MAX } else { self.engine.read(register, bytes) }
    }
}

impl IoatDevice for Model {
    fn read_u8(&self, register: u32) -> u8 {
        self.read(register, 1) as u8
    }

    fn read_u32(&self, register: u32) -> u32 {
        self.read(register, 4) as u32
    }

    fn read_u64(&self, register: u32) -> u64 {
        self.read(register, 8)
    }

    fn write_u8(&mut self, register: u32, value: u8) {
        self.engine.write(register, 1, value.into());
    }

    fn write_u16(&mut self, register: u32, value: u16) {
        self.engine.write(register, 2, value.into());
    }

    fn write_u32(&mut self, register: u32, value: u32) {
        self.engine.write(register, 4, value.into());
    }

    fn write_u64(&mut self, register: u32, value: u64) {
        self.engine.write(register, 8, value);
    }

    fn ring_entries(&self) -> u32 {
        self.entries
    }

    fn ring_address(&self) -> u64 {
        RING_AT
    }

    fn write_descriptor(&mut self, index: u32, words: &[u64; DESCRIPTOR_WORDS]) {
        let address = RING_AT + u64::from(index) * DESCRIPTOR_BYTES as u64;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!(self.memory.write(address, &bytes));
    }

    fn completion_address(&self) -> u64 {
        COMPLETION_AT
    }

    fn completion(&self) -> u64 {
        let range = range(COMPLETION_AT, 8, self.memory.len()).unwrap();
        self.forged.unwrap_or_else(|| u64::from_le_bytes(self.memory[range].try_into().unwrap()))
    }

    fn clear_completion(&mut self) {
        assert!(self.memory.write_word(COMPLETION_AT, 0));
    }
}

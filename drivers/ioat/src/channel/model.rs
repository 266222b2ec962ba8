//! A software model of an engine: registers, and descriptors in a memory that has addresses.

use wire_ioat::registers::*;
use wire_ioat::{
    ChannelErrors, ChannelState, ChannelStatus, DESCRIPTOR_BYTES, DESCRIPTOR_WORDS, Descriptor, DescriptorOp,
};

use crate::IoatDevice;

/// Address of the memory; less is nothing.
pub(super) const MEMORY_AT: u64 = 0x10_0000;
pub(super) const DATA_BYTES: u64 = 64 << 10;
const COMPLETION_AT: u64 = MEMORY_AT + DATA_BYTES;
pub(super) const RING_AT: u64 = COMPLETION_AT + 64;

pub(super) struct Model {
    pub(super) memory: Vec<u8>,
    entries: u32,
    pub(super) version: u8,
    pub(super) transfer_capacity: u8,
    pub(super) capabilities: u32,
    control: u16,
    command: u8,
    count: u16,
    pub(super) state: ChannelState,
    completed: u64,
    chain: u64,
    completion: u64,
    pub(super) errors: u32,
    next: u64,
    executed: u16,
    /// It ignores suspends, resets or descriptors.
    pub(super) ignores_suspend: bool,
    pub(super) ignores_reset: bool,
    pub(super) ignores_descriptors: bool,
    /// It halts instead of executing this descriptor, counted from now.
    pub(super) halts_after: Option<(u32, ChannelErrors)>,
    /// All registers read as ones.
    pub(super) is_gone: bool,
    /// The word of a hostile engine.
    pub(super) forged: Option<u64>,
}

impl Model {
    pub(super) fn new(entries: u32) -> Model {
        let bytes = RING_AT - MEMORY_AT + u64::from(entries) * DESCRIPTOR_BYTES as u64;
        Model {
            memory: vec![0; bytes as usize],
            entries,
            version: 0x33,
            transfer_capacity: 12,
            capabilities: CAPABILITY_FILL,
            control: 0,
            command: 0,
            count: 0,
            state: ChannelState::Idle,
            completed: 0,
            chain: 0,
            completion: 0,
            errors: 0,
            next: 0,
            executed: 0,
            ignores_suspend: false,
            ignores_reset: false,
            ignores_descriptors: false,
            halts_after: None,
            is_gone: false,
            forged: None,
        }
    }

    fn range(&self, address: u64, bytes: u64) -> Option<std::ops::Range<usize>> {
        let start = address.checked_sub(MEMORY_AT)?;
        let end = start.checked_add(bytes)?;
        (end <= self.memory.len() as u64).then_some(start as usize..end as usize)
    }

    fn words(&self, address: u64) -> Option<[u64; DESCRIPTOR_WORDS]> {
        let bytes = &self.memory[self.range(address, DESCRIPTOR_BYTES as u64)?];
        let mut words = [0; DESCRIPTOR_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap());
        }
        Some(words)
    }

    fn report(&mut self) {
        let word = ChannelStatus { state: self.state, completed: self.completed }.encode();
        if let Some(range) = self.range(self.completion, 8) {
            self.memory[range].copy_from_slice(&word.to_le_bytes());
        }
    }

    fn halt(&mut self, errors: ChannelErrors) {
        assert!(self.control & CONTROL_ABORT_ON_ERROR != 0);
        self.errors |= errors.0;
        self.state = ChannelState::Halted;
        if self.control & CONTROL_REPORT_ERROR != 0 {
            self.report();
        }
    }

    /// Takes the next step of commands, and executes `descriptors` at most.
    pub(super) fn step(&mut self, descriptors: u32) {
        if self.command & COMMAND_RESET != 0 {
            if !self.ignores_reset {
                self.command = 0;
                (self.count, self.executed, self.completed, self.errors) = (0, 0, 0, 0);
                self.state = ChannelState::Idle;
            }
            return;
        }
        if self.command & COMMAND_SUSPEND != 0 {
            if !self.ignores_suspend {
                self.state = ChannelState::Suspended;
            }
            return;
        }
        for _ in 0..descriptors {
            let is_stopped = matches!(self.state, ChannelState::Halted | ChannelState::Suspended);
            if self.count == self.executed || is_stopped || self.ignores_descriptors {
                return;
            }
            if let Some((left, errors)) = &mut self.halts_after {
                if *left == 0 {
                    let errors = *errors;
                    self.halts_after = None;
                    return self.halt(errors);
                }
                *left -= 1;
            }
            if let Err(errors) = self.execute() {
                return self.halt(errors);
            }
        }
    }

    fn execute(&mut self) -> Result<(), ChannelErrors> {
        self.state = ChannelState::Active;
        let words = self.words(self.next).ok_or(ChannelErrors(1 << 2))?;
        let descriptor = Descriptor::decode(&words).map_err(|_| ChannelErrors(1 << 10))?;
        let most = 1u64 << self.transfer_capacity;
        match descriptor.op {
            DescriptorOp::Null => {}
            DescriptorOp::Copy { from, to, bytes } => {
                if u64::from(bytes) > most {
                    return Err(ChannelErrors::LENGTH);
                }
                let from = self.range(from, bytes.into()).ok_or(ChannelErrors::SOURCE_ADDRESS)?;
                let to = self.range(to, bytes.into()).ok_or(ChannelErrors(1 << 1))?;
                let data = self.memory[from].to_vec();
                self.memory[to].copy_from_slice(&data);
            }
            DescriptorOp::Fill { pattern, to, bytes } => {
                let to = self.range(to, bytes.into()).ok_or(ChannelErrors(1 << 1))?;
                let pattern = pattern.to_le_bytes();
                self.memory[to].iter_mut().zip(pattern.iter().cycle()).for_each(|(byte, with)| *byte = *with);
            }
        }
        self.executed = self.executed.wrapping_add(1);
        self.completed = self.next;
        self.next = descriptor.next;
        if self.count == self.executed {
            self.state = ChannelState::Idle;
        }
        if descriptor.reports {
            self.report();
        }
        Ok(())
    }
}

impl IoatDevice for Model {
    fn read_u8(&self, register: u32) -> u8 {
        match register {
            _ if self.is_gone => u8::MAX,
            VERSION => self.version,
            TRANSFER_CAPACITY => self.transfer_capacity,
            CHANNEL_COMMAND => self.command,
            other => panic!("8 bits of {other:#x}"),
        }
    }

    fn read_u32(&self, register: u32) -> u32 {
        match register {
            _ if self.is_gone => u32::MAX,
            CAPABILITIES => self.capabilities,
            CHANNEL_ERROR => self.errors,
            other => panic!("32 bits of {other:#x}"),
        }
    }

    fn read_u64(&self, register: u32) -> u64 {
        match register {
            _ if self.is_gone => u64::MAX,
            CHANNEL_STATUS => ChannelStatus { state: self.state, completed: self.completed }.encode(),
            other => panic!("64 bits of {other:#x}"),
        }
    }

    fn write_u8(&mut self, register: u32, value: u8) {
        assert_eq!(register, CHANNEL_COMMAND);
        self.command = value;
    }

    fn write_u16(&mut self, register: u32, value: u16) {
        match register {
            CHANNEL_CONTROL => self.control = value,
            DESCRIPTOR_COUNT => self.count = value,
            other => panic!("16 bits of {other:#x}"),
        }
    }

    fn write_u32(&mut self, register: u32, value: u32) {
        assert_eq!(register, CHANNEL_ERROR);
        self.errors &= !value;
    }

    fn write_u64(&mut self, register: u32, value: u64) {
        match register {
            CHAIN_ADDRESS => (self.chain, self.next) = (value, value),
            COMPLETION_ADDRESS => self.completion = value,
            other => panic!("64 bits of {other:#x}"),
        }
    }

    fn ring_entries(&self) -> u32 {
        self.entries
    }

    fn ring_address(&self) -> u64 {
        RING_AT
    }

    fn write_descriptor(&mut self, index: u32, words: &[u64; DESCRIPTOR_WORDS]) {
        let address = RING_AT + u64::from(index) * DESCRIPTOR_BYTES as u64;
        let range = self.range(address, DESCRIPTOR_BYTES as u64).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory[range].copy_from_slice(&bytes);
    }

    fn completion_address(&self) -> u64 {
        COMPLETION_AT
    }

    fn completion(&self) -> u64 {
        let range = self.range(COMPLETION_AT, 8).unwrap();
        self.forged.unwrap_or_else(|| u64::from_le_bytes(self.memory[range].try_into().unwrap()))
    }

    fn clear_completion(&mut self) {
        let range = self.range(COMPLETION_AT, 8).unwrap();
        self.memory[range].fill(0);
    }
}

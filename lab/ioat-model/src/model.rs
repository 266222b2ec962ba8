//! Registers, and the engine that executes descriptors.

use wire_ioat::registers::{
    CAPABILITIES, CAPABILITY_FILL, CHAIN_ADDRESS, CHANNEL_COMMAND, CHANNEL_CONTROL, CHANNEL_COUNT,
    CHANNEL_ERROR, CHANNEL_STATUS, COMMAND_RESET, COMMAND_SUSPEND, COMPLETION_ADDRESS,
    CONTROL_ABORT_ON_ERROR, CONTROL_REPORT_ERROR, DESCRIPTOR_COUNT, INTERRUPT_CONTROL, TRANSFER_CAPACITY,
    VERSION,
};
use wire_ioat::{
    ChannelErrors, ChannelState, ChannelStatus, DESCRIPTOR_BYTES, DESCRIPTOR_WORDS, DescriptorOp,
    IoatDescriptor,
};

use crate::IoatFault;

/// Bytes that are copied at a time, through memory of the model.
const PIECE_BYTES: usize = 64 << 10;

/// The memory that an engine sees, by device address.
pub trait ModelMemory {
    /// Reads bytes; whether all of them are mapped.
    fn read(&mut self, address: u64, out: &mut [u8]) -> bool;
    /// Writes bytes; whether all of them are mapped and writable.
    fn write(&mut self, address: u64, data: &[u8]) -> bool;
    /// Writes an aligned word at once, after all that was written before. Whether it is mapped and writable.
    fn write_word(&mut self, address: u64, word: u64) -> bool;
}

/// The registers of a function, and its engine.
///
/// A driver's accesses go to [`read`](Self::read) and [`write`](Self::write), which do nothing but keep
/// values; [`step`](Self::step) obeys commands and executes descriptors.
#[derive(Clone, Debug)]
pub struct IoatModel {
    /// The register of this name.
    pub version: u8,
    /// The register of this name: the binary logarithm of the most bytes of a descriptor.
    pub transfer_capacity: u8,
    /// The register of this name.
    pub capabilities: u32,
    /// What the channel does.
    pub state: ChannelState,
    /// The bits of the error register.
    pub errors: u32,
    interrupts: u8,
    control: u16,
    command: u8,
    count: u16,
    completed: u64,
    chain: u64,
    completion: u64,
    next: u64,
    executed: u16,
    executed_total: u64,
    is_stalled: bool,
    faults: Vec<IoatFault>,
}

impl Default for IoatModel {
    fn default() -> IoatModel {
        IoatModel::new()
    }
}

impl IoatModel {
    /// A function as it is after power on: version 3.3, with fills, and 4 KiB a descriptor, so that longer
    /// copies are divided.
    pub fn new() -> IoatModel {
        IoatModel {
            version: 0x33,
            transfer_capacity: 12,
            capabilities: CAPABILITY_FILL,
            state: ChannelState::Idle,
            errors: 0,
            // On, so that a driver has to disable them.
            interrupts: 1,
            control: 0,
            command: 0,
            count: 0,
            completed: 0,
            chain: 0,
            completion: 0,
            next: 0,
            executed: 0,
            executed_total: 0,
            is_stalled: false,
            faults: Vec::new(),
        }
    }

    /// Has it do something wrong from now on, besides what it does already.
    pub fn inject(&mut self, fault: IoatFault) {
        self.faults.push(fault);
    }

    /// Ends all faults.
    pub fn clear_faults(&mut self) {
        self.faults.clear();
        self.is_stalled = false;
    }

    /// As after power on, with the faults and the count of descriptors that it has.
    pub fn power_on(&mut self) {
        let faults = std::mem::take(&mut self.faults);
        let IoatModel { version, transfer_capacity, capabilities, executed_total, .. } = *self;
        *self = IoatModel {
            version,
            transfer_capacity,
            capabilities,
            executed_total,
            faults,
            ..IoatModel::new()
        };
    }

    /// Number of descriptors that were executed.
    pub fn executed_total(&self) -> u64 {
        self.executed_total
    }

    /// Reads `bytes` bytes at an offset of BAR 0. What is no register reads as 0.
    pub fn read(&self, register: u32, bytes: usize) -> u64 {
        let status = ChannelStatus { state: self.state, completed: self.completed }.encode();
        match (register, bytes) {
            (CHANNEL_COUNT, 1) => 1,
            (TRANSFER_CAPACITY, 1) => self.transfer_capacity.into(),
            (INTERRUPT_CONTROL, 1) => self.interrupts.into(),
            (VERSION, 1) => self.version.into(),
            (CAPABILITIES, 4) => self.capabilities.into(),
            (CHANNEL_CONTROL, 2) => self.control.into(),
            (CHANNEL_COMMAND, 1) => self.command.into(),
            (DESCRIPTOR_COUNT, 2) => self.count.into(),
            (CHANNEL_STATUS, 8) => status,
            (CHANNEL_STATUS, 4) => status & u64::from(u32::MAX),
            (CHAIN_ADDRESS, 8) => self.chain,
            (COMPLETION_ADDRESS, 8) => self.completion,
            (CHANNEL_ERROR, 4) => self.errors.into(),
            _ if register == CHANNEL_STATUS + 4 && bytes == 4 => status >> 32,
            _ => 0,
        }
    }

    /// Writes `bytes` bytes at an offset of BAR 0. What is no register, or can only be read, stays.
    pub fn write(&mut self, register: u32, bytes: usize, value: u64) {
        match (register, bytes) {
            (INTERRUPT_CONTROL, 1) => self.interrupts = value as u8,
            (CHANNEL_CONTROL, 2) => self.control = value as u16,
            (CHANNEL_COMMAND, 1) => self.command = value as u8,
            (DESCRIPTOR_COUNT, 2) => self.count = value as u16,
            (CHAIN_ADDRESS, 8) => (self.chain, self.next) = (value, value),
            (COMPLETION_ADDRESS, 8) => self.completion = value,
            (CHANNEL_ERROR, 4) => self.errors &= !(value as u32),
            _ => {}
        }
    }

    /// Obeys a command, or executes descriptors, `descriptors` at most. Whether there was something to do.
    pub fn step(&mut self, descriptors: u32, memory: &mut dyn ModelMemory) -> bool {
        if self.command & COMMAND_RESET != 0 {
            if self.faults.contains(&IoatFault::NoReset) {
                return false;
            }
            (self.command, self.is_stalled) = (0, false);
            (self.count, self.executed, self.completed, self.errors) = (0, 0, 0, 0);
            self.state = ChannelState::Idle;
            return true;
        }
        if self.command & COMMAND_SUSPEND != 0 && !self.faults.contains(&IoatFault::NoSuspend) {
            let changes = self.state != ChannelState::Suspended;
            self.state = ChannelState::Suspended;
            return changes;
        }
        let mut done = 0;
        while done < descriptors && self.has_work() {
            if let Err(errors) = self.execute(memory) {
                self.halt(errors, memory);
            }
            done += 1;
        }
        done > 0
    }

    fn has_work(&self) -> bool {
        let is_stopped = matches!(self.state, ChannelState::Halted | ChannelState::Suspended);
        self.count != self.executed && !is_stopped && !self.is_stalled && !self.has_stopped()
    }

    fn has_stopped(&self) -> bool {
        let stops =
            |fault: &IoatFault| matches!(fault, IoatFault::StopAfter(after) if self.executed_total >= *after);
        self.faults.iter().any(stops)
    }

    /// Executes one descriptor.
    fn execute(&mut self, memory: &mut dyn ModelMemory) -> Result<(), ChannelErrors> {
        self.state = ChannelState::Active;
        let mut bytes = [0; DESCRIPTOR_BYTES];
        if !memory.read(self.next, &mut bytes) {
            return Err(ChannelErrors::NEXT_ADDRESS);
        }
        let mut words = [0; DESCRIPTOR_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let descriptor = IoatDescriptor::decode(&words).map_err(|_| ChannelErrors::CONTROL)?;
        self.executed_total += 1;
        for fault in self.faults.clone() {
            match fault {
                IoatFault::HaltEvery(every) if self.executed_total.is_multiple_of(every) => {
                    return Err(ChannelErrors::READ_DATA);
                }
                IoatFault::PartialEvery(every) if self.executed_total.is_multiple_of(every) => {
                    self.transfer(descriptor.op, 2, memory)?;
                    return Err(ChannelErrors::WRITE_DATA);
                }
                IoatFault::StallAfter(after) if self.executed_total > after => {
                    self.executed_total -= 1;
                    self.is_stalled = true;
                    self.faults.retain(|other| *other != fault);
                    return Ok(());
                }
                _ => {}
            }
        }
        self.transfer(descriptor.op, 1, memory)?;
        self.executed = self.executed.wrapping_add(1);
        self.completed = self.next;
        self.next = descriptor.next;
        if self.count == self.executed {
            self.state = ChannelState::Idle;
        }
        if descriptor.reports && !self.report(memory) {
            return Err(ChannelErrors::COMPLETION_ADDRESS);
        }
        Ok(())
    }

    /// Moves one part in `parts` of the data of a descriptor.
    fn transfer(
        &self,
        op: DescriptorOp,
        parts: u32,
        memory: &mut dyn ModelMemory,
    ) -> Result<(), ChannelErrors> {
        let (from, pattern, to, bytes) = match op {
            DescriptorOp::Null => return Ok(()),
            DescriptorOp::Copy { from, to, bytes } => (Some(from), 0, to, bytes),
            DescriptorOp::Fill { pattern, to, bytes } => (None, pattern, to, bytes),
        };
        if u64::from(bytes) > 1 << self.transfer_capacity {
            return Err(ChannelErrors::LENGTH);
        }
        let mut piece = [pattern.to_le_bytes(); PIECE_BYTES / 8];
        let piece = piece.as_flattened_mut();
        let (mut done, total) = (0, (bytes / parts) as usize);
        while done < total {
            let piece = &mut piece[..PIECE_BYTES.min(total - done)];
            if let Some(from) = from
                && !memory.read(from.wrapping_add(done as u64), piece)
            {
                return Err(ChannelErrors::SOURCE_ADDRESS);
            }
            if !memory.write(to.wrapping_add(done as u64), piece) {
                return Err(ChannelErrors::DESTINATION_ADDRESS);
            }
            done += piece.len();
        }
        Ok(())
    }

    fn halt(&mut self, errors: ChannelErrors, memory: &mut dyn ModelMemory) {
        if self.control & CONTROL_ABORT_ON_ERROR == 0 {
            // What an engine does then is not documented.
            log::warn!(target: "ioat-model", "an error without Any Error Abort Enable: it halts nevertheless");
        }
        self.errors |= errors.0;
        self.state = ChannelState::Halted;
        if self.control & CONTROL_REPORT_ERROR != 0 {
            self.report(memory);
        }
    }

    /// Writes the status to the completion address; whether that is mapped.
    fn report(&self, memory: &mut dyn ModelMemory) -> bool {
        let mut word = ChannelStatus { state: self.state, completed: self.completed }.encode();
        for fault in &self.faults {
            match fault {
                IoatFault::BackwardAfter(after) if self.executed_total > *after => {
                    word = ChannelStatus { state: self.state, completed: self.chain }.encode();
                }
                IoatFault::ForgeAfter(after, forged) if self.executed_total > *after => word = *forged,
                _ => {}
            }
        }
        memory.write_word(self.completion, word)
    }
}

#[cfg(test)]
mod tests;

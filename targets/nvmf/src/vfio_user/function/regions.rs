//! What the client reads and writes by message.

use controller::Event;
use rustix::io::Errno;
use wire_nvme::doorbell::DOORBELLS_OFFSET;
use wire_nvme::registers::offset;
use wire_vfio_user::{RegionInfo, RegionReply, SparseArea, region, region_flags};

use super::super::doorbells::{BAR0_BYTES, DOORBELLS_BYTES};
use super::super::pci::{BAR_PENDING, BAR_TABLE, CONFIG_BYTES};
use super::super::socket::Reply;
use super::{Existing, Function};

/// Bytes of the region with the pending bits.
const PENDING_BYTES: u64 = 4096;

impl Function {
    /// Bytes of a region; 0 for one that there is not.
    fn region_bytes(&self, index: u32) -> Result<u64, Errno> {
        Ok(match index {
            region::BAR0 => BAR0_BYTES,
            BAR_TABLE => self.table.len() as u64,
            BAR_PENDING => PENDING_BYTES,
            region::CONFIG => CONFIG_BYTES as u64,
            _ if index < region::COUNT => 0,
            _ => return Err(Errno::INVAL),
        })
    }

    /// What a region is. The doorbells are mapped unless `trapped`.
    pub(in super::super) fn region_info(&self, asked: &RegionInfo, trapped: bool) -> Result<Reply, Errno> {
        let size = self.region_bytes(asked.index)?;
        if (asked.argsz as usize) < RegionInfo::SIZE {
            return Err(Errno::INVAL);
        }
        let access = if size > 0 { region_flags::READ | region_flags::WRITE } else { 0 };
        let mapped = asked.index == region::BAR0 && !trapped;
        let flags = access | if mapped { region_flags::MMAP } else { 0 };
        let info = RegionInfo { flags, index: asked.index, size, ..RegionInfo::default() };
        let area = SparseArea { offset: DOORBELLS_OFFSET.into(), size: DOORBELLS_BYTES };
        let reply = RegionReply { info, areas: if mapped { vec![area] } else { Vec::new() } };
        // The descriptor goes with the capability that says which part of it may be mapped.
        let complete = mapped && reply.bytes() <= asked.argsz as usize;
        let descriptor = complete.then(|| self.doorbells.file());
        Ok(Reply { payload: reply.to_bytes(asked.argsz as usize), descriptor })
    }

    /// Reads a range of a region.
    pub(in super::super) fn region_read(&mut self, index: u32, at: u64, out: &mut [u8]) -> Result<(), Errno> {
        self.check(index, at, out.len())?;
        if self.faults.gone {
            out.fill(0xff);
            return Ok(());
        }
        match index {
            region::CONFIG => self.config.read(at as usize, out),
            BAR_TABLE => out.copy_from_slice(&self.table[at as usize..at as usize + out.len()]),
            region::BAR0 => {
                for (at, byte) in (at..).zip(out) {
                    let word = self.register(at as u32 & !3).to_le_bytes();
                    *byte = word[at as usize & 3];
                }
            }
            _ => out.fill(0),
        }
        Ok(())
    }

    /// Writes a range of a region; whether that asks for a reset of the function.
    pub(in super::super) fn region_write(
        &mut self,
        index: u32,
        at: u64,
        data: &[u8],
        now_ns: u64,
    ) -> Result<bool, Errno> {
        self.check(index, at, data.len())?;
        if self.faults.gone {
            return Ok(false);
        }
        match index {
            region::CONFIG => return Ok(self.config.write(at as usize, data)),
            BAR_TABLE => self.table[at as usize..at as usize + data.len()].copy_from_slice(data),
            region::BAR0 => {
                // Registers are written whole (PCIe Transport 1.0, section 3.1.1).
                let whole = matches!(data.len(), 4 | 8) && at.is_multiple_of(4);
                if !whole {
                    return Err(Errno::INVAL);
                }
                for (at, word) in (at..).step_by(4).zip(data.as_chunks::<4>().0) {
                    self.set_register(at as u32, u32::from_le_bytes(*word), now_ns);
                }
            }
            _ => {}
        }
        Ok(false)
    }

    fn check(&self, index: u32, at: u64, bytes: usize) -> Result<(), Errno> {
        let size = self.region_bytes(index)?;
        let inside = at.checked_add(bytes as u64).is_some_and(|end| end <= size);
        if inside && bytes > 0 { Ok(()) } else { Err(Errno::INVAL) }
    }

    fn register(&mut self, at: u32) -> u32 {
        const ASQ_HIGH: u32 = offset::ASQ + 4;
        const ACQ_HIGH: u32 = offset::ACQ + 4;
        match at {
            offset::AQA => self.aqa,
            offset::ASQ => self.asq as u32,
            ASQ_HIGH => (self.asq >> 32) as u32,
            offset::ACQ => self.acq as u32,
            ACQ_HIGH => (self.acq >> 32) as u32,
            // Doorbells read as nothing in particular.
            DOORBELLS_OFFSET.. => 0,
            _ => self.core.register(at),
        }
    }

    fn set_register(&mut self, at: u32, value: u32, now_ns: u64) {
        const ASQ_HIGH: u32 = offset::ASQ + 4;
        const ACQ_HIGH: u32 = offset::ACQ + 4;
        let low = |was: u64| was & !0xffff_ffff | u64::from(value);
        let high = |was: u64| was & 0xffff_ffff | u64::from(value) << 32;
        match at {
            offset::CC => self.configure(value),
            offset::AQA => self.aqa = value,
            // The lower twelve bits are reserved; who sets them gets a failed controller, not a queue elsewhere.
            offset::ASQ => self.asq = low(self.asq),
            ASQ_HIGH => self.asq = high(self.asq),
            offset::ACQ => self.acq = low(self.acq),
            ACQ_HIGH => self.acq = high(self.acq),
            DOORBELLS_OFFSET.. => self.ring(at, value, now_ns),
            // Interrupt masks have no meaning with MSI-X, and the rest cannot be written.
            _ => {}
        }
    }

    /// A doorbell that was not written where it is mapped.
    fn ring(&mut self, at: u32, value: u32, now_ns: u64) {
        let index = (at - DOORBELLS_OFFSET) / 4;
        let qid = (index / 2) as u16;
        let exists =
            if index.is_multiple_of(2) { self.has_submission(qid) } else { self.has_completion(qid) };
        if exists {
            self.doorbells.ring(index.into(), value);
            self.last_ns = now_ns;
        } else {
            self.tell(Event::InvalidDoorbell, now_ns);
        }
    }
}

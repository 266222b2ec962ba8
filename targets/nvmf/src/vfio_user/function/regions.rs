//! Region accesses by message: BAR0 registers, the MSI-X table, and PCI configuration space.

use nvme_controller::ControllerEvent;
use rustix::io::Errno;
use wire_nvme::doorbell::DOORBELLS_OFFSET;
use wire_nvme::registers::offset;
use wire_vfio_user::{RegionInfo, RegionReply, SparseArea, region, region_flags};

use super::super::doorbells::{BAR0_BYTES, DOORBELLS_BYTES};
use super::super::pci::{BAR_PENDING, BAR_TABLE, CONFIG_BYTES};
use super::super::socket::VfioUserReply;
use super::{QueueLookup, VfioUserFunction};

/// Bytes of the MSI-X pending bit array region.
const PENDING_BYTES: u64 = 4096;

impl VfioUserFunction {
    /// Bytes of a region; 0 for an unimplemented one.
    fn region_bytes(&self, index: u32) -> Result<u64, Errno> {
        Ok(match index {
            region::BAR0 => BAR0_BYTES,
            BAR_TABLE => self.msix_table.len() as u64,
            BAR_PENDING => PENDING_BYTES,
            region::CONFIG => CONFIG_BYTES as u64,
            _ if index < region::COUNT => 0,
            _ => return Err(Errno::INVAL),
        })
    }

    /// Replies to `DEVICE_GET_REGION_INFO`. The doorbells are mappable unless `trapped`.
    pub(in super::super) fn region_info(
        &self,
        request: &RegionInfo,
        trapped: bool,
    ) -> Result<VfioUserReply, Errno> {
        let size = self.region_bytes(request.index)?;
        if (request.argsz as usize) < RegionInfo::SIZE {
            return Err(Errno::INVAL);
        }
        let access = if size > 0 { region_flags::READ | region_flags::WRITE } else { 0 };
        let mapped = request.index == region::BAR0 && !trapped;
        let flags = access | if mapped { region_flags::MMAP } else { 0 };
        let info = RegionInfo { flags, index: request.index, size, ..RegionInfo::default() };
        let area = SparseArea { offset: DOORBELLS_OFFSET.into(), size: DOORBELLS_BYTES };
        let reply = RegionReply { info, areas: if mapped { vec![area] } else { Vec::new() } };
        // The file descriptor is sent only with the sparse mmap capability that limits its mapping.
        let has_capability = mapped && reply.bytes() <= request.argsz as usize;
        let descriptor = has_capability.then(|| self.doorbells.file());
        Ok(VfioUserReply { payload: reply.to_bytes(request.argsz as usize), descriptor })
    }

    /// Reads a range of a region.
    pub(in super::super) fn region_read(&mut self, index: u32, at: u64, out: &mut [u8]) -> Result<(), Errno> {
        self.check_range(index, at, out.len())?;
        if self.faults.surprise_removed {
            out.fill(0xff);
            return Ok(());
        }
        match index {
            region::CONFIG => self.config.read(at as usize, out),
            BAR_TABLE => out.copy_from_slice(&self.msix_table[at as usize..at as usize + out.len()]),
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

    /// Writes a range of a region. Returns whether this requests a function level reset.
    pub(in super::super) fn region_write(
        &mut self,
        index: u32,
        at: u64,
        data: &[u8],
        now_ns: u64,
    ) -> Result<bool, Errno> {
        self.check_range(index, at, data.len())?;
        if self.faults.surprise_removed {
            return Ok(false);
        }
        match index {
            region::CONFIG => return Ok(self.config.write(at as usize, data)),
            BAR_TABLE => self.msix_table[at as usize..at as usize + data.len()].copy_from_slice(data),
            region::BAR0 => {
                // Registers must be written with aligned 4- or 8-byte accesses (PCIe Transport 1.0, section
                // 3.1.1).
                let is_aligned = matches!(data.len(), 4 | 8) && at.is_multiple_of(4);
                if !is_aligned {
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

    fn check_range(&self, index: u32, at: u64, bytes: usize) -> Result<(), Errno> {
        let size = self.region_bytes(index)?;
        let is_inside = at.checked_add(bytes as u64).is_some_and(|end| end <= size);
        if is_inside && bytes > 0 { Ok(()) } else { Err(Errno::INVAL) }
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
            // Reads of doorbells are undefined; they return 0.
            DOORBELLS_OFFSET.. => 0,
            _ => self.controller.read_register(at),
        }
    }

    fn set_register(&mut self, at: u32, value: u32, now_ns: u64) {
        const ASQ_HIGH: u32 = offset::ASQ + 4;
        const ACQ_HIGH: u32 = offset::ACQ + 4;
        let low = |was: u64| was & !0xffff_ffff | u64::from(value);
        let high = |was: u64| was & 0xffff_ffff | u64::from(value) << 32;
        match at {
            offset::CC => self.write_cc(value),
            offset::CSTS | offset::NSSR => self.write_reset_register(at, value),
            offset::AQA => self.aqa = value,
            // The lower twelve bits are reserved. If they are set, enabling fails with CSTS.CFS.
            offset::ASQ => self.asq = low(self.asq),
            ASQ_HIGH => self.asq = high(self.asq),
            offset::ACQ => self.acq = low(self.acq),
            ACQ_HIGH => self.acq = high(self.acq),
            DOORBELLS_OFFSET.. => self.write_doorbell(at, value, now_ns),
            // INTMS and INTMC are not used with MSI-X; the other registers are read-only.
            _ => {}
        }
    }

    /// Handles a doorbell that was written by message and not through the mapping.
    fn write_doorbell(&mut self, at: u32, value: u32, now_ns: u64) {
        let index = (at - DOORBELLS_OFFSET) / 4;
        let qid = (index / 2) as u16;
        let exists =
            if index.is_multiple_of(2) { self.has_submission(qid) } else { self.has_completion(qid) };
        if exists {
            self.doorbells.write(index.into(), value);
            self.last_activity_ns = now_ns;
        } else {
            self.controller_event(ControllerEvent::InvalidDoorbell, now_ns);
        }
    }
}

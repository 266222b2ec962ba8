//! The simulated controller as a device: its registers, mappings and interrupts.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use dma::{ChunkMemory, Dma, DmaError, RegionMapping};
use wire_nvme::doorbell::AdminQueueAttributes;
use wire_nvme::registers::{
    ControllerConfiguration, ControllerStatus, ShutdownNotification, ShutdownStatus, offset,
};

use super::{CompletionRing, SimulatedController, SimulatedState, SubmissionRing};
use crate::device::{DeviceError, DoorbellRegion, NvmeDevice, Registers};

impl SimulatedState {
    fn configure(&mut self, value: u32) {
        let old = std::mem::replace(&mut self.cc, value);
        let enable = value & 1 != 0;
        if old & 1 != 0 && !enable {
            self.resets += 1;
            self.disable();
        }
        if old & 1 == 0 && enable {
            self.enable();
        }
        let notified = ControllerConfiguration::decode(value).map(|configuration| configuration.shutdown);
        if notified.is_ok_and(|shutdown| shutdown != ShutdownNotification::None) {
            self.shutdown = ShutdownStatus::Complete;
        }
    }

    fn disable(&mut self) {
        if !self.never_ready {
            self.ready = false;
        }
        if std::mem::take(&mut self.change_capabilities) {
            // A different value that CAP.MQES can encode.
            let entries = &mut self.config.capabilities.queue_entries_max;
            *entries = if *entries >= 4 { *entries / 2 } else { *entries + 1 };
        }
        (self.fatal, self.stalled, self.shutdown) = (false, false, ShutdownStatus::Normal);
        self.submission.clear();
        self.completion.clear();
        self.event_requests.clear();
        self.fused.clear();
        self.shadow = None;
        self.event_masked = false;
        self.doorbells.zero(0x1000, self.doorbells.len() - 0x1000);
    }

    fn enable(&mut self) {
        let AdminQueueAttributes { submission_entries, completion_entries } =
            AdminQueueAttributes::decode(self.aqa);
        let sq = SubmissionRing { address: self.asq, entries: submission_entries, head: 0, cqid: 0 };
        let cq = CompletionRing {
            address: self.acq,
            entries: completion_entries,
            tail: 0,
            phase: true,
            vector: None,
        };
        self.submission.insert(0, sq);
        self.completion.insert(0, cq);
        self.stalled = std::mem::take(&mut self.stall_after_reset);
        if !self.never_ready {
            self.ready = true;
        }
    }
}

impl Registers for SimulatedController {
    fn read_u32(&self, at: u32) -> Result<u32, DeviceError> {
        let state = self.lock();
        if state.removed {
            return Ok(u32::MAX);
        }
        Ok(match at {
            offset::VS => state.config.version.encode(),
            offset::CC => state.cc,
            offset::CSTS => ControllerStatus {
                ready: state.ready,
                fatal: state.fatal,
                shutdown: state.shutdown,
                ..ControllerStatus::RESET
            }
            .encode(),
            offset::AQA => state.aqa,
            _ => 0,
        })
    }

    fn read_u64(&self, at: u32) -> Result<u64, DeviceError> {
        let state = self.lock();
        if state.removed {
            return Ok(u64::MAX);
        }
        Ok(if at == offset::CAP { state.config.capabilities.encode() } else { 0 })
    }

    fn write_u32(&self, at: u32, value: u32) -> Result<(), DeviceError> {
        let mut state = self.lock();
        match at {
            _ if state.removed => {}
            offset::CC => state.configure(value),
            offset::AQA => state.aqa = value,
            offset::NSSR => {
                state.cc &= !1;
                state.resets += 1;
                state.disable();
            }
            _ => {}
        }
        Ok(())
    }

    fn write_u64(&self, at: u32, value: u64) -> Result<(), DeviceError> {
        let mut state = self.lock();
        match at {
            offset::ASQ => state.asq = value,
            offset::ACQ => state.acq = value,
            _ => {}
        }
        Ok(())
    }

    fn doorbells(&self, _bytes: u64) -> Result<DoorbellRegion, DeviceError> {
        let state = self.lock();
        let bytes = state.config.bar_bytes.saturating_sub(0x1000);
        Ok(DoorbellRegion { region: state.doorbells.clone(), offset: 0x1000, bytes })
    }
}

impl Dma for SimulatedController {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        self.lock().memory.add(chunk)
    }

    fn map_region(
        &self,
        region: &Arc<RegionMapping>,
        _reserve_bytes: u64,
    ) -> Result<(u64, Box<dyn Send>), DmaError> {
        let mut state = self.lock();
        let Some(memory) = state.lendable.remove(&region.start()) else {
            return Err(DmaError::Refused("the simulated device does not know it".into()));
        };
        let (index, address) = state.memory.add_region(memory);
        state.lent_mapped += 1;
        Ok((address, Box::new(LentMapping { state: Arc::downgrade(&self.state), index })))
    }
}

/// Undoes the mapping of lent memory.
struct LentMapping {
    state: Weak<Mutex<SimulatedState>>,
    index: usize,
}

impl Drop for LentMapping {
    fn drop(&mut self) {
        if let Some(state) = self.state.upgrade() {
            let mut state = sync::lock(&state);
            state.memory.remove(self.index);
            state.lent_mapped -= 1;
        }
    }
}

impl NvmeDevice for SimulatedController {
    fn name(&self) -> String {
        "simulated".into()
    }

    fn enable_dma(&self) -> Result<(), DeviceError> {
        self.lock().started = true;
        Ok(())
    }

    fn disable_dma(&self) -> Result<(), DeviceError> {
        self.lock().started = false;
        Ok(())
    }

    fn is_present(&self) -> bool {
        !self.lock().removed
    }

    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>, DeviceError> {
        let failed = |error: rustix::io::Errno| DeviceError::Other(error.to_string());
        let flags = rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC;
        let (mut device_fds, mut host_fds) = (Vec::new(), Vec::new());
        for _ in 0..vectors {
            let fd = rustix::event::eventfd(0, flags).map_err(failed)?;
            device_fds.push(Arc::new(fd.try_clone().map_err(|error| DeviceError::Other(error.to_string()))?));
            host_fds.push(fd);
        }
        self.lock().events = device_fds;
        Ok(host_fds)
    }

    fn reset(&self) -> Result<(), DeviceError> {
        let mut state = self.lock();
        state.cc = 0;
        state.resets += 1;
        (state.never_ready, state.started) = (false, false);
        state.disable();
        Ok(())
    }
}

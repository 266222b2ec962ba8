//! Events for the driver.

use std::collections::VecDeque;

use wire_scsi::AdditionalSense;
use wire_virtio::scsi::{ScsiEvent, UnitAddress};

use crate::blk_requests::Started;
use crate::chain;
use crate::device::FetchedChain;
use crate::failure::RingError;
use crate::limits::EVENTS_MAX;

/// Events that wait for the driver's buffers.
///
/// They do not depend on negotiated features: QEMU does not pass all that the driver accepts, and a driver that wants no
/// events has no buffers for them.
#[derive(Default)]
pub(super) struct EventQueue {
    events: VecDeque<ScsiEvent>,
    /// Some were lost.
    is_missed: bool,
    /// There is one that was not there before.
    pub(super) is_new: bool,
}

impl EventQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// A target has appeared.
    pub(super) fn push_added(&mut self, target: u8) {
        self.push(target, ScsiEvent::TRANSPORT_RESET, ScsiEvent::RESET_RESCAN);
    }

    /// A target has gone.
    pub(super) fn push_removed(&mut self, target: u8) {
        self.push(target, ScsiEvent::TRANSPORT_RESET, ScsiEvent::RESET_REMOVED);
    }

    /// The logical unit of a target has another size.
    pub(super) fn push_resized(&mut self, target: u8) {
        let AdditionalSense { code, qualifier } = AdditionalSense::CAPACITY_CHANGED;
        self.push(target, ScsiEvent::PARAMETER_CHANGE, u32::from(code) | u32::from(qualifier) << 8);
    }

    fn push(&mut self, target: u8, event: u32, reason: u32) {
        self.is_new = true;
        if self.events.len() >= EVENTS_MAX {
            self.is_missed = true;
            return;
        }
        let lun = UnitAddress { target, lun: 0 }.to_event_field();
        self.events.push_back(ScsiEvent { event, lun, reason });
    }

    /// Writes the next event to a buffer of the driver.
    pub(super) fn fill(&mut self, fetched: &FetchedChain<'_>) -> Result<Started, RingError> {
        let Some(mut event) = self.events.pop_front() else { return Ok(Started::Used(0)) };
        if std::mem::take(&mut self.is_missed) {
            event.event |= ScsiEvent::MISSED;
        }
        let FetchedChain { chain, guest, .. } = *fetched;
        let written = chain::write_bytes(guest.memory, chain.writable(), &event.to_bytes());
        let written = written.map_err(|_| RingError::NoStatus)? as u32;
        if let Some(log) = guest.log {
            chain.written(written).for_each(|range| log.mark(range.address, range.length.into()));
        }
        Ok(Started::Used(written))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_beyond_the_limit_are_reported_as_missed() {
        let mut queue = EventQueue::default();
        (0..EVENTS_MAX + 1).for_each(|_| queue.push_added(1));
        assert_eq!((queue.events.len(), queue.is_missed), (EVENTS_MAX, true));
    }
}

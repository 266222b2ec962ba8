//! The Persistent Event log of a controller: what it records, and its reporting context.

use block_io::Status;
use wire_nvme::Sqe;
use wire_nvme::admin::GetLogPage;
use wire_nvme::identify::ascii;
use wire_nvme::log::{LogId, PersistentEventHeader, SetFeature, persistent_event_action as action};

use super::{AdminResult, Controller};
use crate::persistent_events::EventOrigin;
use crate::{INVALID_FIELD, SubsystemKind};

/// Whether a log page has the counters of [`ControllerEvent::Health`](super::ControllerEvent::Health), which
/// the transport gives to the controller before it passes the command.
pub fn log_has_health(lid: u8) -> bool {
    matches!(LogId::from_wire(lid), Some(LogId::Health | LogId::PersistentEvents))
}

impl Controller {
    fn event_origin(&self) -> EventOrigin {
        EventOrigin { cntlid: self.association().cntlid(), port: Some(self.port.portid) }
    }

    /// Records a Controller Level Reset.
    pub(super) fn record_reset(&self) {
        if self.view.kind == SubsystemKind::Discovery {
            return;
        }
        self.view.persistent_events.record_reset(self.event_origin());
    }

    /// Records a feature that was set.
    pub(super) fn record_feature(&self, sqe: &Sqe, result: &AdminResult) {
        // What a deferred command does is not known yet.
        let is_done = result.as_ref().is_ok_and(|response| !response.deferred);
        if is_done && self.view.kind == SubsystemKind::Nvm {
            let event = SetFeature { cdw10: sqe.cdw10, cdw11: sqe.cdw11 };
            self.view.persistent_events.record_feature(self.event_origin(), &event);
        }
    }

    /// Reads, establishes or releases the reporting context (Base 2.0, section 5.16.1.14). A controller has
    /// one, for all events of the subsystem, so that no host depends on what another one leaves established.
    /// A Controller Level Reset releases it.
    pub(super) fn persistent_events_page(&mut self, command: &GetLogPage) -> Result<Vec<u8>, Status> {
        let sequence_error = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
        match command.specific & action::MASK {
            action::READ => {
                let mut page = self.persistent_events.clone().ok_or(sequence_error)?;
                PersistentEventHeader::mark_existing(&mut page, self.port.portid);
                Ok(page)
            }
            action::ESTABLISH if self.persistent_events.is_some() => Err(sequence_error),
            action::ESTABLISH => {
                let page = self.new_persistent_events_page()?;
                if command.offset > page.len() as u64 {
                    return Err(INVALID_FIELD);
                }
                self.persistent_events = Some(page.clone());
                Ok(page)
            }
            // Not an error without a context. There is no data.
            action::RELEASE if command.offset == 0 => {
                self.persistent_events = None;
                Ok(Vec::new())
            }
            // Establish Context and Read 512 Bytes of Header is optional.
            _ => Err(INVALID_FIELD),
        }
    }

    fn new_persistent_events_page(&self) -> Result<Vec<u8>, Status> {
        let subsystem = &self.view;
        // The counters of a host that does not see all namespaces are not those of the subsystem.
        if std::sync::Arc::ptr_eq(&self.view, &self.subsystem) {
            subsystem.persistent_events.record_health(self.event_origin(), &self.health_page(0)?);
        }
        let header = PersistentEventHeader {
            power_on_hours: self.health.power_on_hours.into(),
            power_cycles: 1,
            vid: self.limits.pci_vendor,
            ssvid: self.limits.pci_vendor,
            serial: ascii(&subsystem.serial),
            model: ascii(&subsystem.model),
            subnqn: subsystem.nqn.as_str().to_owned(),
            // The log sets the rest.
            events: 0,
            length_bytes: 0,
            timestamp: 0,
            generation: 0,
            context_port: None,
            supported: 0,
        };
        Ok(subsystem.persistent_events.page(header))
    }
}

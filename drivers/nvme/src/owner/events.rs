//! Asynchronous events: keeps Asynchronous Event Requests outstanding and handles the events.

use std::rc::Rc;

use block_io::Tag;
use wire_nvme::Sqe;
use wire_nvme::admin::{GetLogPage, SetFeatures};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::{AsyncEventConfiguration, FeatureId};
use wire_nvme::identify::NamespaceList;
use wire_nvme::opcode::AdminOpcode;

use super::attach::identify_page;
use super::{ControllerOwner, EVENT_TAG};
use crate::command::{Command, CommandCompletion};
use crate::shared::{AdminData, NvmeEvent, RunState};

/// Asynchronous Event Requests kept outstanding, so that events of several types are reported without a round trip.
const EVENT_REQUESTS_MAX: u16 = 4;
/// Bytes read of an event's log page: any read with RAE cleared unmasks the event.
const LOG_BYTES: u64 = 512;
/// First entry of a Changed Namespace List that has overflowed (more than 1024 namespaces).
const LIST_OVERFLOW: u32 = 0xffff_ffff;

impl ControllerOwner {
    /// Enables the events that the driver handles and submits Asynchronous Event Requests.
    pub(super) async fn start_events(&self) {
        let identity = &self.shared.params().identity;
        // Health warnings, and of the notices that the driver handles those that OAES offers.
        let notices = AsyncEventConfiguration::NAMESPACE | AsyncEventConfiguration::FIRMWARE;
        let cdw11 = 0x1f | identity.oaes & notices.bits();
        let fid = FeatureId::AsyncEventConfiguration.to_wire();
        let set = SetFeatures { fid, save: false, cdw11, uuid_index: 0 };
        // Not fatal: a controller without the feature reports its default events.
        let _ = self.execute_with(Sqe { flags: 0, ..set.to_sqe(0) }, AdminData::None).await;
        for _ in 0..identity.async_events_max.min(EVENT_REQUESTS_MAX) {
            self.request_event();
        }
    }

    fn request_event(&self) {
        let sqe = Sqe { flags: 0, ..Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()) };
        let mut batch = vec![Command::raw(Tag(EVENT_TAG), sqe, None, None)];
        let mut refused = Vec::new();
        if let Some(queue) = &mut *self.queue.borrow_mut() {
            queue.submit_commands(&mut batch, &mut refused, self.core.now_ns());
        }
        if batch.is_empty() && refused.is_empty() {
            self.event_requests.set(self.event_requests.get() + 1);
        }
    }

    /// Handles the completion of an Asynchronous Event Request.
    pub(super) fn on_async_event(self: &Rc<Self>, executed: &CommandCompletion) {
        self.event_requests.set(self.event_requests.get().saturating_sub(1));
        if !executed.status().is_success() {
            // The controller accepts fewer than AERL says: do not submit this one again.
            return;
        }
        let Some(event) = AsyncEvent::from_result(executed.result()) else {
            self.request_event();
            return;
        };
        self.shared.push_event(NvmeEvent(event));
        let owner = self.clone();
        self.core.spawn(async move {
            owner.handle_event(event).await;
            if owner.shared.state_word().state() == RunState::Running {
                owner.request_event();
            }
        });
    }

    /// Reads the event's log page, which unmasks the event, and applies a namespace change.
    async fn handle_event(&self, event: AsyncEvent) {
        if event.kind == AsyncEvent::NAMESPACE_CHANGED.kind
            && event.information == AsyncEvent::NAMESPACE_CHANGED.information
        {
            self.namespaces_changed().await;
            return;
        }
        let view = GetLogPage { lid: event.log_page, length_bytes: LOG_BYTES, ..GetLogPage::default() };
        let sqe = Sqe { flags: 0, ..view.to_sqe(wire_nvme::NSID_ALL) };
        // If the log page cannot be read, the event stays masked until the next reset.
        let _ = self.execute_with(sqe, AdminData::In(LOG_BYTES as usize)).await;
    }

    async fn namespaces_changed(&self) {
        let view = GetLogPage {
            lid: AsyncEvent::NAMESPACE_CHANGED.log_page,
            length_bytes: wire_nvme::identify::SIZE as u64,
            ..GetLogPage::default()
        };
        let sqe = Sqe { flags: 0, ..view.to_sqe(wire_nvme::NSID_ALL) };
        let data = match self.execute_with(sqe, AdminData::In(wire_nvme::identify::SIZE)).await {
            Ok(answer) => answer.data,
            Err(_) => return,
        };
        let known = self.shared.namespaces();
        let changed = match NamespaceList::decode(identify_page(&data)) {
            Ok(list) if list.0.first() != Some(&LIST_OVERFLOW) => list.0,
            // Overflow or an invalid list: identify every known namespace again.
            _ => known.clone(),
        };
        let mut any_changed = false;
        for nsid in known.into_iter().filter(|nsid| changed.contains(nsid)) {
            any_changed |= self.refresh_namespace(nsid).await.unwrap_or(true);
        }
        if any_changed {
            self.shared.notify_namespace_change();
        }
    }
}

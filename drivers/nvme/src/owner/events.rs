//! Asynchronous events: always some requests outstanding, and what is done when one completes.

use std::rc::Rc;

use ring::Tag;
use sys::clock::now_ns;
use wire_nvme::Sqe;
use wire_nvme::admin::{GetLogPage, SetFeatures};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::{AsyncEventConfiguration, FeatureId};
use wire_nvme::identify::NamespaceList;
use wire_nvme::opcode::AdminOpcode;

use super::attach::page;
use super::{EVENT_TAG, Owner};
use crate::command::{Command, Executed};
use crate::shared::{AdminData, Event, State};

/// Requests that are kept with the controller: a burst of events of several kinds is told at once.
const REQUESTS_MAX: u16 = 4;
/// A log page in short: enough to read what has to be read for an event to come again.
const LOG_BYTES: u64 = 512;
/// First entry of a Changed Namespace List that is too long for a list.
const TOO_MANY: u32 = 0xffff_ffff;

impl Owner {
    /// Says which events are wanted, and asks for them.
    pub(super) async fn start_events(&self) {
        let identity = &self.shared.facts().identity;
        // Health warnings, and the notices that the controller offers of those that mean something here.
        let notices = AsyncEventConfiguration::NAMESPACE | AsyncEventConfiguration::FIRMWARE;
        let cdw11 = 0x1f | identity.oaes & notices;
        let fid = FeatureId::AsyncEventConfiguration.to_wire();
        let set = SetFeatures { fid, save: false, cdw11, uuid_index: 0 };
        // A controller that knows no such feature sends what it sends.
        let _ = self.execute_with(Sqe { flags: 0, ..set.to_sqe(0) }, AdminData::None).await;
        for _ in 0..identity.async_events_max.min(REQUESTS_MAX) {
            self.request_event();
        }
    }

    fn request_event(&self) {
        let sqe = Sqe { flags: 0, ..Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()) };
        let mut batch = vec![Command::raw(Tag(EVENT_TAG), sqe, None, None)];
        let mut refused = Vec::new();
        if let Some(queue) = &mut *self.queue.borrow_mut() {
            queue.submit_commands(&mut batch, &mut refused, now_ns());
        }
        if batch.is_empty() && refused.is_empty() {
            self.event_requests.set(self.event_requests.get() + 1);
        }
    }

    /// A request has completed.
    pub(super) fn event_arrived(self: &Rc<Self>, executed: &Executed) {
        self.event_requests.set(self.event_requests.get().saturating_sub(1));
        if !executed.status().is_success() {
            // The controller does not take as many as it said: it keeps those that it has.
            return;
        }
        let Some(event) = AsyncEvent::from_result(executed.result()) else {
            self.request_event();
            return;
        };
        self.shared.push_event(Event(event));
        let owner = self.clone();
        self.core.spawn(async move {
            owner.handle_event(event).await;
            if owner.shared.signal().state() == State::Running {
                owner.request_event();
            }
        });
    }

    /// Reads the log page, which lets the event come again, and does what it calls for.
    async fn handle_event(&self, event: AsyncEvent) {
        if event.kind == AsyncEvent::NAMESPACE_CHANGED.kind
            && event.information == AsyncEvent::NAMESPACE_CHANGED.information
        {
            self.namespaces_changed().await;
            return;
        }
        let view = GetLogPage { lid: event.log_page, length_bytes: LOG_BYTES, ..GetLogPage::default() };
        let sqe = Sqe { flags: 0, ..view.to_sqe(wire_nvme::NSID_ALL) };
        // A log page that cannot be read leaves the event masked until the next reset.
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
        let changed = match NamespaceList::decode(page(&data)) {
            Ok(list) if list.0.first() != Some(&TOO_MANY) => list.0,
            // All, or nonsense: then all are looked at.
            _ => known.clone(),
        };
        let mut news = false;
        for nsid in known.into_iter().filter(|nsid| changed.contains(nsid)) {
            news |= self.learn_namespace(nsid).await.unwrap_or(true);
        }
        if news {
            self.shared.note_change();
        }
    }
}

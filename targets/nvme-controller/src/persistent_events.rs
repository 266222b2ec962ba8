//! The Persistent Event log of a subsystem (Base 2.0, section 5.16.1.14).

use std::collections::VecDeque;
use std::sync::Mutex;

use wire_nvme::log::{
    ChangeNamespace, ControllerReset, HealthLog, PersistentEvent, PersistentEventHeader, PersistentEventType,
    SetFeature, event_timestamp,
};

/// Bytes of a page at most, the header included: the unit of PELS.
pub(crate) const PAGE_BYTES_MAX: usize = 64 << 10;
const EVENTS_BYTES_MAX: usize = PAGE_BYTES_MAX - PersistentEventHeader::SIZE;
/// Between two snapshots of the health log, in milliseconds: hosts that read often must not displace events.
const HEALTH_INTERVAL_MS: u64 = 3_600_000;
/// Controller identifier of events of no controller.
const NO_CONTROLLER: u16 = 0xffff;

/// The Persistent Event log of a subsystem: the most recent events, 64 KiB at most. It is kept while the
/// subsystem exists, and starts anew with the program.
///
/// The control plane creates it with the subsystem and records namespaces; controllers record resets,
/// features and their health log, and read it. All take its lock, for as long as a copy of 64 KiB takes at
/// most; no I/O does.
#[derive(Debug)]
pub struct PersistentEventLog {
    // Milliseconds since 1970.
    clock: fn() -> u64,
    created_ms: u64,
    state: Mutex<EventQueue>,
}

#[derive(Debug, Default)]
struct EventQueue {
    // Encoded, the newest first.
    events: VecDeque<Box<[u8]>>,
    bytes: usize,
    generation: u16,
    health_at_ms: Option<u64>,
}

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventOrigin {
    pub(crate) cntlid: u16,
    pub(crate) port: Option<u16>,
}

const NO_ORIGIN: EventOrigin = EventOrigin { cntlid: NO_CONTROLLER, port: None };

impl PersistentEventLog {
    /// A log that begins with a power-on. The clock returns milliseconds since 1970.
    pub fn new(clock: fn() -> u64) -> PersistentEventLog {
        let log = PersistentEventLog { clock, created_ms: clock(), state: Mutex::default() };
        let data = ControllerReset::encode(crate::FIRMWARE, None);
        log.record(PersistentEventType::PowerOnOrReset, NO_ORIGIN, &data);
        log
    }

    pub(crate) fn record_namespace(&self, event: &ChangeNamespace) {
        let mut data = [0; ChangeNamespace::SIZE];
        event.encode(&mut data);
        self.record(PersistentEventType::ChangeNamespace, NO_ORIGIN, &data);
    }

    pub(crate) fn record_reset(&self, origin: EventOrigin) {
        let now_ms = (self.clock)();
        let reset = ControllerReset {
            cntlid: origin.cntlid,
            power_cycle: 1,
            power_on_ms: now_ms.saturating_sub(self.created_ms),
            timestamp: event_timestamp(now_ms),
        };
        let data = ControllerReset::encode(crate::FIRMWARE, Some(&reset));
        self.record(PersistentEventType::PowerOnOrReset, origin, &data);
    }

    pub(crate) fn record_feature(&self, origin: EventOrigin, feature: &SetFeature) {
        let mut data = [0; SetFeature::SIZE];
        feature.encode(&mut data);
        self.record(PersistentEventType::SetFeature, origin, &data);
    }

    /// Records the health log page, unless that was done in the last hour.
    pub(crate) fn record_health(&self, origin: EventOrigin, page: &[u8]) {
        assert_eq!(page.len(), HealthLog::SIZE, "a health log page of {} bytes", page.len());
        let now_ms = (self.clock)();
        let mut state = sync::lock(&self.state);
        let is_due = |at_ms: u64| now_ms.saturating_sub(at_ms) >= HEALTH_INTERVAL_MS;
        if state.health_at_ms.is_none_or(is_due) {
            state.health_at_ms = Some(now_ms);
            state.push(PersistentEventType::HealthSnapshot, origin, now_ms, page);
        }
    }

    fn record(&self, kind: PersistentEventType, origin: EventOrigin, data: &[u8]) {
        let now_ms = (self.clock)();
        sync::lock(&self.state).push(kind, origin, now_ms, data);
    }

    /// The page of a new reporting context. The header has what the controller knows.
    pub(crate) fn page(&self, header: PersistentEventHeader) -> Vec<u8> {
        let now_ms = (self.clock)();
        let mut state = sync::lock(&self.state);
        state.generation = state.generation.wrapping_add(1);
        let length = PersistentEventHeader::SIZE + state.bytes;
        let header = PersistentEventHeader {
            events: state.events.len() as u32,
            length_bytes: length as u64,
            timestamp: event_timestamp(now_ms),
            generation: state.generation,
            context_port: None,
            supported: [
                PersistentEventType::HealthSnapshot,
                PersistentEventType::PowerOnOrReset,
                PersistentEventType::ChangeNamespace,
                PersistentEventType::SetFeature,
            ]
            .into_iter()
            .fold(0, |bits, kind| bits | 1 << kind.to_wire()),
            ..header
        };
        let mut fixed = [0; PersistentEventHeader::SIZE];
        header.encode(&mut fixed);
        let mut page = Vec::with_capacity(length);
        page.extend(fixed);
        state.events.iter().for_each(|event| page.extend_from_slice(event));
        assert!(page.len() == length && length <= PAGE_BYTES_MAX, "a page of {} bytes", page.len());
        page
    }
}

impl EventQueue {
    /// Adds an event, and removes the oldest ones beyond the limit.
    fn push(&mut self, kind: PersistentEventType, origin: EventOrigin, now_ms: u64, data: &[u8]) {
        let EventOrigin { cntlid, port } = origin;
        let timestamp = event_timestamp(now_ms);
        let data_bytes = u16::try_from(data.len()).expect("the data of an event has 512 bytes at most");
        let mut header = [0; PersistentEvent::SIZE];
        PersistentEvent { kind, cntlid, timestamp, port, data_bytes }.encode(&mut header);
        let event: Box<[u8]> = [&header[..], data].concat().into();
        self.bytes += event.len();
        self.events.push_front(event);
        while self.bytes > EVENTS_BYTES_MAX {
            let oldest = self.events.pop_back().expect("events have the bytes that are counted");
            self.bytes -= oldest.len();
        }
    }
}

impl Default for PersistentEventLog {
    /// A log whose clock stands at 1970.
    fn default() -> Self {
        PersistentEventLog::new(|| 0)
    }
}

/// Logs do not distinguish snapshots of a subsystem.
impl PartialEq for PersistentEventLog {
    fn eq(&self, _: &PersistentEventLog) -> bool {
        true
    }
}

impl Eq for PersistentEventLog {}

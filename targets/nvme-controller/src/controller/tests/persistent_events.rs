//! The Persistent Event log: contexts, events, and reads of any part of it.

use super::*;
use crate::PersistentEventLog;
use crate::persistent_events::PAGE_BYTES_MAX;

const ESTABLISH: u8 = persistent_event_action::ESTABLISH;
const READ: u8 = persistent_event_action::READ;
const RELEASE: u8 = persistent_event_action::RELEASE;

fn read(action: u8, offset: u64, length_bytes: u64) -> Sqe {
    let page = GetLogPage { specific: action, offset, ..log(LogId::PersistentEvents, length_bytes) };
    log_sqe(page, NSID_ALL)
}

/// The header and the events, with their data.
type Parsed = (PersistentEventHeader, Vec<(PersistentEvent, Vec<u8>)>);

fn parse(page: &[u8]) -> Parsed {
    let header = PersistentEventHeader::decode(page.first_chunk().unwrap()).unwrap();
    let (mut at, mut events) = (PersistentEventHeader::SIZE, Vec::new());
    for _ in 0..header.events {
        let event = PersistentEvent::decode(page[at..].first_chunk().unwrap()).unwrap();
        at += PersistentEvent::SIZE;
        events.push((event, page[at..at + usize::from(event.data_bytes)].to_vec()));
        at += usize::from(event.data_bytes);
    }
    assert_eq!(at as u64, header.length_bytes);
    (header, events)
}

/// Establishes a context and reads the log as nvme-cli does, in parts of 4 KiB, then releases it.
fn whole(harness: &mut Harness) -> Parsed {
    let first = data(harness, read(ESTABLISH, 0, 512));
    let length = PersistentEventHeader::decode(first.first_chunk().unwrap()).unwrap().length_bytes;
    let mut page = Vec::new();
    while (page.len() as u64) < length {
        let offset = page.len() as u64;
        page.extend(data(harness, read(READ, offset, (length - offset).next_multiple_of(4).min(4096))));
    }
    data(harness, read(RELEASE, 0, 512));
    parse(&page)
}

fn kinds(parsed: &Parsed) -> Vec<PersistentEventType> {
    parsed.1.iter().map(|(event, _)| event.kind).collect()
}

#[test]
fn the_log_has_what_happened_newest_first() {
    use PersistentEventType::{ChangeNamespace as Changed, HealthSnapshot, PowerOnOrReset};
    let subsystem =
        Subsystem { persistent_events: Arc::new(PersistentEventLog::new(|| 0x1234_5678)), ..subsystem() };
    let events = subsystem.persistent_events.clone();
    let namespaces = subsystem.namespaces.clone();
    let mut harness = Harness::with_subsystem(subsystem, 0);
    harness.enable();
    let controller = IdentifyController::decode(&page(&mut harness, identify(Cns::Controller, 0))).unwrap();
    assert!(controller.lpa & lpa::PERSISTENT_EVENTS != 0);
    assert_eq!(controller.persistent_events_64kib, 1);

    events.namespace_created(&namespaces[1], true);
    events.namespace_deleted(&namespaces[1]);
    let hidden = SubsystemNamespace { visible_hosts: Some([host()].into()), ..namespaces[1].clone() };
    events.namespace_created(&hidden, true);
    result(&mut harness, set_feature(FeatureId::Arbitration, 7));
    // It fails, and is not recorded.
    assert_ne!(status(&mut harness, set_feature(FeatureId::PowerManagement, 1)), Status::SUCCESS);
    assert_eq!(set_cc(&mut harness, 0), Status::SUCCESS);
    harness.enable();

    let parsed = whole(&mut harness);
    let expected =
        [HealthSnapshot, PowerOnOrReset, PersistentEventType::SetFeature, Changed, Changed, PowerOnOrReset];
    assert_eq!(kinds(&parsed), expected);
    let (header, all) = parsed;
    assert_eq!(header.timestamp, event_timestamp(0x1234_5678));
    assert_eq!((header.subnqn.as_str(), header.power_cycles), ("nqn.2026-11.io.ringbolt:one", 1));
    assert_eq!(header.supported, 1 << 1 | 1 << 4 | 1 << 6 | 1 << 11);
    let cntlid = harness.controller.association().cntlid();
    let port = Some(harness.controller.port.portid);
    for (index, (event, _)) in all.iter().enumerate() {
        let origin = if index < 3 { (cntlid, port) } else { (0xffff, None) };
        assert_eq!((event.cntlid, event.port), origin, "event {index}");
        assert_eq!(event.timestamp, event_timestamp(0x1234_5678));
    }
    let health = HealthLog::decode(all[0].1[..].try_into().unwrap());
    assert_eq!(health.temperature_kelvins, 293);
    assert_eq!(ControllerReset::decode(&all[1].1).unwrap().unwrap().cntlid, cntlid);
    let feature = SetFeature::decode(all[2].1[..].try_into().unwrap()).unwrap();
    assert_eq!(feature, SetFeature { cdw10: FeatureId::Arbitration.to_wire().into(), cdw11: 7 });
    let change = |index: usize| ChangeNamespace::decode(all[index].1[..].try_into().unwrap()).unwrap();
    assert_eq!(change(3), ChangeNamespace { deleted: true, nsid: 3, ..ChangeNamespace::default() });
    let created = ChangeNamespace { deleted: false, blocks: 256, shared: true, anagrpid: 2, nsid: 3 };
    assert_eq!(change(4), created);
    assert_eq!(ControllerReset::decode(&all[5].1), Ok(None));
}

#[test]
fn a_context_must_be_established_once_and_ends_with_a_release_or_a_reset() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let sequence = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
    assert_eq!(status(&mut harness, read(READ, 0, 512)), sequence);
    // Not an error.
    assert_eq!(data(&mut harness, read(RELEASE, 0, 512)), [0; 512]);
    let first = data(&mut harness, read(ESTABLISH, 0, 512));
    let header = PersistentEventHeader::decode(first.first_chunk().unwrap()).unwrap();
    assert_eq!(header.context_port, None);
    assert_eq!(status(&mut harness, read(ESTABLISH, 0, 512)), sequence);
    // The context does not change with the log.
    result(&mut harness, set_feature(FeatureId::Arbitration, 1));
    let again = data(&mut harness, read(READ, 0, 512));
    let again = PersistentEventHeader::decode(again.first_chunk().unwrap()).unwrap();
    let existing = PersistentEventHeader { context_port: Some(harness.controller.port.portid), ..header };
    assert_eq!(again, existing);
    data(&mut harness, read(RELEASE, 0, 4));
    assert_eq!(status(&mut harness, read(READ, 0, 512)), sequence);
    let next = data(&mut harness, read(ESTABLISH, 0, 512));
    let next = PersistentEventHeader::decode(next.first_chunk().unwrap()).unwrap();
    assert_eq!((next.generation, next.events), (existing.generation + 1, existing.events + 1));
    assert_eq!(set_cc(&mut harness, 0), Status::SUCCESS);
    harness.enable();
    assert_eq!(status(&mut harness, read(READ, 0, 512)), sequence);
}

#[test]
fn each_controller_has_its_own_context_of_one_log() {
    let subsystem = subsystem();
    let mut one = Harness::with_subsystem(subsystem.clone(), 0);
    let mut other = Harness::with_subsystem(subsystem, 0);
    one.enable();
    other.enable();
    data(&mut one, read(ESTABLISH, 0, 512));
    result(&mut one, set_feature(FeatureId::Arbitration, 1));
    // The other one's context has the event, though the first one's has not.
    let parsed = whole(&mut other);
    assert_eq!(kinds(&parsed)[0], PersistentEventType::SetFeature);
    let (header, _) = parse(&data(&mut one, read(READ, 0, 4096)));
    assert_eq!(header.events + 1, parsed.0.events);
    assert_eq!(header.generation + 1, parsed.0.generation);
}

#[test]
fn any_part_of_a_context_can_be_read_and_nothing_beyond() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    let invalid = Status::INVALID_FIELD.do_not_retry();
    // A context is not established by a command that fails.
    for offset in [2, 4 << 20, u64::MAX - 3] {
        assert_eq!(status(&mut harness, read(ESTABLISH, offset, 512)), invalid, "{offset}");
    }
    assert_eq!(status(&mut harness, read(ESTABLISH, 0, 256 << 10)), invalid, "more than MDTS");
    assert_eq!(status(&mut harness, read(3, 0, 512)), invalid, "a reserved action");
    assert_eq!(status(&mut harness, read(RELEASE, 4, 512)), invalid);
    let short = Sqe { data: DataPointer::transport(508), ..read(ESTABLISH, 0, 512) };
    assert_eq!(status(&mut harness, short), Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    let index =
        GetLogPage { offset_is_index: true, specific: ESTABLISH, ..log(LogId::PersistentEvents, 512) };
    assert_eq!(status(&mut harness, log_sqe(index, NSID_ALL)), invalid);

    let whole = data(&mut harness, read(ESTABLISH, 0, 4096));
    let mut whole = whole.clone();
    PersistentEventHeader::mark_existing(&mut whole, harness.controller.port.portid);
    let length = parse(&whole).0.length_bytes as usize;
    assert!(length < 4096 && whole[length..].iter().all(|byte| *byte == 0));
    for offset in (0..=length).step_by(4) {
        for bytes in [4, 20, 512] {
            let part = data(&mut harness, read(READ, offset as u64, bytes as u64));
            let mut expected = whole[offset..length.min(offset + bytes)].to_vec();
            expected.resize(bytes, 0);
            assert_eq!(part, expected, "{bytes} bytes from {offset}");
        }
    }
    let beyond = (length + 4) as u64 & !3;
    assert_eq!(status(&mut harness, read(READ, beyond, 4)), invalid);
    assert_eq!(status(&mut harness, read(READ, u64::MAX - 3, 4)), invalid);
}

#[test]
fn the_log_is_bounded_and_loses_the_oldest_events() {
    let mut harness = Harness::enabled(SubsystemKind::Nvm);
    for value in 0..5000 {
        result(&mut harness, set_feature(FeatureId::Arbitration, value));
    }
    let (header, events) = whole(&mut harness);
    // An event of 36 bytes did not fit.
    assert!((PAGE_BYTES_MAX - 36..=PAGE_BYTES_MAX).contains(&(header.length_bytes as usize)));
    let values = events.iter().filter(|(event, _)| event.kind == PersistentEventType::SetFeature);
    let values = values.map(|(_, data)| SetFeature::decode(data[..].try_into().unwrap()).unwrap().cdw11);
    assert!(values.eq((5000 - (events.len() as u32 - 1)..5000).rev()), "the newest, and one health snapshot");
}

#[test]
fn health_is_recorded_once_an_hour_and_only_for_hosts_that_see_all_namespaces() {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NOW_MS: AtomicU64 = AtomicU64::new(0);
    let mut subsystem = Subsystem {
        persistent_events: Arc::new(PersistentEventLog::new(|| NOW_MS.load(Ordering::Relaxed))),
        ..subsystem()
    };
    let snapshots = |parsed: &Parsed| {
        kinds(parsed).iter().filter(|kind| **kind == PersistentEventType::HealthSnapshot).count()
    };
    let mut harness = Harness::with_subsystem(subsystem.clone(), 0);
    harness.enable();
    for (now_ms, count) in [(0, 1), (3_599_999, 1), (3_600_000, 2), (3_600_001, 2), (0, 2)] {
        NOW_MS.store(now_ms, Ordering::Relaxed);
        assert_eq!(snapshots(&whole(&mut harness)), count, "at {now_ms} ms");
    }
    NOW_MS.store(1 << 40, Ordering::Relaxed);
    subsystem.namespaces[0].visible_hosts = Some(Default::default());
    let mut restricted = Harness::with_subsystem(subsystem, 0);
    restricted.enable();
    assert_eq!(snapshots(&whole(&mut restricted)), 2);
}

#[test]
fn discovery_controllers_have_no_such_log() {
    let mut harness = Harness::enabled(SubsystemKind::Discovery);
    assert_eq!(status(&mut harness, read(ESTABLISH, 0, 512)), Status::INVALID_LOG_PAGE.do_not_retry());
}

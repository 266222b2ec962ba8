//! Golden and property tests of Copy, reservations, zones, namespace management and doorbells. As in
//! `golden.rs`, a C program filled in the structures of SPDK's public headers (SPDK 26.09, on little-endian
//! x86-64) and printed the bytes.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use wire_nvme::Sqe;
use wire_nvme::doorbell::{AdminQueueAttributes, DoorbellBuffer};
use wire_nvme::io::{CopyCommand, CopyRange, Prinfo, WriteUncorrectable};
use wire_nvme::manage::{FormatNvm, NamespaceAttachment, NewNamespace, SecureErase};
use wire_nvme::reservation::*;
use wire_nvme::zone::*;

fn bytes(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap())
        .collect()
}

/// A command from its opcode, NSID and dwords 10 to 15; the other fields are zero.
fn sqe(opcode: u8, nsid: u32, tail: &str) -> Sqe {
    let mut entry = [0; 64];
    entry[0] = opcode;
    entry[4..8].copy_from_slice(&nsid.to_le_bytes());
    entry[40..].copy_from_slice(&bytes(tail));
    Sqe::decode(&entry)
}

/// Clears PSDT: encoded I/O commands carry SGLs by default, as for fabrics.
fn plain(sqe: Sqe) -> Sqe {
    Sqe { flags: 0, nsid: 1, ..sqe }
}

#[test]
fn copy_and_write_uncorrectable() {
    let entry = sqe(0x19, 1, "112233445500000003a00054000000001414141478563412");
    let view = CopyCommand {
        lba: 0x55_4433_2211,
        ranges: 4,
        read_prinfo: Prinfo::ACTION | Prinfo::CHECK_APPLICATION_TAG,
        write_prinfo: Prinfo::CHECK_GUARD | Prinfo::CHECK_REFERENCE_TAG,
        fua: true,
        limited_retry: false,
        reference_tag: 0x1414_1414,
        application_tag: 0x5678,
        application_tag_mask: 0x1234,
    };
    assert_eq!(CopyCommand::from_sqe(&entry), Some(view));
    assert_eq!(plain(view.to_sqe()), entry);
    let range: [u8; 32] =
        bytes("000000000000000055443322110000000f00000000000000ddccbbaa11112222").try_into().unwrap();
    let view = CopyRange {
        lba: 0x11_2233_4455,
        blocks: 16,
        reference_tag: 0xaabb_ccdd,
        application_tag: 0x1111,
        application_tag_mask: 0x2222,
    };
    assert_eq!(CopyRange::decode(&range), view);
    let mut made = [0xa5; 32];
    view.encode(&mut made);
    assert_eq!(made, range);
    let entry = sqe(0x04, 1, "080000000000000007000000000000000000000000000000");
    let view = WriteUncorrectable { lba: 8, blocks: 8 };
    assert_eq!(WriteUncorrectable::from_sqe(&entry), view);
    assert_eq!(plain(view.to_sqe()), entry);
}

#[test]
fn reservation_commands() {
    let entry = sqe(0x0d, 1, "0a0000c00000000000000000000000000000000000000000");
    let view = ReservationRegister {
        action: RegisterAction::Replace,
        ignore_key: true,
        persist: PersistChange::Persistent,
    };
    assert_eq!(ReservationRegister::from_sqe(&entry), Some(view));
    assert_eq!(plain(view.to_sqe()), entry);
    let entry = sqe(0x11, 1, "020400000000000000000000000000000000000000000000");
    let view = ReservationAcquire {
        action: AcquireAction::PreemptAndAbort,
        ignore_key: false,
        kind: ReservationType::ExclusiveAccessRegistrants,
    };
    assert_eq!(ReservationAcquire::from_sqe(&entry), Some(view));
    assert_eq!(plain(view.to_sqe()), entry);
    let entry = sqe(0x15, 1, "090500000000000000000000000000000000000000000000");
    let view = ReservationRelease {
        action: ReleaseAction::Clear,
        ignore_key: true,
        kind: ReservationType::WriteExclusiveAll,
    };
    assert_eq!(ReservationRelease::from_sqe(&entry), Some(view));
    assert_eq!(plain(view.to_sqe()), entry);
    assert_eq!(decode_keys(&encode_keys(1, 0xabcd)), (1, 0xabcd));
}

#[test]
fn reservation_reports() {
    let short = bytes(
        "070000000501000000010000000000000000000000000000\
         03000100000000000102030405060708cdab000000000000",
    );
    let registrant = |length: u8| RegisteredController {
        cntlid: 3,
        holder: true,
        host_id: std::array::from_fn(|index| if index < length as usize { index as u8 + 1 } else { 0 }),
        key: 0xabcd,
    };
    let report = |length| ReservationStatus {
        generation: 7,
        kind: Some(ReservationType::WriteExclusiveAll),
        persistent: true,
        registrants: vec![registrant(length)],
    };
    assert_eq!(ReservationStatus::decode(&short, false), Ok(report(8)));
    let mut made = vec![0xa5; short.len()];
    report(8).encode(false, &mut made);
    assert_eq!(made, short);
    let mut long = bytes("07000000050100000001");
    long.resize(64, 0);
    long.extend(bytes("0300010000000000cdab0000000000000102030405060708090a0b0c0d0e0f10"));
    long.resize(128, 0);
    assert_eq!(ReservationStatus::decode(&long, true), Ok(report(16)));
    let mut made = vec![0xa5; long.len()];
    report(16).encode(true, &mut made);
    assert_eq!(made, long);
    assert!(ReservationStatus::decode(&long[..23], true).is_err());
    assert_eq!(ReservationStatus::decode(&long[..100], true).unwrap().registrants, []);
}

#[test]
fn management_commands() {
    let entry = sqe(0x80, 4, "721500000000000000000000000000000000000000000000");
    let view = FormatNvm {
        format: 18,
        extended_lba: true,
        protection: 3,
        protection_first: true,
        secure_erase: SecureErase::Cryptographic,
    };
    assert_eq!(FormatNvm::from_sqe(&entry), Some(view));
    assert_eq!(view.to_sqe(4), entry);
    let entry = sqe(0x15, 4, "010000000000000000000000000000000000000000000000");
    assert_eq!(NamespaceAttachment::from_sqe(&entry), Some(NamespaceAttachment { attach: false }));
    assert_eq!(NamespaceAttachment { attach: false }.to_sqe(4), entry);
    let entry = sqe(0x0d, 4, "010000000000000000000000000000000000000000000000");
    assert_eq!(NewNamespace::to_delete_sqe(4), entry);
    let mut data = [0; 4096];
    for (at, value) in [(1, 0x10), (9, 8), (26, 0x11), (29, 9), (30, 1), (92, 5), (100, 6)] {
        data[at] = value;
    }
    let view = NewNamespace {
        nsze: 0x1000,
        ncap: 0x800,
        format: 1,
        extended_lba: true,
        dps: 9,
        nmic: 1,
        anagrpid: 5,
        nvmsetid: 6,
    };
    assert_eq!(NewNamespace::decode(&data), view);
    let mut made = [0xa5; 4096];
    view.encode(&mut made);
    assert_eq!(made, data);
}

#[test]
fn doorbells() {
    let value = u32::from_le_bytes([0x1f, 0, 0xff, 0x0f]);
    let view = AdminQueueAttributes { submission_entries: 32, completion_entries: 4096 };
    assert_eq!(AdminQueueAttributes::decode(value), view);
    assert_eq!(view.encode(), value);
    let mut entry = [0; 64];
    (entry[0], entry[26], entry[34]) = (0x7c, 1, 2);
    let view = DoorbellBuffer { shadow: 0x10000, events: 0x20000 };
    assert_eq!(DoorbellBuffer::from_sqe(&Sqe::decode(&entry)), view);
    assert_eq!(view.to_sqe().to_bytes(), entry);
}

#[test]
fn zones() {
    let entry = sqe(0x79, 1, "001000000000000000000000040100000000000000000000");
    let view = ZoneManagementSend { zone_lba: 0x1000, action: ZoneAction::Reset, all: true };
    assert_eq!(ZoneManagementSend::from_sqe(&entry), Some(view));
    assert_eq!(plain(view.to_sqe()), entry);
    let entry = sqe(0x7a, 1, "0010000000000000ff030000000101000000000000000000");
    let view = ZoneManagementReceive {
        lba: 0x1000,
        length_bytes: 4096,
        extended: false,
        filter: ReportFilter::Empty,
        partial: true,
    };
    assert_eq!(ZoneManagementReceive::from_sqe(&entry), Some(view));
    assert_eq!(plain(view.to_sqe()), entry);
    let entry = sqe(0x7d, 1, "001000000000000007000042000000000000000000000000");
    let view = ZoneAppend { zone_lba: 0x1000, blocks: 8, fua: true, remap: true, ..ZoneAppend::default() };
    assert_eq!(ZoneAppend::from_sqe(&entry), view);
    assert_eq!(plain(view.to_sqe()), entry);
    let mut descriptor = bytes("0240040000000000000800000000000000100000000000003412");
    descriptor.resize(64, 0);
    let descriptor: [u8; 64] = descriptor.try_into().unwrap();
    let view = ZoneDescriptor {
        state: ZoneState::Closed,
        attributes: 4,
        information: 0,
        capacity_blocks: 0x800,
        lba: 0x1000,
        write_pointer: 0x1234,
    };
    assert_eq!(ZoneDescriptor::decode(&descriptor), Ok(view));
    let mut made = [0xa5; 64];
    view.encode(&mut made);
    assert_eq!(made, descriptor);
    let mut report = vec![0; 64];
    report[0] = 9;
    report.extend(descriptor);
    assert_eq!(ZoneDescriptor::list(&report), Ok((9, vec![view])));
    let mut data = [0; 4096];
    data[..12].copy_from_slice(&bytes("000001000d000000ffffffff"));
    data[2832..2848].copy_from_slice(&bytes("00100000000000000200000000000000"));
    let view = ZonedNamespace::decode(&data);
    assert_eq!((view.optional, view.active_max, view.open_max), (1, Some(14), None));
    assert_eq!(view.formats[1], (0x1000, 128));
    let mut made = [0xa5; 4096];
    view.encode(&mut made);
    assert_eq!(made, data);
}

proptest! {
    #[test]
    fn typed_commands_round_trip(words in prop::array::uniform16(any::<u32>())) {
        let mut entry = [0; 64];
        for (place, word) in entry.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let sqe = Sqe::decode(&entry);
        macro_rules! round_trip {
            ($($view:ty),*) => {$(
                if let Some(view) = <$view>::from_sqe(&sqe) {
                    prop_assert_eq!(<$view>::from_sqe(&view.to_sqe()), Some(view));
                }
            )*};
        }
        round_trip!(CopyCommand, ReservationRegister, ReservationAcquire, ReservationRelease, ZoneManagementSend, ZoneManagementReceive);
        if let Some(view) = FormatNvm::from_sqe(&sqe) {
            prop_assert_eq!(FormatNvm::from_sqe(&view.to_sqe(1)), Some(view));
        }
        prop_assert_eq!(ZoneAppend::from_sqe(&ZoneAppend::from_sqe(&sqe).to_sqe()), ZoneAppend::from_sqe(&sqe));
        let view = WriteUncorrectable::from_sqe(&sqe);
        prop_assert_eq!(WriteUncorrectable::from_sqe(&view.to_sqe()), view);
        let view = ReservationReport::from_sqe(&sqe);
        prop_assert_eq!(ReservationReport::from_sqe(&view.to_sqe()), view);
    }

    #[test]
    fn decoding_an_arbitrary_report_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        for extended in [false, true] {
            if let Ok(report) = ReservationStatus::decode(&bytes, extended) {
                let mut encoded = vec![0; ReservationStatus::size(report.registrants.len(), extended)];
                report.encode(extended, &mut encoded);
                prop_assert_eq!(ReservationStatus::decode(&encoded, extended), Ok(report));
            }
        }
        if let Ok((count, zones)) = ZoneDescriptor::list(&bytes) {
            prop_assert!(zones.len() as u64 <= count);
        }
    }
}

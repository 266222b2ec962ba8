//! Bytes and offsets of the specification: virtio 1.3, and the kernel's `virtio_ring.h` and `virtio_blk.h`.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use wire_virtio::blk::{BlkConfig, BlkStatus, RangeSegment, RequestHeader, RequestKind};
use wire_virtio::packed::{EventSuppression, PackedDescriptor, RingPosition};
use wire_virtio::scsi::{
    AsyncRequest, AsyncResponse, CommandHeader, ControlKind, ResponseHeader, ScsiConfig, ScsiEvent,
    ScsiResponse, TaskFunction, TaskManagementRequest, UnitAddress,
};
use wire_virtio::split::{self, Descriptor, UsedElement, available, used};
use wire_virtio::{Features, descriptor_flags, needs_event};

#[test]
fn descriptors_have_the_layout_of_the_specification() {
    // struct virtq_desc, section 2.7.5.
    let descriptor = Descriptor {
        address: 0x1122_3344_5566_7788,
        length: 0x99aa_bbcc,
        flags: descriptor_flags::NEXT | descriptor_flags::WRITE,
        next: 0x0102,
    };
    let bytes =
        [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xcc, 0xbb, 0xaa, 0x99, 0x03, 0x00, 0x02, 0x01];
    assert_eq!(descriptor.to_bytes(), bytes);
    // struct pvirtq_desc, section 2.8.13: the identifier comes before the flags.
    let packed = PackedDescriptor::decode(&bytes).unwrap();
    assert_eq!((packed.id, packed.flags), (3, 0x0102));
    // The same in words.
    let words = [0x1122_3344_5566_7788, 0x0102_0003_99aa_bbcc];
    assert_eq!((Descriptor::from_words(words), PackedDescriptor::from_words(words)), (descriptor, packed));
    // struct virtq_used_elem, section 2.7.8.
    assert_eq!(UsedElement { id: 5, written: 513 }.to_bytes(), [5, 0, 0, 0, 1, 2, 0, 0]);
    // struct pvirtq_event_suppress, section 2.8.14.
    let event = EventSuppression { offset_wrap: 0x8003, flags: EventSuppression::DESCRIPTOR };
    assert_eq!(event.to_bytes(), [0x03, 0x80, 0x02, 0x00]);
}

#[test]
fn split_rings_have_the_sizes_of_the_specification() {
    // Section 2.7: 16 × size, 6 + 2 × size, 6 + 8 × size.
    for size in [1, 2, 256, 1 << 15] {
        assert_eq!(split::table_bytes(size), 16 * u64::from(size));
        assert_eq!(available::bytes(size, true), 6 + 2 * u64::from(size));
        assert_eq!(used::bytes(size, true), 6 + 8 * u64::from(size));
        assert_eq!(available::bytes(size, false), 4 + 2 * u64::from(size));
    }
    assert_eq!((available::entry(257, 256), used::entry(257, 256)), (6, 12));
    assert_eq!((available::used_event(256), used::available_event(256)), (516, 2052));
}

#[test]
fn block_requests_have_the_layout_of_the_specification() {
    let header = RequestHeader { kind: RequestKind::Out.to_wire(), priority: 0, sector: 0x1234 };
    assert_eq!(header.to_bytes(), [1, 0, 0, 0, 0, 0, 0, 0, 0x34, 0x12, 0, 0, 0, 0, 0, 0]);
    assert_eq!(RequestHeader::from_words([1, 0x1234]), header);
    assert_eq!(RequestHeader::from_words([7 << 32, 0]), RequestHeader { kind: 0, priority: 7, sector: 0 });
    let segment = RangeSegment { sector: 8, sectors: 16, flags: RangeSegment::UNMAP };
    assert_eq!(segment.to_bytes(), [8, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 1, 0, 0, 0]);
    let known: Vec<u32> = (0..32).filter(|value| RequestKind::from_wire(*value).is_some()).collect();
    assert_eq!(known, [0, 1, 4, 8, 11, 13]);
    for value in known {
        assert_eq!(RequestKind::from_wire(value).map(RequestKind::to_wire), Some(value));
    }
    for value in 0..=u8::MAX {
        assert_eq!(
            BlkStatus::decode(value).ok().map(BlkStatus::to_wire),
            Some(value).filter(|value| *value < 3)
        );
    }
}

#[test]
fn the_configuration_has_the_offsets_of_virtio_blk_h() {
    let config = BlkConfig {
        capacity: 0x0807_0605_0403_0201,
        size_max: 0x0c0b_0a09,
        seg_max: 126,
        cylinders: 0x1211,
        heads: 0x13,
        sectors: 0x14,
        block_size: 512,
        physical_block_exponent: 3,
        alignment_offset: 4,
        min_io_blocks: 8,
        optimal_io_blocks: 256,
        writeback: 1,
        queues: 4,
        discard_sectors_max: 36,
        discard_segments_max: 40,
        discard_alignment: 44,
        write_zeroes_sectors_max: 48,
        write_zeroes_segments_max: 52,
        write_zeroes_may_unmap: 1,
        ..BlkConfig::default()
    };
    let bytes = config.to_bytes();
    assert_eq!(bytes[..12], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!(bytes[12..20], [126, 0, 0, 0, 0x11, 0x12, 0x13, 0x14]);
    assert_eq!(bytes[20..32], [0, 2, 0, 0, 3, 4, 8, 0, 0, 1, 0, 0]);
    assert_eq!((bytes[BlkConfig::WRITEBACK], bytes[34]), (1, 4));
    // Offsets that are stored as values.
    for offset in [36, 40, 44, 48, 52] {
        assert_eq!(usize::from(bytes[offset]), offset);
    }
    assert_eq!(bytes[56], 1);
    assert_eq!(BlkConfig::decode(&bytes), Ok(config));
}

#[test]
fn scsi_commands_have_the_layout_of_virtio_scsi_h() {
    // struct virtio_scsi_cmd_req: LUN 1 of target 3, tag, attribute, priority, CRN, and the CDB behind it.
    let address = UnitAddress { target: 3, lun: 1 };
    assert_eq!(address.to_field().to_le_bytes(), [1, 3, 0x40, 1, 0, 0, 0, 0]);
    let header = CommandHeader {
        lun: address.to_field(),
        tag: 0x1122_3344_5566_7788,
        attribute: 1,
        priority: 2,
        reference_number: 3,
    };
    let tag = [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];
    assert_eq!(header.to_bytes(), *[&[1, 3, 0x40, 1, 0, 0, 0, 0], &tag[..], &[1, 2, 3]].concat());
    assert_eq!((wire_virtio::scsi::COMMAND_BYTES, wire_virtio::scsi::RESPONSE_BYTES), (51, 108));
    // struct virtio_scsi_cmd_resp, whose sense data follows.
    let response = ResponseHeader {
        sense_length: 18,
        residual: 0x0102,
        status_qualifier: 0x0304,
        status: 2,
        response: 0,
    };
    assert_eq!(response.to_bytes(), [18, 0, 0, 0, 2, 1, 0, 0, 4, 3, 2, 0]);
}

#[test]
fn scsi_addresses_are_those_of_a_single_level() {
    for (target, lun) in [(0, 0), (7, 0), (255, 255), (1, 256), (1, UnitAddress::LUN_MAX)] {
        let address = UnitAddress { target, lun };
        assert_eq!(UnitAddress::decode(address.to_field()), Ok(address));
        assert_eq!(UnitAddress::decode(address.to_event_field()), Ok(address));
    }
    // As QEMU sends them in events.
    let event = |lun| UnitAddress { target: 2, lun }.to_event_field().to_le_bytes();
    assert_eq!((event(5), event(261)), ([1, 2, 0, 5, 0, 0, 0, 0], [1, 2, 0x41, 5, 0, 0, 0, 0]));
    // As Linux' virtio_scsi sends LUNs below 256 and above.
    let decode = |bytes| UnitAddress::decode(u64::from_le_bytes(bytes));
    assert_eq!(decode([1, 2, 0x40, 5, 0, 0, 0, 0]), Ok(UnitAddress { target: 2, lun: 5 }));
    assert_eq!(decode([1, 2, 0x41, 5, 0, 0, 0, 0]), Ok(UnitAddress { target: 2, lun: 261 }));
    assert_eq!(decode([1, 2, 0, 5, 0, 0, 0, 0]), Ok(UnitAddress { target: 2, lun: 5 }));
    // Another first byte, another method, a second level, a well-known logical unit.
    for other in [
        [0, 2, 0x40, 5, 0, 0, 0, 0],
        [1, 2, 0x80, 5, 0, 0, 0, 0],
        [1, 2, 0x40, 5, 1, 0, 0, 0],
        [0xc1, 1, 0, 0, 0, 0, 0, 0],
    ] {
        assert!(decode(other).is_err(), "{other:?}");
    }
}

#[test]
fn scsi_control_requests_and_events_have_the_layout_of_virtio_scsi_h() {
    let lun = UnitAddress { target: 1, lun: 0 }.to_field();
    let request = TaskManagementRequest {
        kind: ControlKind::TaskManagement.to_wire(),
        function: TaskFunction::LogicalUnitReset.to_wire(),
        lun,
        tag: 9,
    };
    let bytes = [0, 0, 0, 0, 5, 0, 0, 0, 1, 1, 0x40, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(request.to_bytes(), bytes);
    let request = AsyncRequest { kind: ControlKind::AsyncSubscribe.to_wire(), lun, requested: 0x12 };
    assert_eq!(request.to_bytes(), [2, 0, 0, 0, 1, 1, 0x40, 0, 0, 0, 0, 0, 0x12, 0, 0, 0]);
    let response = AsyncResponse { actual: 0x10, response: ScsiResponse::IncorrectLun.to_wire() };
    assert_eq!(response.to_bytes(), [0x10, 0, 0, 0, 12]);
    let event =
        ScsiEvent { event: ScsiEvent::PARAMETER_CHANGE | ScsiEvent::MISSED, lun, reason: 0x2a | 0x09 << 8 };
    assert_eq!(event.to_bytes(), [3, 0, 0, 0x80, 1, 1, 0x40, 0, 0, 0, 0, 0, 0x2a, 9, 0, 0]);
    let known = |count: u32, decode: &dyn Fn(u32) -> Option<u32>| {
        (0..count + 3)
            .for_each(|value| assert_eq!(decode(value), Some(value).filter(|value| *value < count)));
    };
    known(13, &|value| ScsiResponse::decode(value as u8).ok().map(|one| one.to_wire().into()));
    known(8, &|value| TaskFunction::decode(value).ok().map(TaskFunction::to_wire));
    known(3, &|value| ControlKind::decode(value).ok().map(ControlKind::to_wire));
}

#[test]
fn the_scsi_configuration_has_the_offsets_of_virtio_scsi_h() {
    let config = ScsiConfig {
        request_queues: 2,
        seg_max: 126,
        max_sectors: 0x1000,
        commands_per_lun: 128,
        event_info_size: 16,
        sense_size: 96,
        cdb_size: 32,
        max_channel: 0,
        max_target: 7,
        max_lun: 16383,
    };
    let words = [2, 126, 0x1000, 128, 16, 96, 32, 7 << 16, 16383];
    assert_eq!(config.to_bytes(), *words.map(u32::to_le_bytes).concat());
    assert_eq!(
        (config.to_bytes()[ScsiConfig::SENSE_SIZE], config.to_bytes()[ScsiConfig::CDB_SIZE]),
        (96, 32)
    );
    assert_eq!(ScsiConfig::decode(&config.to_bytes()), Ok(config));
}

#[test]
fn feature_bits_are_those_of_the_specification() {
    let bits =
        |features: Features| features.iter().map(|bit| bit.bits().trailing_zeros()).collect::<Vec<_>>();
    assert_eq!(bits(Features::all()), [0, 1, 2, 4, 5, 6, 9, 10, 11, 12, 13, 14, 26, 28, 29, 30, 32, 34]);
}

#[test]
fn an_event_is_due_when_its_index_is_passed() {
    // vring_need_event of the kernel.
    assert!(needs_event(5, 6, 5) && needs_event(5, 10, 3));
    assert!(!needs_event(6, 6, 5) && !needs_event(5, 5, 4) && !needs_event(5, 10, 6));
    assert!(needs_event(0xffff, 0, 0xffff) && !needs_event(0, 0, 0xffff));
}

#[test]
fn wrap_counters_tell_available_from_used() {
    let start = RingPosition::START;
    assert!(start.is_available(descriptor_flags::AVAILABLE));
    assert!(!start.is_available(0) && !start.is_available(start.used_flags()));
    let wrapped = start.advanced(4, 4);
    assert_eq!(wrapped, RingPosition { index: 0, wrap: false });
    assert!(wrapped.is_available(descriptor_flags::USED) && !wrapped.is_available(start.available_flags()));
    assert_eq!(start.advanced(3, 4), RingPosition { index: 3, wrap: true });
}

proptest! {
    #[test]
    fn arbitrary_bytes_round_trip(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        macro_rules! round_trip {
            ($($type:ident),*) => {$(
                if let Ok(decoded) = $type::decode(&bytes) {
                    prop_assert_eq!(&decoded.to_bytes()[..], &bytes[..$type::SIZE]);
                } else {
                    prop_assert!(bytes.len() < $type::SIZE);
                }
            )*};
        }
        round_trip!(Descriptor, UsedElement, PackedDescriptor, EventSuppression, RequestHeader, RangeSegment, BlkConfig);
        round_trip!(CommandHeader, ResponseHeader, TaskManagementRequest, AsyncRequest, AsyncResponse, ScsiEvent, ScsiConfig);
    }

    #[test]
    fn positions_round_trip(bits: u16) {
        prop_assert_eq!(RingPosition::from_bits(bits).to_bits(), bits);
    }

    #[test]
    fn positions_stay_in_the_ring(size in 1..=wire_virtio::QUEUE_SIZE_MAX, index: u16, count: u16, wrap: bool) {
        let (index, count) = (index % size, count % size);
        let position = RingPosition { index, wrap }.advanced(count, size);
        let sum = u32::from(index) + u32::from(count);
        prop_assert_eq!(u32::from(position.index), sum % u32::from(size));
        prop_assert_eq!(position.wrap, wrap ^ (sum >= u32::from(size)));
    }
}

//! Every decoder of SCSI with arbitrary bytes. Decoded values round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire_scsi::blocks::UnmapList;
use wire_scsi::copy::{CopyList, CopySegment, target_designator};
use wire_scsi::mode::{ModePage, pages_of_list};
use wire_scsi::reserve::{ReserveOutList, TransportId, transport_ids};
use wire_scsi::{Cdb, ScsiStatus, SenseKey, luns};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(cdb) = Cdb::decode(bytes) {
        assert_eq!(Cdb::decode(&[bytes, &[0x5a]].concat()), Ok(cdb));
    }
    if let Some(lun) = bytes.first_chunk().and_then(|bytes| luns::decode_lun(*bytes)) {
        assert_eq!(luns::decode_lun(luns::encode_lun(lun)), Some(lun));
    }
    if let Some(code) = bytes.first() {
        assert!(ScsiStatus::from_wire(*code).is_none_or(|status| status.to_wire() == *code));
        assert!(SenseKey::from_wire(*code).is_none_or(|key| key as u8 == *code));
    }
    if let Ok(list) = UnmapList::decode(bytes) {
        assert_eq!(list.iter().count(), list.len());
    }
    for ten in [false, true] {
        let mut pages = pages_of_list(bytes, ten).unwrap_or_default();
        while !pages.is_empty() {
            let Ok((page, rest)) = ModePage::decode(pages) else { break };
            assert_eq!(page.bytes.len() + rest.len(), pages.len());
            pages = rest;
        }
    }
    if let Ok(list) = CopyList::decode(bytes) {
        list.targets.as_chunks().0.iter().for_each(|target| _ = target_designator(target));
        for segment in list.segments.as_chunks().0 {
            if let Some(decoded) = CopySegment::decode(segment) {
                assert_eq!(CopySegment::decode(&decoded.encode()), Some(decoded));
            }
        }
    }
    if let Ok(list) = ReserveOutList::decode(bytes) {
        assert_eq!(ReserveOutList::decode(&list.encode()), Ok(list));
    }
    let mut ids = transport_ids(bytes).unwrap_or_default();
    while !ids.is_empty() {
        let Ok((id, rest)) = TransportId::decode(ids) else { break };
        let encoded = id.encode();
        assert_eq!(TransportId::decode(&encoded), Ok((id, &[][..])));
        ids = rest;
    }
});

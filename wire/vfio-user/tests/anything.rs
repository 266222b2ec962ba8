//! Arbitrary bytes are decoded or rejected, and decoded values round-trip.

use proptest::prelude::*;
use wire_vfio_user::*;

macro_rules! round_trip {
    ($bytes:ident: $($type:ident),*) => {$(
        if let Ok(decoded) = $type::decode(&$bytes) {
            prop_assert_eq!($type::decode(&decoded.to_bytes()), Ok(decoded));
        } else {
            prop_assert!($bytes.len() < $type::SIZE);
        }
    )*};
}

proptest! {
    #[test]
    fn arbitrary_bytes_round_trip(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        round_trip!(bytes: DmaMap, DmaUnmap, DmaAccess, DeviceInfo, RegionInfo, SparseArea, IoFdsRequest,
            IrqInfo, SetIrqs, RegionAccess);
        if let Some(Ok(header)) = bytes.first_chunk().map(Header::decode) {
            prop_assert_eq!(Header::decode(&header.to_bytes()), Ok(header));
        }
        if let Ok(version) = VersionMessage::decode(&bytes) {
            prop_assert_eq!(VersionMessage::decode(&version.to_bytes()), Ok(version));
        }
        if let Ok(reply) = RegionReply::decode(&bytes) {
            let decoded = RegionReply::decode(&reply.to_bytes(usize::MAX));
            prop_assert_eq!(decoded.map(|decoded| decoded.areas), Ok(reply.areas));
        }
        if let Ok(writes) = MultiWrites::decode(&bytes) {
            prop_assert_eq!(MultiWrites::decode(&writes.to_bytes()), Ok(writes));
        }
    }

    #[test]
    fn arbitrary_json_round_trips(text in "[\\{\\}\\[\\]\"a-z_:,0-9]{0,80}") {
        let bytes = [&[0, 0, 1, 0], text.as_bytes(), &[0]].concat();
        if let Ok(version) = VersionMessage::decode(&bytes) {
            prop_assert_eq!(VersionMessage::decode(&version.to_bytes()), Ok(version));
        }
    }

    #[test]
    fn capabilities_round_trip(fds: u32, bytes: u32, maps: u32, pgsizes: u64, multiple: bool, twin: bool) {
        let capabilities = ProtocolCapabilities {
            max_msg_fds: fds, max_data_xfer_size: bytes, max_dma_maps: maps, pgsizes,
            write_multiple: multiple, twin_socket: twin,
        };
        let version = VersionMessage { major: 0, minor: 1, capabilities };
        prop_assert_eq!(VersionMessage::decode(&version.to_bytes()), Ok(version));
    }
}

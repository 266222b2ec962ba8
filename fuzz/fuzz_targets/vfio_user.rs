//! Every decoder of vfio-user with arbitrary bytes. Decoded values round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire_vfio_user::{
    DeviceInfo, DmaAccess, DmaMap, DmaUnmap, Header, IoFdsRequest, IrqInfo, MultiWrites, RegionAccess,
    RegionInfo, RegionReply, SetIrqs, SparseArea, VersionMessage,
};

macro_rules! round_trip {
    ($bytes:ident: $($type:ident),*) => {$(
        if let Ok(decoded) = $type::decode($bytes) {
            assert_eq!($type::decode(&decoded.to_bytes()), Ok(decoded));
        }
    )*};
}

fuzz_target!(|bytes: &[u8]| {
    round_trip!(bytes: DmaMap, DmaUnmap, DmaAccess, DeviceInfo, RegionInfo, SparseArea, IoFdsRequest, IrqInfo, SetIrqs,
        RegionAccess, MultiWrites, VersionMessage);
    if let Some(Ok(header)) = bytes.first_chunk().map(Header::decode) {
        assert_eq!(Header::decode(&header.to_bytes()), Ok(header));
    }
    if let Ok(reply) = RegionReply::decode(bytes) {
        let written = reply.to_bytes(usize::MAX);
        assert_eq!(RegionReply::decode(&written).map(|decoded| decoded.areas), Ok(reply.areas));
    }
});

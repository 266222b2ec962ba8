//! Every decoder of vfio-user on any bytes. What one understands it understands again when it is written out.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire_vfio_user::{
    DeviceInfo, DmaAccess, DmaMap, DmaUnmap, Header, IoFdsRequest, IrqInfo, MultiWrites, RegionAccess, RegionInfo,
    RegionReply, SetIrqs, SparseArea, Version,
};

macro_rules! again {
    ($bytes:ident: $($type:ident),*) => {$(
        if let Ok(decoded) = $type::decode($bytes) {
            assert_eq!($type::decode(&decoded.to_bytes()), Ok(decoded));
        }
    )*};
}

fuzz_target!(|bytes: &[u8]| {
    again!(bytes: DmaMap, DmaUnmap, DmaAccess, DeviceInfo, RegionInfo, SparseArea, IoFdsRequest, IrqInfo, SetIrqs,
        RegionAccess, MultiWrites, Version);
    if let Some(Ok(header)) = bytes.first_chunk().map(Header::decode) {
        assert_eq!(Header::decode(&header.to_bytes()), Ok(header));
    }
    if let Ok(reply) = RegionReply::decode(bytes) {
        let written = reply.to_bytes(usize::MAX);
        assert_eq!(RegionReply::decode(&written).map(|again| again.areas), Ok(reply.areas));
    }
});

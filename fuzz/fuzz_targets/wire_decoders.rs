//! Every decoder of `wire_nvme` with arbitrary bytes. Decoded values round-trip.
#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use wire_nvme::admin::{GetLogPage, SetFeatures};
use wire_nvme::fabrics::{Connect, ConnectData, ConnectResponse, Disconnect, PropertyGet, PropertySet};
use wire_nvme::identify::{
    CommandSetVectors, ControllerList, IdentifyController, IdentifyNamespace, NamespaceDescriptor,
    NamespaceIndependent, NamespaceList, NvmController, NvmNamespace,
};
use wire_nvme::io::{DatasetManagement, DsmRange, ReadWrite, WriteZeroes};
use wire_nvme::log::{
    AnaLog, ChangeNamespace, CommandEffectsLog, ControllerReset, DiscoveryEntry, DiscoveryHeader, ErrorEntry,
    FeatureEffectsLog, FirmwareSlots, HealthLog, PersistentEvent, PersistentEventHeader, SetFeature,
    SupportedLogPages,
};
use wire_nvme::registers::{ControllerConfiguration, ControllerStatus};
use wire_nvme::tcp::{
    C2hData, CapsuleCmd, CapsuleResp, CommonHeader, Framing, H2cData, IcReq, IcResp, PduType, R2t, TermReq,
};
use wire_nvme::{Cqe, Sqe};

/// Decodes the first `N` bytes, encodes the value and decodes it again.
fn round_trip<const N: usize, T: PartialEq + Debug>(
    bytes: &[u8],
    decode: impl Fn(&[u8; N]) -> Option<T>,
    encode: impl Fn(&T, &mut [u8; N]),
) {
    // Short input is padded with zeroes.
    let mut padded = [0; N];
    let count = bytes.len().min(N);
    padded[..count].copy_from_slice(&bytes[..count]);
    let Some(decoded) = decode(&padded) else { return };
    let mut written = [0; N];
    encode(&decoded, &mut written);
    assert_eq!(decode(&written), Some(decoded));
}

macro_rules! infallible {
    ($bytes:ident: $($type:ident),*) => {{
        $(round_trip($bytes, |from| Some($type::decode(from)), $type::encode);)*
    }};
}

macro_rules! fallible {
    ($bytes:ident: $($type:ident),*) => {{
        $(round_trip($bytes, |from| $type::decode(from).ok(), $type::encode);)*
    }};
}

fn entries(bytes: &[u8]) {
    infallible!(bytes: Cqe, Sqe, DsmRange);
    let Some(sqe) = bytes.first_chunk() else { return };
    let sqe = Sqe::decode(sqe);
    let _ = (sqe.fuse(), sqe.psdt(), sqe.data.sgl(), sqe.data.identifier(), sqe.data.length());
    if let Ok(sgl) = sqe.data.sgl() {
        assert_eq!(wire_nvme::DataPointer::from(sgl).sgl(), Ok(sgl));
    }
    let _ = (ReadWrite::from_sqe(&sqe), WriteZeroes::from_sqe(&sqe), DatasetManagement::from_sqe(&sqe));
    let _ = (
        GetLogPage::from_sqe(&sqe),
        SetFeatures::from_sqe(&sqe),
        Connect::from_sqe(&sqe),
        Disconnect::from_sqe(&sqe),
    );
    let _ =
        (PropertyGet::from_sqe(&sqe), PropertySet::from_sqe(&sqe), wire_nvme::fabrics::fabrics_type(&sqe));
    let _ = ConnectResponse::from_result(sqe.mptr);
    assert_eq!(Connect::from_sqe(&Connect::from_sqe(&sqe).to_sqe()), Connect::from_sqe(&sqe));
    for value in [sqe.cdw10, sqe.cdw11] {
        let _ = (ControllerConfiguration::decode(value), ControllerStatus::decode(value));
    }
    let _ = DsmRange::list(&bytes[64..], sqe.cid).map(|ranges| ranges.count());
}

fn pdus(bytes: &[u8]) {
    fallible!(bytes: CommonHeader, IcReq, IcResp);
    let (Some(common), Some(short)) = (bytes.first_chunk(), bytes.first_chunk()) else { return };
    let framing = Framing {
        header_digest: bytes[8] & 1 != 0,
        data_digest: bytes[8] & 2 != 0,
        data_alignment_bytes: (bytes[9] % 32 + 1) * 4,
    };
    if let Ok(layout) = CommonHeader::decode(common).and_then(|header| header.layout(&framing)) {
        let around = layout.length - layout.data_length;
        assert!(layout.prefix_length() as u32 <= around && around <= 255 + 4, "{layout:?}");
    }
    let _ = (C2hData::decode(short), H2cData::decode(short), R2t::decode(short), CapsuleResp::decode(short));
    let _ = TermReq::decode(PduType::H2cTermReq, short);
    let _ = bytes.first_chunk().map(CapsuleCmd::decode);
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else { return };
    match which % 8 {
        0 => entries(bytes),
        1 => pdus(bytes),
        2 => fallible!(bytes: IdentifyController, IdentifyNamespace),
        3 => infallible!(bytes: NvmController, NvmNamespace, NamespaceIndependent, CommandSetVectors),
        4 => {
            fallible!(bytes: NamespaceList, ControllerList);
            round_trip(
                bytes,
                |from| NamespaceDescriptor::decode_list(from).ok(),
                |list, into| {
                    NamespaceDescriptor::encode_list(list, into);
                },
            );
        }
        5 => infallible!(
            bytes: ErrorEntry, HealthLog, FirmwareSlots, CommandEffectsLog, FeatureEffectsLog, SupportedLogPages
        ),
        6 => {
            fallible!(bytes: DiscoveryEntry, DiscoveryHeader, PersistentEventHeader, PersistentEvent);
            fallible!(bytes: ChangeNamespace, SetFeature);
            let _ = ControllerReset::decode(bytes);
            round_trip(bytes, |from| ConnectData::decode(from).ok(), ConnectData::encode);
        }
        _ => {
            let Ok(log) = AnaLog::decode(bytes) else { return };
            let mut written = vec![0; log.encoded_length()];
            log.encode(&mut written);
            assert_eq!(AnaLog::decode(&written), Ok(log));
        }
    }
});

//! Property tests: decoding arbitrary bytes never panics, and encoding round-trips.
//! A failure prints its seed; `PROPTEST_CASES` sets the number of cases.
#![allow(clippy::unwrap_used)]

use block_io::Status;
use proptest::prelude::*;
use wire_nvme::admin::{Abort, GetFeatures, GetLogPage, Identify, SetFeatures};
use wire_nvme::fabrics::*;
use wire_nvme::identify::*;
use wire_nvme::io::*;
use wire_nvme::log::*;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::{self, ControllerConfiguration, ControllerStatus};
use wire_nvme::tcp::*;
use wire_nvme::{Cqe, DecodeError, Sqe};

/// `N` bytes, mostly zero or mostly random.
fn bytes<const N: usize>() -> impl Strategy<Value = Box<[u8; N]>> {
    let byte = prop_oneof![3 => Just(0), 1 => 0..4u8, 1 => any::<u8>()];
    prop_oneof![prop::collection::vec(byte, N), prop::collection::vec(any::<u8>(), N)]
        .prop_map(|bytes| bytes.into_boxed_slice().try_into().unwrap())
}

fn framing() -> impl Strategy<Value = Framing> {
    (any::<bool>(), any::<bool>(), 1..=32u8).prop_map(|(header_digest, data_digest, dwords)| Framing {
        header_digest,
        data_digest,
        data_alignment_bytes: dwords * 4,
    })
}

/// A decoded value must survive encoding and decoding.
macro_rules! round_trip {
    ($decode:path, $encode:path, $bytes:expr) => {
        if let Ok(view) = $decode(&$bytes) {
            let mut encoded = [0xa5; _];
            $encode(&view, &mut encoded);
            prop_assert_eq!($decode(&encoded), Ok(view));
        }
    };
}

proptest! {
    #[test]
    fn queue_entries_round_trip_bytewise(sqe in bytes::<64>(), cqe in bytes::<16>()) {
        let view = Sqe::decode(&sqe);
        prop_assert_eq!(view.to_bytes(), *sqe);
        prop_assert_eq!(view.to_words().map(u64::to_le_bytes).concat(), sqe.to_vec());
        let _ = (view.fuse(), view.psdt());
        if let Ok(sgl) = view.data.sgl() {
            prop_assert_eq!(wire_nvme::DataPointer::from(sgl).sgl(), Ok(sgl));
        }
        prop_assert_eq!(Cqe::decode(&cqe).to_bytes(), *cqe);
    }

    #[test]
    fn typed_commands_round_trip(bytes in bytes::<64>()) {
        let sqe = Sqe::decode(&bytes);
        let rw = ReadWrite::from_sqe(&sqe);
        prop_assert!((1..=65536).contains(&rw.blocks));
        prop_assert_eq!(ReadWrite::from_sqe(&rw.to_sqe(NvmOpcode::Read)), rw);
        let view = WriteZeroes::from_sqe(&sqe);
        prop_assert_eq!(WriteZeroes::from_sqe(&view.to_sqe()), view);
        let view = DatasetManagement::from_sqe(&sqe);
        prop_assert_eq!(DatasetManagement::from_sqe(&view.to_sqe()), view);
        let view = Identify::from_sqe(&sqe);
        prop_assert_eq!(Identify::from_sqe(&view.to_sqe(sqe.nsid)), view);
        let view = GetLogPage::from_sqe(&sqe);
        prop_assert_eq!(GetLogPage::from_sqe(&view.to_sqe(sqe.nsid)), view);
        let view = GetFeatures::from_sqe(&sqe);
        prop_assert_eq!(GetFeatures::from_sqe(&view.to_sqe(sqe.nsid)), view);
        let view = SetFeatures::from_sqe(&sqe);
        prop_assert_eq!(SetFeatures::from_sqe(&view.to_sqe(sqe.nsid)), view);
        let view = Abort::from_sqe(&sqe);
        prop_assert_eq!(Abort::from_sqe(&view.to_sqe()), view);
        let view = Connect::from_sqe(&sqe);
        prop_assert_eq!(Connect::from_sqe(&view.to_sqe()), view);
        let view = Disconnect::from_sqe(&sqe);
        prop_assert_eq!(Disconnect::from_sqe(&view.to_sqe()), view);
        if let Ok(view) = PropertyGet::from_sqe(&sqe) {
            prop_assert_eq!(PropertyGet::from_sqe(&view.to_sqe()), Ok(view));
        }
        if let Ok(view) = PropertySet::from_sqe(&sqe) {
            prop_assert_eq!(PropertySet::from_sqe(&view.to_sqe()), Ok(view));
        }
        let _ = fabrics_type(&sqe);
    }

    #[test]
    fn identify_structures_round_trip(mut bytes in bytes::<4096>(), length in 0..4096usize) {
        // A name field of random bytes is rarely valid UTF-8.
        bytes[768..1024].fill(b'n');
        bytes[111] &= 3;
        bytes[263] &= 31;
        bytes[1806] &= 3;
        bytes[1023] = 0;
        bytes[1795] = 0;
        bytes[1799] = 0;
        round_trip!(IdentifyController::decode, IdentifyController::encode, *bytes);
        round_trip!(IdentifyNamespace::decode, IdentifyNamespace::encode, *bytes);
        round_trip!(NamespaceList::decode, NamespaceList::encode, *bytes);
        round_trip!(ControllerList::decode, ControllerList::encode, *bytes);
        let _ = NamespaceDescriptor::decode_list(&bytes);
        let view = CommandSetVectors::decode(&bytes);
        view.encode(&mut [0; 4096]);
        NvmNamespace::decode(&bytes).encode(&mut [0; 4096]);
        NvmController::decode(&bytes).encode(&mut [0; 4096]);
        NamespaceIndependent::decode(&bytes).encode(&mut [0; 4096]);
        let short = ConnectData::decode(&bytes[..length.min(1023)]);
        prop_assert!(matches!(short, Err(DecodeError::Length { .. })), "{:?}", short);
    }

    #[test]
    fn log_pages_round_trip(page in bytes::<4096>(), length in 0..4096usize) {
        let short = &page[..length];
        if let Ok(view) = AnaLog::decode(short) {
            let mut encoded = vec![0xa5; view.encoded_length()];
            view.encode(&mut encoded);
            prop_assert_eq!(AnaLog::decode(&encoded), Ok(view));
        }
        round_trip!(DiscoveryHeader::decode, DiscoveryHeader::encode, page[..1024].try_into().unwrap());
        round_trip!(DiscoveryEntry::decode, DiscoveryEntry::encode, page[..1024].try_into().unwrap());
        if let Ok((view, length)) = ExtendedDiscoveryEntry::decode(&page[..]) {
            let mut encoded = vec![0xa5; view.encoded_length()];
            view.encode(&mut encoded);
            prop_assert!(encoded.len() <= length && length <= page.len());
            prop_assert_eq!(ExtendedDiscoveryEntry::decode(&encoded), Ok((view, encoded.len())));
        }
        let view = HealthLog::decode(page.first_chunk().unwrap());
        let mut encoded = [0xa5; 512];
        view.encode(&mut encoded);
        prop_assert_eq!(HealthLog::decode(&encoded), view);
        let mut header: [u8; 512] = page[..512].try_into().unwrap();
        (header[0], header[16]) = (LogId::PersistentEvents.to_wire(), 3);
        header[116..371].fill(b'n');
        header[371] = 0;
        round_trip!(PersistentEventHeader::decode, PersistentEventHeader::encode, header);
        round_trip!(PersistentEvent::decode, PersistentEvent::encode, page[..24].try_into().unwrap());
        round_trip!(ChangeNamespace::decode, ChangeNamespace::encode, page[..48].try_into().unwrap());
        round_trip!(SetFeature::decode, SetFeature::encode, page[..12].try_into().unwrap());
        let view = CommandEffectsLog::decode(&page);
        let mut encoded = [0xa5; 4096];
        view.encode(&mut encoded);
        prop_assert_eq!(CommandEffectsLog::decode(&encoded), view);
        let _ = (ErrorEntry::decode(page.first_chunk().unwrap()), FirmwareSlots::decode(page.first_chunk().unwrap()));
        for (ranges, range) in DsmRange::list(&page[..], 256).unwrap().enumerate() {
            prop_assert_eq!(range, DsmRange::decode(page[ranges * 16..][..16].try_into().unwrap()));
        }
        prop_assert!(DsmRange::list(short, 256).is_err());
    }

    #[test]
    fn connect_data_round_trips(
        host_id in any::<[u8; 16]>(),
        cntlid in any::<u16>(),
        names in ("nqn\\.[0-9]{4}-[0-9]{2}\\.[a-z.]{1,20}:[ -~]{0,180}", "nqn\\.[0-9]{4}-[0-9]{2}\\.[a-z.]{1,20}"),
        damage in prop::option::of((0..1024usize, any::<u8>())),
    ) {
        let (Ok(subnqn), Ok(hostnqn)) = (Nqn::new(&names.0), Nqn::new(&names.1)) else {
            return Ok(());
        };
        let view = ConnectData { host_id, cntlid, subnqn, hostnqn };
        let mut bytes = [0xa5; CONNECT_DATA_SIZE];
        view.encode(&mut bytes);
        prop_assert_eq!(ConnectData::decode(&bytes), Ok(view));
        if let Some((at, value)) = damage {
            bytes[at] = value;
            let _ = ConnectData::decode(&bytes);
        }
    }

    #[test]
    fn nqn_parsing_never_panics(name in ".*", prefixed in "nqn.[0-9]{0,4}-?[0-9]{0,2}.?.{0,230}") {
        for name in [name, prefixed] {
            if let Ok(nqn) = Nqn::new(&name) {
                prop_assert!(nqn.len() <= NQN_MAX && nqn.starts_with("nqn.") && !nqn.contains('\0'));
            }
        }
    }

    #[test]
    fn properties_round_trip(value in any::<u64>()) {
        let cap = registers::ControllerCapabilities::decode(value);
        if cap.queue_entries_max >= 2 {
            prop_assert_eq!(registers::ControllerCapabilities::decode(cap.encode()), cap);
        }
        if let Ok(cc) = ControllerConfiguration::decode(value as u32) {
            prop_assert_eq!(ControllerConfiguration::decode(cc.encode()), Ok(cc));
        }
        if let Ok(csts) = ControllerStatus::decode(value as u32) {
            prop_assert_eq!(ControllerStatus::decode(csts.encode()), Ok(csts));
        }
    }

    /// The parts of a valid PDU layout do not overlap and cover the whole PDU.
    #[test]
    fn layouts_of_arbitrary_headers_are_consistent(bytes in bytes::<8>(), framing in framing(), hlen in prop::sample::select(vec![24u8, 72, 128])) {
        let mut bytes = *bytes;
        bytes[0] %= 10;
        bytes[2] = hlen;
        let Ok(header) = CommonHeader::decode(&bytes) else { return Ok(()) };
        let mut encoded = [0; 8];
        header.encode(&mut encoded);
        prop_assert_eq!(encoded, bytes);
        let Ok(layout) = header.layout(&framing) else { return Ok(()) };
        let digest = |on| if on { 4 } else { 0 };
        let headers = u64::from(layout.header_length) + digest(layout.header_digest);
        prop_assert_eq!(layout.length, header.plen);
        if layout.data_length == 0 {
            prop_assert_eq!(u64::from(layout.length), headers);
            prop_assert_eq!(layout.prefix_length() as u64, headers);
        } else {
            prop_assert!(u64::from(layout.data_offset) >= headers);
            let total = u64::from(layout.data_offset) + u64::from(layout.data_length) + digest(layout.data_digest);
            prop_assert_eq!(total, u64::from(layout.length));
        }
    }

    #[test]
    fn pdus_round_trip(
        framing in framing(),
        ids in any::<(u16, u16, u32)>(),
        length in 1..=u32::MAX - 256,
        sqe in bytes::<64>(),
        cqe in bytes::<16>(),
        last in any::<bool>(),
        success in any::<bool>(),
    ) {
        let (cccid, ttag, offset) = ids;
        let receive = |header: &[u8], layout: PduLayout| {
            let common = CommonHeader::decode(header.first_chunk().unwrap()).unwrap();
            assert_eq!(common.layout(&framing), Ok(layout));
        };
        let mut short = [0xa5; SHORT_SIZE];
        let data = H2cData { cccid, ttag, offset, length, last };
        let layout = data.encode(&framing, &mut short);
        receive(&short, layout);
        prop_assert_eq!(H2cData::decode(&short), data);
        let data = C2hData { cccid, offset, length, last, success: last && success };
        let layout = data.encode(&framing, &mut short);
        receive(&short, layout);
        prop_assert_eq!(C2hData::decode(&short), data);
        let r2t = R2t { cccid, ttag, offset, length };
        let layout = r2t.encode(&framing, &mut short);
        receive(&short, layout);
        prop_assert_eq!(R2t::decode(&short), r2t);
        let cqe = Cqe::decode(&cqe);
        let layout = CapsuleResp { cqe }.encode(&framing, &mut short);
        receive(&short, layout);
        prop_assert_eq!(CapsuleResp::decode(&short), cqe);
        let sqe = Sqe::decode(&sqe);
        let mut long = [0xa5; CAPSULE_CMD_SIZE];
        for data_length in [0, length] {
            let layout = CapsuleCmd { sqe, data_length }.encode(&framing, &mut long);
            receive(&long, layout);
            prop_assert_eq!(CapsuleCmd::decode(&long), sqe);
            prop_assert_eq!(layout.data_length, data_length);
        }
    }

    #[test]
    fn connection_initialization_round_trips(bytes in bytes::<128>(), r2t_max in 1..=1u64 << 32) {
        round_trip!(IcResp::decode, IcResp::encode, *bytes);
        if let Ok(view) = IcReq::decode(&bytes) {
            let view = IcReq { r2t_max, ..view };
            let mut encoded = [0xa5; IC_SIZE];
            view.encode(&mut encoded);
            prop_assert_eq!(IcReq::decode(&encoded), Ok(view));
        }
        let _ = TermReq::decode(PduType::H2cTermReq, bytes.first_chunk().unwrap());
    }

    #[test]
    fn statuses_round_trip_through_a_completion(field in 0..0x8000u16) {
        let cqe = Cqe::new(1, Status::from_field(field));
        prop_assert_eq!(Cqe::decode(&cqe.to_bytes()), cqe);
    }
}

/// Each row violates one rule; the error names the offset of the invalid field.
#[test]
fn invalid_headers_report_the_offset_of_the_field() {
    const PLAIN: Framing = Framing::PLAIN;
    const DIGESTS: Framing = Framing { header_digest: true, data_digest: true, data_alignment_bytes: 4 };
    const ALIGNED: Framing = Framing { data_alignment_bytes: 128, ..PLAIN };
    // Type, flags, HLEN, PDO, PLEN.
    let rows: &[(&str, [u32; 5], Framing, u32)] = &[
        ("reserved type 8", [8, 0, 24, 0, 24], PLAIN, 0),
        ("reserved type 0ah", [10, 0, 24, 0, 24], PLAIN, 0),
        ("capsule with the header of a response", [4, 0, 24, 0, 24], PLAIN, 2),
        ("ICReq that is too short", [0, 0, 127, 0, 127], PLAIN, 2),
        ("ICReq with data", [0, 0, 128, 128, 132], PLAIN, 4),
        ("ICReq with a header digest", [0, 1, 128, 0, 132], DIGESTS, 1),
        ("capsule shorter than its header", [4, 0, 72, 0, 71], PLAIN, 4),
        ("capsule of no length", [4, 0, 72, 0, 0], PLAIN, 4),
        ("header digest that was not agreed on", [4, 1, 72, 0, 76], PLAIN, 1),
        ("no header digest although agreed on", [4, 0, 72, 0, 72], DIGESTS, 1),
        ("no data digest although agreed on", [4, 1, 72, 76, 512 + 80], DIGESTS, 1),
        ("data digest that was not agreed on", [4, 2, 72, 72, 512 + 76], PLAIN, 1),
        ("header digest beyond the end", [4, 1, 72, 0, 72], DIGESTS, 4),
        ("data inside the header", [4, 0, 72, 68, 512], PLAIN, 3),
        ("data inside the header digest", [4, 3, 72, 72, 512], DIGESTS, 3),
        ("data off its dword", [4, 0, 72, 73, 512], PLAIN, 3),
        ("data off its alignment", [4, 0, 72, 124, 512], ALIGNED, 3),
        ("data that starts at the end", [4, 0, 72, 128, 128], ALIGNED, 4),
        ("data digest without data before it", [4, 3, 72, 76, 80], DIGESTS, 4),
        ("data PDU without data", [6, 4, 24, 0, 24], PLAIN, 4),
        ("R2T with data", [9, 0, 24, 24, 28], PLAIN, 4),
        ("TermReq longer than 152 bytes", [2, 0, 24, 0, 153], PLAIN, 4),
    ];
    for (name, [kind, flags, hlen, pdo, plen], framing, field) in rows {
        let mut bytes = [*kind as u8, *flags as u8, *hlen as u8, *pdo as u8, 0, 0, 0, 0];
        bytes[4..].copy_from_slice(&plen.to_le_bytes());
        let got = CommonHeader::decode(&bytes).and_then(|header| header.layout(framing));
        assert_eq!(got, Err(FatalError::field(*field)), "{name}");
    }
}

#[test]
fn unsupported_versions_and_reserved_bits_of_icreq_are_rejected() {
    let good = || {
        let mut bytes = [0; IC_SIZE];
        let view =
            IcReq { host_data_alignment_bytes: 4, header_digest: false, data_digest: false, r2t_max: 1 };
        view.encode(&mut bytes);
        bytes
    };
    for (at, value, expected) in [
        (8, 1, FatalError::unsupported(8)),
        (9, 1, FatalError::unsupported(8)),
        (10, 32, FatalError::field(10)),
        (11, 4, FatalError::field(11)),
    ] {
        let mut bytes = good();
        bytes[at] = value;
        assert_eq!(IcReq::decode(&bytes), Err(expected));
    }
}

#[test]
fn invalid_nqns_are_rejected() {
    let long = format!("nqn.2014-08.{}", "x".repeat(212));
    for name in [
        "",
        "nqn.",
        "nqn.2014-08",
        "nqn.2014-08.",
        "nqn.2014-8.org",
        "iqn.2014-08.org",
        "nqn.2014-08.o\n",
        &long,
    ] {
        assert!(Nqn::new(name).is_err(), "{name:?}");
    }
    assert!(Nqn::new(&long[..NQN_MAX]).is_ok());
    // A field without a terminating NUL.
    let mut bytes = [b'x'; CONNECT_DATA_SIZE];
    assert!(matches!(ConnectData::decode(&bytes), Err(DecodeError::Value { at: 256, .. })));
    bytes[256..512].fill(0);
    bytes[256..256 + DISCOVERY_NQN.len()].copy_from_slice(DISCOVERY_NQN.as_bytes());
    assert!(matches!(ConnectData::decode(&bytes), Err(DecodeError::Value { at: 512, .. })));
    // A host may be without a name, but a subsystem has one.
    bytes[512..768].fill(0);
    assert_eq!(ConnectData::decode(&bytes).unwrap().hostnqn.as_str(), "");
    bytes[256..512].fill(0);
    assert!(matches!(ConnectData::decode(&bytes), Err(DecodeError::Value { at: 256, .. })));
}

#[test]
fn a_subsystem_nqn_without_nul_is_rejected() {
    let mut bytes = [0; wire_nvme::identify::SIZE];
    bytes[768..1024].fill(b'n');
    assert!(IdentifyController::decode(&bytes).is_err());
    bytes[1023] = 0;
    assert_eq!(IdentifyController::decode(&bytes).unwrap().subnqn.len(), 255);
}

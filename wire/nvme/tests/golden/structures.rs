//! Data that commands transfer: identify, log pages, the discovery log.

use block_io::Status;
use wire_nvme::DecodeError;
use wire_nvme::fabrics::*;
use wire_nvme::identify::*;
use wire_nvme::log::*;
use wire_nvme::registers::*;

use super::{encoded, hex, sparse};

#[test]
fn identify_controller() {
    let bytes: [u8; 4096] = sparse(
        "0=868087805350444b303030303030303030303030303120205350444b206264657620436f6e74726f6c6c65722020202020\
20202020202020202020202020202032342e303920202006e4d25c0b053412 82=02 84=44332211809698 93=09 95=8041 111=010f \
         127=1f01 130=02 132=0303 256=0101030703267f02 266=57016101 284=10 296=05 304=06 320=64 342=0a1120 348=21 \
         512=664480 516=20 520=1d 522=01 524=020707 528=03 532=01 534=01 536=01 538=30 540=1f \
         768=6e716e2e323031362d30362e696f2e7370646b3a636e6f646531 1792=0402 1796=01 1800=02 1802=011001",
    );
    let mut fguid = [0; 16];
    (fguid[0], fguid[15]) = (0x0f, 0x1f);
    let view = IdentifyController {
        vid: 0x8086,
        ssvid: 0x8087,
        sn: ascii("SPDK00000000000001"),
        mn: ascii("SPDK bdev Controller"),
        fr: ascii("24.09"),
        rab: 6,
        ieee: [0xe4, 0xd2, 0x5c],
        cmic: cmic::MULTIPLE_PORTS | cmic::MULTIPLE_CONTROLLERS | cmic::ANA,
        mdts: 5,
        cntlid: 0x1234,
        ver: NvmeVersion::new(2, 0, 0),
        rtd3r_us: 0x1122_3344,
        rtd3e_us: 10_000_000,
        oaes: oaes::NAMESPACE | oaes::ANA | oaes::DISCOVERY,
        ctratt: ctratt::HOST_ID_128 | ctratt::TRAFFIC_KEEP_ALIVE,
        cntrltype: ControllerType::Io,
        fguid,
        crdt_100ms: [1, 2, 0x303],
        oacs: oacs::SECURITY | oacs::DOORBELL_BUFFER,
        aborts_max: 4,
        async_events_max: 8,
        frmw: 3,
        lpa: lpa::COMMAND_EFFECTS | lpa::EXTENDED | lpa::MISCELLANEOUS,
        error_log_entries: 128,
        power_states: 3,
        wctemp: 343,
        cctemp: 353,
        tnvmcap: 0x10_0000_0000,
        unvmcap: 5 | 6 << 64,
        kas_100ms: 100,
        anatt_s: 10,
        anacap: anacap::OPTIMIZED | anacap::CHANGE,
        anagrpmax: 32,
        nanagrpid: 33,
        persistent_events_64kib: 0,
        sqes: 0x66,
        cqes: 0x44,
        maxcmd: 128,
        nn: 32,
        oncs: oncs::COMPARE | oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES | oncs::SAVE_AND_SELECT,
        fuses: fuses::COMPARE_AND_WRITE,
        fna: 2,
        vwc: vwc::PRESENT | vwc::FLUSH_ALL,
        atomic_write_blocks: 8,
        atomic_write_power_fail_blocks: 4,
        atomic_compare_write_blocks: 2,
        ocfs: ocfs::FORMAT_0,
        sgls: sgls::SUPPORTED | sgls::OFFSET | sgls::TRANSPORT,
        mnan: 31,
        subnqn: "nqn.2016-06.io.spdk:cnode1".to_owned(),
        io_command_capsule_bytes: 516 * 16,
        io_response_capsule_bytes: 16,
        in_capsule_offset_bytes: 32,
        fcatt: 1,
        msdbd: 16,
        ofcs: 1,
        dctype: DiscoveryType::Unknown,
    };
    assert_eq!(IdentifyController::decode(&bytes), Ok(view.clone()));
    assert!(encoded(|into| view.encode(into)) == bytes);
}

#[test]
fn identify_namespace() {
    let bytes: [u8; 4096] = sparse(
        "2=10 8=01 10=10 16=02 18=10 24=110111020102017f0509 36=0f 42=03 44=1f 47=01 51=20 64=07 66=06 68=05 70=04 72=03 74=8000 76=0001 80=7f 92=09 99=0121 \
         102=22 104=a0a1a2a3a4a5a6a7a8a9aaabacadaeaf1122334455667788 130=09 132=08 134=0c02",
    );
    let view = IdentifyNamespace {
        nsze: 0x10_0000,
        ncap: 0x10_0001,
        nuse: 0x10_0002,
        nsfeat: nsfeat::THIN | nsfeat::PREFERRED_SIZES,
        formats: vec![
            LbaFormat { metadata_bytes: 0, data_log2: 9, performance: 0 },
            LbaFormat { metadata_bytes: 8, data_log2: 12, performance: 2 },
        ],
        format: 1,
        extended_lba: true,
        mc: 2,
        dpc: 1,
        dps: 2,
        nmic: 1,
        rescap: 0x7f,
        fpi: 5,
        dlfeat: dlfeat::READS_ZERO | dlfeat::WRITE_ZEROES,
        atomic_write_power_fail_blocks: 16,
        atomic_boundary_offset: 3,
        atomic_boundary_blocks: 32,
        noiob: 256,
        nvmcap: 0x2000_0000,
        preferred_write_blocks: 8,
        preferred_write_alignment: 7,
        preferred_deallocate_blocks: 6,
        preferred_deallocate_alignment: 5,
        optimal_write_blocks: 4,
        copy_range_blocks_max: 128,
        copy_blocks_max: 256,
        copy_ranges_max: 128,
        anagrpid: 9,
        nsattr: 1,
        nvmsetid: 0x21,
        endgid: 0x22,
        nguid: std::array::from_fn(|index| 0xa0 + index as u8),
        eui64: 0x8877_6655_4433_2211_u64.to_le_bytes(),
    };
    assert_eq!(IdentifyNamespace::decode(&bytes), Ok(view.clone()));
    assert!(encoded(|into| view.encode(into)) == bytes);

    let bytes: [u8; 4096] = sparse("0=2211 8=02 16=0801");
    let mut extended_formats = [ExtendedLbaFormat::default(); 64];
    extended_formats[1] = ExtendedLbaFormat { pif: 2, storage_tag_bits: 8 };
    let view = NvmNamespace { lbstm: 0x1122, pic: 2, extended_formats };
    assert_eq!(NvmNamespace::decode(&bytes), view);
    assert!(encoded(|into| view.encode(into)) == bytes);

    let bytes: [u8; 4096] = sparse("0=2001 3=0509 8=01 10=21 12=22 14=01");
    let view = NamespaceIndependent {
        nsfeat: NamespaceIndependent::NO_VOLATILE_CACHE,
        nmic: 1,
        rescap: 0,
        fpi: 5,
        anagrpid: 9,
        nsattr: 1,
        nvmsetid: 0x21,
        endgid: 0x22,
        nstat: NamespaceIndependent::READY,
    };
    assert_eq!(NamespaceIndependent::decode(&bytes), view);
    assert!(encoded(|into| view.encode(into)) == bytes);

    let bytes: [u8; 4096] = sparse("0=0102030488776655ddccbbaa99");
    let view = NvmController { vsl: 1, wzsl: 2, wusl: 3, dmrl: 4, dmrsl: 0x5566_7788, dmsl: 0x99_aabb_ccdd };
    assert_eq!(NvmController::decode(&bytes), view);
    assert!(encoded(|into| view.encode(into)) == bytes);

    let bytes: [u8; 4096] = sparse(
        "0=0108 4=11111111111111110210 16=222222222222222222222222222222220310 36=33333333333333333333333333333333\
0401 56=02",
    );
    let view = vec![
        NamespaceDescriptor::Eui64([0x11; 8]),
        NamespaceDescriptor::Nguid([0x22; 16]),
        NamespaceDescriptor::Uuid([0x33; 16]),
        NamespaceDescriptor::Csi(Csi::Zoned),
    ];
    assert_eq!(NamespaceDescriptor::decode_list(&bytes), Ok(view.clone()));
    assert!(encoded(|into| NamespaceDescriptor::encode_list(&view, into)) == bytes);
}

#[test]
fn log_pages() {
    let bytes = hex("0500000000000000010002000081280090785634120000000100000000030000\
         1100000000000000220000000000000000000000000000000000000000000000");
    let view = ErrorEntry {
        count: 5,
        sqid: 1,
        cid: 2,
        status: Status::LBA_OUT_OF_RANGE.do_not_retry(),
        location: 0x28,
        lba: 0x12_3456_7890,
        nsid: 1,
        transport: TransportType::Tcp.to_wire(),
        command_specific: 0x11,
        transport_specific: 0x22,
    };
    assert_eq!(ErrorEntry::decode(&bytes), view);
    assert_eq!(encoded(|into| view.encode(into)), bytes);

    let bytes: [u8; 512] = sparse(
        "0=012501640a01 32=01 48=02 64=03 80=04 96=05 112=06 128=07 144=08 160=09 184=0a 192=0b 196=0c 200=0d 214=0e",
    );
    let view = HealthLog {
        critical_warning: 1,
        temperature_kelvins: 293,
        spare_percent: 100,
        spare_threshold_percent: 10,
        used_percent: 1,
        data_units_read: 1,
        data_units_written: 2,
        host_reads: 3,
        host_writes: 4,
        busy_minutes: 5,
        power_cycles: 6,
        power_on_hours: 7,
        unsafe_shutdowns: 8,
        media_errors: 9,
        error_log_entries: 0xa << 64,
        warning_temperature_minutes: 0xb,
        critical_temperature_minutes: 0xc,
        sensors_kelvins: [0xd, 0, 0, 0, 0, 0, 0, 0xe],
    };
    assert_eq!(HealthLog::decode(&bytes), view);
    assert!(encoded(|into| view.encode(into)) == bytes);

    let bytes: [u8; 512] = sparse("0=21 8=32342e3039202020 56=4142434445464748");
    let mut view = FirmwareSlots { active: 1, next: 2, ..FirmwareSlots::default() };
    view.revisions[0] = ascii("24.09");
    view.revisions[6] = ascii("ABCDEFGH");
    assert_eq!(FirmwareSlots::decode(&bytes), view);
    assert!(encoded(|into| view.encode(into)) == bytes);

    let effects = CommandEffects {
        changes_inventory: true,
        exclusive: 2,
        scope: 1 | 1 << 5,
        ..CommandEffects::CHANGES_BLOCKS
    };
    assert_eq!(effects.to_wire(), 0x0212_000b);
    assert_eq!(CommandEffects::from_wire(0x0212_000b), effects);

    let bytes: [u8; 1024] = sparse("44=11 46=20 1020=02");
    let view = FeatureEffectsLog::decode(&bytes);
    let controller = FeatureEffects {
        supported: true,
        changes_controller: true,
        scope: FeatureEffects::CONTROLLER,
        ..FeatureEffects::default()
    };
    assert_eq!(view.0[0x0b], controller);
    assert_eq!(view.0[0xff], FeatureEffects { changes_data: true, ..FeatureEffects::default() });
    assert!(encoded(|into| view.encode(into)) == bytes);

    let bytes: [u8; 1024] = sparse("0=01 448=03 450=0201");
    let view = SupportedLogPages::decode(&bytes);
    assert_eq!(view.0[0], SupportedLogPage { supported: true, ..SupportedLogPage::default() });
    let discovery = SupportedLogPage { supported: true, index_offset: true, specific: 0x102 };
    assert_eq!(view.0[usize::from(LogId::Discovery.to_wire())], discovery);
    assert!(encoded(|into| view.encode(into)) == bytes);

    let bytes: [u8; 92] = hex("07000000000000000200000000000000\
         0100000002000000070000000000000001000000000000000000000000000000\
         0100000004000000\
         020000000100000007000000000000000f000000000000000000000000000000\
         02000000");
    let group = |id, state, nsids| AnaGroup { id, change_count: 7, state, nsids };
    let view = AnaLog {
        change_count: 7,
        groups: vec![group(1, AnaState::Optimized, vec![1, 4]), group(2, AnaState::Change, vec![2])],
    };
    assert_eq!(AnaLog::decode(&bytes), Ok(view.clone()));
    assert_eq!(view.encoded_length(), bytes.len());
    assert_eq!(encoded::<92>(|into| view.encode(into)), bytes);
}

#[test]
fn discovery_log() {
    let bytes: [u8; 1024] = sparse("0=09 8=02 18=04 21=0c");
    let view = DiscoveryHeader { genctr: 9, numrec: 2, recfmt: 0, dlpf: 4, tdlpl: 3072 };
    assert_eq!(DiscoveryHeader::decode(&bytes), Ok(view));
    assert!(encoded(|into| view.encode(into)) == bytes);

    let spaces = |count| "20".repeat(count);
    let bytes: [u8; 1024] = sparse(&format!(
        "0=0301020601 6=ffff80 10=02 32=34343230{} 256=6e716e2e323031362d30362e696f2e7370646b3a636e6f646531 \
         512=3139322e3136382e312e3130{} 768=02",
        spaces(28),
        spaces(244)
    ));
    let view = DiscoveryEntry {
        address: TransportAddress {
            trtype: TransportType::Tcp,
            adrfam: AddressFamily::Ipv4,
            traddr: "192.168.1.10".to_owned(),
            trsvcid: "4420".to_owned(),
        },
        subtype: SubsystemType::Nvm,
        secure_channel: SecureChannel::NotRequired,
        flow_control_optional: true,
        portid: 1,
        cntlid: CNTLID_DYNAMIC,
        admin_queue_entries_max: 128,
        eflags: DiscoveryEntry::EXPLICIT_PERSISTENT,
        subnqn: Nqn::new("nqn.2016-06.io.spdk:cnode1").unwrap(),
        tcp_security: 2,
    };
    assert_eq!(DiscoveryEntry::decode(&bytes), Ok(view.clone()));
    assert!(encoded(|into| view.encode(into)) == bytes);

    // As an extended entry: TEL 1044, one attribute of type 2 with 8 bytes, of which 6 are the label.
    let attributes: [u8; 20] = sparse("0=1404 4=01 8=02 10=08 12=7261636b2d37");
    let extended = [&bytes[..], &attributes].concat();
    let view = ExtendedDiscoveryEntry { entry: view, admin_label: Some("rack-7".to_owned()) };
    assert_eq!(ExtendedDiscoveryEntry::decode(&extended), Ok((view.clone(), 1044)));
    let mut encoded = vec![0xa5; view.encoded_length()];
    view.encode(&mut encoded);
    assert!(encoded == extended);
    let plain = ExtendedDiscoveryEntry { admin_label: None, ..view };
    let mut encoded = vec![0xa5; plain.encoded_length()];
    plain.encode(&mut encoded);
    assert_eq!(encoded[1024..], [0x08, 4, 0, 0, 0, 0, 0, 0]);
    // An entry of another length follows.
    encoded.extend(&extended);
    assert_eq!(ExtendedDiscoveryEntry::decode(&encoded), Ok((plain, 1032)));
}

#[test]
fn extended_discovery_entries_with_wrong_lengths_are_rejected() {
    let mut good = vec![0; 1044];
    good[..4].copy_from_slice(&[3, 1, 2, 4]);
    good[256..268].copy_from_slice(b"nqn.2014-08.");
    good[268] = b'a';
    good[1024..]
        .copy_from_slice(&[0x14, 4, 0, 0, 1, 0, 0, 0, 2, 0, 8, 0, b'r', b'a', b'c', b'k', 0, 0, 0, 0]);
    assert!(ExtendedDiscoveryEntry::decode(&good).is_ok());
    for (what, at, value) in [
        ("TEL", 1024, 0x15),
        ("TEL", 1025, 3),
        ("NUMEXAT", 1028, 2),
        ("EXATLEN", 1034, 0),
        ("EXATLEN", 1034, 6),
        ("EXATLEN", 1034, 12),
        ("EXATVAL", 1036, 0),
        ("EXATVAL", 1036, 0xff),
    ] {
        let mut bad = good.clone();
        bad[at] = value;
        let error = ExtendedDiscoveryEntry::decode(&bad).unwrap_err();
        assert!(matches!(error, DecodeError::Value { what: found, .. } if found == what), "{error} at {at}");
    }
    assert!(matches!(ExtendedDiscoveryEntry::decode(&good[..1031]), Err(DecodeError::Length { .. })));
}

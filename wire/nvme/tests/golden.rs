//! Golden tests against SPDK and Linux.
//!
//! A C program printed the hexadecimal strings. It filled in the structures of SPDK's public
//! headers (`spdk/nvme_spec.h` and `spdk/nvmf_spec.h`, SPDK 26.09, on little-endian x86-64) field by
//! field. A sparse string gives `offset=bytes` for the non-zero parts.
#![allow(clippy::unwrap_used)]

use block_io::Status;
use wire_nvme::admin::{Abort, GetFeatures, GetLogPage, Identify, SetFeatures};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::fabrics::*;
use wire_nvme::feature::{AsyncEventConfiguration, NumberOfQueues, TemperatureThreshold};
use wire_nvme::identify::*;
use wire_nvme::io::*;
use wire_nvme::log::*;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::{self, *};
use wire_nvme::sqe::{Fuse, Psdt, Sgl};
use wire_nvme::tcp::*;
use wire_nvme::{Cqe, DataPointer, NSID_ALL, Sqe};

fn hex<const N: usize>(text: &str) -> [u8; N] {
    assert_eq!(text.len(), 2 * N);
    std::array::from_fn(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap())
}

fn sparse<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    for part in text.split_whitespace() {
        let (offset, part) = part.split_once('=').unwrap();
        let offset: usize = offset.parse().unwrap();
        for index in 0..part.len() / 2 {
            bytes[offset + index] = u8::from_str_radix(&part[2 * index..2 * index + 2], 16).unwrap();
        }
    }
    bytes
}

fn encoded<const N: usize>(encode: impl FnOnce(&mut [u8; N])) -> [u8; N] {
    // Encoding must overwrite the previous content of the buffer.
    let mut bytes = [0xa5; N];
    encode(&mut bytes);
    bytes
}

fn sqe(text: &str) -> Sqe {
    let bytes = hex(text);
    let sqe = Sqe::decode(&bytes);
    assert_eq!(sqe.to_bytes(), bytes);
    sqe
}

#[test]
fn read_command() {
    let sqe = sqe("0240341203000000000000000000000000000000000000000000000000000000\
         002000000000005a55443322110000000f000040000000000000000000000000");
    assert_eq!((sqe.opcode, sqe.cid, sqe.nsid), (NvmOpcode::Read.to_wire(), 0x1234, 3));
    assert_eq!((sqe.fuse(), sqe.psdt()), (Fuse::Normal, Psdt::Sgl));
    assert_eq!(sqe.data, DataPointer::transport(0x2000));
    let read = ReadWrite { lba: 0x11_2233_4455, blocks: 16, fua: true, ..ReadWrite::default() };
    assert_eq!(ReadWrite::from_sqe(&sqe), read);
    let made =
        Sqe { cid: 0x1234, nsid: 3, data: DataPointer::transport(0x2000), ..read.to_sqe(NvmOpcode::Read) };
    assert_eq!(made, sqe);
}

#[test]
fn every_sqe_field_has_the_correct_offset() {
    let sqe = sqe("0142efbe01000000020202020303030311223344556677884000000000000000\
         0010000000000001101010101111111107000080131313131414141415151515");
    let expected = Sqe {
        opcode: 1,
        flags: 0x42,
        cid: 0xbeef,
        nsid: 1,
        cdw2: 0x0202_0202,
        cdw3: 0x0303_0303,
        mptr: 0x8877_6655_4433_2211,
        data: DataPointer::capsule(0x40, 4096),
        cdw10: 0x1010_1010,
        cdw11: 0x1111_1111,
        cdw12: 0x8000_0007,
        cdw13: 0x1313_1313,
        cdw14: 0x1414_1414,
        cdw15: 0x1515_1515,
    };
    assert_eq!(sqe, expected);
    assert_eq!(sqe.fuse(), Fuse::Second);
    let write = ReadWrite::from_sqe(&sqe);
    assert!(write.limited_retry && !write.fua);
    assert_eq!((write.blocks, write.hints, write.directive), (8, 0x13, 0x1313));
}

#[test]
fn keyed_descriptor() {
    let bytes: [u8; 16] = hex("0010000000000000563412bebafeca4f");
    let mut entry = [0; 64];
    entry[24..40].copy_from_slice(&bytes);
    let data = Sqe::decode(&entry).data;
    let sgl = Sgl::Keyed { address: 0x1000, length: 0x12_3456, key: 0xcafe_babe, invalidate: true };
    assert_eq!(data.sgl(), Ok(sgl));
    assert_eq!(DataPointer::from(sgl), data);
}

#[test]
fn dataset_management_and_write_zeroes() {
    let zeros = "0".repeat(32);
    let dsm = sqe(&format!("0940000001000000{zeros}{zeros}ff000000040000000000000000000000{}", &zeros[..16]));
    let view =
        DatasetManagement { ranges: 256, integral_read: false, integral_write: false, deallocate: true };
    assert_eq!(DatasetManagement::from_sqe(&dsm), view);
    assert_eq!(Sqe { nsid: 1, ..view.to_sqe() }, dsm);

    let range = hex("23010007001000009a78563412000000");
    let view = DsmRange { attributes: 0x0700_0123, blocks: 0x1000, lba: 0x12_3456_789a };
    assert_eq!(DsmRange::decode(&range), view);
    assert_eq!(encoded(|into| view.encode(into)), range);

    let zeroes =
        sqe(&format!("0840000001000000{zeros}{zeros}08000000000000000700004200000000{}", &zeros[..16]));
    let view = WriteZeroes { lba: 8, blocks: 8, fua: true, deallocate: true, prinfo: Prinfo::empty() };
    assert_eq!(WriteZeroes::from_sqe(&zeroes), view);
    assert_eq!(Sqe { nsid: 1, ..view.to_sqe() }, zeroes);
}

#[test]
fn admin_commands() {
    let zeros = "0".repeat(64);
    let entry = |head: &str, tail: &str| sqe(&format!("{head}{zeros}{tail}"));

    let log = entry("02400000ffffffff", "708178563412cdab11223344080000007f00000000000000");
    let view = GetLogPage {
        lid: 0x70,
        specific: 1,
        retain_event: true,
        length_bytes: (0x1234_5678 + 1) * 4,
        offset: 0x8_4433_2211,
        offset_is_index: false,
        identifier: 0xabcd,
        csi: 0,
        uuid_index: 0x7f,
    };
    assert_eq!(GetLogPage::from_sqe(&log), view);
    assert_eq!(view.to_sqe(NSID_ALL), log);

    let identify = entry("0640000002000000", "050077000900000200000000000000000000000000000000");
    let view = Identify { cns: 5, cntid: 0x77, cns_specific: 9, csi: 2, uuid_index: 0 };
    assert_eq!(Identify::from_sqe(&identify), view);
    assert_eq!(view.to_sqe(2), identify);

    let get = entry("0a40000000000000", "0b0300000000000000000000000000000000000000000000");
    let view = GetFeatures { fid: 0x0b, select: 3, cdw11: 0, uuid_index: 0 };
    assert_eq!(GetFeatures::from_sqe(&get), view);
    assert_eq!(view.to_sqe(0), get);

    let set = entry("0940000000000000", "070000800700030000000000000000000000000000000000");
    let view = SetFeatures { fid: 7, save: true, cdw11: 0x0003_0007, uuid_index: 0 };
    assert_eq!(SetFeatures::from_sqe(&set), view);
    assert_eq!(view.to_sqe(0), set);
    let queues = NumberOfQueues { submission: 8, completion: 4 };
    assert_eq!(NumberOfQueues::from_wire(view.cdw11), Ok(queues));
    assert_eq!(queues.to_wire(), view.cdw11);

    let abort = entry("0840000000000000", "040099000000000000000000000000000000000000000000");
    assert_eq!(Abort::from_sqe(&abort), Abort { sqid: 4, cid: 0x99 });
    assert_eq!(Abort { sqid: 4, cid: 0x99 }.to_sqe(), abort);
}

#[test]
fn completion() {
    let bytes = hex("040302010807060511002200330001e3");
    // Type 1, code 80h, CRD 2, More and Do Not Retry.
    let status = Status::from_field(1 << 14 | 1 << 13 | 2 << 11 | 1 << 8 | 0x80);
    let cqe = Cqe { result: 0x0506_0708_0102_0304, sqhd: 0x11, sqid: 0x22, cid: 0x33, status, phase: true };
    assert_eq!(Cqe::decode(&bytes), cqe);
    assert_eq!(cqe.to_bytes(), bytes);
}

#[test]
fn connect() {
    let io = sqe("7f40010001000000000000000000000000000000000000000000000000000000\
         0004000000000001000002007f00040000000000000000000000000000000000");
    let attributes = ConnectAttributes::DISABLE_SQ_FLOW_CONTROL;
    let view = Connect { record_format: 0, qid: 2, queue_entries: 128, attributes, kato_ms: 0 };
    assert_eq!(Connect::from_sqe(&io), view);
    assert_eq!(Sqe { cid: 1, data: DataPointer::capsule(0, 1024), ..view.to_sqe() }, io);

    let admin = sqe("7f40000001000000000000000000000000000000000000000000000000000000\
         0000000000000000000000001f000000983a0000000000000000000000000000");
    let view = Connect::from_sqe(&admin);
    assert_eq!((view.qid, view.queue_entries, view.kato_ms), (0, 32, 15000));

    let data: [u8; 1024] = sparse(
        "0=0102030405060708090a0b0c0d0e0f10ffff \
         256=6e716e2e323031362d30362e696f2e7370646b3a636e6f646531 \
         512=6e716e2e323031342d30382e6f72672e6e766d657870726573733a757569643a30303131323233332d343435352d3636\
37372d383839392d616162626363646465656666",
    );
    let view = ConnectData {
        host_id: std::array::from_fn(|index| index as u8 + 1),
        cntlid: CNTLID_DYNAMIC,
        subnqn: Nqn::new("nqn.2016-06.io.spdk:cnode1").unwrap(),
        hostnqn: Nqn::new("nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff").unwrap(),
    };
    assert_eq!(ConnectData::decode(&data), Ok(view.clone()));
    assert_eq!(encoded(|into| view.encode(into)), data);

    let refused: [u8; 16] = hex("00010100000000000000000000000000");
    let parameter = InvalidParameter { in_data: true, offset: 256 };
    assert_eq!(InvalidParameter::from_result(Cqe::decode(&refused).result), parameter);
    assert_eq!(Cqe::new(0, Status::SUCCESS).with_result(parameter.to_result()).to_bytes(), refused);
    let accepted: [u8; 16] = hex("34120200000000000000000000000000");
    let connected = ConnectResponse { cntlid: 0x1234, authentication_required: true };
    assert_eq!(ConnectResponse::from_result(Cqe::decode(&accepted).result), connected);
    assert_eq!(connected.to_result(), Cqe::decode(&accepted).result);
}

#[test]
fn properties() {
    let get = sqe("7f40000004000000000000000000000000000000000000000000000000000000\
         0000000000000000010000000000000000000000000000000000000000000000");
    assert_eq!(PropertyGet::from_sqe(&get), Ok(PropertyGet { wide: true, offset: registers::offset::CAP }));
    assert_eq!(PropertyGet { wide: true, offset: 0 }.to_sqe(), get);
    let set = sqe("7f40000000000000000000000000000000000000000000000000000000000000\
         0000000000000000000000001400000001004600000000000000000000000000");
    let view = PropertySet { wide: false, offset: registers::offset::CC, value: 0x46_0001 };
    assert_eq!(PropertySet::from_sqe(&set), Ok(view));
    assert_eq!(view.to_sqe(), set);

    let cap = registers::ControllerCapabilities {
        queue_entries_max: 128,
        contiguous_queues_required: true,
        arbitration: 1,
        ready_timeout_500ms: 30,
        doorbell_stride_log2: 2,
        subsystem_reset: true,
        nvm_command_set: true,
        io_command_sets: true,
        no_io_command_set: true,
        boot_partitions: true,
        page_min_log2: 12,
        page_max_log2: 16,
        persistent_memory: true,
        memory_buffer: true,
        subsystem_shutdown: true,
        ready_modes: 3,
    };
    assert_eq!(registers::ControllerCapabilities::decode(0x1f40_3832_1e03_007f), cap);
    assert_eq!(cap.encode(), 0x1f40_3832_1e03_007f);

    let cc = ControllerConfiguration {
        enable: true,
        command_sets: CommandSets::All,
        page_log2: 13,
        arbitration: Arbitration::Weighted,
        shutdown: ShutdownNotification::Abrupt,
        sqe_log2: 6,
        cqe_log2: 4,
        ready_independent_of_media: true,
    };
    assert_eq!(ControllerConfiguration::decode(0x0146_88e1), Ok(cc));
    assert_eq!(cc.encode(), 0x0146_88e1);

    let csts = ControllerStatus {
        ready: true,
        fatal: true,
        shutdown: ShutdownStatus::Complete,
        subsystem_reset_occurred: true,
        paused: true,
    };
    assert_eq!(ControllerStatus::decode(0x3b), Ok(csts));
    assert_eq!(csts.encode(), 0x3b);

    let wanted = AsyncEventConfiguration::NAMESPACE
        | AsyncEventConfiguration::ANA
        | AsyncEventConfiguration::DISCOVERY;
    assert_eq!(wanted.bits(), 0x8000_0900);
    let threshold = TemperatureThreshold { kelvins: 343, sensor: 3, under: true };
    assert_eq!(threshold.to_wire(), 0x0013_0157);
    assert_eq!(TemperatureThreshold::from_wire(0x0013_0157), Ok(threshold));
    assert_eq!(AsyncEvent::DISCOVERY_CHANGED.to_result(), 0x0070_f002);
    assert_eq!(AsyncEvent::from_result(0x0070_f002), Some(AsyncEvent::DISCOVERY_CHANGED));
}

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
        "2=10 8=01 10=10 16=02 18=10 24=110111020102017f0509 47=01 51=20 64=07 66=06 68=05 70=04 72=03 74=8000 76=0001 80=7f 92=09 99=0121 \
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
    let mut extended_formats = [0; 64];
    extended_formats[1] = 8 | 2 << 7;
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
}

fn layout(bytes: &[u8], framing: &Framing) -> PduLayout {
    CommonHeader::decode(bytes.first_chunk().unwrap()).unwrap().layout(framing).unwrap()
}

const BOTH: Framing = Framing { header_digest: true, data_digest: true, data_alignment_bytes: 4 };

#[test]
fn tcp_initialization() {
    let bytes: [u8; 128] = sparse("2=80 4=80 10=030303");
    let view = IcReq { host_data_alignment_bytes: 16, header_digest: true, data_digest: true, r2t_max: 4 };
    assert_eq!(IcReq::decode(&bytes), Ok(view));
    assert_eq!(encoded(|into| view.encode(into)), bytes);
    assert_eq!(layout(&bytes, &Framing::PLAIN).prefix_length(), 128);

    let bytes: [u8; 128] = sparse("0=01 2=80 4=80 10=1f02 14=02");
    let view = IcResp {
        controller_data_alignment_bytes: 128,
        header_digest: false,
        data_digest: true,
        h2c_data_max_bytes: 0x2_0000,
    };
    assert_eq!(IcResp::decode(&bytes), Ok(view));
    assert_eq!(encoded(|into| view.encode(into)), bytes);

    let bytes: [u8; 24] = hex("030018006000000001000400000000000000000000000000");
    let view = TermReq { kind: PduType::C2hTermReq, fatal: FatalError::field(4) };
    assert_eq!(TermReq::decode(PduType::C2hTermReq, &bytes), Ok(view));
    let mut made = [0; TERM_MAX];
    assert_eq!(view.encode(&[0x77; 72], &mut made), 96);
    assert_eq!((&made[..24], &made[24..96]), (&bytes[..], &[0x77; 72][..]));
    assert_eq!(layout(&bytes, &BOTH).data_length, 72);
}

#[test]
fn tcp_data() {
    let bytes: [u8; 24] = hex("0607181c2010000034127856001000000010000000000000");
    let view = H2cData { cccid: 0x1234, ttag: 0x5678, offset: 0x1000, length: 4096, last: true };
    assert_eq!(H2cData::decode(&bytes), view);
    let parts = layout(&bytes, &BOTH);
    let expected = PduLayout {
        header_length: 24,
        header_digest: true,
        data_offset: 28,
        data_length: 4096,
        data_digest: true,
        length: 4128,
    };
    assert_eq!(parts, expected);
    assert_eq!(encoded(|into| assert_eq!(view.encode(&BOTH, into), expected)), bytes);

    let bytes: [u8; 24] = hex("070c18181802000034120000000200000002000000000000");
    let view = C2hData { cccid: 0x1234, offset: 0x200, length: 512, last: true, success: true };
    assert_eq!(C2hData::decode(&bytes), view);
    assert_eq!(layout(&bytes, &Framing::PLAIN).prefix_length(), 24);
    assert_eq!(encoded(|into| _ = view.encode(&Framing::PLAIN, into)), bytes);

    let bytes: [u8; 24] = hex("090118001c00000034127856002000000000020000000000");
    let view = R2t { cccid: 0x1234, ttag: 0x5678, offset: 0x2000, length: 0x2_0000 };
    assert_eq!(R2t::decode(&bytes), view);
    assert_eq!(layout(&bytes, &BOTH).prefix_length(), 28);
    assert_eq!(encoded(|into| _ = view.encode(&BOTH, into)), bytes);
}

#[test]
fn tcp_capsules() {
    let bytes: [u8; 24] = hex("050018001800000000000000000000000300000007000000");
    let cqe = Cqe { sqhd: 3, ..Cqe::new(7, Status::SUCCESS) };
    assert_eq!(CapsuleResp::decode(&bytes), cqe);
    assert_eq!(encoded(|into| _ = CapsuleResp { cqe }.encode(&Framing::PLAIN, into)), bytes);

    let bytes: [u8; 72] = hex("0400484848020000014009000100000000000000000000000000000000000000\
         000000000000000000020000000000010000000000000000000000000000000000000000000000\
00");
    let sqe =
        Sqe { cid: 9, nsid: 1, data: DataPointer::capsule(0, 512), ..Sqe::new(NvmOpcode::Write.to_wire()) };
    assert_eq!(CapsuleCmd::decode(&bytes), sqe);
    assert_eq!(layout(&bytes, &Framing::PLAIN).data_length, 512);
    assert_eq!(encoded(|into| _ = CapsuleCmd { sqe, data_length: 512 }.encode(&Framing::PLAIN, into)), bytes);
}

/// Constants of the Linux kernel (include/linux/nvme.h and nvme-tcp.h, 6.x), used by its initiator.
#[test]
fn constants_of_linux() {
    // NVME_TRANSPORT_SGL_DATA_DESC << 4 | NVME_SGL_FMT_TRANSPORT_A, NVME_SGL_FMT_DATA_DESC << 4 |
    // NVME_SGL_FMT_OFFSET, NVME_CMD_SGL_METABUF.
    assert_eq!((DataPointer::TRANSPORT, DataPointer::CAPSULE, Sqe::FLAGS_SGL), (5 << 4 | 0xa, 1, 1 << 6));
    // enum nvme_tcp_pdu_flags.
    let flags = [tcp_flags(PduFlags::HEADER_DIGEST), tcp_flags(PduFlags::DATA_DIGEST)];
    assert_eq!((flags, tcp_flags(PduFlags::LAST), tcp_flags(PduFlags::SUCCESS)), ([1, 2], 4, 8));
    // enum nvme_tcp_fatal_error_status.
    assert_eq!(FatalStatus::HeaderDigestError as u16, 0x03);
    assert_eq!(FatalStatus::UnsupportedParameter as u16, 0x06);
    // NVME_DISC_SUBSYS_NAME.
    assert_eq!(DISCOVERY_NQN, "nqn.2014-08.org.nvmexpress.discovery");
}

fn tcp_flags(flags: PduFlags) -> u8 {
    flags.bits()
}

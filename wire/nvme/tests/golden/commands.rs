//! Submission and completion queue entries, features and events.

use block_io::Status;
use wire_nvme::admin::{Abort, GetFeatures, GetLogPage, Identify, SetFeatures};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::fabrics::*;
use wire_nvme::feature::{AsyncEventConfiguration, NumberOfQueues, TemperatureThreshold};
use wire_nvme::io::*;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::{self, *};
use wire_nvme::sqe::{Fuse, Psdt, Sgl};
use wire_nvme::{Cqe, DataPointer, NSID_ALL, Sqe};

use super::{encoded, hex, sparse, sqe};

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
    let connected =
        ConnectResponse { cntlid: 0x1234, authentication_required: true, secure_channel_required: false };
    assert_eq!(ConnectResponse::from_result(Cqe::decode(&accepted).result), connected);
    assert_eq!(connected.to_result(), Cqe::decode(&accepted).result);
    // NVME_CONNECT_AUTHREQ_ASCR of include/linux/nvme.h.
    let concatenated = ConnectResponse { secure_channel_required: true, ..connected };
    assert_eq!(concatenated.to_result(), 0x1234 | 1 << 17 | 1 << 18);
    assert_eq!(ConnectResponse::from_result(concatenated.to_result()), concatenated);
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

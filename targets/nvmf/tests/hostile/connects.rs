//! Connect commands that must fail, and commands before Connect.

use block_io::Status;
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, InvalidParameter, PropertyGet};
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::registers::offset;
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{RawTcpHost, connect, pattern, read, write_in_capsule};
use crate::test_target::TcpTestTarget;

type Data = [u8; CONNECT_DATA_SIZE];
type ModifyConnect = fn(&mut Sqe, &mut Data);

fn name(data: &mut Data, at: usize, name: &[u8]) {
    data[at..at + 256].fill(0);
    data[at..at + name.len()].copy_from_slice(name);
}

/// Description, modification, and the invalid parameter in the response: whether it is in the data, and its offset.
const PARAMETERS: &[(&str, ModifyConnect, bool, u16)] = &[
    ("SUBNQN without a terminator", |_, data| data[256..512].fill(b'n'), true, 256),
    ("an empty SUBNQN", |_, data| name(data, 256, b""), true, 256),
    ("SUBNQN that is no NQN", |_, data| name(data, 256, b"cnode1"), true, 256),
    ("SUBNQN that is no UTF-8", |_, data| name(data, 256, b"nqn.2016-06.io.\xff\xfe"), true, 256),
    ("SUBNQN of an unknown subsystem", |_, data| name(data, 256, b"nqn.2016-06.io.spdk:cnode2"), true, 256),
    ("HOSTNQN without a terminator", |_, data| data[512..768].fill(b'h'), true, 512),
    ("HOSTNQN that is no NQN", |_, data| name(data, 512, b"host"), true, 512),
    ("HOSTNQN with a line break", |_, data| name(data, 512, b"nqn.2014-08.org:\n"), true, 512),
    ("HOSTNQN of 224 bytes", |_, data| data[512 + 28..512 + 224].fill(b'x'), true, 512),
    ("CNTLID 1 for an admin queue", |_, data| data[16..18].copy_from_slice(&[1, 0]), true, 16),
    ("CNTLID FFFEh for an admin queue", |_, data| data[16] = 0xfe, true, 16),
    ("SQSIZE 0", |sqe, _| sqe.cdw11 = 0, false, 44),
    ("SQSIZE beyond an admin queue's", |sqe, _| sqe.cdw11 = 128, false, 44),
    ("SQSIZE FFFFh", |sqe, _| sqe.cdw11 = 0xffff, false, 44),
    ("QID 1 of a controller that does not exist", |sqe, _| sqe.cdw10 = 1 << 16, true, 16),
    ("QID FFFFh of a controller that does not exist", |sqe, _| sqe.cdw10 = 0xffff << 16, true, 16),
];

/// Description, modification, and expected status.
const STATUSES: &[(&str, ModifyConnect, Status)] = &[
    ("a record format of 1", |sqe, _| sqe.cdw10 = 1, Status::CONNECT_INCOMPATIBLE_FORMAT),
    ("FUSE", |sqe, _| sqe.flags |= 1, Status::INVALID_FIELD),
    ("PRPs", |sqe, _| sqe.flags = 0, Status::INVALID_FIELD),
    ("metadata SGLs", |sqe, _| sqe.flags = 0x80, Status::INVALID_FIELD),
    (
        "an SGL of 1023 bytes",
        |sqe, _| sqe.data = DataPointer::capsule(0, 1023),
        Status::DATA_SGL_LENGTH_INVALID,
    ),
    (
        "an SGL of 1025 bytes",
        |sqe, _| sqe.data = DataPointer::capsule(0, 1025),
        Status::DATA_SGL_LENGTH_INVALID,
    ),
    ("an SGL of no bytes", |sqe, _| sqe.data = DataPointer::capsule(0, 0), Status::DATA_SGL_LENGTH_INVALID),
    (
        "a transport SGL of 4 GiB",
        |sqe, _| sqe.data = DataPointer::transport(u32::MAX),
        Status::DATA_SGL_LENGTH_INVALID,
    ),
    (
        "an SGL that starts after the capsule",
        |sqe, _| sqe.data = DataPointer::capsule(1025, 1024),
        Status::SGL_OFFSET_INVALID,
    ),
    (
        "an SGL that starts far after the capsule",
        |sqe, _| sqe.data = DataPointer::capsule(u64::MAX, 1024),
        Status::SGL_OFFSET_INVALID,
    ),
    (
        "an SGL that ends after the capsule",
        |sqe, _| sqe.data = DataPointer::capsule(4, 1024),
        Status::DATA_SGL_LENGTH_INVALID,
    ),
    ("a keyed SGL", |sqe, _| sqe.data.high = 1024 | 0x40 << 56, Status::SGL_TYPE_INVALID),
];

#[test]
fn an_invalid_connect_fails_with_the_parameter_and_may_be_retried() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut other = RawTcpHost::io(&rig, &admin, 1, 16, false);
    for (what, modify, in_data, at) in PARAMETERS {
        let mut peer = RawTcpHost::initialized(&rig, false);
        let (mut sqe, mut data) = connect(0, 32, 0xffff);
        modify(&mut sqe, &mut data);
        let answer = peer.command(sqe, &data);
        assert!(answer.status.same_code(Status::CONNECT_INVALID_PARAMETERS), "{what}: {answer:?}");
        let reported = InvalidParameter::from_result(answer.result);
        assert_eq!(reported, InvalidParameter { in_data: *in_data, offset: *at }, "{what}");
        let (sqe, data) = connect(0, 32, 0xffff);
        assert_eq!(peer.command(sqe, &data).status, Status::SUCCESS, "after {what}");
    }
    for (what, modify, status) in STATUSES {
        let mut peer = RawTcpHost::initialized(&rig, false);
        let (mut sqe, mut data) = connect(0, 32, 0xffff);
        modify(&mut sqe, &mut data);
        let answer = peer.command(sqe, &data);
        assert!(answer.status.same_code(*status), "{what}: {answer:?}");
        let (sqe, data) = connect(0, 32, 0xffff);
        assert_eq!(peer.command(sqe, &data).status, Status::SUCCESS, "after {what}");
    }
    other.round_trip(1);
}

#[test]
fn a_connect_with_truncated_data_fails() {
    let rig = TcpTestTarget::with_transport(Default::default());
    for bytes in [0, 4, 512, 1020] {
        let mut peer = RawTcpHost::initialized(&rig, false);
        let (sqe, data) = connect(0, 32, 0xffff);
        let answer = peer.command(sqe, &data[..bytes]);
        assert!(answer.status.same_code(Status::DATA_SGL_LENGTH_INVALID), "{bytes} bytes: {answer:?}");
        assert_eq!(peer.command(sqe, &data).status, Status::SUCCESS);
    }
}

#[test]
fn connect_data_may_be_transferred_by_r2t() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let mut peer = RawTcpHost::initialized(&rig, false);
    let (sqe, data) = connect(0, 32, 0xffff);
    peer.capsule(Sqe { data: DataPointer::transport(1024), ..sqe }, &[]);
    let r2t = peer.expect_r2t();
    assert_eq!((r2t.offset, r2t.length), (0, 1024));
    peer.data(&r2t, 0, &data[..1000], false);
    peer.data(&r2t, 1000, &data[1000..], true);
    assert_eq!(peer.expect_response().status, Status::SUCCESS);
}

#[test]
fn io_queue_connects_are_validated_against_the_controller() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut first = RawTcpHost::io(&rig, &admin, 1, 16, false);
    let mut connect_as = |qid, entries, cntlid, host_id: u8| {
        let mut peer = RawTcpHost::initialized(&rig, false);
        let (sqe, mut data) = connect(qid, entries, cntlid);
        data[0] = host_id;
        let answer = peer.command(sqe, &data);
        first.round_trip(qid as u8);
        (answer.status, InvalidParameter::from_result(answer.result))
    };
    let invalid = |(status, reported): (Status, InvalidParameter), in_data, offset| {
        assert!(status.same_code(Status::CONNECT_INVALID_PARAMETERS), "{status}");
        assert_eq!(reported, InvalidParameter { in_data, offset });
    };
    let busy = connect_as(1, 16, admin.cntlid, 1).0;
    assert!(busy.same_code(Status::COMMAND_SEQUENCE_ERROR), "queue 1 exists: {busy}");
    invalid(connect_as(128, 16, admin.cntlid, 1), false, 42);
    invalid(connect_as(2, 129, admin.cntlid, 1), false, 44);
    invalid(connect_as(2, 16, admin.cntlid + 1, 1), true, 16);
    invalid(connect_as(2, 16, 0xffff, 1), true, 16);
    invalid(connect_as(2, 16, admin.cntlid, 2), true, 0);
    assert_eq!(connect_as(2, 128, admin.cntlid, 1).0, Status::SUCCESS);
}

#[test]
fn commands_before_connect_fail_with_command_sequence_error() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let property = PropertyGet { wide: false, offset: offset::CSTS };
    for sqe in [
        property.to_sqe(),
        Sqe::new(AdminOpcode::Identify.to_wire()),
        Sqe::new(NvmOpcode::Flush.to_wire()),
        Sqe { flags: 0x3f, ..Sqe::new(0xff) },
        read(1, 0, 4096),
    ] {
        let mut peer = RawTcpHost::initialized(&rig, false);
        let status = peer.command(sqe, &[]).status;
        assert!(status.same_code(Status::COMMAND_SEQUENCE_ERROR), "{sqe:?}: {status}");
        let status = peer.command(write_in_capsule(1, 0, 512), &pattern(512, 1)).status;
        assert!(
            status.same_code(Status::COMMAND_SEQUENCE_ERROR),
            "its data is received and discarded: {status}"
        );
        let (sqe, data) = connect(0, 32, 0xffff);
        assert_eq!(peer.command(sqe, &data).status, Status::SUCCESS);
        let status = peer.command(sqe, &data).status;
        assert!(status.same_code(Status::COMMAND_SEQUENCE_ERROR), "a second Connect: {status}");
    }
}

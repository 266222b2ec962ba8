//! Options that RPC methods set, as a host sees them that sends plain commands.

use block_io::Status;
use control::json::{Value, json};
use wire_nvme::admin::SetFeatures;
use wire_nvme::fabrics::{PropertyGet, PropertySet};
use wire_nvme::feature::{FeatureId, HOST_BEHAVIOR_SIZE};
use wire_nvme::io::{DSM_RANGE_SIZE, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteZeroes};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::{ControllerStatus, SUBSYSTEM_RESET, offset};
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{RawTcpHost, connect_as};
use crate::test_target::{NQN, TcpTestTarget, wait_until};

const INVALID_OPCODE: Status = Status::INVALID_OPCODE.do_not_retry();

fn property(host: &mut RawTcpHost, offset: u32) -> u64 {
    host.command(PropertyGet { wide: offset == offset::CAP, offset }.to_sqe(), &[]).result
}

fn csts(host: &mut RawTcpHost) -> ControllerStatus {
    ControllerStatus::decode(property(host, offset::CSTS) as u32).unwrap()
}

fn set_property(host: &mut RawTcpHost, offset: u32, value: u32) -> Status {
    let set = PropertySet { wide: false, offset, value: value.into() };
    host.command(set.to_sqe(), &[]).status
}

fn compare(fuse: u8) -> Sqe {
    let sqe = ReadWrite { blocks: 1, ..ReadWrite::default() }.to_sqe(NvmOpcode::Compare);
    Sqe { nsid: 1, flags: sqe.flags | fuse, data: DataPointer::capsule(0, 512), ..sqe }
}

#[test]
fn masked_commands_are_rejected() {
    let masked = json!({ "trtype": "TCP", "masked_oncs": ["nvmwzsv"], "disable_compare": true });
    let target = TcpTestTarget::configured(&[("nvmf_create_transport", masked)], json!({}));
    let admin = RawTcpHost::admin(&target);
    let mut io = RawTcpHost::io(&target, &admin, 1, 32, false);
    assert_eq!(io.command(compare(0), &[0; 512]).status, INVALID_OPCODE);
    let zeroes = WriteZeroes { lba: 0, blocks: 1, fua: false, deallocate: false, prinfo: Prinfo::empty() };
    assert_eq!(io.command(Sqe { nsid: 1, ..zeroes.to_sqe() }, &[]).status, INVALID_OPCODE);
    // A fused operation that is not supported (Base 2.0, section 3.4.2).
    assert_eq!(io.command(compare(1), &[0; 512]).status, Status::INVALID_FIELD.do_not_retry());
    io.round_trip(1);
    let described = target.invoke("nvmf_get_transports", json!({}));
    assert_eq!(described[0]["masked_oncs"], json!(["nvmcmps", "nvmwzsv"]));
    assert_eq!(described[0]["masked_fuses"], json!(["fcws"]));
}

#[test]
fn commands_above_the_limits_of_a_subsystem_are_rejected() {
    let target = TcpTestTarget::configured(&[], json!({ "dmrsl": 8, "max_write_zeroes_size_kib": 8 }));
    let described = target.invoke("nvmf_get_subsystems", json!({ "nqn": NQN }));
    assert_eq!((&described[0]["dmrsl"], &described[0]["wzsl"]), (&json!(8), &json!(1)));
    let admin = RawTcpHost::admin(&target);
    let mut io = RawTcpHost::io(&target, &admin, 1, 32, false);
    let mut zeroes = |blocks| {
        let zeroes = WriteZeroes { lba: 0, blocks, fua: false, deallocate: false, prinfo: Prinfo::empty() };
        io.command(Sqe { nsid: 1, ..zeroes.to_sqe() }, &[]).status
    };
    assert_eq!((zeroes(16), zeroes(17)), (Status::SUCCESS, Status::INVALID_FIELD.do_not_retry()));
    let mut deallocate = |blocks| {
        let mut data = [0; DSM_RANGE_SIZE];
        DsmRange { attributes: 0, blocks, lba: 0 }.encode(&mut data);
        let command = DatasetManagement { ranges: 1, deallocate: true, ..DatasetManagement::default() };
        let data_pointer = DataPointer::capsule(0, data.len() as u32);
        io.command(Sqe { nsid: 1, data: data_pointer, ..command.to_sqe() }, &data).status
    };
    let exceeded = Status::COMMAND_SIZE_LIMIT_EXCEEDED.do_not_retry();
    assert_eq!((deallocate(8), deallocate(9)), (Status::SUCCESS, exceeded));
    io.round_trip(2);
}

#[test]
fn failed_commands_of_hosts_that_honour_delays_have_one() {
    let delays = [("nvmf_set_crdt", json!({ "crdt1": 5, "crdt2": 6 }))];
    let target = TcpTestTarget::configured(&delays, json!({ "ana_reporting": true }));
    let address = &target.address;
    let ana = json!({ "nqn": NQN, "ana_state": "inaccessible", "listen_address":
        { "trtype": "TCP", "adrfam": "ipv4", "traddr": address.traddr, "trsvcid": address.trsvcid } });
    target.invoke("nvmf_subsystem_listener_set_ana_state", ana);
    for honours in [true, false] {
        let mut admin = RawTcpHost::admin(&target);
        let mut behavior = [0; HOST_BEHAVIOR_SIZE];
        behavior[0] = honours.into();
        let set = SetFeatures { fid: FeatureId::HostBehavior.to_wire(), ..SetFeatures::default() };
        let data = DataPointer::capsule(0, behavior.len() as u32);
        assert_eq!(admin.command(Sqe { data, ..set.to_sqe(0) }, &behavior).status, Status::SUCCESS);
        let mut io = RawTcpHost::io(&target, &admin, 1, 32, false);
        let delayed = Status::ANA_INACCESSIBLE.with_retry_delay(honours.into());
        assert_eq!(io.read_back(1, 0, 512), Err(delayed), "honours: {honours}");
        // Not those that need no retry.
        assert_eq!(io.read_back(9, 0, 512), Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry()));
    }
}

#[test]
fn a_host_resets_the_subsystem() {
    let target = TcpTestTarget::configured(&[], json!({ "enable_nssr": true }));
    let mut writer = RawTcpHost::admin(&target);
    let mut sibling = RawTcpHost::admin_as(&target, [2; 16]);
    let mut io = RawTcpHost::io_as(&target, &sibling, 1, 32, false, [2; 16]);
    io.round_trip(3);
    assert_eq!(set_property(&mut writer, offset::NSSR, SUBSYSTEM_RESET), Status::SUCCESS);
    io.receive_until_closed();
    let reset = ControllerStatus { subsystem_reset_occurred: true, ..ControllerStatus::RESET };
    for host in [&mut writer, &mut sibling] {
        wait_until("the controller is reset", || csts(host) == reset);
        assert_eq!(set_property(host, offset::CC, 0x0046_0001), Status::SUCCESS);
        assert_eq!(csts(host), ControllerStatus { ready: true, ..reset });
        assert_eq!(set_property(host, offset::CSTS, ControllerStatus::NSSRO), Status::SUCCESS);
        assert!(!csts(host).subsystem_reset_occurred);
    }
    RawTcpHost::io_as(&target, &sibling, 1, 32, false, [2; 16]).round_trip(4);
}

#[test]
fn a_second_controller_of_a_host_waits_for_the_first_to_end() {
    let restricted = json!({ "dup_host_policy": "restrict_per_listener" });
    let target = TcpTestTarget::configured(&[("nvmf_set_config", restricted)], json!({}));
    let first = RawTcpHost::admin(&target);
    // Its I/O queues connect, and so do other hosts.
    RawTcpHost::io(&target, &first, 1, 32, false).round_trip(5);
    drop(RawTcpHost::admin_as(&target, [2; 16]));
    let connected = || {
        let (sqe, data) = connect_as(0, 32, 0xffff, [1; 16]);
        RawTcpHost::initialized(&target, false).command(sqe, &data).status
    };
    assert_eq!(connected(), Status::CONNECT_CONTROLLER_BUSY);
    drop(first);
    wait_until("the first controller is gone", || connected() == Status::SUCCESS);
}

#[test]
fn connections_stay_on_the_reactors_of_the_mask() {
    let allowed = os::CpuSet::allowed();
    let [first, second, ..] = allowed.cpus() else {
        eprintln!("SKIPPED: it needs two CPUs");
        return;
    };
    let mask = json!({ "poll_groups_mask": format!("[{second}]") });
    let target = TcpTestTarget::configured(&[("nvmf_set_config", mask)], json!({}));
    let admin = RawTcpHost::admin(&target);
    let mut io: Vec<RawTcpHost> =
        (1..=4).map(|qid| RawTcpHost::io(&target, &admin, qid, 32, false)).collect();
    io.iter_mut().for_each(|io| io.round_trip(6));
    let stats = target.invoke("nvmf_get_stats", json!({}));
    let groups = stats["poll_groups"].as_array().unwrap();
    let described: Vec<(&Value, &Value)> =
        groups.iter().map(|group| (&group["name"], &group["current_io_qpairs"])).collect();
    assert_eq!(described, [(&json!("reactor_1"), &json!(4))], "core {first} serves none");
    let qpairs = target.invoke("nvmf_subsystem_get_qpairs", json!({ "nqn": NQN }));
    assert!(qpairs.as_array().unwrap().iter().all(|qpair| qpair["thread"] == "reactor_1"), "{qpairs}");
}

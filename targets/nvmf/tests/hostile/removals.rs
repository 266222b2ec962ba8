//! Removal of namespaces, devices, subsystems, listeners and hosts while commands are in flight.

use std::time::{Duration, Instant};

use block_io::Status;
use nvmf::{NamespaceConfig, SubsystemConfig};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::tcp::{Framing, R2t};
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{HOST, RawTcpHost, ReceivedPdu, h2c_data, pattern, read, write, write_in_capsule};
use crate::test_target::{NQN, TcpTestTarget, TestTargetConfig, wait_until};

const NAMESPACE_REMOVED: Status = Status::INVALID_NAMESPACE_OR_FORMAT;

#[test]
fn late_write_data_for_a_removed_namespace_reaches_no_other() {
    // The last namespace, and one in the middle: the remaining tables differ.
    for (removed, last) in [(3, true), (2, false)] {
        let rig = TcpTestTarget::new(TestTargetConfig { namespaces: 3, ..TestTargetConfig::default() });
        let admin = RawTcpHost::admin(&rig);
        let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
        for nsid in 1..=3 {
            assert_eq!(peer.write(nsid, 0, &pattern(4096, nsid as u8)), Status::SUCCESS);
        }
        peer.capsule(write(removed, 0, 4096), &[]);
        let r2t = peer.expect_r2t();
        rig.target.remove_namespace(NQN, removed).unwrap();
        peer.data(&r2t, 0, &pattern(4096, 99), true);
        let status = peer.expect_response().status;
        assert!(status.same_code(NAMESPACE_REMOVED), "last {last}: {status}");
        for nsid in (1..=3).filter(|nsid| *nsid != removed) {
            assert!(peer.read_back(nsid, 0, 4096) == Ok(pattern(4096, nsid as u8)), "namespace {nsid}");
        }
    }
}

#[test]
fn late_write_data_for_a_replaced_namespace_does_not_reach_the_new_one() {
    let rig = TcpTestTarget::new(TestTargetConfig { namespaces: 2, ..TestTargetConfig::default() });
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    peer.capsule(write(2, 0, 4096), &[]);
    let r2t = peer.expect_r2t();
    rig.target.remove_namespace(NQN, 2).unwrap();
    rig.target.remove_namespace(NQN, 1).unwrap();
    // Another device with the same NSID and the same backend key.
    let other = NamespaceConfig { nsid: Some(2), ..NamespaceConfig::new("Malloc1") };
    rig.target.add_namespace(NQN, other).unwrap();
    peer.data(&r2t, 0, &pattern(4096, 99), true);
    let status = peer.expect_response().status;
    assert!(status.same_code(NAMESPACE_REMOVED), "{status}");
    assert_eq!(peer.read_back(2, 0, 4096), Ok(vec![0; 4096]));
}

/// An I/O queue with commands in flight on a slow device: CIDs 0 to 15 are at the device, 16 to 19 are writes
/// with an outstanding R2T.
struct CommandsInFlight {
    admin: RawTcpHost,
    peer: RawTcpHost,
    r2ts: Vec<R2t>,
}

const WITH_DEVICES: u16 = 16;
const COMMANDS: usize = 20;

impl CommandsInFlight {
    fn new(prepare: impl FnOnce(&TcpTestTarget)) -> (TcpTestTarget, CommandsInFlight) {
        let rig = TcpTestTarget::new(TestTargetConfig {
            namespaces: 2,
            latency_us: 300_000,
            ..TestTargetConfig::default()
        });
        prepare(&rig);
        let admin = RawTcpHost::admin(&rig);
        let mut peer = RawTcpHost::io(&rig, &admin, 1, 64, false);
        for n in 0..WITH_DEVICES / 2 {
            peer.capsule(Sqe { cid: n, ..write_in_capsule(1, n.into(), 512) }, &pattern(512, 1));
            peer.capsule(Sqe { cid: WITH_DEVICES / 2 + n, ..read(1, n.into(), 512) }, &[]);
        }
        let mut r2ts = Vec::new();
        for cid in WITH_DEVICES..COMMANDS as u16 {
            peer.capsule(Sqe { cid, ..write(1, 64, 4096) }, &[]);
            r2ts.push(peer.expect_r2t());
        }
        (rig, CommandsInFlight { admin, peer, r2ts })
    }

    /// Sends the data for all R2Ts.
    fn send_data(&mut self) {
        for r2t in &self.r2ts {
            self.peer.data(r2t, 0, &pattern(4096, 2), true);
        }
    }

    /// Receives one response for each command; those whose data arrived after the removal must have status `late`.
    fn expect_all(&mut self, late: Status) {
        let mut answered = [false; COMMANDS];
        while answered.contains(&false) {
            match self.peer.receive_pdu() {
                ReceivedPdu::Response(cqe) => {
                    let seen = std::mem::replace(&mut answered[usize::from(cqe.cid)], true);
                    assert!(!seen, "{} completes twice", cqe.cid);
                    let expected = if cqe.cid < WITH_DEVICES { Status::SUCCESS } else { late };
                    assert!(cqe.status.same_code(expected), "{cqe:?}");
                }
                ReceivedPdu::Data(..) => {}
                other => panic!("{other:?} after {answered:?}"),
            }
        }
    }
}

#[test]
fn the_bdev_of_a_removed_namespace_is_free_when_its_commands_have_completed() {
    const OTHER: &str = "nqn.2025-01.io.ringbolt:other";
    type Remove = fn(&TcpTestTarget) -> bdev::Closing;
    let removals: [Remove; 2] =
        [|rig| rig.target.remove_namespace(NQN, 1).unwrap(), |rig| rig.target.delete_subsystem(NQN).unwrap()];
    for remove in removals {
        let (rig, in_flight) = CommandsInFlight::new(|_| {});
        rig.target.create_subsystem(OTHER, SubsystemConfig::default()).unwrap();
        let slow = || NamespaceConfig::new("Slow1");
        assert!(rig.target.add_namespace(OTHER, slow()).is_err(), "it is in use");
        remove(&rig).wait().unwrap();
        assert_eq!(rig.target.add_namespace(OTHER, slow()).unwrap(), 1);
        drop(in_flight);
    }
}

/// A namespace is removed: the connection stays.
fn commands_fail_and_the_connection_stays(remove: impl FnOnce(&TcpTestTarget)) {
    let (rig, mut in_flight) = CommandsInFlight::new(|_| {});
    remove(&rig);
    in_flight.send_data();
    in_flight.expect_all(NAMESPACE_REMOVED);
    let peer = &mut in_flight.peer;
    let status = peer.read_back(1, 0, 512).unwrap_err();
    assert!(status.same_code(NAMESPACE_REMOVED), "{status}");
    assert_eq!(peer.write(2, 0, &pattern(512, 3)), Status::SUCCESS);
    assert_eq!(peer.read_back(2, 0, 512), Ok(pattern(512, 3)));
}

/// Access to the subsystem is removed: commands in flight complete, no more are accepted, and the queues close,
/// the admin queue last.
fn commands_complete_and_the_connections_close(
    prepare: impl FnOnce(&TcpTestTarget),
    remove: impl FnOnce(&TcpTestTarget),
    late: Status,
) {
    let (rig, mut in_flight) = CommandsInFlight::new(prepare);
    let start = Instant::now();
    remove(&rig);
    in_flight.send_data();
    in_flight.peer.capsule(Sqe { cid: 40, ..read(1, 0, 512) }, &[]);
    in_flight.expect_all(late);
    assert_eq!(in_flight.peer.receive_pdu(), ReceivedPdu::Closed);
    assert_eq!(in_flight.admin.receive_pdu(), ReceivedPdu::Closed);
    // The drain ended before its timeout.
    assert!(start.elapsed() < Duration::from_millis(2500), "it took {:?}", start.elapsed());
}

#[test]
fn commands_of_a_removed_namespace_complete() {
    commands_fail_and_the_connection_stays(|rig| drop(rig.target.remove_namespace(NQN, 1).unwrap()));
}

#[test]
fn commands_of_a_removed_bdev_complete() {
    commands_fail_and_the_connection_stays(|rig| drop(rig.registry.unregister("Slow1").unwrap()));
}

#[test]
fn commands_of_a_removed_base_bdev_complete() {
    commands_fail_and_the_connection_stays(|rig| drop(rig.registry.unregister("Malloc1").unwrap()));
}

#[test]
fn commands_of_a_deleted_subsystem_complete() {
    commands_complete_and_the_connections_close(
        |_| {},
        |rig| drop(rig.target.delete_subsystem(NQN).unwrap()),
        NAMESPACE_REMOVED,
    );
}

#[test]
fn commands_through_a_removed_listener_complete() {
    commands_complete_and_the_connections_close(
        |_| {},
        |rig| rig.target.remove_listener(NQN, rig.address.clone()).unwrap(),
        Status::SUCCESS,
    );
}

#[test]
fn commands_of_a_removed_host_complete() {
    let listed = |rig: &TcpTestTarget| {
        rig.target.add_host(NQN, HOST).unwrap();
        rig.target.allow_any_host(NQN, false).unwrap();
    };
    commands_complete_and_the_connections_close(
        listed,
        |rig| rig.target.remove_host(NQN, HOST).unwrap(),
        Status::SUCCESS,
    );
    commands_complete_and_the_connections_close(
        |_| {},
        |rig| rig.target.allow_any_host(NQN, false).unwrap(),
        Status::SUCCESS,
    );
}

#[test]
fn commands_complete_before_the_target_stops() {
    let (rig, mut in_flight) = CommandsInFlight::new(|_| {});
    let address = rig.address.socket().unwrap();
    std::thread::scope(|scope| {
        // Stopping waits for the commands in flight.
        scope.spawn(move || drop(rig));
        wait_until("the listener is closed", || std::net::TcpStream::connect(address).is_err());
        in_flight.send_data();
        in_flight.expect_all(Status::SUCCESS);
        assert_eq!(in_flight.peer.receive_pdu(), ReceivedPdu::Closed);
        assert_eq!(in_flight.admin.receive_pdu(), ReceivedPdu::Closed);
    });
}

#[test]
fn an_async_event_does_not_complete_a_command_with_the_same_cid() {
    let rig = TcpTestTarget::new(TestTargetConfig { namespaces: 2, ..TestTargetConfig::default() });
    let mut admin = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &admin, 1, 16, false);
    // Asynchronous Event Configuration: namespace attribute notices.
    let notices = Sqe { cdw10: 0x0b, cdw11: 1 << 8, ..Sqe::new(AdminOpcode::SetFeatures.to_wire()) };
    assert_eq!(admin.command(notices, &[]).status, Status::SUCCESS);
    // Host Behavior Support with partly received data, under the CID of an Asynchronous Event Request.
    let behavior = Sqe {
        cid: 5,
        cdw10: 0x16,
        data: DataPointer::transport(512),
        ..Sqe::new(AdminOpcode::SetFeatures.to_wire())
    };
    admin.capsule(behavior, &[]);
    let r2t = admin.expect_r2t();
    admin.capsule(Sqe { cid: 5, ..Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()) }, &[]);
    let pdu = h2c_data(&Framing::PLAIN, &r2t, 0, &[0; 512], true);
    admin.send(&pdu[..200]);
    std::thread::sleep(Duration::from_millis(50));
    rig.target.remove_namespace(NQN, 2).unwrap();
    let notice = admin.expect_response();
    assert_eq!((notice.cid, notice.status), (5, Status::SUCCESS));
    assert_eq!(notice.result & 7, 2, "it is a notice: {notice:?}");
    admin.send(&pdu[200..]);
    assert_eq!(admin.expect_response().cid, 5);
    io.round_trip(1);
}

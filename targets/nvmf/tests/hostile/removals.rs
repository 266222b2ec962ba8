//! What is served goes away while it is used.

use std::time::{Duration, Instant};

use nvmf::NamespaceConfig;
use ring::Status;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::tcp::{Framing, R2t};
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{HOST, Peer, Said, h2c_data, pattern, read, write, write_in_capsule};
use crate::rig::{NQN, Parts, Rig, eventually};

const REFUSED: Status = Status::INVALID_NAMESPACE_OR_FORMAT;

#[test]
fn data_for_a_namespace_that_is_gone_reaches_no_other() {
    // The last namespace, and one in the middle: the tables that are left differ.
    for (gone, last) in [(3, true), (2, false)] {
        let rig = Rig::new(Parts { namespaces: 3, ..Parts::default() });
        let admin = Peer::admin(&rig);
        let mut peer = Peer::io(&rig, &admin, 1, 16, false);
        for nsid in 1..=3 {
            assert_eq!(peer.write(nsid, 0, &pattern(4096, nsid as u8)), Status::SUCCESS);
        }
        peer.capsule(write(gone, 0, 4096), &[]);
        let r2t = peer.hear_r2t();
        rig.target.remove_namespace(NQN, gone).unwrap();
        peer.data(&r2t, 0, &pattern(4096, 99), true);
        let status = peer.hear_response().status;
        assert!(status.same_code(REFUSED), "last {last}: {status}");
        for nsid in (1..=3).filter(|nsid| *nsid != gone) {
            assert!(peer.read_back(nsid, 0, 4096) == Ok(pattern(4096, nsid as u8)), "namespace {nsid}");
        }
    }
}

#[test]
fn data_for_a_namespace_that_was_replaced_does_not_reach_the_new_one() {
    let rig = Rig::new(Parts { namespaces: 2, ..Parts::default() });
    let admin = Peer::admin(&rig);
    let mut peer = Peer::io(&rig, &admin, 1, 16, false);
    peer.capsule(write(2, 0, 4096), &[]);
    let r2t = peer.hear_r2t();
    rig.target.remove_namespace(NQN, 2).unwrap();
    rig.target.remove_namespace(NQN, 1).unwrap();
    // Under the same identifier another device, which has the same key.
    let other = NamespaceConfig { nsid: Some(2), ..NamespaceConfig::new("Malloc1") };
    rig.target.add_namespace(NQN, other).unwrap();
    peer.data(&r2t, 0, &pattern(4096, 99), true);
    let status = peer.hear_response().status;
    assert!(status.same_code(REFUSED), "{status}");
    assert_eq!(peer.read_back(2, 0, 4096), Ok(vec![0; 4096]));
}

/// An I/O queue with commands of every kind under way at a slow device: identifiers 0 to 15 are with it, 16 to
/// 19 are writes whose data was asked for.
struct UnderWay {
    admin: Peer,
    peer: Peer,
    asked: Vec<R2t>,
}

const WITH_DEVICES: u16 = 16;
const COMMANDS: usize = 20;

impl UnderWay {
    fn new(prepare: impl FnOnce(&Rig)) -> (Rig, UnderWay) {
        let rig = Rig::new(Parts { namespaces: 2, latency_us: 300_000, ..Parts::default() });
        prepare(&rig);
        let admin = Peer::admin(&rig);
        let mut peer = Peer::io(&rig, &admin, 1, 64, false);
        for n in 0..WITH_DEVICES / 2 {
            peer.capsule(Sqe { cid: n, ..write_in_capsule(1, n.into(), 512) }, &pattern(512, 1));
            peer.capsule(Sqe { cid: WITH_DEVICES / 2 + n, ..read(1, n.into(), 512) }, &[]);
        }
        let mut asked = Vec::new();
        for cid in WITH_DEVICES..COMMANDS as u16 {
            peer.capsule(Sqe { cid, ..write(1, 64, 4096) }, &[]);
            asked.push(peer.hear_r2t());
        }
        (rig, UnderWay { admin, peer, asked })
    }

    /// Sends the data that was asked for.
    fn give(&mut self) {
        for r2t in &self.asked {
            self.peer.data(r2t, 0, &pattern(4096, 2), true);
        }
    }

    /// Each is answered once; those whose data came late with `late`.
    fn hear_all(&mut self, late: Status) {
        let mut answered = [false; COMMANDS];
        while answered.contains(&false) {
            match self.peer.hear() {
                Said::Response(cqe) => {
                    let seen = std::mem::replace(&mut answered[usize::from(cqe.cid)], true);
                    assert!(!seen, "{} is answered twice", cqe.cid);
                    let expected = if cqe.cid < WITH_DEVICES { Status::SUCCESS } else { late };
                    assert!(cqe.status.same_code(expected), "{cqe:?}");
                }
                Said::Data(..) => {}
                other => panic!("{other:?} after {answered:?}"),
            }
        }
    }
}

/// A namespace goes: the connection stays.
fn goes(happens: impl FnOnce(&Rig)) {
    let (rig, mut under_way) = UnderWay::new(|_| {});
    happens(&rig);
    under_way.give();
    under_way.hear_all(REFUSED);
    let peer = &mut under_way.peer;
    let status = peer.read_back(1, 0, 512).unwrap_err();
    assert!(status.same_code(REFUSED), "{status}");
    assert_eq!(peer.write(2, 0, &pattern(512, 3)), Status::SUCCESS);
    assert_eq!(peer.read_back(2, 0, 512), Ok(pattern(512, 3)));
}

/// The way to the subsystem goes: what is under way is answered, nothing more is taken, and the queues end, that
/// of the admin commands last.
fn ends(prepare: impl FnOnce(&Rig), happens: impl FnOnce(&Rig), late: Status) {
    let (rig, mut under_way) = UnderWay::new(prepare);
    let start = Instant::now();
    happens(&rig);
    under_way.give();
    under_way.peer.capsule(Sqe { cid: 40, ..read(1, 0, 512) }, &[]);
    under_way.hear_all(late);
    assert_eq!(under_way.peer.hear(), Said::Closed);
    assert_eq!(under_way.admin.hear(), Said::Closed);
    // Not because there was no more time.
    assert!(start.elapsed() < Duration::from_millis(2500), "it took {:?}", start.elapsed());
}

#[test]
fn commands_of_a_removed_namespace_are_answered() {
    goes(|rig| rig.target.remove_namespace(NQN, 1).unwrap());
}

#[test]
fn commands_of_a_removed_bdev_are_answered() {
    goes(|rig| drop(rig.registry.unregister("Slow1").unwrap()));
}

#[test]
fn commands_of_a_removed_base_bdev_are_answered() {
    goes(|rig| drop(rig.registry.unregister("Malloc1").unwrap()));
}

#[test]
fn commands_of_a_deleted_subsystem_are_answered() {
    ends(|_| {}, |rig| rig.target.delete_subsystem(NQN).unwrap(), REFUSED);
}

#[test]
fn commands_through_a_removed_listener_are_answered() {
    ends(|_| {}, |rig| rig.target.remove_listener(NQN, rig.address.clone()).unwrap(), Status::SUCCESS);
}

#[test]
fn commands_of_a_removed_host_are_answered() {
    let listed = |rig: &Rig| {
        rig.target.add_host(NQN, HOST).unwrap();
        rig.target.allow_any_host(NQN, false).unwrap();
    };
    ends(listed, |rig| rig.target.remove_host(NQN, HOST).unwrap(), Status::SUCCESS);
    ends(|_| {}, |rig| rig.target.allow_any_host(NQN, false).unwrap(), Status::SUCCESS);
}

#[test]
fn commands_of_a_target_that_stops_are_answered() {
    let (rig, mut under_way) = UnderWay::new(|_| {});
    let address = rig.address.socket().unwrap();
    std::thread::scope(|scope| {
        // Stopping waits for them.
        scope.spawn(move || drop(rig));
        eventually("nobody listens", || std::net::TcpStream::connect(address).is_err());
        under_way.give();
        under_way.hear_all(Status::SUCCESS);
        assert_eq!(under_way.peer.hear(), Said::Closed);
        assert_eq!(under_way.admin.hear(), Said::Closed);
    });
}

#[test]
fn an_event_does_not_answer_a_command_whose_data_is_arriving() {
    let rig = Rig::new(Parts { namespaces: 2, ..Parts::default() });
    let mut admin = Peer::admin(&rig);
    let mut io = Peer::io(&rig, &admin, 1, 16, false);
    // Asynchronous Event Configuration: namespace attribute notices.
    let notices = Sqe { cdw10: 0x0b, cdw11: 1 << 8, ..Sqe::new(AdminOpcode::SetFeatures.to_wire()) };
    assert_eq!(admin.command(notices, &[]).status, Status::SUCCESS);
    // Host Behavior Support, whose data stands half here, under the identifier of an event request.
    let behavior = Sqe {
        cid: 5,
        cdw10: 0x16,
        data: DataPointer::transport(512),
        ..Sqe::new(AdminOpcode::SetFeatures.to_wire())
    };
    admin.capsule(behavior, &[]);
    let r2t = admin.hear_r2t();
    admin.capsule(Sqe { cid: 5, ..Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()) }, &[]);
    let pdu = h2c_data(&Framing::PLAIN, &r2t, 0, &[0; 512], true);
    admin.send(&pdu[..200]);
    std::thread::sleep(Duration::from_millis(50));
    rig.target.remove_namespace(NQN, 2).unwrap();
    let notice = admin.hear_response();
    assert_eq!((notice.cid, notice.status), (5, Status::SUCCESS));
    assert_eq!(notice.result & 7, 2, "it is a notice: {notice:?}");
    admin.send(&pdu[200..]);
    assert_eq!(admin.hear_response().cid, 5);
    io.round_trip(1);
}

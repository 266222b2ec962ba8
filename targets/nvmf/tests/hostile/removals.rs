//! What is served goes away while it is used.

use std::time::Duration;

use nvmf::NamespaceConfig;
use ring::Status;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::tcp::Framing;
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{Peer, Said, h2c_data, pattern, read, write, write_in_capsule};
use crate::rig::{NQN, Parts, Rig};

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

/// Commands of every kind under way at a slow device when something happens; each must be answered.
fn under_way(happens: impl FnOnce(&Rig), ends: bool) {
    let rig = Rig::new(Parts { namespaces: 2, latency_us: 300_000, ..Parts::default() });
    let admin = Peer::admin(&rig);
    let mut peer = Peer::io(&rig, &admin, 1, 64, false);
    for n in 0..8 {
        peer.capsule(Sqe { cid: n, ..write_in_capsule(1, n.into(), 512) }, &pattern(512, 1));
        peer.capsule(Sqe { cid: 8 + n, ..read(1, n.into(), 512) }, &[]);
    }
    let mut asked = Vec::new();
    for n in 0..4 {
        peer.capsule(Sqe { cid: 16 + n, ..write(1, 64, 4096) }, &[]);
        asked.push(peer.hear_r2t());
    }
    std::thread::sleep(Duration::from_millis(50));
    happens(&rig);
    if ends {
        peer.hear_end();
        return;
    }
    for r2t in &asked {
        peer.data(r2t, 0, &pattern(4096, 2), true);
    }
    let mut answered = [false; 20];
    while answered.contains(&false) {
        match peer.hear() {
            Said::Response(cqe) => {
                let seen = std::mem::replace(&mut answered[usize::from(cqe.cid)], true);
                assert!(!seen, "{} is answered twice", cqe.cid);
                assert!(cqe.cid < 16 || cqe.status.same_code(REFUSED), "{cqe:?}");
            }
            Said::Data(..) => {}
            other => panic!("{other:?}"),
        }
    }
    let status = peer.read_back(1, 0, 512).unwrap_err();
    assert!(status.same_code(REFUSED), "{status}");
    assert_eq!(peer.write(2, 0, &pattern(512, 3)), Status::SUCCESS);
    assert_eq!(peer.read_back(2, 0, 512), Ok(pattern(512, 3)));
}

#[test]
fn commands_of_a_removed_namespace_are_answered() {
    under_way(|rig| rig.target.remove_namespace(NQN, 1).unwrap(), false);
}

#[test]
fn commands_of_a_removed_bdev_are_answered() {
    under_way(|rig| drop(rig.registry.unregister("Slow1").unwrap()), false);
}

#[test]
fn commands_of_a_removed_base_bdev_are_answered() {
    under_way(|rig| drop(rig.registry.unregister("Malloc1").unwrap()), false);
}

#[test]
fn the_queues_of_a_deleted_subsystem_end() {
    under_way(|rig| rig.target.delete_subsystem(NQN).unwrap(), true);
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

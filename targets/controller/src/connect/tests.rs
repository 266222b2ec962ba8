use wire_nvme::DataPointer;
use wire_nvme::fabrics::{CNTLID_STATIC, Disconnect, PropertyGet};

use super::*;
use crate::harness::{connect_data, connect_sqe, host, subnqn, subsystem};
use crate::{Controller, Event, Listener};

struct Target {
    directory: Arc<Directory>,
    limits: Limits,
    subsystem: Arc<Subsystem>,
}

impl Target {
    fn new(subsystem: Subsystem) -> Target {
        Target { directory: Arc::default(), limits: Limits::default(), subsystem: Arc::new(subsystem) }
    }

    fn connect(&self, sqe: &Sqe, data: &[u8]) -> Result<ConnectOk, ConnectError> {
        let place = Place { directory: &self.directory, limits: &self.limits, port: Port::default() };
        connect(sqe, data, &place, |nqn| (*nqn == self.subsystem.nqn).then(|| self.subsystem.clone()))
    }

    fn controller(&self) -> Controller {
        let data = connect_data(self.subsystem.nqn.clone(), CNTLID_DYNAMIC);
        match self.connect(&connect_sqe(0, 32, 0), &data) {
            Ok(ConnectOk::Admin(admin)) => {
                Controller::new(admin, Arc::new(self.limits.clone()), Arc::default(), 0)
            }
            other => panic!("{other:?}"),
        }
    }

    fn enabled(&self) -> Controller {
        let mut controller = self.controller();
        let sqe = crate::harness::property_set(0x14, crate::harness::LINUX_CC);
        controller.handle(Event::Command { sqe: &sqe, data: &[] }, 0, &mut Vec::new());
        controller
    }
}

fn in_command(offset: u16) -> (Status, u64) {
    (Status::CONNECT_INVALID_PARAMETERS, offset.into())
}

fn in_data(offset: u16) -> (Status, u64) {
    (Status::CONNECT_INVALID_PARAMETERS, u64::from(offset) | 1 << 16)
}

/// Statuses and parameter offsets of Base 2.0, section 6.3.
#[test]
fn wrong_connects_are_refused_for_their_reason() {
    let dnr = |(status, result): (Status, u64)| (status.do_not_retry(), result);
    let only = |status: Status| (status.do_not_retry(), 0);
    let good = || connect_data(subnqn(), CNTLID_DYNAMIC).to_vec();
    let with = |at: usize, bytes: &[u8]| {
        let mut data = good();
        data[at..at + bytes.len()].copy_from_slice(bytes);
        data
    };
    let admin = connect_sqe(0, 32, 0);
    let rows = vec![
        ("no data", admin, vec![], only(Status::DATA_SGL_LENGTH_INVALID)),
        ("short data", admin, good()[..1023].to_vec(), only(Status::DATA_SGL_LENGTH_INVALID)),
        ("long data", admin, [good(), vec![0]].concat(), only(Status::DATA_SGL_LENGTH_INVALID)),
        ("fused", Sqe { flags: 0x41, ..admin }, good(), only(Status::INVALID_FIELD)),
        ("PRPs", Sqe { flags: 0, ..admin }, good(), only(Status::INVALID_FIELD)),
        ("read first", Sqe::new(2), good(), only(Status::COMMAND_SEQUENCE_ERROR)),
        (
            "property first",
            PropertyGet { wide: true, offset: 0 }.to_sqe(),
            vec![],
            only(Status::COMMAND_SEQUENCE_ERROR),
        ),
        (
            "disconnect first",
            Disconnect { record_format: 0 }.to_sqe(),
            vec![],
            only(Status::COMMAND_SEQUENCE_ERROR),
        ),
        ("reserved fabrics type", Sqe { nsid: 0x33, ..admin }, good(), only(Status::COMMAND_SEQUENCE_ERROR)),
        (
            "record format",
            Sqe { cdw10: 1, ..admin },
            good(),
            (Status::CONNECT_INCOMPATIBLE_FORMAT.do_not_retry(), 40),
        ),
        ("queue of one entry", connect_sqe(0, 1, 0), good(), dnr(in_command(44))),
        ("admin queue too long", connect_sqe(0, 129, 0), good(), dnr(in_command(44))),
        ("I/O queue too long", connect_sqe(1, 65536, 0), good(), dnr(in_command(44))),
        ("subsystem not NUL-terminated", admin, with(256, &[b'n'; 256]), dnr(in_data(256))),
        (
            "subsystem too long",
            admin,
            with(256, format!("nqn.2014-08.{}", "x".repeat(212)).as_bytes()),
            dnr(in_data(256)),
        ),
        ("subsystem not UTF-8", admin, with(260, &[0xff]), dnr(in_data(256))),
        ("subsystem no NQN", admin, with(256, b"iqn"), dnr(in_data(256))),
        ("subsystem empty", admin, with(256, &[0]), dnr(in_data(256))),
        ("host not NUL-terminated", admin, with(512, &[b'n'; 256]), dnr(in_data(512))),
        ("host empty", admin, with(512, &[0]), dnr(in_data(512))),
        ("subsystem unknown", admin, with(256, b"nqn.2026-11.io.ringbolt:two"), in_data(256)),
        ("a controller of its choice", admin, with(16, &7u16.to_le_bytes()), dnr(in_data(16))),
        ("static model", admin, with(16, &CNTLID_STATIC.to_le_bytes()), dnr(in_data(16))),
        ("I/O queue without a controller", connect_sqe(1, 32, 0), with(16, &7u16.to_le_bytes()), in_data(16)),
        ("I/O queue of any controller", connect_sqe(1, 32, 0), good(), in_data(16)),
    ];
    let target = Target::new(subsystem());
    for (name, sqe, data, expected) in rows {
        let error = target.connect(&sqe, &data).expect_err(name);
        assert_eq!((error.status, error.result), expected, "{name}");
        assert_eq!(error.cqe(9).cid, 9);
    }
    assert!(target.directory.controllers(&subnqn()).is_empty());
}

#[test]
fn hosts_and_ports_that_are_not_allowed_are_refused() {
    let mut closed = subsystem();
    closed.allow_any_host = false;
    closed.hosts.insert("nqn.2026-11.io.ringbolt:other-host".parse().unwrap());
    let data = connect_data(subnqn(), CNTLID_DYNAMIC);
    let error = Target::new(closed.clone()).connect(&connect_sqe(0, 32, 0), &data).unwrap_err();
    assert_eq!(error, ConnectError { status: Status::CONNECT_INVALID_HOST, result: 512 | 1 << 16 });
    closed.hosts.insert(host());
    assert!(Target::new(closed.clone()).connect(&connect_sqe(0, 32, 0), &data).is_ok());
    closed.listeners = vec![Listener { portid: 3, ana: vec![] }];
    let error = Target::new(closed.clone()).connect(&connect_sqe(0, 32, 0), &data).unwrap_err();
    assert_eq!(error.status, Status::CONNECT_INVALID_HOST);
    closed.listeners.push(Listener::default());
    assert!(Target::new(closed).connect(&connect_sqe(0, 32, 0), &data).is_ok());
}

#[test]
fn io_queues_join_an_enabled_controller_of_the_same_host() {
    let target = Target::new(subsystem());
    let disabled = target.controller();
    let cntlid = disabled.association().cntlid();
    let data = connect_data(subnqn(), cntlid);
    let refused = |sqe: &Sqe, data: &[u8]| {
        let error = target.connect(sqe, data).unwrap_err();
        (error.status, error.result)
    };
    let join = connect_sqe(1, 128, 0);
    assert_eq!(refused(&join, &data), (Status::COMMAND_SEQUENCE_ERROR, 0), "not enabled");
    drop(disabled);

    let controller = target.enabled();
    let cntlid = controller.association().cntlid();
    let data = connect_data(subnqn(), cntlid);
    let Ok(ConnectOk::Io(queue)) = target.connect(&join, &data) else { panic!("refused") };
    assert_eq!((queue.lease.qid(), queue.queue_entries, queue.no_flow_control), (1, 128, false));
    assert_eq!(refused(&join, &data), (Status::COMMAND_SEQUENCE_ERROR, 0), "in use");
    let (status, result) = refused(&connect_sqe(128, 32, 0), &data);
    assert_eq!((status, result), (Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), 42), "one too many");
    drop(queue);
    assert!(target.connect(&join, &data).is_ok(), "given back");

    let mut other = data;
    other[0] ^= 1;
    assert_eq!(refused(&join, &other), in_data(0), "another host identifier");
    let mut other = data;
    other[600] = 0;
    other[512..520].copy_from_slice(b"nqn.2099");
    assert_eq!(refused(&join, &other), in_data(512), "another host");
    drop(controller);
    assert_eq!(refused(&join, &data), in_data(16), "gone");
}

#[test]
fn discovery_controllers_have_no_io_queues() {
    let target = Target::new(Subsystem::discovery(Nqn::discovery()));
    let controller = target.controller();
    let data = connect_data(Nqn::discovery(), controller.association().cntlid());
    let error = target.connect(&connect_sqe(1, 32, 0), &data).unwrap_err();
    assert_eq!((error.status, error.result), (Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), 42));
}

#[test]
fn controller_identifiers_are_not_reused_while_there_are_others() {
    let mut small = subsystem();
    (small.cntlid_min, small.cntlid_max) = (5, 7);
    let target = Target::new(small);
    let first = target.controller();
    assert_eq!(first.association().cntlid(), 5);
    drop(first);
    let all = [target.controller(), target.controller(), target.controller()];
    assert_eq!(all.each_ref().map(|controller| controller.association().cntlid()), [6, 7, 5]);
    let data = connect_data(subnqn(), CNTLID_DYNAMIC);
    let error = target.connect(&connect_sqe(0, 32, 0), &data).unwrap_err();
    assert_eq!(error.status, Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(target.directory.controllers(&subnqn()).len(), 3);
    drop(all);
    assert!(target.directory.controllers(&subnqn()).is_empty());
}

#[test]
fn answers_carry_the_controller() {
    let target = Target::new(subsystem());
    let attributes = ConnectAttributes(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL);
    let sqe = Connect { record_format: 0, qid: 0, queue_entries: 32, attributes, kato_ms: 7 }.to_sqe();
    let connected = target.connect(&sqe, &connect_data(subnqn(), CNTLID_DYNAMIC)).unwrap();
    let cqe = connected.cqe(3);
    assert_eq!((cqe.cid, cqe.status, cqe.result), (3, Status::SUCCESS, 1));
    let ConnectOk::Admin(admin) = connected else { panic!("an admin queue") };
    assert_eq!((admin.queue_entries, admin.kato_ms, admin.no_flow_control), (32, 7, true));
    // An admin queue that fails before it has a controller leaves nothing behind.
    drop(admin);
    assert!(target.directory.controllers(&subnqn()).is_empty());
    assert_eq!(sqe.data, DataPointer::default());
}

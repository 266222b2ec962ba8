use wire_nvme::DataPointer;
use wire_nvme::fabrics::{CNTLID_STATIC, Disconnect, PropertyGet};

use super::*;
use crate::harness::{connect_data, connect_sqe, host, subnqn, subsystem};
use crate::{Controller, ControllerEvent, SubsystemListener};

struct ConnectFixture {
    directory: Arc<ControllerDirectory>,
    limits: ControllerLimits,
    subsystem: Arc<Subsystem>,
}

impl ConnectFixture {
    fn new(subsystem: Subsystem) -> ConnectFixture {
        ConnectFixture {
            directory: Arc::default(),
            limits: ControllerLimits::default(),
            subsystem: Arc::new(subsystem),
        }
    }

    fn connect(&self, sqe: &Sqe, data: &[u8]) -> Result<ConnectOk, ConnectError> {
        let context = ConnectContext {
            secure: None,
            directory: &self.directory,
            limits: &self.limits,
            port: SubsystemPort::default(),
        };
        connect(sqe, data, &context, |nqn| (*nqn == self.subsystem.nqn).then(|| self.subsystem.clone()))
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
        controller.handle(ControllerEvent::Command { sqe: &sqe, data: &[] }, 0, &mut Vec::new());
        controller
    }
}

#[test]
fn a_host_may_be_restricted_to_one_controller_on_each_listener() {
    let mut fixture = ConnectFixture::new(subsystem());
    fixture.limits.one_controller_per_listener = true;
    let data = connect_data(subnqn(), CNTLID_DYNAMIC);
    let mut of_other_host = data;
    of_other_host[0] ^= 1;
    let sqe = connect_sqe(0, 32, 0);
    let first = fixture.controller();
    let refused = fixture.connect(&sqe, &data).unwrap_err();
    assert_eq!((refused.status, refused.result), (Status::CONNECT_CONTROLLER_BUSY, 0));
    let other = fixture.connect(&sqe, &of_other_host).unwrap();
    let context = ConnectContext {
        secure: None,
        directory: &fixture.directory,
        limits: &fixture.limits,
        port: SubsystemPort { portid: 7, ..SubsystemPort::default() },
    };
    let on_other_listener = connect(&sqe, &data, &context, |_| Some(fixture.subsystem.clone())).unwrap();
    drop(first);
    assert!(fixture.connect(&sqe, &data).is_ok());
    drop((other, on_other_listener));
}

fn invalid_sqe_field(offset: u16) -> (Status, u64) {
    (Status::CONNECT_INVALID_PARAMETERS, offset.into())
}

fn invalid_data_field(offset: u16) -> (Status, u64) {
    (Status::CONNECT_INVALID_PARAMETERS, u64::from(offset) | 1 << 16)
}

/// Statuses and parameter offsets of Base 2.0, section 6.3.
#[test]
fn invalid_connects_fail_with_the_specified_status() {
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
        ("queue of one entry", connect_sqe(0, 1, 0), good(), dnr(invalid_sqe_field(44))),
        ("admin queue too long", connect_sqe(0, 129, 0), good(), dnr(invalid_sqe_field(44))),
        ("I/O queue too long", connect_sqe(1, 65536, 0), good(), dnr(invalid_sqe_field(44))),
        ("subsystem not NUL-terminated", admin, with(256, &[b'n'; 256]), dnr(invalid_data_field(256))),
        (
            "subsystem too long",
            admin,
            with(256, format!("nqn.2014-08.{}", "x".repeat(212)).as_bytes()),
            dnr(invalid_data_field(256)),
        ),
        ("subsystem not UTF-8", admin, with(260, &[0xff]), dnr(invalid_data_field(256))),
        ("subsystem is not an NQN", admin, with(256, b"iqn"), dnr(invalid_data_field(256))),
        ("subsystem empty", admin, with(256, &[0]), dnr(invalid_data_field(256))),
        ("host not NUL-terminated", admin, with(512, &[b'n'; 256]), dnr(invalid_data_field(512))),
        ("host not an NQN", admin, with(512, b"iqn"), dnr(invalid_data_field(512))),
        ("subsystem unknown", admin, with(256, b"nqn.2026-11.io.ringbolt:two"), invalid_data_field(256)),
        ("specific controller requested", admin, with(16, &7u16.to_le_bytes()), dnr(invalid_data_field(16))),
        ("static model", admin, with(16, &CNTLID_STATIC.to_le_bytes()), dnr(invalid_data_field(16))),
        (
            "I/O queue without a controller",
            connect_sqe(1, 32, 0),
            with(16, &7u16.to_le_bytes()),
            invalid_data_field(16),
        ),
        ("I/O queue of any controller", connect_sqe(1, 32, 0), good(), invalid_data_field(16)),
    ];
    let fixture = ConnectFixture::new(subsystem());
    for (name, sqe, data, expected) in rows {
        let error = fixture.connect(&sqe, &data).expect_err(name);
        assert_eq!((error.status, error.result), expected, "{name}");
        assert_eq!(error.cqe(9).cid, 9);
    }
    assert!(fixture.directory.controllers(&subnqn()).is_empty());
}

#[test]
fn connect_requires_an_allowed_host_and_port() {
    let mut closed = subsystem();
    closed.allow_any_host = false;
    closed.hosts.insert("nqn.2026-11.io.ringbolt:other-host".parse().unwrap());
    let data = connect_data(subnqn(), CNTLID_DYNAMIC);
    let error = ConnectFixture::new(closed.clone()).connect(&connect_sqe(0, 32, 0), &data).unwrap_err();
    assert_eq!(error, ConnectError { status: Status::CONNECT_INVALID_HOST, result: 512 | 1 << 16 });
    closed.hosts.insert(host());
    assert!(ConnectFixture::new(closed.clone()).connect(&connect_sqe(0, 32, 0), &data).is_ok());
    closed.listeners = vec![SubsystemListener { portid: 3, ana: vec![] }];
    let error = ConnectFixture::new(closed.clone()).connect(&connect_sqe(0, 32, 0), &data).unwrap_err();
    assert_eq!(error.status, Status::CONNECT_INVALID_HOST);
    closed.listeners.push(SubsystemListener::default());
    assert!(ConnectFixture::new(closed).connect(&connect_sqe(0, 32, 0), &data).is_ok());
}

/// `spdk_nvme_perf` without `hostnqn:` sends an empty host NQN.
#[test]
fn a_host_without_a_name_connects_where_any_host_is_allowed() {
    let data = |cntlid| {
        let mut data = connect_data(subnqn(), cntlid);
        data[512..768].fill(0);
        data
    };
    let open = ConnectFixture::new(subsystem());
    let Ok(ConnectOk::Admin(admin)) = open.connect(&connect_sqe(0, 32, 0), &data(CNTLID_DYNAMIC)) else {
        panic!("rejected")
    };
    let mut controller = Controller::new(admin, Arc::new(open.limits.clone()), Arc::default(), 0);
    let sqe = crate::harness::property_set(0x14, crate::harness::LINUX_CC);
    controller.handle(ControllerEvent::Command { sqe: &sqe, data: &[] }, 0, &mut Vec::new());
    let cntlid = controller.association().cntlid();
    // Its I/O queues are those of the same host: one without a name.
    assert!(open.connect(&connect_sqe(1, 32, 0), &data(cntlid)).is_ok());
    let named = open.connect(&connect_sqe(2, 32, 0), &connect_data(subnqn(), cntlid)).unwrap_err();
    assert_eq!((named.status, named.result), invalid_data_field(512));

    let mut closed = subsystem();
    closed.allow_any_host = false;
    closed.hosts.insert(host());
    let error =
        ConnectFixture::new(closed).connect(&connect_sqe(0, 32, 0), &data(CNTLID_DYNAMIC)).unwrap_err();
    assert_eq!(error.status, Status::CONNECT_INVALID_HOST);
}

#[test]
fn io_queues_join_an_enabled_controller_of_the_same_host() {
    let fixture = ConnectFixture::new(subsystem());
    let disabled = fixture.controller();
    let cntlid = disabled.association().cntlid();
    let data = connect_data(subnqn(), cntlid);
    let error_of = |sqe: &Sqe, data: &[u8]| {
        let error = fixture.connect(sqe, data).unwrap_err();
        (error.status, error.result)
    };
    let join = connect_sqe(1, 128, 0);
    assert_eq!(error_of(&join, &data), (Status::COMMAND_SEQUENCE_ERROR, 0), "not enabled");
    drop(disabled);

    let controller = fixture.enabled();
    let cntlid = controller.association().cntlid();
    let data = connect_data(subnqn(), cntlid);
    let Ok(ConnectOk::Io(queue)) = fixture.connect(&join, &data) else { panic!("rejected") };
    assert_eq!((queue.lease.qid(), queue.queue_entries, queue.no_flow_control), (1, 128, false));
    assert_eq!(error_of(&join, &data), (Status::COMMAND_SEQUENCE_ERROR, 0), "in use");
    let (status, result) = error_of(&connect_sqe(128, 32, 0), &data);
    assert_eq!((status, result), (Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), 42), "one too many");
    drop(queue);
    assert!(fixture.connect(&join, &data).is_ok(), "released");

    let mut other = data;
    other[0] ^= 1;
    assert_eq!(error_of(&join, &other), invalid_data_field(0), "another host identifier");
    let mut other = data;
    other[600] = 0;
    other[512..520].copy_from_slice(b"nqn.2099");
    assert_eq!(error_of(&join, &other), invalid_data_field(512), "another host");
    drop(controller);
    assert_eq!(error_of(&join, &data), invalid_data_field(16), "no controller");
}

#[test]
fn discovery_controllers_have_no_io_queues() {
    let fixture = ConnectFixture::new(Subsystem::discovery(Nqn::discovery()));
    let controller = fixture.controller();
    let data = connect_data(Nqn::discovery(), controller.association().cntlid());
    let error = fixture.connect(&connect_sqe(1, 32, 0), &data).unwrap_err();
    assert_eq!((error.status, error.result), (Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), 42));
}

#[test]
fn a_deleted_subsystem_is_forgotten_with_its_last_controller() {
    let fixture = ConnectFixture::new(subsystem());
    let (first, second) = (fixture.controller(), fixture.controller());
    drop(first);
    fixture.directory.remove_subsystem(&subnqn());
    assert_eq!(fixture.directory.subsystems(), 1, "it has a controller");
    drop(second);
    assert_eq!(fixture.directory.subsystems(), 0);
    // Created again before its old controllers are gone.
    let old = fixture.controller();
    fixture.directory.remove_subsystem(&subnqn());
    let new = fixture.controller();
    drop((old, new));
    assert_eq!(fixture.directory.subsystems(), 1, "identifiers of a subsystem that exists are reused last");
    fixture.directory.remove_subsystem(&subnqn());
    assert_eq!(fixture.directory.subsystems(), 0);
}

#[test]
fn controller_identifiers_are_reused_last() {
    let mut small = subsystem();
    (small.cntlid_min, small.cntlid_max) = (5, 7);
    let fixture = ConnectFixture::new(small);
    let first = fixture.controller();
    assert_eq!(first.association().cntlid(), 5);
    drop(first);
    let all = [fixture.controller(), fixture.controller(), fixture.controller()];
    assert_eq!(all.each_ref().map(|controller| controller.association().cntlid()), [6, 7, 5]);
    let data = connect_data(subnqn(), CNTLID_DYNAMIC);
    let error = fixture.connect(&connect_sqe(0, 32, 0), &data).unwrap_err();
    assert_eq!(error.status, Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(fixture.directory.controllers(&subnqn()).len(), 3);
    drop(all);
    assert!(fixture.directory.controllers(&subnqn()).is_empty());
}

#[test]
fn completion_returns_controller_and_flow_control() {
    let fixture = ConnectFixture::new(subsystem());
    let attributes = ConnectAttributes::DISABLE_SQ_FLOW_CONTROL;
    let sqe = Connect { record_format: 0, qid: 0, queue_entries: 32, attributes, kato_ms: 7 }.to_sqe();
    let connected = fixture.connect(&sqe, &connect_data(subnqn(), CNTLID_DYNAMIC)).unwrap();
    let cqe = connected.cqe(3);
    assert_eq!((cqe.cid, cqe.status, cqe.result), (3, Status::SUCCESS, 1));
    let ConnectOk::Admin(admin) = connected else { panic!("an admin queue") };
    assert_eq!((admin.queue_entries, admin.kato_ms, admin.no_flow_control), (32, 7, true));
    // Dropping an admin queue before it has a controller removes its directory entry.
    drop(admin);
    assert!(fixture.directory.controllers(&subnqn()).is_empty());
    assert_eq!(sqe.data, DataPointer::default());
}

/// Secure channel concatenation: a subsystem whose host has a key of authentication, at a port with TLS.
fn concatenating() -> ConnectFixture {
    let mut subsystem = subsystem();
    let key = nvme_auth::AuthKey::new(None, &[1; 32]).unwrap();
    subsystem.host_keys.insert(host(), AuthKeys { host: key, controller: None });
    ConnectFixture::new(subsystem)
}

fn generated(number: u8) -> nvme_auth::TlsPsk {
    let key = nvme_auth::TlsKey::new(None, &[number; 32]).unwrap();
    let psk = key.psks(host().as_str(), subnqn().as_str()).swap_remove(0);
    let identity = format!("NVMe1G01 {} {} {number}", host(), subnqn());
    nvme_auth::TlsPsk { identity, ..psk }
}

impl ConnectFixture {
    fn connect_secure(
        &self,
        psk: Option<&nvme_auth::TlsPsk>,
        qid: u16,
        cntlid: u16,
    ) -> Result<ConnectOk, ConnectError> {
        let channel = psk.map(|psk| SecureChannel::of_identity(&psk.identity).unwrap());
        let context = ConnectContext {
            secure: channel.as_ref(),
            directory: &self.directory,
            limits: &self.limits,
            port: SubsystemPort { secure: true, ..SubsystemPort::default() },
        };
        let data = connect_data(self.subsystem.nqn.clone(), cntlid);
        connect(&connect_sqe(qid, 32, 0), &data, &context, |_| Some(self.subsystem.clone()))
    }
}

#[test]
fn a_generated_key_is_for_one_admin_queue_and_its_io_queues() {
    let fixture = concatenating();
    let invalid_host = |result: Result<ConnectOk, ConnectError>| {
        assert_eq!(result.map(drop).unwrap_err().status, Status::CONNECT_INVALID_HOST);
    };
    let plain = fixture.connect_secure(None, 0, CNTLID_DYNAMIC).unwrap();
    let answer = wire_nvme::fabrics::ConnectResponse::from_result(plain.cqe(0).result);
    assert!(answer.authentication_required && answer.secure_channel_required);
    assert_eq!(plain.requirement().concatenation(0), ConcatenationRule::Required);
    invalid_host(fixture.connect_secure(None, 1, answer.cntlid));
    let (psk, other) = (generated(1), generated(2));
    invalid_host(fixture.connect_secure(Some(&psk), 0, CNTLID_DYNAMIC));
    fixture.directory.add_generated_key(plain.association(), psk.clone(), 0, 100);
    invalid_host(fixture.connect_secure(Some(&psk), 1, answer.cntlid));
    invalid_host(fixture.connect_secure(Some(&other), 0, CNTLID_DYNAMIC));
    drop(plain);
    assert_eq!(fixture.directory.generated_key(&psk.identity, 50).as_ref(), Some(&psk));
    let admin = fixture.connect_secure(Some(&psk), 0, CNTLID_DYNAMIC).unwrap();
    let answer = wire_nvme::fabrics::ConnectResponse::from_result(admin.cqe(0).result);
    assert!(!answer.authentication_required && !answer.secure_channel_required);
    assert_eq!(admin.requirement().concatenation(0), ConcatenationRule::Replaces);
    assert_eq!(admin.requirement().concatenation(1), ConcatenationRule::Refused);
    // It has no time any more, and no other controller.
    assert!(fixture.directory.generated_key(&psk.identity, 1000).is_some());
    invalid_host(fixture.connect_secure(Some(&psk), 0, CNTLID_DYNAMIC));
    let ConnectOk::Admin(admin) = admin else { panic!() };
    let mut controller = Controller::new(admin, Arc::new(fixture.limits.clone()), Arc::default(), 0);
    let sqe = crate::harness::property_set(0x14, crate::harness::LINUX_CC);
    controller.handle(ControllerEvent::Command { sqe: &sqe, data: &[] }, 0, &mut Vec::new());
    drop(fixture.connect_secure(Some(&psk), 1, answer.cntlid).unwrap());
    invalid_host(fixture.connect_secure(None, 1, answer.cntlid));
    invalid_host(fixture.connect(&connect_sqe(1, 32, 0), &connect_data(subnqn(), answer.cntlid)));
    fixture.directory.replace_generated_key(controller.association(), other.clone());
    invalid_host(fixture.connect_secure(Some(&psk), 1, answer.cntlid));
    assert_eq!(fixture.directory.generated_key(&psk.identity, 0), None);
    drop(fixture.connect_secure(Some(&other), 1, answer.cntlid).unwrap());
    drop(controller);
    assert_eq!(fixture.directory.generated_keys(), 0);
}

/// An identity separates its fields by spaces, which NQNs may contain.
#[test]
fn a_generated_key_is_that_of_the_host_that_has_generated_it() {
    let mut fixture = concatenating();
    let spaced: Nqn = format!("{} {}", host(), subnqn()).parse().unwrap();
    let key = nvme_auth::AuthKey::new(None, &[2; 32]).unwrap();
    let subsystem = Arc::get_mut(&mut fixture.subsystem).unwrap();
    subsystem.host_keys.insert(spaced.clone(), AuthKeys { host: key, controller: None });
    let mut data = connect_data(subnqn(), CNTLID_DYNAMIC);
    data[512..768].fill(0);
    data[512..512 + spaced.as_str().len()].copy_from_slice(spaced.as_str().as_bytes());
    let context = ConnectContext {
        secure: None,
        directory: &fixture.directory,
        limits: &fixture.limits,
        port: SubsystemPort { secure: true, ..SubsystemPort::default() },
    };
    let plain =
        connect(&connect_sqe(0, 32, 0), &data, &context, |_| Some(fixture.subsystem.clone())).unwrap();
    assert_eq!(*plain.association().hostnqn(), spaced);
    let psk = generated(1);
    fixture.directory.add_generated_key(plain.association(), psk.clone(), 0, 100);
    let refused = fixture.connect_secure(Some(&psk), 0, CNTLID_DYNAMIC).map(drop).unwrap_err();
    assert_eq!(refused.status, Status::CONNECT_INVALID_HOST);
}

#[test]
fn unused_generated_keys_expire_and_are_few() {
    let fixture = concatenating();
    let plain = fixture.connect_secure(None, 0, CNTLID_DYNAMIC).unwrap();
    let used = fixture.connect_secure(None, 0, CNTLID_DYNAMIC).unwrap();
    fixture.directory.replace_generated_key(used.association(), generated(99));
    for number in 0..40 {
        fixture.directory.add_generated_key(plain.association(), generated(number), 0, 100);
    }
    assert_eq!(fixture.directory.generated_keys(), 17);
    let other: Nqn = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000009".parse().unwrap();
    fixture.directory.drop_unused_generated_keys(&other, plain.association().subnqn());
    assert_eq!(fixture.directory.generated_keys(), 17);
    let is_there =
        |number, now_ns| fixture.directory.generated_key(&generated(number).identity, now_ns).is_some();
    assert!(is_there(39, 99) && is_there(24, 99) && !is_there(23, 99));
    assert!(!is_there(39, 100) && is_there(99, u64::MAX));
    assert_eq!(fixture.directory.generated_keys(), 1);
    fixture.directory.add_generated_key(plain.association(), generated(40), 100, 200);
    let (host, subsystem) = (plain.association().hostnqn(), plain.association().subnqn());
    fixture.directory.drop_unused_generated_keys(host, subsystem);
    assert!(!is_there(40, 100) && is_there(99, 100));
}

//! Hosts that have to authenticate, and do not.

use std::time::{Duration, Instant};

use block_io::Status;
use nvme_auth::{
    AuthHash, AuthKey, AuthKeys, AuthOptions, AuthParties, DhGroup, HostAction, HostAuth, SystemNonces,
};
use nvmf::{HostKeys, TcpTransportConfig};
use wire_nvme::auth::{AuthBody, AuthCommand, AuthFailure, AuthMessage};
use wire_nvme::fabrics::{ConnectResponse, PropertyGet};
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::registers::offset;
use wire_nvme::{Cqe, DataPointer, Sqe};

use crate::peer::{HOST, RawTcpHost, ReceivedPdu, connect};
use crate::test_target::{NQN, TcpTestTarget, TestTargetConfig};

/// Bytes that the host takes of a message.
const LENGTH: u32 = 4096;

fn keys() -> AuthKeys {
    AuthKeys { host: AuthKey::new(Some(AuthHash::Sha256), &[7; 32]).unwrap(), controller: None }
}

/// A target that demands authentication of the host.
fn target(transport: TcpTransportConfig) -> TcpTestTarget {
    let rig = TcpTestTarget::new(TestTargetConfig { transport, ..TestTargetConfig::default() });
    let directory = std::env::temp_dir().join(format!("nvmf-hostile-keys-{:?}", std::thread::current().id()));
    let directory = directory.with_extension(std::process::id().to_string());
    std::fs::create_dir_all(&directory).unwrap();
    let (path, keyring) = (directory.join("key"), control::Keyring::default());
    keys().host.to_text().write_new(&path).unwrap();
    keyring.add_file("key", &path).unwrap();
    let key = (keyring.key("key").unwrap(), keys().host);
    std::fs::remove_dir_all(&directory).unwrap();
    rig.target.add_host_with_keys(NQN, HOST, HostKeys { host: key, controller: None }).unwrap();
    rig
}

/// A queue after Connect.
fn connected(rig: &TcpTestTarget) -> RawTcpHost {
    let mut host = RawTcpHost::initialized(rig, false);
    let (sqe, data) = connect(0, 32, 0xffff);
    let answer = host.command(sqe, &data);
    assert_eq!(answer.status, Status::SUCCESS);
    assert!(ConnectResponse::from_result(answer.result).authentication_required);
    host
}

fn send(host: &mut RawTcpHost, message: &[u8]) -> Cqe {
    let length = message.len() as u32;
    let sqe = Sqe { data: DataPointer::capsule(0, length), ..AuthCommand::new(length).to_send() };
    host.command(sqe, message)
}

fn receive(host: &mut RawTcpHost) -> Result<Vec<u8>, Status> {
    host.capsule(Sqe { data: DataPointer::transport(LENGTH), ..AuthCommand::new(LENGTH).to_receive() }, &[]);
    match host.receive_pdu() {
        ReceivedPdu::Data(data, bytes) => {
            assert!(data.success || host.expect_response().status.is_success());
            Ok(bytes)
        }
        ReceivedPdu::Response(cqe) => Err(cqe.status),
        other => panic!("{other:?}"),
    }
}

fn exchange() -> (HostAuth, Vec<u8>) {
    let options = AuthOptions { hashes: vec![AuthHash::Sha256], groups: vec![DhGroup::Null] };
    HostAuth::new(keys(), AuthParties::new(HOST, NQN), &options, 9)
}

#[test]
fn a_host_that_is_not_authenticated_executes_nothing_else() {
    let rig = target(TcpTransportConfig::default());
    let mut host = connected(&rig);
    let required = Status::AUTHENTICATION_REQUIRED.do_not_retry();
    let identify =
        Sqe { data: DataPointer::transport(4096), cdw10: 1, ..Sqe::new(AdminOpcode::Identify.to_wire()) };
    let property = PropertyGet { wide: true, offset: offset::CAP }.to_sqe();
    let commands = [
        identify,
        property,
        Sqe::new(AdminOpcode::KeepAlive.to_wire()),
        Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()),
        Sqe { nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) },
        Sqe::new(0xff),
    ];
    for command in &commands {
        assert_eq!(host.command(*command, &[]).status, required, "{command:?}");
    }
    // Nor while it authenticates.
    let (mut auth, negotiate) = exchange();
    assert_eq!(send(&mut host, &negotiate).status, Status::SUCCESS);
    assert_eq!(host.command(property, &[]).status, required);
    let challenge = receive(&mut host).unwrap();
    assert_eq!(host.command(property, &[]).status, required);
    let HostAction::Send(reply) = auth.receive(&challenge, &mut SystemNonces) else { panic!() };
    assert_eq!(send(&mut host, &reply).status, Status::SUCCESS);
    assert_eq!(host.command(property, &[]).status, required);
    let success = receive(&mut host).unwrap();
    assert_eq!(auth.receive(&success, &mut SystemNonces), HostAction::Authenticated);
    assert_eq!(host.command(property, &[]).status, Status::SUCCESS);
    // It may authenticate anew, and executes commands meanwhile.
    assert_eq!(send(&mut host, &exchange().1).status, Status::SUCCESS);
    assert_eq!(host.command(property, &[]).status, Status::SUCCESS);
}

#[test]
fn commands_of_the_authentication_are_checked() {
    let rig = target(TcpTransportConfig::default());
    let mut host = connected(&rig);
    let invalid = Status::INVALID_FIELD.do_not_retry();
    let of =
        |length: u32| Sqe { data: DataPointer::transport(length), ..AuthCommand::new(length).to_receive() };
    let other = AuthCommand { protocol: 0xea, ..AuthCommand::new(16) };
    for (sqe, status) in [
        (of(0), invalid),
        (of(4097), invalid),
        (of(u32::MAX), invalid),
        (Sqe { data: DataPointer::transport(16), ..other.to_receive() }, invalid),
        (Sqe { flags: 0, ..of(16) }, invalid),
        (Sqe { data: DataPointer::transport(15), ..of(16) }, Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
        (of(16), Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
    ] {
        assert_eq!(host.command(sqe, &[]).status, status, "{sqe:?}");
    }
    // A message that does not fit is still due.
    send(&mut host, &exchange().1);
    assert_eq!(host.command(of(16), &[]).status, invalid);
    assert!(receive(&mut host).is_ok());
}

#[test]
fn a_message_can_be_sent_by_r2t() {
    let rig = target(TcpTransportConfig::default());
    let mut host = connected(&rig);
    let (_, negotiate) = exchange();
    let length = negotiate.len() as u32;
    host.capsule(Sqe { data: DataPointer::transport(length), ..AuthCommand::new(length).to_send() }, &[]);
    let r2t = host.expect_r2t();
    host.data(&r2t, 0, &negotiate, true);
    assert_eq!(host.expect_response().status, Status::SUCCESS);
    assert!(receive(&mut host).is_ok());
}

#[test]
fn a_failure_is_reported_and_closes_the_connection() {
    let rig = target(TcpTransportConfig::default());
    for (message, reason) in [
        (vec![0xff; 64], AuthFailure::IncorrectMessage),
        (exchange().1[..30].to_vec(), AuthFailure::IncorrectPayload),
    ] {
        let mut host = connected(&rig);
        assert_eq!(send(&mut host, &message).status, Status::SUCCESS);
        let answer = receive(&mut host).unwrap();
        assert_eq!(AuthMessage::decode(&answer).unwrap().body, AuthBody::Failure1(reason));
        assert_eq!(host.receive_pdu(), ReceivedPdu::Closed);
    }
    // The host's own failure.
    let mut host = connected(&rig);
    let failure = AuthMessage { transaction: 1, body: AuthBody::Failure2(AuthFailure::Failed) };
    assert_eq!(send(&mut host, &failure.encode()).status, Status::SUCCESS);
    assert_eq!(host.receive_pdu(), ReceivedPdu::Closed);
}

#[test]
fn a_host_that_does_not_authenticate_in_time_is_disconnected() {
    let rig = target(TcpTransportConfig { connect_timeout_ms: 300, ..TcpTransportConfig::default() });
    let begin = Instant::now();
    let mut host = connected(&rig);
    send(&mut host, &exchange().1);
    receive(&mut host).unwrap();
    assert_eq!(host.receive_pdu(), ReceivedPdu::Closed);
    assert!(begin.elapsed() >= Duration::from_millis(250), "{:?}", begin.elapsed());
}

#[test]
fn commands_of_the_authentication_are_rejected_without_keys() {
    let rig = TcpTestTarget::new(TestTargetConfig::default());
    let mut host = RawTcpHost::admin(&rig);
    assert_eq!(send(&mut host, &exchange().1).status, Status::INVALID_OPCODE.do_not_retry());
}

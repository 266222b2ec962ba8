//! Hosts that make their keys of TLS by secure channel concatenation: Ringbolt's own initiator, and hostile
//! peers, over the loopback interface.
#![allow(clippy::unwrap_used)]

mod secrets;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use block_io::{FabricsStatus, Request, Status, Tag};
use nvme::{AnyController, ControllerFailure, HostCredentials, HostTls, Namespace, NvmeOpenError, Options};
use nvme_auth::{
    AuthFailure, AuthHash, AuthKeys, AuthOptions, AuthParties, Concatenation, DhGroup, HostAction, HostAuth,
    HostAuthError, SystemNonces, TlsDerivation, TlsKey, TlsPsk,
};
use nvmf::TcpTransportConfig;
use reactor::{Core, IdlePolicy, ReactorConfig};
use secrets::{Rig, keys, on_host};
use wire_nvme::auth::{AuthBody, AuthCommand, AuthMessage};
use wire_nvme::fabrics::{
    CONNECT_DATA_SIZE, Connect, ConnectData, ConnectResponse, PropertyGet, PropertySet,
};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::registers::offset;
use wire_nvme::tcp::{
    CAPSULE_CMD_SIZE, COMMON_SIZE, CapsuleCmd, CapsuleResp, CommonHeader, Framing, IC_SIZE, IcReq, PduType,
};
use wire_nvme::{Cqe, DataPointer, Sqe};

const NQN: &str = "nqn.2026-11.io.ringbolt:a";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
const STRANGER: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-666666666666";
/// Alerts (RFC 8446, section 6).
const UNKNOWN_IDENTITY: &str = "alert number 115";
/// Value of CC that Linux writes to enable a controller.
const ENABLE: u64 = 0x0046_0001;
/// Time for a host to come back with TLS.
const CONNECT_TIMEOUT_MS: u32 = 3000;

/// A target with a subsystem.
fn rig(test: &str) -> Rig {
    let config = ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() };
    let transport =
        TcpTransportConfig { connect_timeout_ms: CONNECT_TIMEOUT_MS, ..TcpTransportConfig::default() };
    Rig::start(&format!("concatenation-{test}"), &config, transport, &[NQN])
}

fn quick() -> AuthOptions {
    AuthOptions { hashes: vec![AuthHash::Sha256], groups: vec![DhGroup::Null, DhGroup::Ffdhe2048] }
}

fn options_of(keys: AuthKeys, auth: AuthOptions) -> Options {
    Options {
        hostnqn: Some(HOST.parse().unwrap()),
        authentication: Some(HostCredentials::new(Some(keys), auth)),
        concat: true,
        ..Options::default()
    }
}

impl Rig {
    fn allow(&self, keys: &AuthKeys) {
        self.target.add_host_with_keys(NQN, HOST, self.host_keys(keys)).unwrap();
    }

    /// Opens the namespace, writes to it and reads what was written.
    fn open(&self, port: &str, options: Options) -> Result<(), NvmeOpenError> {
        let uri = format!("nvme+tcp://127.0.0.1:{port}/{NQN}?ns=1").parse().unwrap();
        on_host(|core| async move {
            let mut namespace = Namespace::open(&core, &uri, &options).await?;
            round_trip(&core, &mut namespace).await;
            Ok(())
        })
    }

    /// Waits until the target has no queue left.
    fn wait_until_unused(&self) {
        let end = Instant::now() + Duration::from_secs(30);
        while !self.target.qpairs(NQN).unwrap().is_empty() {
            assert!(Instant::now() < end, "queues are left");
            std::thread::yield_now();
        }
    }
}

async fn round_trip(core: &Core, namespace: &mut Namespace) {
    let sent: Vec<u8> = (0..4096).map(|at| (at / 5) as u8).collect();
    let mut data = core.pool().take_data(sent.len()).unwrap();
    data.copy_from(0, &sent);
    assert!(namespace.run(Request::write(Tag(0), 0, 8, data)).await.status().is_success());
    let data = core.pool().take_data(sent.len()).unwrap();
    let read = namespace.run(Request::read(Tag(0), 0, 8, data)).await;
    assert!(read.status().is_success());
    let mut got = vec![0; sent.len()];
    read.into_data().unwrap().copy_to(0, &mut got);
    assert!(got == sent);
}

fn rejected(result: Result<(), NvmeOpenError>) -> AuthFailure {
    match result {
        Err(NvmeOpenError::Authentication(0, HostAuthError::Rejected(reason))) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_host_makes_its_key_with_each_hash_one_way_and_mutually() {
    for mutual in [None, Some(2)] {
        let rig = rig(&format!("each-{}", mutual.is_some()));
        rig.allow(&keys(1, mutual));
        for hashes in [vec![AuthHash::Sha256], vec![AuthHash::Sha384], AuthHash::ALL.to_vec()] {
            let auth = AuthOptions { hashes, ..quick() };
            rig.open(&rig.secure, options_of(keys(1, mutual), auth)).unwrap();
        }
    }
}

#[test]
fn new_keys_replace_the_key_of_a_connected_host() {
    let rig = rig("replace");
    rig.allow(&keys(1, None));
    let uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", rig.secure).parse().unwrap();
    let (target, new) = (rig.target.clone(), rig.host_keys(&keys(2, None)));
    on_host(|core| async move {
        let options = options_of(keys(1, None), quick());
        let credentials = options.authentication.clone().unwrap();
        let mut controller = AnyController::attach(&core, &uri, &options, 2).await.unwrap();
        let before = target.generated_keys();
        assert_eq!(before, 1);
        target.set_host_keys(NQN, HOST, Some(new)).unwrap();
        credentials.set_keys(Some(keys(2, None)));
        controller.reauthenticate().await.unwrap();
        assert_eq!((target.generated_keys(), controller.failure()), (1, None));
        // Its queues have the new one: a further queue is connected.
        let identify = wire_nvme::identify::IdentifyNamespace {
            nsze: 4096,
            formats: vec![wire_nvme::identify::LbaFormat { metadata_bytes: 0, data_log2: 9, performance: 0 }],
            ..Default::default()
        };
        let queues = controller.io_queues();
        queues.open(&core, 1, &identify, &nvme::MetadataFormat::default()).await.unwrap();
    });
    rig.wait_until_unused();
    assert_eq!(rig.target.generated_keys(), 0, "keys go with their controllers");
}

#[test]
fn hosts_that_may_not_or_do_not_concatenate_are_rejected() {
    let rig = rig("not");
    let configured = TlsKey::new(Some(AuthHash::Sha256), &[1; 32]).unwrap();
    // No host has a key: nothing without TLS is served at all.
    let with_keys = || options_of(keys(1, None), quick());
    let closed = rig.open(&rig.secure, with_keys());
    assert!(matches!(closed, Err(NvmeOpenError::Failure(ControllerFailure::Closed))), "{closed:?}");
    rig.allow(&keys(1, None));
    // Another host, and one without concatenation.
    let stranger = Options { hostnqn: Some(STRANGER.parse().unwrap()), ..with_keys() };
    let invalid_host = FabricsStatus(Status::CONNECT_INVALID_HOST);
    for options in [stranger.clone(), Options { concat: false, authentication: None, ..stranger }] {
        let result = rig.open(&rig.secure, options);
        assert!(
            matches!(&result, Err(NvmeOpenError::ConnectRejected(status)) if *status == invalid_host),
            "{result:?}"
        );
    }
    let result = rig.open(&rig.secure, Options { concat: false, ..with_keys() });
    assert!(matches!(result, Err(NvmeOpenError::SecureChannelRequired)), "{result:?}");
    let result = rig.open(&rig.secure, Options { authentication: None, ..with_keys() });
    assert!(matches!(result, Err(NvmeOpenError::KeyRequired)), "{result:?}");
    assert_eq!(rejected(rig.open(&rig.secure, options_of(keys(2, None), quick()))), AuthFailure::Failed);
    let sha512 = AuthOptions { hashes: vec![AuthHash::Sha512], ..quick() };
    let null = AuthOptions { groups: vec![DhGroup::Null], ..quick() };
    for (auth, reason) in [(sha512, AuthFailure::HashNotUsable), (null, AuthFailure::GroupNotUsable)] {
        assert_eq!(rejected(rig.open(&rig.secure, options_of(keys(1, None), auth))), reason);
    }
    // Where there is no TLS to come back with.
    assert_eq!(rejected(rig.open(&rig.plain, with_keys())), AuthFailure::ConcatenationMismatch);
    rig.open(&rig.plain, Options { concat: false, ..with_keys() }).unwrap();
    // A configured key is no reason for another one.
    let tls = Some(HostTls { key: configured, derivation: TlsDerivation::Specified });
    let result = rig.open(&rig.secure, Options { tls, ..with_keys() });
    assert!(matches!(result, Err(NvmeOpenError::InvalidArgument(_))), "{result:?}");
    rig.open(&rig.secure, with_keys()).unwrap();
    rig.wait_until_unused();
    assert_eq!(rig.target.generated_keys(), 0);
}

/// A host over a socket without TLS.
struct PlainHost(TcpStream);

impl PlainHost {
    fn new(rig: &Rig) -> PlainHost {
        PlainHost::at(&rig.secure)
    }

    fn at(port: &str) -> PlainHost {
        let stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut host = PlainHost(stream);
        // In parts: the first byte decides whether it is TLS.
        let request = ic_req();
        for part in [&request[..1], &request[1..3], &request[3..]] {
            host.0.write_all(part).unwrap();
        }
        let (kind, _) = host.receive().unwrap();
        assert_eq!(kind, PduType::IcResp);
        host
    }

    /// The next PDU, without its first eight bytes; `None` at the end.
    fn receive(&mut self) -> Option<(PduType, Vec<u8>)> {
        let mut start = [0; COMMON_SIZE];
        self.0.read_exact(&mut start).ok()?;
        let common = CommonHeader::decode(&start).unwrap();
        let mut rest = vec![0; common.plen as usize - COMMON_SIZE];
        self.0.read_exact(&mut rest).unwrap();
        Some((common.kind, rest))
    }

    /// The data and the completion of a command; `None` if the target closes.
    fn command(&mut self, sqe: Sqe, data: &[u8]) -> Option<(Cqe, Vec<u8>)> {
        let mut header = [0; CAPSULE_CMD_SIZE];
        CapsuleCmd { sqe, data_length: data.len() as u32 }.encode(&Framing::PLAIN, &mut header);
        self.0.write_all(&[&header[..], data].concat()).unwrap();
        let mut received = Vec::new();
        loop {
            match self.receive()? {
                (PduType::C2hData, rest) => received = rest[16..].to_vec(),
                (PduType::CapsuleResp, rest) => {
                    let mut pdu = [0; 24];
                    pdu[8..].copy_from_slice(&rest);
                    return Some((CapsuleResp::decode(&pdu), received));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn connect(&mut self, qid: u16, cntlid: u16) -> Cqe {
        let command =
            Connect { record_format: 0, qid, queue_entries: 32, attributes: Default::default(), kato_ms: 0 };
        let mut data = [0; CONNECT_DATA_SIZE];
        let (subnqn, hostnqn) = (NQN.parse().unwrap(), HOST.parse().unwrap());
        ConnectData { host_id: [1; 16], cntlid, subnqn, hostnqn }.encode(&mut data);
        let sqe = Sqe { data: DataPointer::capsule(0, data.len() as u32), ..command.to_sqe() };
        self.command(sqe, &data).unwrap().0
    }

    fn send(&mut self, message: &[u8]) {
        let length = message.len() as u32;
        let sqe = Sqe { data: DataPointer::capsule(0, length), ..AuthCommand::new(length).to_send() };
        assert_eq!(self.command(sqe, message).unwrap().0.status, Status::SUCCESS);
    }

    fn receive_message(&mut self) -> Vec<u8> {
        let sqe = Sqe { data: DataPointer::transport(4096), ..AuthCommand::new(4096).to_receive() };
        let (cqe, message) = self.command(sqe, &[]).unwrap();
        assert_eq!(cqe.status, Status::SUCCESS);
        message
    }

    /// Authenticates after Connect; returns the key, and the controller's identifier.
    fn concatenate(&mut self) -> (TlsPsk, u16) {
        let answer = self.connect(0, 0xffff);
        assert_eq!(answer.status, Status::SUCCESS);
        let answer = ConnectResponse::from_result(answer.result);
        assert!(answer.authentication_required && answer.secure_channel_required);
        (self.exchange().unwrap(), answer.cntlid)
    }

    fn exchange(&mut self) -> Result<TlsPsk, AuthFailure> {
        let parties = AuthParties::new(HOST, NQN);
        let (mut auth, mut message) =
            HostAuth::concatenating(keys(1, None), parties, &quick(), 9, Concatenation::NewTlsPsk);
        loop {
            self.send(&message);
            match auth.receive(&self.receive_message(), &mut SystemNonces) {
                HostAction::Send(next) => message = next,
                HostAction::Authenticated => return Ok(auth.take_generated().unwrap()),
                HostAction::Failed(HostAuthError::Rejected(reason), _) => return Err(reason),
                other => panic!("{other:?}"),
            }
        }
    }

    fn is_closed(&mut self) -> bool {
        self.receive().is_none()
    }
}

fn ic_req() -> [u8; IC_SIZE] {
    let mut request = [0; IC_SIZE];
    IcReq { host_data_alignment_bytes: 4, header_digest: false, data_digest: false, r2t_max: 1 }
        .encode(&mut request);
    request
}

/// Whether OpenSSL's client gets an answer to ICReq with a key; else what it says. It sends what follows
/// behind.
fn s_client(rig: &Rig, identity: &str, key: &[u8], request: &[u8], bytes: usize) -> Result<Vec<u8>, String> {
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut client = Command::new("openssl")
        .args(["s_client", "-connect", &format!("127.0.0.1:{}", rig.secure), "-tls1_3", "-quiet", "-ign_eof"])
        .args(["-ciphersuites", "TLS_AES_128_GCM_SHA256", "-psk_identity", identity, "-psk", &hex])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    client.stdin.as_mut().unwrap().write_all(request).unwrap();
    let mut answer = vec![0; bytes];
    let read = client.stdout.as_mut().unwrap().read_exact(&mut answer);
    let _ = client.kill();
    let output = client.wait_with_output().unwrap();
    read.map(|()| answer).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Connect of a queue over TLS with OpenSSL's client: its status.
fn connects(rig: &Rig, psk: &TlsPsk, qid: u16, cntlid: u16) -> Status {
    let command =
        Connect { record_format: 0, qid, queue_entries: 32, attributes: Default::default(), kato_ms: 0 };
    let mut data = [0; CONNECT_DATA_SIZE];
    let (subnqn, hostnqn) = (NQN.parse().unwrap(), HOST.parse().unwrap());
    ConnectData { host_id: [1; 16], cntlid, subnqn, hostnqn }.encode(&mut data);
    let sqe = Sqe { data: DataPointer::capsule(0, data.len() as u32), ..command.to_sqe() };
    let mut header = [0; CAPSULE_CMD_SIZE];
    CapsuleCmd { sqe, data_length: data.len() as u32 }.encode(&Framing::PLAIN, &mut header);
    let request = [&ic_req()[..], &header, &data].concat();
    let answer = s_client(rig, &psk.identity, psk.key.reveal(), &request, IC_SIZE + 24).unwrap();
    CapsuleResp::decode(answer[IC_SIZE..].first_chunk().unwrap()).status
}

fn has_openssl() -> bool {
    let is_there = Command::new("openssl").arg("version").output().is_ok();
    if !is_there {
        println!("SKIPPED: the program openssl is not installed");
    }
    is_there
}

#[test]
fn a_connection_for_concatenation_serves_nothing_else() {
    let rig = rig("plain");
    rig.allow(&keys(1, None));
    // No I/O queue begins without TLS.
    let mut host = PlainHost::new(&rig);
    assert_eq!(host.connect(1, 1).status, Status::CONNECT_INVALID_HOST);
    let mut host = PlainHost::new(&rig);
    let (_, cntlid) = host.concatenate();
    let status = |host: &mut PlainHost, sqe| host.command(sqe, &[]).unwrap().0.status;
    // What the kernel's host does before it comes back.
    let set = |offset, value| PropertySet { wide: false, offset, value }.to_sqe();
    let identify =
        Sqe { data: DataPointer::transport(4096), cdw10: 1, ..Sqe::new(AdminOpcode::Identify.to_wire()) };
    for sqe in [PropertyGet { wide: true, offset: offset::CAP }.to_sqe(), set(offset::CC, ENABLE), identify] {
        assert_eq!(status(&mut host, sqe), Status::SUCCESS, "{sqe:?}");
    }
    let required = Status::AUTHENTICATION_REQUIRED.do_not_retry();
    for sqe in [
        set(offset::NSSR, 0x4e56_4d65),
        Sqe { cdw10: 0x0b, ..Sqe::new(AdminOpcode::SetFeatures.to_wire()) },
        Sqe::new(AdminOpcode::Abort.to_wire()),
        Sqe::new(0xff),
    ] {
        assert_eq!(status(&mut host, sqe), required, "{sqe:?}");
    }
    for port in [&rig.secure, &rig.plain] {
        let mut io = PlainHost::at(port);
        assert_eq!(io.connect(1, cntlid).status, Status::CONNECT_INVALID_HOST);
    }
    assert!(host.is_closed(), "it did not come back with TLS");
}

#[test]
fn a_key_is_that_of_one_association_and_ends_with_it() {
    if !has_openssl() {
        return;
    }
    let rig = rig("once");
    rig.allow(&keys(1, None));
    let mut host = PlainHost::new(&rig);
    let (psk, cntlid) = host.concatenate();
    assert_eq!(rig.target.generated_keys(), 1);
    let answer = |identity: &str, key: &[u8]| s_client(&rig, identity, key, &ic_req(), IC_SIZE);
    // Another key with its identity, and others' identities.
    let mut wrong = psk.key.reveal().to_vec();
    wrong[0] ^= 1;
    assert!(answer(&psk.identity, &wrong).is_err());
    for identity in [psk.identity.replace("G01", "R01"), psk.identity.replace("5555 ", "5556 ")] {
        let log = answer(&identity, psk.key.reveal()).unwrap_err();
        assert!(log.contains(UNKNOWN_IDENTITY), "{log}");
    }
    // No I/O queue of the association that has no TLS, and of none.
    let invalid_host = Status::CONNECT_INVALID_HOST;
    assert_eq!(connects(&rig, &psk, 1, cntlid), invalid_host);
    assert_eq!(connects(&rig, &psk, 0, 0xffff), Status::SUCCESS);
    // That association has ended, and the key with it.
    let end = Instant::now() + Duration::from_secs(20);
    while rig.target.generated_keys() > 0 {
        assert!(Instant::now() < end, "the key is still there");
        std::thread::yield_now();
    }
    let log = answer(&psk.identity, psk.key.reveal()).unwrap_err();
    assert!(log.contains(UNKNOWN_IDENTITY), "{log}");
}

#[test]
fn keys_of_hosts_that_do_not_come_back_are_few_and_expire() {
    if !has_openssl() {
        return;
    }
    let rig = rig("expire");
    rig.allow(&keys(1, None));
    let begin = Instant::now();
    let mut hosts: Vec<PlainHost> = Vec::new();
    let mut psks = Vec::new();
    for _ in 0..20 {
        let mut host = PlainHost::new(&rig);
        psks.push(host.concatenate().0);
        hosts.push(host);
    }
    // A host may also make one after the other on one connection.
    for _ in 0..5 {
        psks.push(hosts[19].exchange().unwrap());
    }
    assert!(rig.target.generated_keys() <= 16, "{}", rig.target.generated_keys());
    for host in &mut hosts {
        assert!(host.is_closed());
    }
    let least = Duration::from_millis(u64::from(CONNECT_TIMEOUT_MS));
    assert!(begin.elapsed() >= least, "{:?}", begin.elapsed());
    for psk in [&psks[0], &psks[24]] {
        let log = s_client(&rig, &psk.identity, psk.key.reveal(), &ic_req(), IC_SIZE).unwrap_err();
        assert!(log.contains(UNKNOWN_IDENTITY), "{log}");
    }
    assert_eq!(rig.target.generated_keys(), 0);
    rig.open(&rig.secure, options_of(keys(1, None), quick())).unwrap();
}

#[test]
fn a_host_that_loses_its_key_of_authentication_cannot_use_the_generated_one() {
    if !has_openssl() {
        return;
    }
    let rig = rig("lost");
    rig.allow(&keys(1, None));
    let mut host = PlainHost::new(&rig);
    let (psk, _) = host.concatenate();
    rig.target.set_host_keys(NQN, HOST, Some(rig.host_keys(&keys(2, None)))).unwrap();
    assert_eq!(rig.target.generated_keys(), 0);
    assert!(s_client(&rig, &psk.identity, psk.key.reveal(), &ic_req(), IC_SIZE).is_err());
    rig.target.set_host_keys(NQN, HOST, Some(rig.host_keys(&keys(1, None)))).unwrap();
    let mut host = PlainHost::new(&rig);
    let (psk, _) = host.concatenate();
    rig.target.remove_host(NQN, HOST).unwrap();
    assert!(host.is_closed());
    assert_eq!(rig.target.generated_keys(), 0);
    assert!(s_client(&rig, &psk.identity, psk.key.reveal(), &ic_req(), IC_SIZE).is_err());
}

#[test]
fn malformed_requests_for_concatenation_fail_with_a_reason() {
    let rig = rig("malformed");
    rig.allow(&keys(1, None));
    for sc_c in [0, 1, 3, 4, 255] {
        let mut host = PlainHost::new(&rig);
        assert_eq!(host.connect(0, 0xffff).status, Status::SUCCESS);
        let parties = AuthParties::new(HOST, NQN);
        let (_, mut negotiate) =
            HostAuth::concatenating(keys(1, None), parties, &quick(), 9, Concatenation::NewTlsPsk);
        negotiate[6] = sc_c;
        host.send(&negotiate);
        let answer = host.receive_message();
        let expected = AuthBody::Failure1(AuthFailure::ConcatenationMismatch);
        assert_eq!(AuthMessage::decode(&answer).unwrap().body, expected, "SC_C {sc_c}");
        assert!(host.is_closed(), "SC_C {sc_c}");
    }
    // Bytes that are neither TLS nor NVMe/TCP.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[4, 0, 72, 0], &[1], &[0; 8], &[0xff; 200]] {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{}", rig.secure)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(bytes).unwrap();
        match stream.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
    rig.open(&rig.secure, options_of(keys(1, None), quick())).unwrap();
}

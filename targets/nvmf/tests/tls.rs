//! Hosts that connect through TLS: Ringbolt's own initiator, and OpenSSL's client, over the loopback
//! interface.
#![allow(clippy::unwrap_used)]

mod secrets;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block_io::{Request, Tag};
use control::ConnectionMove;
use nvme::{ControllerFailure, HostTls, Namespace, NvmeOpenError, Options};
use nvme_auth::{AuthHash, TlsDerivation, TlsIdentityVersion, TlsKey};
use nvmf::{HostPsk, ListenAddress, SubsystemConfig, TcpTransportConfig};
use reactor::{IdlePolicy, ReactorConfig};
use secrets::{Rig, on_host};
use tls::TlsFailure;
use wire_nvme::tcp::{IC_SIZE, IcReq};

const NQN: &str = "nqn.2026-11.io.ringbolt:a";
const OTHER: &str = "nqn.2026-11.io.ringbolt:b";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
const STRANGER: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-666666666666";
/// Alerts (RFC 8446, section 6).
const DECRYPT_ERROR: u8 = 51;
const ILLEGAL_PARAMETER: u8 = 47;
const UNKNOWN_IDENTITY: u8 = 115;

/// A target with two subsystems.
fn rig(test: &str) -> Rig {
    rig_on(test, os::CpuSet::new(vec![0]).unwrap())
}

/// The same with a reactor for each of these processors.
fn rig_on(test: &str, cpus: os::CpuSet) -> Rig {
    let config = ReactorConfig { cpus, pin: false, idle: IdlePolicy::Sleep, ..ReactorConfig::default() };
    let transport = TcpTransportConfig { ic_timeout_ms: 2000, ..TcpTransportConfig::default() };
    Rig::start(&format!("tls-{test}"), &config, transport, &[NQN, OTHER])
}

fn key(byte: u8) -> TlsKey {
    TlsKey::new(Some(AuthHash::Sha256), &[byte; 32]).unwrap()
}

impl Rig {
    fn allow(&self, nqn: &str, host: &str, key: &TlsKey) {
        let psk = HostPsk { key: self.add_key(&key.to_text()), configured: key.clone() };
        self.target.add_host_with_psk(nqn, host, psk, None).unwrap();
    }

    /// Opens a namespace as a host, writes to it and reads what was written.
    fn open(&self, port: &str, nqn: &str, host: &str, tls: Option<HostTls>) -> Result<(), NvmeOpenError> {
        let uri = format!("nvme+tcp://127.0.0.1:{port}/{nqn}?ns=1").parse().unwrap();
        let options = Options { hostnqn: Some(host.parse().unwrap()), tls, ..Options::default() };
        on_host(|core| async move {
            let mut namespace = Namespace::open(&core, &uri, &options).await?;
            for blocks in [1, 8, 256] {
                let bytes = blocks as usize * 512;
                let mut data = core.pool().take_data(bytes).unwrap();
                data.copy_from(0, &pattern(bytes, blocks as u8));
                let write = Request::write(Tag(0), 0, blocks, data);
                assert!(namespace.run(write).await.status().is_success());
                let data = core.pool().take_data(bytes).unwrap();
                let read = namespace.run(Request::read(Tag(0), 0, blocks, data)).await;
                assert!(read.status().is_success());
                let mut got = vec![0; bytes];
                read.into_data().unwrap().copy_to(0, &mut got);
                assert!(got == pattern(bytes, blocks as u8), "{blocks}");
            }
            Ok(())
        })
    }
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at / 5) as u8 ^ seed).collect()
}

fn with(key: TlsKey) -> Option<HostTls> {
    Some(HostTls { key, derivation: TlsDerivation::Specified })
}

#[test]
fn a_host_with_the_key_reads_and_writes_with_each_hash_and_derivation() {
    let rig = rig("each");
    let long = TlsKey::new(Some(AuthHash::Sha384), &[3; 48]).unwrap();
    let as_it_is = TlsKey::new(None, &[4; 32]).unwrap();
    for (host, key) in [(HOST, key(1)), (STRANGER, long), ("nqn.2026-11.io.ringbolt:h", as_it_is)] {
        rig.allow(NQN, host, &key);
        rig.open(&rig.secure, NQN, host, with(key.clone())).unwrap();
    }
    let libnvme = HostTls { key: key(1), derivation: TlsDerivation::Libnvme };
    rig.open(&rig.secure, NQN, HOST, Some(libnvme)).unwrap();
}

#[test]
fn a_host_without_the_right_key_reaches_nothing() {
    let rig = rig("wrong");
    rig.allow(NQN, HOST, &key(1));
    rig.allow(OTHER, STRANGER, &key(2));
    rig.target.add_host(OTHER, HOST).unwrap();
    let alert = |result| match result {
        Err(NvmeOpenError::Failure(ControllerFailure::Tls(TlsFailure::PeerAlert(alert)))) => alert,
        other => panic!("{other:?}"),
    };
    // Another key has another digest, so that its identity is not known.
    assert_eq!(alert(rig.open(&rig.secure, NQN, HOST, with(key(9)))), UNKNOWN_IDENTITY);
    assert_eq!(alert(rig.open(&rig.secure, OTHER, HOST, with(key(1)))), UNKNOWN_IDENTITY);
    assert_eq!(alert(rig.open(&rig.secure, NQN, STRANGER, with(key(2)))), UNKNOWN_IDENTITY);
    // Without TLS on the port that has it, and with TLS on the port that has not.
    let closed = rig.open(&rig.secure, NQN, HOST, None);
    assert!(matches!(closed, Err(NvmeOpenError::Failure(ControllerFailure::Closed))), "{closed:?}");
    let not_tls = rig.open(&rig.plain, NQN, HOST, with(key(1)));
    let expected = ControllerFailure::Tls(TlsFailure::NotTls);
    assert!(matches!(not_tls, Err(NvmeOpenError::Failure(failure)) if failure == expected), "{not_tls:?}");
    // Without TLS on the port that has none: the host has to use TLS, at this subsystem.
    let rejected = rig.open(&rig.plain, NQN, HOST, None);
    assert!(matches!(rejected, Err(NvmeOpenError::ConnectRejected(_))), "{rejected:?}");
    rig.open(&rig.plain, OTHER, HOST, None).unwrap();
    rig.open(&rig.secure, NQN, HOST, with(key(1))).unwrap();
    // A host that was removed.
    rig.target.remove_host(NQN, HOST).unwrap();
    assert_eq!(alert(rig.open(&rig.secure, NQN, HOST, with(key(1)))), UNKNOWN_IDENTITY);
}

#[test]
fn subsystems_on_one_address_agree_about_tls() {
    let rig = rig("agree");
    let third = "nqn.2026-11.io.ringbolt:c";
    rig.target.create_subsystem(third, SubsystemConfig::default()).unwrap();
    let address = |port: &str| ListenAddress::tcp("127.0.0.1", port);
    assert!(rig.target.add_listener(third, address(&rig.secure)).is_err());
    assert!(rig.target.add_secure_listener(third, address(&rig.plain)).is_err());
    rig.target.add_secure_listener(third, address(&rig.secure)).unwrap();
}

/// The session, with records that have half arrived, moves with its queue.
#[test]
fn a_queue_with_tls_moves_between_reactors() {
    let cpus: Vec<u32> = os::CpuSet::allowed().cpus().iter().copied().take(2).collect();
    if cpus.len() < 2 {
        println!("SKIPPED: this machine has one processor, and so one reactor");
        return;
    }
    let rig = rig_on("moves", os::CpuSet::new(cpus).unwrap());
    rig.allow(NQN, HOST, &key(1));
    let target = rig.target.balanced().pop().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let mover = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            let loads = target.loads().unwrap().into_iter().enumerate();
            let moves: Vec<_> = loads
                .flat_map(|(from, all)| all.into_iter().map(move |one| (from, one.id)))
                .map(|(from, id)| ConnectionMove { id, from, to: 1 - from })
                .collect();
            target.move_connections(&moves);
        }
    });
    for _ in 0..20 {
        rig.open(&rig.secure, NQN, HOST, with(key(1))).unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    mover.join().unwrap();
    let moved: u64 = rig.target.connection_totals().iter().map(|(_, totals)| totals.moved).sum();
    println!("{moved} moves");
    assert!(moved >= 20, "{moved} moves");
}

/// OpenSSL's client with a key, as a process.
fn s_client(rig: &Rig, identity: &str, key: &[u8], request: &[u8]) -> (Vec<u8>, String) {
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut client = Command::new("openssl")
        .args(["s_client", "-connect", &format!("127.0.0.1:{}", rig.secure), "-tls1_3", "-quiet", "-ign_eof"])
        .args(["-ciphersuites", "TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256"])
        .args(["-psk_identity", identity, "-psk", &hex])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    client.stdin.as_mut().unwrap().write_all(request).unwrap();
    let mut answer = vec![0; if request.is_empty() { 0 } else { IC_SIZE }];
    let read = client.stdout.as_mut().unwrap().read_exact(&mut answer);
    if read.is_ok() {
        let _ = client.kill();
    }
    let output = client.wait_with_output().unwrap();
    (if read.is_ok() { answer } else { Vec::new() }, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn openssls_client_gets_an_answer_to_icreq_with_the_key_alone() {
    if Command::new("openssl").arg("version").output().is_err() {
        println!("SKIPPED: the program openssl is not installed");
        return;
    }
    let rig = rig("openssl");
    rig.allow(NQN, HOST, &key(1));
    let mut request = [0; IC_SIZE];
    IcReq { host_data_alignment_bytes: 4, header_digest: false, data_digest: false, r2t_max: 1 }
        .encode(&mut request);
    for (version, way) in [
        (TlsIdentityVersion::One, TlsDerivation::Specified),
        (TlsIdentityVersion::One, TlsDerivation::Libnvme),
        (TlsIdentityVersion::Zero, TlsDerivation::Specified),
    ] {
        let psk = key(1).psk(HOST, NQN, version, way).unwrap();
        // It prefers the suite of the other hash function: the target selects the key's.
        let (answer, log) = s_client(&rig, &psk.identity, psk.key.reveal(), &request);
        assert_eq!(answer.first(), Some(&1), "ICResp: {log}");
        let mut wrong = psk.key.reveal().to_vec();
        wrong[0] ^= 1;
        let (answer, log) = s_client(&rig, &psk.identity, &wrong, &request);
        assert!(answer.is_empty());
        let alert = log.contains(&format!("alert number {DECRYPT_ERROR}"))
            || log.contains(&format!("alert number {ILLEGAL_PARAMETER}"));
        assert!(alert, "{log}");
    }
}

#[test]
fn silent_and_hostile_peers_are_closed_and_others_are_served() {
    let rig = rig("hostile");
    rig.allow(NQN, HOST, &key(1));
    let connect = || {
        let stream = TcpStream::connect(format!("127.0.0.1:{}", rig.secure)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    };
    // Some say nothing, some half of a ClientHello, some begin a record and end it with nonsense.
    let first: [&[u8]; 6] = [
        b"",
        &[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3],
        &[22],
        &[22, 3, 1, 0, 4, 1, 0, 0, 0],
        &[0, 0, 128, 0],
        b"GET / HTTP/1.1\r\n\r\n",
    ];
    let mut peers: Vec<TcpStream> = Vec::new();
    for bytes in first.iter().cycle().take(120) {
        let mut peer = connect();
        let _ = peer.write_all(bytes);
        peers.push(peer);
    }
    rig.open(&rig.secure, NQN, HOST, with(key(1))).unwrap();
    for mut peer in peers {
        let mut rest = Vec::new();
        // Until the target closes: at once, when others take the place, or after the time of a handshake.
        match peer.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
    rig.open(&rig.secure, NQN, HOST, with(key(1))).unwrap();
}

use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use secret::Secret;
use sockets::{
    ByteStream, ConnectionId, FlushStatus, HandshakeStatus, Listen, Network, NetworkEvent, NetworkFaults,
    SimulatedNetwork, StreamAddress, StreamLayer, TransferResult,
};

use crate::{
    CertificateError, CertificateFiles, Certificates, HandshakeProgress, PlainRead, Psk, PskHash,
    ServerCredentials, TlsError, TlsFailure, TlsLayer, TlsSession,
};

fn psk(identity: &str, byte: u8, hash: PskHash) -> Psk {
    Psk::new(identity, Secret::new(vec![byte; hash.bytes()]), hash).unwrap()
}

fn source(keys: &[Psk]) -> ServerCredentials {
    ServerCredentials::of_keys(Arc::new(keys.to_vec()))
}

/// Moves all records from one end to the other.
fn pass(from: &mut TlsSession, to: &mut TlsSession) -> Result<(), TlsError> {
    let mut records = [0; 1000];
    loop {
        match from.take_records(&mut records) {
            0 => return Ok(()),
            count => to.put_records(&records[..count])?,
        }
    }
}

/// Completes a handshake, or returns the failure of the end that has failed first, and then of the other.
fn establish(client: &mut TlsSession, server: &mut TlsSession) -> Result<(), (TlsFailure, TlsFailure)> {
    for _ in 0..10 {
        let progress = client.handshake();
        let passed = pass(client, server);
        if let Err(error) = progress {
            let other = passed.and_then(|()| server.handshake().map(drop)).unwrap_err();
            return Err((error.0, other.0));
        }
        if let Err(error) = passed.and_then(|()| server.handshake().map(drop)) {
            pass(server, client).unwrap();
            return Err((error.0, client.handshake().unwrap_err().0));
        }
        pass(server, client).unwrap();
        if client.is_established() && server.is_established() {
            return Ok(());
        }
    }
    panic!("the handshake does not end");
}

#[test]
fn both_ends_get_what_the_other_writes_with_either_hash() {
    for hash in [PskHash::Sha256, PskHash::Sha384] {
        let keys = [psk("other", 9, hash), psk("a host", 1, hash)];
        let mut client = TlsSession::client(keys[1].clone()).unwrap();
        let mut server = TlsSession::server(&source(&keys)).unwrap();
        assert_eq!(server.psk(), None);
        establish(&mut client, &mut server).unwrap();
        assert_eq!(client.handshake(), Ok(HandshakeProgress::Done));
        assert_eq!(server.psk().unwrap().identity(), "a host");
        assert_eq!(server.offered_identity(), Some("a host"));
        let plain: Vec<u8> = (0..100_000u32).map(|number| number as u8).collect();
        for _ in 0..2 {
            std::mem::swap(&mut client, &mut server);
            let (from, to) = (&mut client, &mut server);
            from.write(&plain).unwrap();
            assert!(from.records_len() > plain.len());
            pass(from, to).unwrap();
            let (mut got, mut part) = (Vec::new(), [0; 7000]);
            while let PlainRead::Bytes(count) = to.read(&mut part).unwrap() {
                got.extend_from_slice(&part[..count]);
            }
            assert!(got == plain);
        }
    }
}

#[test]
fn a_failed_handshake_names_its_step_at_both_ends() {
    let ours = psk("a host", 1, PskHash::Sha256);
    let cases = [
        (psk("a host", 2, PskHash::Sha256), TlsFailure::WrongKey),
        (psk("b host", 1, PskHash::Sha256), TlsFailure::UnknownIdentity),
        (psk("a host", 1, PskHash::Sha384), TlsFailure::NothingInCommon),
    ];
    for (theirs, expected) in cases {
        let mut client = TlsSession::client(theirs.clone()).unwrap();
        let mut server = TlsSession::server(&source(std::slice::from_ref(&ours))).unwrap();
        let (failure, of_peer) = establish(&mut client, &mut server).unwrap_err();
        assert_eq!(failure, expected, "{theirs:?}");
        assert!(matches!(of_peer, TlsFailure::PeerAlert(_)), "{of_peer:?}");
        assert_eq!(server.offered_identity(), Some(theirs.identity()));
        assert!(!server.is_established() && !client.is_established());
    }
}

#[test]
fn bytes_that_are_no_handshake_are_rejected_and_bounded() {
    let server = || TlsSession::server(&source(&[psk("a", 1, PskHash::Sha256)])).unwrap();
    // The beginning of an ICReq of NVMe/TCP.
    assert_eq!(server().put_records(&[0, 0, 128, 0]), Err(TlsError(TlsFailure::NotTls)));
    let mut one = server();
    // A ClientHello of 100 KiB in records of 16 KiB.
    let mut record = vec![22, 3, 1, 0x40, 0, 1, 1, 0x90, 0];
    record.resize(5 + (16 << 10), 0);
    let mut failed = None;
    for _ in 0..7 {
        failed = failed.or(one.put_records(&record).err()).or(one.handshake().err());
    }
    assert_eq!(failed, Some(TlsError(TlsFailure::TooLong)));
    for bytes in [&[22u8; 200][..], &[22, 3, 1, 0, 4, 1, 0, 0, 0], &[21, 3, 3, 0, 2, 2, 40]] {
        let mut one = server();
        one.put_records(bytes).unwrap();
        assert!(one.handshake().is_err(), "{bytes:?}");
    }
}

#[test]
fn a_changed_record_ends_the_session() {
    let key = psk("a host", 1, PskHash::Sha256);
    let mut client = TlsSession::client(key.clone()).unwrap();
    let mut server = TlsSession::server(&source(&[key])).unwrap();
    establish(&mut client, &mut server).unwrap();
    client.write(b"plain").unwrap();
    let mut records = [0; 100];
    let count = client.take_records(&mut records);
    records[count - 1] ^= 1;
    server.put_records(&records[..count]).unwrap();
    let failed = server.read(&mut [0; 10]).unwrap_err();
    assert!(matches!(failed.0, TlsFailure::Protocol(_)), "{failed:?}");
}

/// One end over a simulated network.
struct End {
    network: SimulatedNetwork,
    id: ConnectionId,
    layer: TlsLayer,
    established: bool,
}

impl End {
    /// Continues the handshake; afterwards receives into `got`, and sends what is left of `plain`.
    fn turn(&mut self, plain: &mut &[u8], got: &mut Vec<u8>, scratch: &mut [u8]) {
        self.network.poll(&mut Vec::new());
        let stream = &mut self.network.stream(self.id);
        if !self.established {
            match self.layer.handshake(stream, scratch) {
                HandshakeStatus::Done => self.established = true,
                HandshakeStatus::Pending => return,
                other => panic!("{other:?} {:?}", self.layer),
            }
        }
        let mut plain_stream = self.layer.stream(stream);
        loop {
            let (one, two) = scratch.split_at_mut(3000);
            let (requested, parts) =
                (one.len() + two.len(), &mut [IoSliceMut::new(one), IoSliceMut::new(two)]);
            match plain_stream.receive(parts) {
                TransferResult::Bytes(count) => {
                    got.extend_from_slice(&scratch[..count]);
                    if count < requested {
                        break;
                    }
                }
                TransferResult::Blocked => break,
                other => panic!("{other:?}"),
            }
        }
        let (one, two) = plain.split_at(plain.len().min(72));
        match plain_stream.send(&[IoSlice::new(one), IoSlice::new(two)]) {
            TransferResult::Bytes(count) => *plain = &plain[count..],
            TransferResult::Blocked => {}
            other => panic!("{other:?}"),
        }
        assert_ne!(plain_stream.flush(), FlushStatus::Failed(std::io::ErrorKind::BrokenPipe));
    }
}

/// Both ends of a connection, before their handshake.
fn ends(seed: u64, faults: NetworkFaults) -> (End, End) {
    let (mut one, mut two) = SimulatedNetwork::pair(seed, faults);
    two.listen(&"10.0.0.1:1".parse().unwrap()).unwrap();
    let stream = one.connect("10.0.0.1:1".parse::<StreamAddress>().unwrap());
    let near = one.add(stream).unwrap();
    let mut events = Vec::new();
    two.poll(&mut events);
    let Some(NetworkEvent::Incoming { stream, .. }) = events.pop() else { panic!("nothing was accepted") };
    let far = two.add(stream).unwrap();
    let key = psk("a host", 1, PskHash::Sha256);
    let client = End { network: one, id: near, layer: TlsLayer::client(key.clone()), established: false };
    let server = End { network: two, id: far, layer: TlsLayer::server(source(&[key])), established: false };
    (client, server)
}

#[test]
fn a_peer_with_nothing_but_new_keys_is_not_served() {
    let (mut client, mut server) = ends(1, NetworkFaults::default());
    let (mut none, mut got, mut scratch) = (&b""[..], Vec::new(), vec![0; 20_000]);
    while !server.established {
        client.turn(&mut none, &mut got, &mut scratch);
        server.turn(&mut none, &mut got, &mut scratch);
    }
    for updates in 1..100 {
        for _ in 0..500 {
            client.layer.session().unwrap().update_key();
        }
        client.turn(&mut none, &mut got, &mut scratch);
        server.network.poll(&mut Vec::new());
        let stream = &mut server.network.stream(server.id);
        let received = server.layer.stream(stream).receive(&mut [IoSliceMut::new(&mut scratch)]);
        if let TransferResult::Failed(kind) = received {
            assert_eq!((kind, server.layer.failure()), (TlsFailure::NoData.kind(), Some(TlsFailure::NoData)));
            // 27 bytes each, and as many as one receive of the stream takes beyond the limit.
            assert!((2..12).contains(&updates), "after {updates} times 500");
            return;
        }
    }
    panic!("it is served without end");
}

#[test]
fn a_stream_arrives_whole_over_a_network_that_shortens_and_delays() {
    for seed in 0..20 {
        let faults = NetworkFaults { cut_per_mille: 500, stall_per_mille: 300, break_per_mille: 0 };
        let (mut client, mut server) = ends(seed, faults);
        let bytes: Vec<u8> = (0..300_000u32).map(|number| (number / 7) as u8).collect();
        let (mut up, mut down) = (&bytes[..], &bytes[..200_000]);
        let (mut got_up, mut got_down, mut scratch) = (Vec::new(), Vec::new(), vec![0; 20_000]);
        for _ in 0..200_000 {
            client.turn(&mut up, &mut got_down, &mut scratch);
            server.turn(&mut down, &mut got_up, &mut scratch);
            if got_up.len() == bytes.len() && got_down.len() == 200_000 {
                break;
            }
        }
        assert!(
            got_up == bytes && got_down == bytes[..200_000],
            "seed {seed}: {} {}",
            got_up.len(),
            got_down.len()
        );
        assert_eq!(server.layer.psk().unwrap().identity(), "a host");
    }
}

/// A folder with certificates, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ringbolt-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// A certificate that has signed itself, by OpenSSL's program.
    fn certificate(&self, name: &str) -> CertificateFiles {
        let (certificate, private_key) =
            (self.0.join(format!("{name}-cert.pem")), self.0.join(format!("{name}-key.pem")));
        let mut request = Command::new("openssl");
        request.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        request.args(["-subj", "/CN=server", "-days", "2", "-keyout"]).arg(&private_key);
        let done = request.arg("-out").arg(&certificate).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        std::fs::set_permissions(&private_key, std::fs::Permissions::from_mode(0o600)).unwrap();
        CertificateFiles { certificate, private_key, client_ca: None }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_key_serves_beside_a_certificate_and_no_other_key_does() {
    let folder = Folder::new("beside");
    let mut files = folder.certificate("server");
    for client_ca in [None, Some(files.certificate.clone())] {
        files.client_ca = client_ca;
        let certificates = Some(Certificates::read(&files).unwrap());
        let credentials = ServerCredentials { certificates, ..source(&[psk("a", 1, PskHash::Sha256)]) };
        let mut server = TlsSession::server(&credentials).unwrap();
        establish(&mut TlsSession::client(psk("a", 1, PskHash::Sha256)).unwrap(), &mut server).unwrap();
        assert_eq!(server.psk().unwrap().identity(), "a");
        for (identity, byte) in [("a", 2), ("b", 1)] {
            let mut client = TlsSession::client(psk(identity, byte, PskHash::Sha256)).unwrap();
            let mut server = TlsSession::server(&credentials).unwrap();
            establish(&mut client, &mut server).unwrap_err();
            assert!(!client.is_established() && !server.is_established(), "{identity} {byte}");
        }
    }
}

#[test]
fn files_that_are_no_certificate_with_its_key_are_refused_by_name() {
    let folder = Folder::new("files");
    let (files, other) = (folder.certificate("server"), folder.certificate("other"));
    let garbage = folder.0.join("garbage.pem");
    std::fs::write(&garbage, "-----BEGIN CERTIFICATE-----\nnothing\n").unwrap();
    std::fs::set_permissions(&garbage, std::fs::Permissions::from_mode(0o600)).unwrap();
    let absent = folder.0.join("absent.pem");
    let read = |change: &dyn Fn(&mut CertificateFiles)| {
        let mut files = files.clone();
        change(&mut files);
        Certificates::read(&files).map(drop).unwrap_err().to_string()
    };
    let text = read(&|files| files.private_key.clone_from(&other.private_key));
    assert!(text.contains("other-key.pem: it is not the private key of"), "{text}");
    let fifo = folder.0.join("fifo.pem");
    assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&fifo).status().unwrap().success());
    for bad in [&garbage, &absent, &fifo] {
        let name = bad.file_name().unwrap().to_string_lossy().into_owned();
        for text in [
            read(&|files| files.certificate.clone_from(bad)),
            read(&|files| files.private_key.clone_from(bad)),
            read(&|files| files.client_ca = Some(bad.clone())),
        ] {
            assert!(text.contains(&name), "{text}");
        }
    }
    std::fs::set_permissions(&files.private_key, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(Certificates::read(&files), Err(CertificateError::KeyFile { .. })));
}

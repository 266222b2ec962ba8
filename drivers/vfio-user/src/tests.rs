//! The client against scripted servers.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use wire_vfio_user::{
    DeviceInfo, Header, IrqInfo, ProtocolCapabilities, RegionAccess, RegionInfo, VersionMessage,
    VfioUserCommand, device_flags, region_flags,
};

use crate::{BAR0, ClientConfig, VfioUserClient, VfioUserError};

/// A scripted server thread and its socket, which is removed on drop.
struct ScriptedServer {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok(), "the server panicked");
        }
    }
}

fn serve(name: &str, script: impl FnOnce(&mut UnixStream) + Send + 'static) -> ScriptedServer {
    let path = std::env::temp_dir().join(format!("ringbolt-vfio-user-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        script(&mut stream);
    });
    ScriptedServer { path, thread: Some(thread) }
}

fn request(stream: &mut UnixStream) -> Option<(Header, Vec<u8>)> {
    let mut header = [0; Header::SIZE];
    stream.read_exact(&mut header).ok()?;
    let header = Header::decode(&header).unwrap();
    let mut payload = vec![0; header.payload_bytes()];
    stream.read_exact(&mut payload).unwrap();
    Some((header, payload))
}

fn send_reply(stream: &mut UnixStream, header: &Header, payload: &[u8]) {
    stream.write_all(&header.reply(payload.len()).to_bytes()).unwrap();
    stream.write_all(payload).unwrap();
}

/// Replies to the requests of a client that connects.
fn accept_client(stream: &mut UnixStream) {
    let (header, payload) = request(stream).unwrap();
    assert_eq!(header.command, VfioUserCommand::Version.to_wire());
    let theirs = VersionMessage::decode(&payload).unwrap();
    assert_eq!((theirs.major, theirs.minor), (0, 1));
    let version = VersionMessage { major: 0, minor: 1, capabilities: ProtocolCapabilities::default() };
    send_reply(stream, &header, &version.to_bytes());
    let (header, _) = request(stream).unwrap();
    let flags = device_flags::PCI;
    send_reply(stream, &header, &DeviceInfo { argsz: 16, flags, regions: 9, irqs: 5 }.to_bytes());
    for index in 0..9 {
        let (header, payload) = request(stream).unwrap();
        assert_eq!(RegionInfo::decode(&payload).unwrap().index, index);
        let size = if index == BAR0 { 0x2000 } else { 0 };
        let flags = region_flags::READ | region_flags::WRITE;
        send_reply(
            stream,
            &header,
            &RegionInfo { argsz: 32, flags, index, size, ..RegionInfo::default() }.to_bytes(),
        );
    }
    let (header, _) = request(stream).unwrap();
    send_reply(stream, &header, &IrqInfo { argsz: 16, flags: 1, index: 2, count: 3 }.to_bytes());
}

fn short_timeout() -> ClientConfig {
    ClientConfig { timeout: Duration::from_millis(300), ..ClientConfig::default() }
}

#[test]
fn registers_are_accessed_by_message() {
    let server = serve("registers", |stream| {
        accept_client(stream);
        let (header, payload) = request(stream).unwrap();
        let access = RegionAccess::decode(&payload).unwrap();
        assert_eq!(access, RegionAccess { offset: 0x1c, region: BAR0, count: 4 });
        send_reply(stream, &header, &[&access.to_bytes()[..], &7u32.to_le_bytes()].concat());
        let (header, payload) = request(stream).unwrap();
        let access = RegionAccess::decode(&payload).unwrap();
        assert_eq!((access.offset, &payload[16..]), (0x28, &0x1234_5678_9abc_def0u64.to_le_bytes()[..]));
        send_reply(stream, &header, &access.to_bytes());
        let (header, _) = request(stream).unwrap();
        stream.write_all(&header.failure(17).to_bytes()).unwrap();
    });
    let client = VfioUserClient::connect(&server.path, &ClientConfig::default()).unwrap();
    assert_eq!(client.msix_vectors(), 3);
    assert_eq!(client.read_u32(BAR0, 0x1c).unwrap(), 7);
    client.write_u64(BAR0, 0x28, 0x1234_5678_9abc_def0).unwrap();
    let rejected = client.dma_unmap(0, 4096);
    assert!(matches!(rejected, Err(VfioUserError::Refused(VfioUserCommand::DmaUnmap, 17))), "{rejected:?}");
    // Invalid arguments fail without a message.
    assert!(matches!(client.read_u32(BAR0, 0x1ffd), Err(VfioUserError::OutOfRange { size: 0x2000, .. })));
    assert!(matches!(client.map_region(BAR0, 0x1000, 0x1000), Err(VfioUserError::NotMappable { .. })));
    let unsupported = client.reset().unwrap_err();
    assert!(matches!(unsupported, VfioUserError::ResetUnsupported), "{unsupported}");
    assert_eq!(unsupported.to_string(), "the device does not support reset");
    let stdin = std::io::stdin();
    let four = [stdin.as_fd(); 4];
    assert!(matches!(client.set_interrupts(&four), Err(VfioUserError::Interrupts { have: 3, want: 4 })));
}

#[test]
fn private_memory_is_rejected_with_advice() {
    let server = serve("private", |stream| {
        accept_client(stream);
        assert!(request(stream).is_none());
    });
    let client = VfioUserClient::connect(&server.path, &ClientConfig::default()).unwrap();
    let arena = dma::Arena::new(dma::ArenaConfig { limit_bytes: 4 << 20, ..Default::default() });
    let buffer = dma::Pool::new(&arena).take(4096).unwrap();
    let error = client.dma_map(&buffer.chunk().unwrap()).unwrap_err();
    assert!(error.to_string().contains("make the arena with shared memory"), "{error}");
}

#[test]
fn timeout_invalidates_the_connection() {
    let server = serve("silent", |stream| {
        accept_client(stream);
        let _ = request(stream);
        // The client closes the connection after the timeout.
        assert!(request(stream).is_none());
    });
    let client = VfioUserClient::connect(&server.path, &short_timeout()).unwrap();
    assert!(client.is_present());
    assert!(matches!(client.read_u32(BAR0, 0), Err(VfioUserError::Timeout(VfioUserCommand::RegionRead, _))));
    // A late reply could be mistaken for the reply to the next request.
    assert!(matches!(client.read_u32(BAR0, 0), Err(VfioUserError::Disconnected)));
    assert!(!client.is_present());
}

#[test]
fn a_server_that_answers_each_request_late_uses_up_its_time() {
    let late = |stream: &mut _| {
        accept_client(stream);
        while let Some((header, payload)) = request(stream) {
            // Each reply is in time, if only one counts.
            std::thread::sleep(Duration::from_millis(100));
            let access = RegionAccess::decode(&payload).unwrap();
            let reply = [&access.to_bytes()[..], &7u32.to_le_bytes()].concat();
            // The last one comes after the client has closed the connection.
            let _ = stream.write_all(&[&header.reply(reply.len()).to_bytes()[..], &reply].concat());
        }
    };
    let server = serve("prompt", late);
    let prompt = ClientConfig { prompt: Duration::from_secs(1), ..short_timeout() };
    let client = VfioUserClient::connect(&server.path, &prompt).unwrap();
    assert!((0..5).all(|_| client.read_u32(BAR0, 0).is_ok()), "each is prompt");
    let server = serve("late", late);
    let client = VfioUserClient::connect(&server.path, &short_timeout()).unwrap();
    let results: Vec<_> = (0..5).map(|_| client.read_u32(BAR0, 0)).collect();
    let late = results.iter().position(Result::is_err).expect("five replies take 500 ms of 300");
    assert!(
        matches!(results[late], Err(VfioUserError::Timeout(VfioUserCommand::RegionRead, _))),
        "{results:?}"
    );
}

#[test]
fn a_server_that_accepts_no_client_is_not_waited_for() {
    let directory = std::env::temp_dir().join(format!("ringbolt-vfio-user-full-{}", std::process::id()));
    let _ = std::fs::remove_file(&directory);
    let _listener = sockets::UnixListenSocket::bind(&directory, 0o600, 1).unwrap();
    // Connections fill the queue of the listener, which a blocking connect would wait for.
    let mut waiting = Vec::new();
    let refused = loop {
        match sockets::connect(&sockets::StreamAddress::Unix(directory.clone())) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), std::io::ErrorKind::WouldBlock);
    let connected = VfioUserClient::connect(&directory, &short_timeout());
    assert!(matches!(connected, Err(VfioUserError::Connect(..))));
    std::fs::remove_file(&directory).unwrap();
}

#[test]
fn server_exit_is_detected() {
    let server = serve("gone", accept_client);
    let client = VfioUserClient::connect(&server.path, &short_timeout()).unwrap();
    assert!(matches!(client.read_u32(BAR0, 0), Err(VfioUserError::Disconnected)));
    assert!(!client.is_present());
    assert!(matches!(
        VfioUserClient::connect("/nonexistent/dir".as_ref(), &short_timeout()),
        Err(VfioUserError::Connect(..))
    ));
}

#[test]
fn invalid_replies_are_errors() {
    type ReplyFn = fn(&Header) -> Vec<u8>;
    let bad: [(&str, ReplyFn); 4] = [
        ("other-id", |header| Header { id: header.id ^ 1, ..header.reply(0) }.to_bytes().to_vec()),
        ("too-long", |header| Header { size: u32::MAX, ..header.reply(0) }.to_bytes().to_vec()),
        ("too-short", |header| header.reply(0).to_bytes().to_vec()),
        ("no-data", |header| {
            let access = RegionAccess { offset: 0, region: 0, count: 4 };
            [&header.reply(16).to_bytes()[..], &access.to_bytes()].concat()
        }),
    ];
    for (name, reply) in bad {
        let server = serve(name, move |stream| {
            accept_client(stream);
            let (header, _) = request(stream).unwrap();
            stream.write_all(&reply(&header)).unwrap();
            assert!(request(stream).is_none());
        });
        let client = VfioUserClient::connect(&server.path, &short_timeout()).unwrap();
        let error = client.read_u32(BAR0, 0).unwrap_err();
        let expected = matches!(
            error,
            VfioUserError::ProtocolViolation(VfioUserCommand::RegionRead, _)
                | VfioUserError::InvalidReply(VfioUserCommand::RegionRead, _)
        );
        assert!(expected, "{name}: {error}");
        drop(client);
    }
}

#[test]
fn server_requests_are_rejected() {
    let server = serve("requests", |stream| {
        accept_client(stream);
        let (header, payload) = request(stream).unwrap();
        let theirs = Header::request(99, VfioUserCommand::DmaRead, 16);
        stream.write_all(&[&theirs.to_bytes()[..], &[0; 16]].concat()).unwrap();
        let (rejection, _) = request(stream).unwrap();
        assert!(rejection.failed && rejection.id == 99);
        send_reply(stream, &header, &[&payload[..16], &[9, 0, 0, 0]].concat());
    });
    let client = VfioUserClient::connect(&server.path, &ClientConfig::default()).unwrap();
    assert_eq!(client.read_u32(BAR0, 0).unwrap(), 9);
}

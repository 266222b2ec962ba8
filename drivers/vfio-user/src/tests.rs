//! The client against a server that plays back what it was told to.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use wire_vfio_user::{
    Capabilities, Command, DeviceInfo, Header, IrqInfo, RegionAccess, RegionInfo, Version, device_flags,
    region_flags,
};

use crate::{BAR0, Client, ClientError, Config};

/// A socket with a server behind it, which goes with it.
struct Server {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok(), "the server panicked");
        }
    }
}

fn serve(name: &str, script: impl FnOnce(&mut UnixStream) + Send + 'static) -> Server {
    let path = std::env::temp_dir().join(format!("ringbolt-vfio-user-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        script(&mut stream);
    });
    Server { path, thread: Some(thread) }
}

fn request(stream: &mut UnixStream) -> Option<(Header, Vec<u8>)> {
    let mut header = [0; Header::SIZE];
    stream.read_exact(&mut header).ok()?;
    let header = Header::decode(&header).unwrap();
    let mut payload = vec![0; header.payload_bytes()];
    stream.read_exact(&mut payload).unwrap();
    Some((header, payload))
}

fn answer(stream: &mut UnixStream, header: &Header, payload: &[u8]) {
    stream.write_all(&header.reply(payload.len()).to_bytes()).unwrap();
    stream.write_all(payload).unwrap();
}

/// Answers what a client asks when it connects.
fn greet(stream: &mut UnixStream) {
    let (header, payload) = request(stream).unwrap();
    assert_eq!(header.command, Command::Version.to_wire());
    let theirs = Version::decode(&payload).unwrap();
    assert_eq!((theirs.major, theirs.minor), (0, 1));
    let version = Version { major: 0, minor: 1, capabilities: Capabilities::default() };
    answer(stream, &header, &version.to_bytes());
    let (header, _) = request(stream).unwrap();
    let flags = device_flags::PCI;
    answer(stream, &header, &DeviceInfo { argsz: 16, flags, regions: 9, irqs: 5 }.to_bytes());
    for index in 0..9 {
        let (header, payload) = request(stream).unwrap();
        assert_eq!(RegionInfo::decode(&payload).unwrap().index, index);
        let size = if index == BAR0 { 0x2000 } else { 0 };
        let flags = region_flags::READ | region_flags::WRITE;
        answer(
            stream,
            &header,
            &RegionInfo { argsz: 32, flags, index, size, ..RegionInfo::default() }.to_bytes(),
        );
    }
    let (header, _) = request(stream).unwrap();
    answer(stream, &header, &IrqInfo { argsz: 16, flags: 1, index: 2, count: 3 }.to_bytes());
}

fn quick() -> Config {
    Config { timeout: Duration::from_millis(300) }
}

#[test]
fn registers_are_read_and_written_by_message() {
    let server = serve("registers", |stream| {
        greet(stream);
        let (header, payload) = request(stream).unwrap();
        let access = RegionAccess::decode(&payload).unwrap();
        assert_eq!(access, RegionAccess { offset: 0x1c, region: BAR0, count: 4 });
        answer(stream, &header, &[&access.to_bytes()[..], &7u32.to_le_bytes()].concat());
        let (header, payload) = request(stream).unwrap();
        let access = RegionAccess::decode(&payload).unwrap();
        assert_eq!((access.offset, &payload[16..]), (0x28, &0x1234_5678_9abc_def0u64.to_le_bytes()[..]));
        answer(stream, &header, &access.to_bytes());
        let (header, _) = request(stream).unwrap();
        stream.write_all(&header.failure(17).to_bytes()).unwrap();
    });
    let client = Client::connect(&server.path, &Config::default()).unwrap();
    assert_eq!(client.msix_vectors(), 3);
    assert_eq!(client.read_u32(BAR0, 0x1c).unwrap(), 7);
    client.write_u64(BAR0, 0x28, 0x1234_5678_9abc_def0).unwrap();
    let refused = client.dma_unmap(0, 4096);
    assert!(matches!(refused, Err(ClientError::Refused(Command::DmaUnmap, 17))), "{refused:?}");
    // What is wrong here is not even sent.
    assert!(matches!(client.read_u32(BAR0, 0x1ffd), Err(ClientError::Range { size: 0x2000, .. })));
    assert!(matches!(client.map_region(BAR0, 0x1000, 0x1000), Err(ClientError::NotMappable { .. })));
    assert!(matches!(client.reset(), Err(ClientError::Nonsense(Command::DeviceReset, _))));
    let stdin = std::io::stdin();
    let four = [stdin.as_fd(); 4];
    assert!(matches!(client.set_interrupts(&four), Err(ClientError::Interrupts { have: 3, want: 4 })));
}

#[test]
fn private_memory_is_refused_with_a_way_out() {
    let server = serve("private", |stream| {
        greet(stream);
        assert!(request(stream).is_none());
    });
    let client = Client::connect(&server.path, &Config::default()).unwrap();
    let arena = memory::Arena::new(memory::Config { limit_bytes: 4 << 20, ..Default::default() });
    let buffer = memory::Pool::new(&arena).take(4096).unwrap();
    let error = client.dma_map(&buffer.chunk().unwrap()).unwrap_err();
    assert!(error.to_string().contains("make the arena with shared memory"), "{error}");
}

#[test]
fn a_silent_server_is_given_up_on_for_good() {
    let server = serve("silent", |stream| {
        greet(stream);
        let _ = request(stream);
        // The client goes when it has waited long enough.
        assert!(request(stream).is_none());
    });
    let client = Client::connect(&server.path, &quick()).unwrap();
    assert!(client.is_present());
    assert!(matches!(client.read_u32(BAR0, 0), Err(ClientError::Timeout(Command::RegionRead, _))));
    // A late answer would be taken for that of the next question.
    assert!(matches!(client.read_u32(BAR0, 0), Err(ClientError::Gone)));
    assert!(!client.is_present());
}

#[test]
fn a_server_that_goes_is_noticed() {
    let server = serve("gone", greet);
    let client = Client::connect(&server.path, &quick()).unwrap();
    assert!(matches!(client.read_u32(BAR0, 0), Err(ClientError::Gone)));
    assert!(!client.is_present());
    assert!(matches!(Client::connect("/nonexistent/dir".as_ref(), &quick()), Err(ClientError::Connect(..))));
}

#[test]
fn answers_that_make_no_sense_are_errors() {
    type Reply = fn(&Header) -> Vec<u8>;
    let bad: [(&str, Reply); 4] = [
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
            greet(stream);
            let (header, _) = request(stream).unwrap();
            stream.write_all(&reply(&header)).unwrap();
            assert!(request(stream).is_none());
        });
        let client = Client::connect(&server.path, &quick()).unwrap();
        let error = client.read_u32(BAR0, 0).unwrap_err();
        let expected = matches!(
            error,
            ClientError::Nonsense(Command::RegionRead, _) | ClientError::Answer(Command::RegionRead, _)
        );
        assert!(expected, "{name}: {error}");
        drop(client);
    }
}

#[test]
fn requests_of_the_server_are_refused_and_do_not_confuse() {
    let server = serve("requests", |stream| {
        greet(stream);
        let (header, payload) = request(stream).unwrap();
        let theirs = Header::request(99, Command::DmaRead, 16);
        stream.write_all(&[&theirs.to_bytes()[..], &[0; 16]].concat()).unwrap();
        let (refusal, _) = request(stream).unwrap();
        assert!(refusal.failed && refusal.id == 99);
        answer(stream, &header, &[&payload[..16], &[9, 0, 0, 0]].concat());
    });
    let client = Client::connect(&server.path, &Config::default()).unwrap();
    assert_eq!(client.read_u32(BAR0, 0).unwrap(), 9);
}

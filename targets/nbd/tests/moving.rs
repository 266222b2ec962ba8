//! Connections that move between reactors, under load, and while what they belong to goes away.
//!
//! They are moved by the interface that the control plane's balancer uses.
#![allow(clippy::unwrap_used)]

#[path = "moving/load.rs"]
mod load;
#[path = "../../shell/tests/moves/mod.rs"]
mod moves;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use bdev::{Registry, malloc};
use control::BalancedTarget;
use control::json::json;
use load::{LOAD_BYTES, NbdLoad};
use moves::{Shuffler, counts, seed, wait_until};
use nbd::{ExportConfig, NbdTarget, TlsFiles};
use random::WyRand;
use reactor::Reactors;
use secret::Secret;
use sockets::StreamAddress;
use tls::{HandshakeProgress, PlainRead, Psk, PskHash, TlsSession};
use wire_nbd::{
    CommandFlags, ExportReply, HeaderForm, NbdCommand, NbdGreeting, OptionCode, OptionHeader,
    OptionReplyHeader, RequestHeader, SimpleReply,
};

/// A target on two reactors with an export of a memory device at a TCP port, and one at a UNIX socket.
struct Rig {
    reactors: Option<Reactors>,
    registry: Registry,
    target: NbdTarget,
    port: u16,
    directory: PathBuf,
}

/// Where a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Tcp,
    Unix,
    Tls,
}

const KEY: [u8; 32] = [7; 32];
const READ_BYTES: usize = 256 << 10;

fn export(bdev: &str, name: &str, address: StreamAddress, require_tls: bool) -> ExportConfig {
    ExportConfig {
        bdev_name: bdev.into(),
        name: name.into(),
        description: String::new(),
        read_only: false,
        require_tls,
        address,
    }
}

impl Rig {
    fn new() -> Option<Rig> {
        let reactors = moves::reactors()?;
        let registry = Registry::new();
        let target = NbdTarget::new(registry.clone(), reactors.handles());
        let directory =
            std::env::temp_dir().join(format!("ringbolt-nbd-moving-{}-{}", std::process::id(), seed()));
        std::fs::create_dir_all(&directory).unwrap();
        let keys = directory.join("keys");
        let hex: String = KEY.iter().map(|byte| format!("{byte:02x}")).collect();
        std::fs::write(&keys, format!("alice:{hex}\n")).unwrap();
        std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(0o600)).unwrap();
        target.set_tls(Some(TlsFiles { psk_file: Some(keys), certificate: None })).unwrap();
        let mut port = 0;
        for (name, require_tls) in [("disk", false), ("private", true)] {
            malloc::create(&registry, malloc::MallocConfig::new(name, 2 * LOAD_BYTES as u64 / 512, 512))
                .unwrap();
            let address = StreamAddress::Tcp(([127, 0, 0, 1], port).into());
            let made = target.create(export(name, name, address, require_tls)).unwrap();
            port = made.config.address.tcp().unwrap().port();
        }
        malloc::create(&registry, malloc::MallocConfig::new("local", 2 * LOAD_BYTES as u64 / 512, 512))
            .unwrap();
        let socket = StreamAddress::Unix(directory.join("socket"));
        target.create(export("local", "local", socket, false)).unwrap();
        Some(Rig { reactors: Some(reactors), registry, target, port, directory })
    }

    fn balanced(&self) -> Arc<dyn BalancedTarget> {
        self.target.balanced().expect("it has exports")
    }

    fn moved(&self) -> u64 {
        self.target.connection_totals().moved
    }

    fn connect(&self, transport: Transport, form: HeaderForm) -> Client {
        Client::connect(self.port, &self.directory, transport, form)
    }

    /// A client in a thread of its own that runs a load to its end.
    fn run(&self, transport: Transport, form: HeaderForm, mut load: NbdLoad) -> JoinHandle<NbdLoad> {
        let (port, directory) = (self.port, self.directory.clone());
        std::thread::spawn(move || {
            let mut client = Client::connect(port, &directory, transport, form);
            while !load.is_done() {
                assert!(client.step(&mut load), "the connection is closed");
            }
            load
        })
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.target.shutdown();
        drop(self.reactors.take());
        _ = std::fs::remove_dir_all(&self.directory);
    }
}

trait ReadWrite: Read + Write + Send {}

impl<S: Read + Write + Send> ReadWrite for S {}

/// A client that knows only bytes.
struct Client {
    stream: Box<dyn ReadWrite>,
    tls: Option<TlsSession>,
    received: Vec<u8>,
}

impl Client {
    fn connect(port: u16, directory: &Path, transport: Transport, form: HeaderForm) -> Client {
        let stream: Box<dyn ReadWrite> = match transport {
            Transport::Unix => Box::new(UnixStream::connect(directory.join("socket")).unwrap()),
            Transport::Tcp | Transport::Tls => {
                let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                stream.set_nodelay(true).unwrap();
                Box::new(stream)
            }
        };
        let mut client = Client { stream, tls: None, received: Vec::new() };
        client.read(NbdGreeting::SIZE);
        client.write(&[0, 0, 0, 3]);
        if transport == Transport::Tls {
            client.option(OptionCode::StartTls, b"");
            client.read(OptionReplyHeader::SIZE);
            client.start_tls();
        }
        if form == HeaderForm::Extended {
            client.option(OptionCode::ExtendedHeaders, b"");
            client.read(OptionReplyHeader::SIZE);
        }
        let name: &[u8] = match transport {
            Transport::Tcp => b"disk",
            Transport::Unix => b"local",
            Transport::Tls => b"private",
        };
        client.option(OptionCode::ExportName, name);
        client.read(ExportReply::SIZE);
        client
    }

    fn option(&mut self, option: OptionCode, data: &[u8]) {
        let header = OptionHeader { option: option as u32, length: data.len() as u32 };
        self.write(&[&header.to_bytes()[..], data].concat());
    }

    fn start_tls(&mut self) {
        let key = Psk::new("alice", Secret::new(KEY), PskHash::Sha256).unwrap();
        let mut session = TlsSession::client(key).unwrap();
        while session.handshake().unwrap() == HandshakeProgress::Pending {
            self.write_records(&mut session);
            let mut records = [0; 4096];
            let count = self.stream.read(&mut records).unwrap();
            assert!(count > 0, "the handshake fails");
            session.put_records(&records[..count]).unwrap();
        }
        self.write_records(&mut session);
        self.tls = Some(session);
    }

    fn write_records(&mut self, session: &mut TlsSession) {
        let mut records = vec![0; session.records_len()];
        let count = session.take_records(&mut records);
        self.stream.write_all(&records[..count]).unwrap();
    }

    fn write(&mut self, bytes: &[u8]) {
        match self.tls.take() {
            None => self.stream.write_all(bytes).unwrap(),
            Some(mut session) => {
                session.write(bytes).unwrap();
                self.write_records(&mut session);
                self.tls = Some(session);
            }
        }
    }

    /// Receives once. Returns whether the connection is open.
    fn receive(&mut self) -> bool {
        let mut bytes = vec![0; 64 << 10];
        let count = self.stream.read(&mut bytes).unwrap_or(0);
        match &mut self.tls {
            None => self.received.extend(&bytes[..count]),
            Some(session) => {
                session.put_records(&bytes[..count]).unwrap();
                while let PlainRead::Bytes(count) = session.read(&mut bytes).unwrap() {
                    self.received.extend(&bytes[..count]);
                }
            }
        }
        count > 0
    }

    fn read(&mut self, count: usize) -> Vec<u8> {
        while self.received.len() < count {
            assert!(self.receive(), "the connection is closed");
        }
        self.received.drain(..count).collect()
    }

    /// Sends reads that keep the target busier than this client.
    fn send_reads(&mut self, count: usize) {
        for cookie in 0..count as u64 {
            let (flags, length) = (CommandFlags::empty(), READ_BYTES as u64);
            let header = RequestHeader { flags, command: NbdCommand::Read.into(), cookie, offset: 0, length };
            let mut bytes = [0; HeaderForm::REQUEST_SIZE_MAX];
            let size = header.encode(HeaderForm::Compact, &mut bytes);
            self.write(&bytes[..size]);
        }
    }

    fn receive_reads(&mut self, count: usize) {
        for _ in 0..count {
            let reply = self.read(SimpleReply::SIZE + READ_BYTES);
            assert_eq!(SimpleReply::decode(reply.first_chunk().unwrap()).unwrap().error, 0);
        }
    }

    /// Sends what a load has, and receives once. Returns whether the connection is open.
    fn step(&mut self, load: &mut NbdLoad) -> bool {
        let requests = load.requests();
        if !requests.is_empty() {
            self.write(&requests);
        }
        let is_open = self.receive();
        load.receive(&std::mem::take(&mut self.received));
        is_open
    }
}

#[test]
fn verified_loads_do_not_notice_that_their_connections_move() {
    let seed = seed();
    let Some(rig) = Rig::new() else { return };
    let shuffler = Shuffler::start(rig.balanced(), seed);
    for transport in [Transport::Tcp, Transport::Unix, Transport::Tls] {
        // One after the other: a load knows what is on its device.
        let mut load = NbdLoad::new(seed, HeaderForm::Compact, 24, 0);
        let before = rig.moved();
        for form in [HeaderForm::Compact, HeaderForm::Extended] {
            load.set_form(form);
            for _ in 0..200 {
                load.add(500);
                load = rig.run(transport, form, load).join().unwrap();
                if rig.moved() >= before + 10 {
                    break;
                }
            }
        }
        let moved = rig.moved() - before;
        println!("{moved} moves over {transport:?}");
        assert!(moved >= 10, "{moved} moves over {transport:?}");
    }
    drop(shuffler);
}

/// Scheduler, period and masks change all the time, so that moves are asked for while others are under way.
#[test]
fn a_verified_load_does_not_notice_that_schedulers_and_masks_change() {
    let seed = seed();
    let Some(rig) = Rig::new() else { return };
    let plane = moves::plane(rig.reactors.as_ref().unwrap(), rig.balanced());
    let cpus: Vec<u32> = rig.reactors.as_ref().unwrap().handles().iter().map(|one| one.cpu()).collect();
    let mut random = WyRand::new(seed);
    let idle: Vec<Client> = (0..6).map(|_| rig.connect(Transport::Unix, HeaderForm::Compact)).collect();
    let mut load = NbdLoad::new(seed, HeaderForm::Compact, 24, 0);
    for _ in 0..200 {
        load.add(400);
        let running = rig.run(Transport::Tls, HeaderForm::Compact, load);
        while !running.is_finished() {
            let (thread, other) = if random.happens(500) { (0, 1) } else { (1, 0) };
            let mask = |cpu: u32| json!({ "id": thread + 1, "cpumask": format!("[{cpu}]") });
            plane.invoke("thread_set_cpumask", mask(cpus[other])).unwrap();
            let name = if random.happens(500) { "dynamic" } else { "static" };
            let period = 10_000 + random.below(5_000);
            plane.invoke("framework_set_scheduler", json!({ "name": name, "period": period })).unwrap();
            plane.invoke("thread_set_cpumask", mask(cpus[thread])).unwrap();
        }
        load = running.join().unwrap();
        if rig.moved() >= 40 {
            break;
        }
    }
    assert!(rig.moved() >= 40, "{} moves", rig.moved());
    plane.drain();
    drop(idle);
}

#[test]
fn a_request_that_has_half_arrived_moves_with_its_connection() {
    let Some(rig) = Rig::new() else { return };
    let target = rig.balanced();
    for transport in [Transport::Tcp, Transport::Unix, Transport::Tls] {
        let mut client = rig.connect(transport, HeaderForm::Compact);
        let mut load = NbdLoad::new(1, HeaderForm::Compact, 1, 40);
        // What was sent before belongs to the request, too.
        wait_until("the connection can move", || counts(&*target).iter().sum::<usize>() == 1);
        let mut cut = 0;
        while !load.is_done() {
            let request = load.requests();
            cut = (cut + 5) % 27 + 1;
            client.write(&request[..cut]);
            let before = rig.moved();
            wait_until("it moves", || {
                let from = usize::from(counts(&*target)[0] == 0);
                moves::ask(&*target, from, 1 - from);
                rig.moved() > before
            });
            client.write(&request[cut..]);
            while !load.may_begin() {
                assert!(client.receive());
                load.receive(&std::mem::take(&mut client.received));
            }
        }
        drop(client);
        wait_until("it is closed", || rig.target.connection_totals().open == 0);
    }
}

#[test]
fn what_is_removed_closes_connections_that_move() {
    type Remove = fn(&Rig);
    let removals: [(&str, Remove); 4] = [
        ("the export", |rig| {
            // Waits until the device is free.
            rig.target.delete("disk").unwrap().wait().unwrap();
        }),
        ("the device", |rig| {
            rig.registry.unregister("disk").unwrap();
        }),
        ("the target", |rig| rig.target.shutdown()),
        ("the clients", |_| {}),
    ];
    for (what, remove) in removals {
        for round in 0..6 {
            let Some(rig) = Rig::new() else { return };
            let shuffler = Shuffler::start(rig.balanced(), seed() + round);
            let mut clients: Vec<Client> =
                (0..4).map(|_| rig.connect(Transport::Tcp, HeaderForm::Compact)).collect();
            let new = |at| NbdLoad::new(at, HeaderForm::Compact, 8, 100_000);
            let mut loads: Vec<NbdLoad> = (0..4).map(new).collect();
            for _ in 0..10 * (round + 1) {
                for (client, load) in clients.iter_mut().zip(&mut loads) {
                    client.write(&load.requests());
                    assert!(client.receive());
                    // Several clients write to the device.
                    load.receive_unchecked(&std::mem::take(&mut client.received));
                }
            }
            remove(&rig);
            if what == "the clients" {
                clients.clear();
            }
            for client in &mut clients {
                while client.receive() {
                    client.received.clear();
                }
            }
            wait_until(what, || rig.target.connection_totals().open == 0);
            drop(shuffler);
        }
    }
}

/// Connections of a program whose scheduler is `dynamic`, all of which begin on its first reactor; and then
/// of one whose first thread may not be there.
#[test]
fn the_balancer_divides_connections_and_keeps_them_away_from_a_thread() {
    const CONNECTIONS: usize = 12;
    let Some(rig) = Rig::new() else { return };
    let target = rig.balanced();
    let mut clients: Vec<Client> =
        (0..CONNECTIONS).map(|_| rig.connect(Transport::Unix, HeaderForm::Compact)).collect();
    wait_until("all connections are on the first reactor", || {
        moves::ask(&*target, 1, 0);
        counts(&*target) == [CONNECTIONS, 0]
    });
    let plane = moves::plane(rig.reactors.as_ref().unwrap(), target.clone());
    let set = |params| plane.invoke("framework_set_scheduler", params).unwrap();
    set(json!({ "name": "dynamic", "period": 50_000 }));
    wait_until("connections move", || {
        for _ in 0..20 {
            clients.iter_mut().for_each(|client| client.send_reads(4));
            clients.iter_mut().for_each(|client| client.receive_reads(4));
        }
        counts(&*target)[1] >= 3
    });
    set(json!({ "name": "static" }));
    assert!(counts(&*target)[0] >= 3, "they do not all go to the other");

    let reactors = rig.reactors.as_ref().unwrap().handles();
    let mask = |cpus: &[u32]| json!({ "id": 1, "cpumask": format!("{cpus:?}") });
    let (own, other) = (reactors[0].cpu(), reactors[1].cpu());
    plane.invoke("thread_set_cpumask", mask(&[other])).unwrap();
    wait_until("no connection is left on the first reactor", || counts(&*target) == [0, CONNECTIONS]);
    let later: Vec<Client> = (0..4).map(|_| rig.connect(Transport::Tcp, HeaderForm::Compact)).collect();
    wait_until("further ones are on the other", || counts(&*target) == [0, CONNECTIONS + 4]);
    plane.invoke("thread_set_cpumask", mask(&[own])).unwrap();
    let new = rig.connect(Transport::Tcp, HeaderForm::Compact);
    wait_until("it gets connections again", || counts(&*target) == [1, CONNECTIONS + 4]);
    plane.drain();
    drop((clients, later, new));
}

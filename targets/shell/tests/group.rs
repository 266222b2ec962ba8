//! A group of connections on a simulated network, in virtual time, with a protocol of one-byte commands.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};
use std::rc::Rc;
use std::sync::Arc;

use bdev::malloc::MallocConfig;
use bdev::{Access, Registry};
use block_io::Tag;
use dma::{Arena, ArenaConfig, Data};
use reactor::{Reactor, ReactorConfig, Shutdown};
use sockets::{
    ByteStream, ConnectionId, Network, NetworkFaults, SimulatedNetwork, StreamAddress, TransferResult,
};
use target_shell::{
    Accepted, CloseReason, ConnectionGroup, ConnectionLimits, Connections, DeviceMap, GroupLimits, IoContext,
    MemoryShare, MoreToRead, NoMemory, Notice, PollGroup, Polling, Protocol, ProtocolConnection,
    TURN_COMMANDS_MAX, TargetConfig, TransferReport,
};

const LIMITS: GroupLimits = GroupLimits {
    connections: ConnectionLimits::new(3),
    logins_max: 2,
    logins_per_peer_max: 2,
    drain_timeout_ns: 1000,
    transfer_timeout_ns: 4_000_000_000,
    registry: None,
};
/// Bytes of a bulk answer: as many as the simulated network takes.
const BULK_BYTES: usize = 256 << 10;
/// How long a connection or a target counts as active.
const ACTIVE_NS: u64 = 10_000_000;
/// Key of the block device.
const KEY: u32 = 5;

#[derive(Default)]
struct ScriptConfig {
    devices: DeviceMap,
}

impl TargetConfig for ScriptConfig {
    fn devices(&self) -> &DeviceMap {
        &self.devices
    }
}

/// What a connection may begin: nothing, some commands, or any number.
fn allowance(context: &IoContext<'_, Script>) -> u8 {
    match context.turn_commands() {
        0 => b'0',
        some if some <= TURN_COMMANDS_MAX as usize => b'S',
        _ => b'A',
    }
}

/// Answers are queued in `unsent`.
#[derive(Default)]
struct ScriptConnection {
    unsent: Vec<u8>,
    deadline_ns: Option<u64>,
    waits: u32,
    is_busy: bool,
    draining: bool,
    notice: Notice,
    active_ns: Option<u64>,
    /// It has no stream, and has not continued yet.
    is_share: bool,
    /// It reports reads that find nothing.
    is_quiet: bool,
    flushes: u32,
    memory: Option<MemoryShare>,
    /// Buffers that it keeps for its peer.
    kept: Vec<Data>,
    kept_ever: u64,
    /// What it has logged in to.
    number: u64,
}

/// Commands in memory that peers share with the target.
#[derive(Default)]
struct Script {
    memory: Rc<Cell<u32>>,
    /// Connections without a stream to add in the next poll: each continues once, and then closes.
    shares: Rc<Cell<u32>>,
    /// Connections that continued with a limit.
    limited: Rc<Cell<u32>>,
}

impl Protocol for Script {
    const NAME: &'static str = "script";
    type Config = ScriptConfig;
    type Connection = ScriptConnection;
    type Error = &'static str;

    fn accept(&mut self, _: Accepted, _: &Arc<ScriptConfig>, _: u64) -> Option<ScriptConnection> {
        Some(ScriptConnection::default())
    }

    fn begin_poll(&mut self, connections: &mut Connections<ScriptConnection>, _: u64) -> usize {
        let count = self.shares.take();
        for _ in 0..count {
            let share = ScriptConnection { waits: 1, is_share: true, ..ScriptConnection::default() };
            assert!(connections.attach(share, World::address()).is_ok());
        }
        count as usize
    }

    fn recheck(&mut self, connections: &mut Connections<ScriptConnection>, _: u64) {
        connections.update(|_, entry| {
            entry.connection.unsent.push(b'!');
            true
        });
    }
}

/// Bytes of a buffer that a connection keeps.
const KEPT_BYTES: usize = 64 << 10;
/// In `waits`: for memory.
const KEEP_WAITS: u32 = u32::MAX;

impl ScriptConnection {
    /// Takes a buffer, which it keeps until its peer says otherwise.
    fn keep(&mut self, context: &IoContext<'_, Script>) {
        let memory = self.memory.get_or_insert_with(|| context.memory_share(1 << 20));
        match memory.take(KEPT_BYTES, context.pool) {
            Ok(data) => {
                self.kept.push(data);
                self.kept_ever += 1;
                self.unsent.push(b'k');
            }
            Err(NoMemory::Full) => self.unsent.push(b'f'),
            Err(NoMemory::Lacking) => self.waits = KEEP_WAITS,
        }
    }

    fn give_back(&mut self) {
        let bytes = self.kept.drain(..).map(|data| data.len()).sum();
        if let Some(memory) = &mut self.memory {
            memory.remove(bytes);
        }
        self.unsent.push(b'g');
    }
}

impl ProtocolConnection<Script> for ScriptConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut IoContext<'_, Script>,
    ) -> Result<MoreToRead, CloseReason<&'static str>> {
        // One command at a time, so that the group must come back without a new event.
        let count = CloseReason::check(stream.receive(&mut [IoSliceMut::new(&mut scratch[..1])]))?;
        let Some(command) = scratch[..count].first() else {
            return Ok(if self.is_quiet { MoreToRead::Unchanged } else { MoreToRead::No });
        };
        match command {
            b'b' => self.is_busy = true,
            b'B' => self.unsent.extend((0..BULK_BYTES).map(|at| at as u8)),
            b'c' => self.notice.recheck = true,
            b'L' => self.notice.logged_in = true,
            b'r' => {
                let read = bdev::Request::read(Tag(77), 0, 1, context.pool.take(512).unwrap());
                if context.submit(KEY, read).is_err() {
                    self.unsent.push(b'F');
                }
            }
            b'q' => self.is_quiet = true,
            b'k' => self.keep(context),
            digit @ b'0'..=b'9' => self.number = (*digit).into(),
            b'g' => self.give_back(),
            b'm' => self.active_ns = Some(context.now_ns),
            b'v' => self.unsent.push(allowance(context)),
            b'V' => {
                context.count_command(TURN_COMMANDS_MAX as u64 * (32 << 10));
                self.unsent.push(allowance(context));
            }
            b't' => self.deadline_ns = Some(context.now_ns + 100),
            b'w' => self.waits = 3,
            b'x' => return Err(CloseReason::Protocol("x is not a command")),
            other => self.unsent.push(*other),
        }
        Ok(MoreToRead::Yes)
    }

    fn resume(
        &mut self,
        context: &mut IoContext<'_, Script>,
    ) -> Result<MoreToRead, CloseReason<&'static str>> {
        let limited = &context.protocol.limited;
        limited.set(limited.get() + u32::from(context.turn_commands() == TURN_COMMANDS_MAX as usize));
        if self.waits == KEEP_WAITS {
            self.waits = 0;
            self.keep(context);
            return Ok(MoreToRead::No);
        }
        self.waits -= 1;
        self.is_share = false;
        if self.waits == 0 {
            self.unsent.push(b'W');
        }
        Ok(MoreToRead::No)
    }

    fn complete(&mut self, tag: u64, completion: bdev::Completion) {
        assert!(tag == 77 && completion.status().is_success());
        self.unsent.push(b'R');
    }

    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<&'static str>> {
        self.flushes += 1;
        while !self.unsent.is_empty() {
            match CloseReason::check(stream.send(&[IoSlice::new(&self.unsent)]))? {
                0 => break,
                sent => drop(self.unsent.drain(..sent)),
            }
        }
        Ok(())
    }

    fn polling(&self) -> Polling {
        self.active_ns.map_or(Polling::Off, |active_ns| Polling::Timed { active_ns })
    }

    fn poll(&mut self, context: &mut IoContext<'_, Script>) -> usize {
        let memory = &context.protocol.memory;
        let count = memory.get().min(1);
        memory.set(memory.get() - count);
        let letter = if context.turn_commands() == TURN_COMMANDS_MAX as usize { b'N' } else { b'M' };
        self.unsent.extend((0..count).map(|_| letter));
        count as usize
    }

    fn wants_resume(&self) -> bool {
        self.is_share
    }

    fn is_waiting(&self) -> bool {
        self.waits > 0
    }

    fn begin_drain(&mut self) {
        self.draining = true;
    }

    fn is_draining(&self) -> bool {
        self.draining
    }

    fn is_drained(&self) -> bool {
        !self.is_busy
    }

    fn deadline_ns(&self) -> u64 {
        self.deadline_ns.unwrap_or(u64::MAX)
    }

    fn on_deadline(&mut self, _: &mut Script, _: u64) -> Result<(), CloseReason<&'static str>> {
        self.deadline_ns = None;
        self.unsent.push(b'T');
        Ok(())
    }

    fn take_notice(&mut self) -> Notice {
        std::mem::take(&mut self.notice)
    }

    fn awaits_login(&self) -> bool {
        true
    }

    fn transfers(&self, report: &mut TransferReport) {
        let first = self.kept_ever - self.kept.len() as u64;
        for (index, data) in self.kept.iter().enumerate() {
            report.waits_for_peer(first + index as u64, data.len(), 0);
        }
    }

    fn memory(&mut self) -> Option<&mut MemoryShare> {
        self.memory.as_mut()
    }

    fn abandon_transfers(&mut self) {
        self.unsent.push(b'A');
    }

    fn object(&self) -> Option<u64> {
        Some(self.number)
    }

    fn tenant(&self) -> Option<String> {
        (self.number > 0).then(|| format!("host {}", self.number))
    }
}

struct OtherTarget {
    group: ConnectionGroup<Script, SimulatedNetwork>,
    peers: SimulatedNetwork,
}

struct World {
    group: ConnectionGroup<Script, SimulatedNetwork>,
    peers: SimulatedNetwork,
    memory: Rc<Cell<u32>>,
    shares: Rc<Cell<u32>>,
    limited: Rc<Cell<u32>>,
    now_ns: u64,
    // Dropped last: the fields above use its buffers.
    reactor: Reactor,
}

impl World {
    fn new() -> World {
        World::with_limits(LIMITS)
    }

    fn with_limits(limits: GroupLimits) -> World {
        World::with_config(limits, &ReactorConfig::default())
    }

    /// Any number of connections, on a core with this many bytes of memory.
    fn with_memory(bytes: usize) -> World {
        let arena = Arena::new(ArenaConfig { limit_bytes: bytes, hugepages: false, shared: false });
        let limits = GroupLimits {
            connections: ConnectionLimits::new(200),
            logins_max: 200,
            logins_per_peer_max: 200,
            ..LIMITS
        };
        World::with_config(limits, &ReactorConfig { arena, ..ReactorConfig::default() })
    }

    fn with_config(limits: GroupLimits, config: &ReactorConfig) -> World {
        let reactor = Reactor::new(config).unwrap();
        let (peers, network) = SimulatedNetwork::pair(1, NetworkFaults::default());
        let memory = Rc::default();
        let shares = Rc::default();
        let limited = Rc::default();
        let script =
            Script { memory: Rc::clone(&memory), shares: Rc::clone(&shares), limited: Rc::clone(&limited) };
        let mut group = ConnectionGroup::standalone(&reactor.core(), network, script, limits);
        group.listen(&World::address(), 1).unwrap();
        World { group, peers, memory, shares, limited, now_ns: 1, reactor }
    }

    /// Another target on the same core.
    fn add_target(&self) -> OtherTarget {
        let (peers, network) = SimulatedNetwork::pair(2, NetworkFaults::default());
        let mut group = ConnectionGroup::standalone(&self.reactor.core(), network, Script::default(), LIMITS);
        group.listen(&World::address(), 1).unwrap();
        OtherTarget { group, peers }
    }

    fn address() -> StreamAddress {
        "10.0.0.1:7".parse().unwrap()
    }

    fn connect_from(&mut self, peer: &str, credentials: Option<os::PeerCredentials>) -> ConnectionId {
        let stream = self.peers.connect_from(peer.parse().unwrap(), World::address(), credentials);
        self.peers.add(stream).unwrap()
    }

    fn connect(&mut self) -> ConnectionId {
        let stream = self.peers.connect(World::address());
        self.peers.add(stream).unwrap()
    }

    fn poll(&mut self) {
        self.group.poll(&self.reactor.core(), self.now_ns);
    }

    /// Sends commands, polls until the group is idle, and returns the answers; `None` if the connection is closed.
    fn run(&mut self, id: ConnectionId, commands: &[u8]) -> Option<String> {
        if !commands.is_empty() {
            self.peers.send(id, &[IoSlice::new(commands)]);
        }
        // More than the commands of a test.
        for _ in 0..20 {
            self.poll();
        }
        let mut bytes = [0; 64];
        match self.peers.receive(id, &mut [IoSliceMut::new(&mut bytes)]) {
            TransferResult::Bytes(count) => Some(String::from_utf8(bytes[..count].to_vec()).unwrap()),
            TransferResult::Blocked => Some(String::new()),
            TransferResult::Closed | TransferResult::Failed(_) => None,
        }
    }
}

#[test]
fn a_connection_is_read_until_it_says_that_there_is_no_more() {
    let mut world = World::new();
    let id = world.connect();
    assert_eq!(world.run(id, b"hello").unwrap(), "hello");
}

#[test]
fn a_read_that_finds_nothing_leads_to_no_flush() {
    let mut world = World::new();
    let id = world.connect();
    world.run(id, b"");
    let flushes = |world: &World| world.group.connections().open().map(|one| one.flushes).sum::<u32>();
    let before = flushes(&world);
    world.run(id, b"q");
    assert_eq!(flushes(&world), before + 1, "for the command, not for the read after it");
    assert_eq!(world.run(id, b"e").unwrap(), "e");
    assert_eq!(flushes(&world), before + 2);
}

/// Peers, with the bytes that each has received.
struct Readers(Vec<(ConnectionId, Vec<u8>)>);

impl Readers {
    /// Receives all that has arrived. Returns its bytes.
    fn receive(&mut self, peers: &mut SimulatedNetwork) -> usize {
        let mut all = 0;
        for (id, received) in &mut self.0 {
            let mut bytes = vec![0; BULK_BYTES];
            while let TransferResult::Bytes(count) = peers.receive(*id, &mut [IoSliceMut::new(&mut bytes)]) {
                received.extend(&bytes[..count]);
                all += count;
            }
        }
        all
    }
}

#[test]
fn bulk_answers_are_sent_in_turn_and_small_ones_do_not_wait_for_them() {
    const PEERS: usize = 32;
    let limits = GroupLimits {
        connections: ConnectionLimits::new(40),
        logins_max: 40,
        logins_per_peer_max: 40,
        ..LIMITS
    };
    let mut world = World::with_limits(limits);
    let mut readers = Readers((0..PEERS).map(|_| (world.connect(), Vec::new())).collect());
    let small = world.connect();
    assert_eq!(world.run(small, b"e").unwrap(), "e");
    for (id, _) in &readers.0 {
        world.peers.send(*id, &[IoSlice::new(b"B")]);
    }
    // All of it would be eight times a turn's bytes.
    let mut one_answer = [0; 8];
    let mut turns = 0;
    while readers.0.iter().any(|(_, received)| received.len() < BULK_BYTES) {
        world.peers.send(small, &[IoSlice::new(b"e")]);
        world.poll();
        let answered = world.peers.receive(small, &mut [IoSliceMut::new(&mut one_answer)]);
        assert!(matches!(answered, TransferResult::Bytes(1)), "turn {turns}");
        let bytes = readers.receive(&mut world.peers);
        // Each connection has something new in the first.
        let bytes_max = if turns == 0 { (1 << 20) + PEERS * (64 << 10) } else { (1 << 20) + (64 << 10) };
        assert!(0 < bytes && bytes <= bytes_max, "turn {turns}: {bytes} bytes");
        let is_done = readers.0.iter().all(|(_, received)| received.len() == BULK_BYTES);
        assert!(is_done || world.group.deadline() == Some(0), "it continues without an event");
        turns += 1;
    }
    for (_, received) in &readers.0 {
        assert!(received.iter().enumerate().all(|(at, byte)| *byte == at as u8), "in order, each byte once");
    }
}

#[test]
fn connections_beyond_the_limit_are_closed_until_others_end() {
    let mut world = World::new();
    let login = |world: &mut World| {
        let id = world.connect();
        (id, world.run(id, b"Le"))
    };
    let admitted: Vec<_> = (0..3).map(|_| login(&mut world)).collect();
    assert!(admitted.iter().all(|(_, answer)| answer.as_deref() == Some("e")));
    assert_eq!(login(&mut world).1, None);
    world.peers.close(admitted[1].0);
    world.poll();
    assert_eq!(login(&mut world).1.unwrap(), "e");
    assert_eq!(world.run(admitted[0].0, b"e").unwrap(), "e");
}

#[test]
fn connections_that_do_not_log_in_make_room_for_newer_ones() {
    let mut world = World::new();
    let member = world.connect();
    assert_eq!(world.run(member, b"Le").unwrap(), "e");
    let silent: Vec<ConnectionId> = (0..2).map(|_| world.connect()).collect();
    assert_eq!(world.run(silent[0], b"").unwrap(), "");
    for _ in 0..100 {
        let flood = world.connect();
        assert_eq!(world.run(flood, b"e").unwrap(), "e");
        assert_eq!(world.group.connections().len(), 3);
    }
    assert_eq!(world.run(silent[0], b""), None);
    assert_eq!(world.run(member, b"e").unwrap(), "e");
    let late = world.connect();
    assert_eq!(world.run(late, b"Le").unwrap(), "e");
}

#[test]
fn logins_beyond_the_limit_are_closed() {
    let mut world = World::new();
    // Both are accepted while there is room for one more.
    for _ in 0..2 {
        let id = world.connect();
        assert_eq!(world.run(id, b"Le").unwrap(), "e");
    }
    let (one, other) = (world.connect(), world.connect());
    assert_eq!(world.run(one, b"Le").unwrap(), "e");
    assert_eq!(world.run(other, b"e").unwrap(), "e");
    assert_eq!(world.run(other, b"L"), None);
    assert_eq!(world.group.connections().len(), 3);
}

#[test]
fn requests_reach_their_device_until_it_is_removed() {
    let mut world = World::new();
    let registry = Registry::new();
    bdev::malloc::create(&registry, MallocConfig::new("Malloc0", 8, 512)).unwrap();
    let descriptor = Arc::new(registry.open("Malloc0", Access::Exclusive { by: "test" }).unwrap());
    let config = ScriptConfig { devices: DeviceMap::from([(KEY, descriptor)]) };
    world.group.apply(&world.reactor.core(), Arc::new(config), 1);
    let (one, other) = (world.connect(), world.connect());
    assert_eq!(world.run(one, b"rr").unwrap(), "RR");
    assert_eq!(world.run(other, b"r").unwrap(), "R");
    world.group.apply(&world.reactor.core(), Arc::default(), 1);
    assert_eq!(world.run(one, b"r").unwrap(), "F");
    // Its claim ended with the last channel and descriptor.
    registry.open("Malloc0", Access::Exclusive { by: "another" }).unwrap();
}

#[test]
fn a_deadline_is_kept_once() {
    let mut world = World::new();
    let id = world.connect();
    assert_eq!(world.run(id, b"t").unwrap(), "");
    world.now_ns += 99;
    assert_eq!(world.run(id, b"").unwrap(), "");
    world.now_ns += 1;
    assert_eq!(world.run(id, b"").unwrap(), "T");
    world.now_ns += 1000;
    assert_eq!(world.run(id, b"").unwrap(), "", "it was due once");
}

#[test]
fn what_waits_without_an_event_is_retried() {
    let mut world = World::new();
    let id = world.connect();
    assert_eq!(world.run(id, b"w").unwrap(), "W");
}

#[test]
fn work_in_shared_memory_is_found_without_an_event() {
    let mut world = World::new();
    let (one, other) = (world.connect(), world.connect());
    world.memory.set(1);
    assert_eq!(world.run(one, b"e").unwrap(), "e");
    assert_eq!(world.run(other, b"m").unwrap(), "M");
    world.memory.set(2);
    assert_eq!(world.run(other, b"").unwrap(), "MM");
    assert_eq!(world.run(one, b"").unwrap(), "", "it is not polled");
    world.peers.close(other);
    world.poll();
    world.memory.set(1);
    world.poll();
    assert_eq!(world.memory.get(), 1, "a closed connection is not polled");
}

#[test]
fn one_of_several_connections_begins_a_limited_number_of_commands() {
    let mut world = World::new();
    let one = world.connect();
    assert_eq!(world.run(one, b"L").unwrap(), "");
    assert_eq!(world.run(one, b"vvV").unwrap(), "AAA", "it has the core for itself");
    let other = world.connect();
    assert_eq!(world.run(other, b"L").unwrap(), "");
    world.peers.send(other, &[IoSlice::new(b"vv")]);
    // Data counts as commands.
    assert_eq!(world.run(one, b"vV").unwrap(), "S0");
    assert_eq!(world.run(other, b"").unwrap(), "SS");
}

#[test]
fn a_connection_that_continues_in_the_next_turn_is_not_received_from_twice_in_one() {
    let mut world = World::new();
    let (one, other) = (world.connect(), world.connect());
    assert_eq!(world.run(one, b"L").unwrap(), "");
    assert_eq!(world.run(other, b"L").unwrap(), "");
    // An event in each turn, beside what is left of the one before.
    for _ in 0..3 {
        for id in [one, other] {
            world.peers.send(id, &[IoSlice::new(b"vv")]);
        }
        world.poll();
    }
    let mut bytes = [0; 64];
    for id in [one, other] {
        let received = world.peers.receive(id, &mut [IoSliceMut::new(&mut bytes)]);
        assert!(matches!(received, TransferResult::Bytes(3)), "{received:?}");
    }
}

#[test]
fn one_of_several_polled_connections_fetches_a_limited_number_of_commands() {
    let mut world = World::new();
    let (one, other) = (world.connect(), world.connect());
    assert_eq!(world.run(one, b"Lm").unwrap(), "");
    assert_eq!(world.run(other, b"L").unwrap(), "");
    world.memory.set(3);
    assert_eq!(world.run(one, b"").unwrap(), "MMM", "the other one is not polled");
    assert_eq!(world.run(other, b"m").unwrap(), "");
    world.memory.set(7);
    assert_eq!(world.run(one, b"").unwrap(), "MNNN", "the other one had none before the first poll");
    assert_eq!(world.run(other, b"").unwrap(), "NNN");
    world.now_ns += ACTIVE_NS - 1;
    world.memory.set(1);
    assert_eq!(world.run(one, b"").unwrap(), "N", "the other one had a command lately");
    world.now_ns += 1;
    world.memory.set(1);
    assert_eq!(world.run(one, b"").unwrap(), "M", "the other one is idle");
}

#[test]
fn a_connection_has_a_limit_while_another_target_of_its_core_is_active() {
    let mut world = World::new();
    let mut other = world.add_target();
    let id = world.connect();
    assert_eq!(world.run(id, b"Lv").unwrap(), "A");
    let stream = other.peers.connect(World::address());
    let peer = other.peers.add(stream).unwrap();
    let mut answer = |world: &mut World| {
        other.peers.send(peer, &[IoSlice::new(b"v")]);
        for _ in 0..3 {
            other.group.poll(&world.reactor.core(), world.now_ns);
        }
        let mut bytes = [0; 8];
        match other.peers.receive(peer, &mut [IoSliceMut::new(&mut bytes)]) {
            TransferResult::Bytes(count) => String::from_utf8(bytes[..count].to_vec()).unwrap(),
            end => panic!("{end:?}"),
        }
    };
    assert_eq!(answer(&mut world), "S");
    assert_eq!(world.run(id, b"v").unwrap(), "S");
    // Commands in memory, too.
    world.memory.set(1);
    assert_eq!(world.run(id, b"m").unwrap(), "N");
    world.now_ns += ACTIVE_NS;
    world.memory.set(1);
    assert_eq!(world.run(id, b"v").unwrap(), "AM", "the other target is idle");
    assert_eq!(answer(&mut world), "S");
}

#[test]
fn one_of_several_connections_that_continue_has_a_limit() {
    let mut world = World::new();
    for (shares, limited) in [(1, 0), (2, 2)] {
        world.shares.set(shares);
        world.poll();
        assert_eq!(world.limited.take(), limited, "of {shares}");
    }
}

#[test]
fn a_violation_closes_only_its_connection() {
    let mut world = World::new();
    let (one, other) = (world.connect(), world.connect());
    assert_eq!(world.run(one, b"ex").unwrap(), "e");
    assert_eq!(world.run(one, b""), None);
    assert_eq!(world.run(other, b"e").unwrap(), "e");
    assert_eq!(world.group.connections().len(), 1);
}

#[test]
fn a_recheck_visits_all_connections() {
    let mut world = World::new();
    let (one, other) = (world.connect(), world.connect());
    assert_eq!(world.run(one, b"e").unwrap(), "e");
    assert_eq!(world.run(other, b"c").unwrap(), "!");
    assert_eq!(world.run(one, b"").unwrap(), "!");
}

#[test]
fn shutdown_drains_connections_for_a_bounded_time() {
    let mut world = World::new();
    let (idle, busy) = (world.connect(), world.connect());
    assert_eq!(world.run(idle, b"e").unwrap(), "e");
    assert_eq!(world.run(busy, b"b").unwrap(), "");
    assert_eq!(world.group.shutdown(world.now_ns), Shutdown::Draining);
    assert_eq!(world.run(idle, b""), None);
    assert_eq!(world.run(busy, b"").unwrap(), "", "its command is in flight");
    // New peers are not accepted.
    let late = world.connect();
    assert_ne!(world.run(late, b"e").as_deref(), Some("e"));
    world.now_ns += LIMITS.drain_timeout_ns;
    assert_eq!(world.run(busy, b""), None);
    assert_eq!(world.group.shutdown(world.now_ns), Shutdown::Done);
}

#[test]
fn a_connection_without_a_stream_has_its_turn_and_is_not_counted() {
    let mut world = World::new();
    world.shares.set(5);
    world.poll();
    assert_eq!(world.group.connections().len(), 5);
    // They have continued; what they send fails, which closes them.
    world.poll();
    assert_eq!(world.group.connections().len(), 0);
    world.shares.set(5);
    world.poll();
    // The limit of connections is that of streams, before and after.
    let ids = [(); 3].map(|()| {
        let id = world.connect();
        assert_eq!(world.run(id, b"L").as_deref(), Some(""));
        id
    });
    let fourth = world.connect();
    assert_eq!(world.run(fourth, b""), None);
    assert_eq!(world.run(ids[0], b"a").as_deref(), Some("a"));
}

#[test]
fn silent_peers_that_keep_the_memory_do_not_stop_others_and_are_closed_when_these_lack_it() {
    const SILENT: usize = 150;
    let mut world = World::with_memory(16 << 20);
    // One of another target on the same core.
    let mut other = world.add_target();
    let stream = other.peers.connect(World::address());
    let honest = other.peers.add(stream).unwrap();
    let mut exchange = |world: &mut World, commands: &[u8]| {
        other.peers.send(honest, &[IoSlice::new(commands)]);
        for _ in 0..20 {
            other.group.poll(&world.reactor.core(), world.now_ns);
        }
        let mut bytes = [0; 64];
        match other.peers.receive(honest, &mut [IoSliceMut::new(&mut bytes)]) {
            TransferResult::Bytes(count) => String::from_utf8(bytes[..count].to_vec()).unwrap(),
            end => format!("{end:?}"),
        }
    };
    // It has moved data at a check.
    assert_eq!(exchange(&mut world, b"kgkg"), "kgkg");
    world.now_ns += 1_000_000_000;
    assert_eq!(exchange(&mut world, b"kg"), "kg");
    let silent: Vec<_> = (0..SILENT).map(|_| world.connect()).collect();
    let mut kept = 0;
    for id in &silent {
        kept += world.run(*id, b"kkkkkkkk").unwrap().matches('k').count();
        assert_eq!(exchange(&mut world, b"kg"), "kg", "after {kept} buffers");
    }
    assert!(kept * KEPT_BYTES > 8 << 20, "they hold more than half of the memory: {kept}");
    // Some of them lack memory, so that the others have two checks.
    for seconds in 1..=4 {
        world.now_ns += 1_000_000_000;
        world.run(silent[0], b"");
        assert_eq!(exchange(&mut world, b"kkgkkg"), "kkgkkg", "after {seconds} s");
    }
    let left = world.group.connections().open().filter(|connection| !connection.kept.is_empty()).count();
    assert!(left < SILENT / 2, "{left} are left");
    let mut bytes = [0; 64];
    let last = world.peers.receive(silent[0], &mut [IoSliceMut::new(&mut bytes)]);
    assert!(matches!(last, TransferResult::Closed), "{last:?}");
}

#[test]
fn a_silent_peer_has_the_whole_time_out_while_there_is_memory() {
    let mut world = World::with_memory(64 << 20);
    let (silent, slow, idle) = (world.connect(), world.connect(), world.connect());
    assert_eq!(world.run(silent, b"k").unwrap(), "k");
    assert_eq!(world.run(idle, b"kg").unwrap(), "kg");
    for _ in 0..5 {
        // Its buffers change, however slowly.
        assert_eq!(world.run(slow, b"kkgk").unwrap(), "kkgk");
        assert_eq!(world.run(silent, b"").as_deref(), Some(""));
        world.now_ns += 1_000_000_000;
    }
    assert_eq!(world.run(silent, b"").as_deref(), Some("A"), "it is notified");
    assert_eq!(world.run(silent, b""), None);
    assert_eq!(world.run(slow, b"g").unwrap(), "g");
    for _ in 0..100 {
        world.now_ns += 1_000_000_000;
        assert_eq!(world.run(idle, b"").as_deref(), Some(""), "nothing waits for its peer");
    }
    assert_eq!(world.run(idle, b"e").unwrap(), "e");
}

#[test]
fn no_peer_takes_all_connections_whatever_it_connects_from() {
    let limits = GroupLimits {
        connections: ConnectionLimits::new(100),
        logins_max: 100,
        logins_per_peer_max: 100,
        ..LIMITS
    };
    let process = |process_id, user_id| Some(os::PeerCredentials { process_id, user_id, group_id: 0 });
    // An address, a network, and a process: each with another port, address or path every time.
    type Address = fn(u32) -> String;
    let peers: [(Address, _); 3] = [
        (|number| format!("10.0.0.1:{}", 1000 + number), None),
        (|number| format!("[2001:db8::{number}]:7"), None),
        (|number| format!("unix:/run/{number}"), process(7, 1000)),
    ];
    let login = |world: &mut World, address: &str, credentials| {
        let id = world.connect_from(address, credentials);
        (id, world.run(id, b"Le").as_deref() == Some("e"))
    };
    for (address, credentials) in peers {
        let mut world = World::with_limits(limits.clone());
        let own: Vec<_> = (0..60).map(|number| login(&mut world, &address(number), credentials)).collect();
        assert_eq!(own.iter().filter(|(_, is_admitted)| *is_admitted).count(), 50, "{}", address(0));
        let others = ["10.0.0.2:7", "[2001:db8:0:1::1]:7", "unix:/run/1"];
        for (other, credentials) in others.into_iter().zip([None, None, process(8, 1001)]) {
            assert!(login(&mut world, other, credentials).1, "{other}");
        }
        // Three have ended, of which others took two.
        for (id, _) in &own[..3] {
            world.peers.close(*id);
        }
        world.poll();
        assert!(login(&mut world, &address(99), credentials).1);
        assert!(!login(&mut world, &address(97), credentials).1);
    }
}

#[test]
fn an_object_is_not_all_that_a_target_has_connections_for() {
    let limits = GroupLimits { connections: ConnectionLimits::new(40), ..LIMITS };
    let mut world = World::with_limits(limits);
    let mut login = |number: u32, commands: &[u8]| {
        let id = world.connect_from(&format!("10.0.0.{number}:7"), None);
        world.run(id, commands).as_deref() == Some("e")
    };
    let admitted = (0..40).filter(|number| login(*number, b"1Le")).count();
    assert_eq!(admitted, 30, "three quarters");
    assert!(login(50, b"2Le"));
    assert!(!login(51, b"1Le"));
}

#[test]
fn connections_are_one_tenant_by_their_peer_and_then_by_their_login() {
    let registry = bdev::Registry::new();
    let tenants = registry.tenants();
    let limits = GroupLimits {
        connections: ConnectionLimits::new(40),
        logins_max: 40,
        logins_per_peer_max: 40,
        registry: Some(registry.clone()),
        ..LIMITS
    };
    let mut world = World::with_limits(limits);
    let listed = || -> Vec<String> {
        tenants.list()[1..].iter().map(|one| format!("{} x{}", one.name, one.flows)).collect()
    };
    let peers = ["10.0.0.1:7", "10.0.0.1:8", "10.0.0.2:7"].map(|peer| world.connect_from(peer, None));
    for id in peers {
        assert_eq!(world.run(id, b"e").unwrap(), "e");
    }
    assert_eq!(listed(), ["peer 10.0.0.1 x2", "peer 10.0.0.2 x1"]);
    // From two addresses, as one host.
    for id in [peers[0], peers[2]] {
        assert_eq!(world.run(id, b"5Le").unwrap(), "e");
    }
    assert_eq!(listed(), ["peer 10.0.0.1 x1", "host 53 x2"]);
    world.peers.close(peers[0]);
    world.poll();
    assert_eq!(listed(), ["peer 10.0.0.1 x1", "host 53 x1"]);
}

//! A group of connections on the simulated network, for tests that segment, stall and break connections, and
//! for fuzzing.

#[cfg(test)]
mod moves;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tls_tests;
#[cfg(test)]
mod write_units;

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use bdev::malloc::MallocConfig;
use bdev::{Access, Registry};
#[cfg(test)]
use dma::{Arena, ArenaConfig};
use reactor::{Reactor, ReactorConfig};
use secret::Secret;
use sockets::{ConnectionId, Network, NetworkFaults, SimulatedNetwork, StreamAddress, TransferResult};
use target_shell::{ConnectionGroup, DeviceMap, GroupLimits, PollGroup};
use tls::{Psk, PskHash, ServerCredentials};

use crate::connection::NbdCore;
use crate::export::{Export, ExportNames, NbdConfig};

const PORT: u16 = 1;
const BLOCK_BYTES: usize = 512;
/// Size of the device.
const DISK_BYTES: usize = 1 << 20;
/// Simulated time of one poll.
const POLL_NS: u64 = 10_000;
/// Polls from one move to the next: not a multiple of what a request takes.
const MOVE_POLLS: u64 = 7;

/// One group, the clients' side of its network, and the simulated clock.
struct SimulatedTarget {
    group: ConnectionGroup<NbdCore, SimulatedNetwork>,
    #[cfg(test)]
    descriptor: Arc<bdev::Descriptor>,
    #[cfg(test)]
    reservations: bdev::ReservationLease,
    clients: SimulatedNetwork,
    now_ns: u64,
    /// Connections move all the time.
    moves: bool,
    // Dropped last: the fields above use its buffers.
    reactor: Reactor,
}

impl SimulatedTarget {
    fn new(seed: u64, faults: NetworkFaults) -> SimulatedTarget {
        SimulatedTarget::with_config(seed, faults, &ReactorConfig::default())
    }

    /// On a core with this many bytes of memory.
    #[cfg(test)]
    fn with_memory(limit_bytes: usize) -> SimulatedTarget {
        let arena = Arena::new(ArenaConfig { limit_bytes, hugepages: false, shared: false });
        let config = ReactorConfig { arena, ..ReactorConfig::default() };
        SimulatedTarget::with_config(1, NetworkFaults::default(), &config)
    }

    fn with_config(seed: u64, faults: NetworkFaults, config: &ReactorConfig) -> SimulatedTarget {
        SimulatedTarget::with_disk(seed, faults, config, |_| "Malloc0")
    }

    /// With the disk whose name `disk` returns, which is on `Malloc0`.
    fn with_disk(
        seed: u64,
        faults: NetworkFaults,
        config: &ReactorConfig,
        disk: impl FnOnce(&Registry) -> &'static str,
    ) -> SimulatedTarget {
        let reactor = Reactor::new(config).expect("a reactor for a test");
        let core = reactor.core();
        let (clients, network) = SimulatedNetwork::pair(seed, faults);
        let limits = GroupLimits::default();
        let mut group = ConnectionGroup::standalone(&core, network, NbdCore, limits);
        group.listen(&address(), PORT).expect("room for a listener");
        let registry = Registry::new();
        let blocks = (DISK_BYTES / BLOCK_BYTES) as u64;
        bdev::malloc::create(&registry, MallocConfig::new("Malloc0", blocks, BLOCK_BYTES as u32))
            .expect("a new name");
        let disk = disk(&registry);
        let descriptor = Arc::new(registry.open(disk, Access::ReadWrite).expect("it was just made"));
        let export = |id, name: &str, read_only, requires_tls| {
            let names =
                ExportNames { name: name.into(), description: "a disk".into(), read_only, requires_tls };
            Arc::new(Export::new(id, 0, PORT, names, descriptor.device()))
        };
        let exports = vec![
            export(1, "disk", false, false),
            export(2, "locked", true, false),
            export(3, "private", false, true),
        ];
        let tls = Some(ServerCredentials::of_keys(Arc::new(vec![client_key()])));
        let config = NbdConfig { exports, devices: DeviceMap::from([(0, descriptor.clone())]), tls };
        group.apply(&core, Arc::new(config), 1);
        SimulatedTarget {
            group,
            #[cfg(test)]
            reservations: registry.open_reservations(descriptor.device(), None).expect("no file is needed"),
            #[cfg(test)]
            descriptor,
            clients,
            now_ns: 1,
            moves: false,
            reactor,
        }
    }

    fn connect(&mut self) -> ConnectionId {
        let stream = self.clients.connect(address());
        self.clients.add(stream).expect("room for a connection")
    }

    /// As [`connect`](Self::connect), from another address.
    #[cfg(test)]
    fn connect_from(&mut self, peer: &str) -> ConnectionId {
        let to = address();
        let peer = peer.parse().expect("an address");
        let stream = self.clients.connect_from(peer, to, None);
        self.clients.add(stream).expect("room for a connection")
    }

    fn poll(&mut self) {
        self.now_ns += POLL_NS;
        if self.moves && (self.now_ns / POLL_NS).is_multiple_of(MOVE_POLLS) {
            self.group.move_all(self.now_ns);
        }
        self.group.poll(&self.reactor.core(), self.now_ns);
    }

    /// Bytes of buffers that connections have.
    #[cfg(test)]
    fn held_bytes(&self) -> usize {
        self.reactor.core().local::<target_shell::CoreMemory>().held()
    }

    #[cfg(test)]
    fn delete_exports(&mut self) {
        self.group.apply(&self.reactor.core(), Arc::default(), self.now_ns);
    }

    /// Reads that the device has completed.
    #[cfg(test)]
    fn reads(&self) -> u64 {
        self.descriptor.device().stats().op(block_io::Op::Read).ops
    }

    /// Sends what the network takes.
    fn send(&mut self, id: ConnectionId, bytes: &[u8]) -> TransferResult {
        self.clients.send(id, &[IoSlice::new(bytes)])
    }

    /// Receives what has arrived; `None` if the connection is closed.
    fn receive(&mut self, id: ConnectionId, into: &mut Vec<u8>) -> Option<usize> {
        let mut bytes = vec![0; 64 << 10];
        match self.clients.receive(id, &mut [IoSliceMut::new(&mut bytes)]) {
            TransferResult::Bytes(count) => {
                into.extend(&bytes[..count]);
                Some(count)
            }
            TransferResult::Blocked => Some(0),
            TransferResult::Closed | TransferResult::Failed(_) => None,
        }
    }
}

fn address() -> StreamAddress {
    StreamAddress::Tcp(([10, 0, 0, 1], 10809).into())
}

/// The key of a client with TLS.
fn client_key() -> Psk {
    Psk::new("alice", Secret::new([7; 32]), PskHash::Sha256).expect("a key of 32 bytes")
}

/// The traffic of a client: the first byte selects how far it is valid. The target must not panic, and must
/// free everything of a client that disconnects.
pub fn any_bytes(bytes: &[u8]) {
    let Some((&how, bytes)) = bytes.split_first() else { return };
    let mut target = SimulatedTarget::new(u64::from(how), NetworkFaults::default());
    target.moves = how & 128 != 0;
    let id = target.connect();
    let mut sent = Vec::new();
    if how & 1 != 0 {
        sent.extend([0, 0, 0, 3]);
        for option in [8u32, 11].iter().take(usize::from(how >> 1 & 3)) {
            sent.extend(b"IHAVEOPT");
            sent.extend(option.to_be_bytes());
            sent.extend([0; 4]);
        }
    }
    if how & 8 != 0 {
        let mut data = Vec::new();
        wire_nbd::MetaContextRequest::encode("disk", &[wire_nbd::BASE_ALLOCATION], &mut data);
        for option in [10, 1] {
            let data: &[u8] = if option == 10 { &data } else { b"disk" };
            sent.extend(wire_nbd::OptionHeader { option, length: data.len() as u32 }.to_bytes());
            sent.extend(data);
        }
    }
    if how & 16 == 0 {
        sent.extend(bytes);
    } else {
        // Requests with arbitrary fields behind the right magic number.
        let extended = how >> 1 & 3 >= 2;
        for chunk in bytes.chunks(if extended { 28 } else { 24 }) {
            sent.extend(if extended { [0x21, 0xe4, 0x1c, 0x71] } else { [0x25, 0x60, 0x95, 0x13] });
            sent.extend(chunk);
        }
    }
    let mut received = Vec::new();
    let mut rest = &sent[..];
    // More polls than any input has bytes of requests.
    for _ in 0..2000 {
        if let TransferResult::Bytes(count) = target.send(id, rest) {
            rest = &rest[count..];
        }
        target.poll();
        // Every other client does not read.
        if how & 32 == 0 && target.receive(id, &mut received).is_none() {
            break;
        }
        received.clear();
        if rest.is_empty() && how & 64 != 0 {
            break;
        }
    }
    target.clients.close(id);
    for _ in 0..20_000 {
        if target.group.connections().is_empty() {
            return;
        }
        target.poll();
    }
    panic!("a connection is left");
}

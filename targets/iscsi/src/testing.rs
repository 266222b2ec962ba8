//! A group of connections on the simulated network, for tests that segment, stall and break connections, and
//! for fuzzing.

#[cfg(test)]
mod tests;

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use bdev::malloc::MallocConfig;
use bdev::{Access, Registry};
#[cfg(test)]
use dma::{Arena, ArenaConfig};
use reactor::{Reactor, ReactorConfig};
use scsi::{LogicalUnit, UnitConfig};
use secret::Secret;
use sockets::{ConnectionId, Network, NetworkFaults, SimulatedNetwork, StreamAddress, TransferResult};
use target_shell::{ConnectionGroup, DeviceMap, GroupLimits, PollGroup};
use wire_iscsi::{HEADER_BYTES, LoginRequest, LoginStage, TextWriter, padded};

use crate::chap::{AuthGroup, AuthPolicy, ChapCredentials};
use crate::config::{
    ANY, InitiatorGroup, IscsiConfig, IscsiOptions, Netmask, NodeUnit, Portal, PortalGroup, TargetNode,
};
use crate::core::IscsiCore;
use crate::parameters::DigestPolicy;

const PORT: u16 = 1;
const NODE: &str = "iqn.2026-11.io.ringbolt:disk";
const INITIATOR: &str = "iqn.2026-11.io.ringbolt:host";
const BLOCK_BYTES: usize = 512;
/// Size of the device.
const DISK_BYTES: usize = 4 << 20;
/// Simulated time of one poll.
const POLL_NS: u64 = 10_000;
/// Polls from one move to the next: not a multiple of what a command takes.
const MOVE_POLLS: u64 = 7;

/// One group, the initiators' side of its network, and the simulated clock.
struct SimulatedTarget {
    group: ConnectionGroup<IscsiCore, SimulatedNetwork>,
    #[cfg(test)]
    descriptor: Arc<bdev::Descriptor>,
    initiators: SimulatedNetwork,
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

    fn with_config(seed: u64, faults: NetworkFaults, of_reactor: &ReactorConfig) -> SimulatedTarget {
        let reactor = Reactor::new(of_reactor).expect("a reactor for a test");
        let core = reactor.core();
        let (initiators, network) = SimulatedNetwork::pair(seed, faults);
        let iscsi = IscsiCore::new(Arc::default(), None);
        let mut group = ConnectionGroup::standalone(&core, network, iscsi, GroupLimits::default());
        group.listen(&StreamAddress::Tcp(address()), PORT).expect("room for a listener");
        let config = config(DigestPolicy::default());
        #[cfg(test)]
        let descriptor = config.devices.get(&0).expect("it is the first unit's").clone();
        group.apply(&core, Arc::new(config), 1);
        SimulatedTarget {
            group,
            #[cfg(test)]
            descriptor,
            initiators,
            now_ns: 1,
            moves: false,
            reactor,
        }
    }

    fn connect(&mut self) -> ConnectionId {
        let stream = self.initiators.connect(StreamAddress::Tcp(address()));
        self.initiators.add(stream).expect("room for a connection")
    }

    /// As [`connect`](Self::connect), from another address.
    #[cfg(test)]
    fn connect_from(&mut self, peer: &str) -> ConnectionId {
        let to = StreamAddress::from(address());
        let peer = peer.parse().expect("an address");
        let stream = self.initiators.connect_from(peer, to, None);
        self.initiators.add(stream).expect("room for a connection")
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

    /// Reads that the device of LUN 0 has completed.
    #[cfg(test)]
    fn reads(&self) -> u64 {
        self.descriptor.device().stats().op(block_io::Op::Read).ops
    }

    /// Sends what the network takes.
    fn send(&mut self, id: ConnectionId, bytes: &[u8]) -> TransferResult {
        self.initiators.send(id, &[IoSlice::new(bytes)])
    }

    /// Receives what has arrived; `None` if the connection is closed.
    fn receive(&mut self, id: ConnectionId, into: &mut Vec<u8>) -> Option<usize> {
        let mut bytes = vec![0; 64 << 10];
        match self.initiators.receive(id, &mut [IoSliceMut::new(&mut bytes)]) {
            TransferResult::Bytes(count) => {
                into.extend(&bytes[..count]);
                Some(count)
            }
            TransferResult::Blocked => Some(0),
            TransferResult::Closed | TransferResult::Failed(_) => None,
        }
    }
}

fn address() -> std::net::SocketAddr {
    ([10, 0, 0, 1], 3260).into()
}

/// The UUID of the disk that is this LUN.
fn unit_uuid(lun: u16) -> bdev::Uuid {
    bdev::Uuid::from_u128(u128::from(lun) + 1)
}

/// A target node with two disks as LUN 0 and 1, for anyone.
fn config(digests: DigestPolicy) -> IscsiConfig {
    let registry = Registry::new();
    let blocks = (DISK_BYTES / BLOCK_BYTES) as u64;
    let mut devices = DeviceMap::default();
    let mut units = Vec::new();
    for lun in 0..2 {
        let name = format!("Malloc{lun}");
        bdev::malloc::create(&registry, MallocConfig::new(&name, blocks, BLOCK_BYTES as u32))
            .expect("a new name");
        let descriptor = registry.open(&name, Access::ReadWrite).expect("it was just made");
        let of_device = UnitConfig::of_device(descriptor.device(), false);
        let unit = UnitConfig { uuid: unit_uuid(lun), ..of_device };
        let unit = LogicalUnit::new(unit, Arc::default());
        let key = u32::from(lun);
        units.push(NodeUnit { id: u64::from(lun) + 1, lun, key, unit });
        devices.insert(key, Arc::new(descriptor));
    }
    let node = TargetNode {
        id: 1,
        name: NODE.to_string(),
        alias: String::new(),
        maps: vec![(1, 1)],
        queue_depth: 8,
        digests,
        auth: AuthPolicy::default(),
        redirects: Vec::new(),
        access: Vec::new(),
        histogram: None,
        units,
    };
    let portal = Portal { portid: PORT, address: address() };
    let initiators =
        InitiatorGroup { tag: 1, initiators: vec![ANY.to_string()], netmasks: vec![Netmask::Any] };
    IscsiConfig {
        options: IscsiOptions { connections_max: 3, ..IscsiOptions::default() },
        portal_groups: vec![Arc::new(PortalGroup {
            tag: 1,
            private: false,
            discovery_auth: None,
            addresses: Vec::new(),
            portals: vec![portal],
        })],
        initiator_groups: vec![Arc::new(initiators)],
        nodes: vec![Arc::new(node)],
        devices,
        ..IscsiConfig::default()
    }
}

/// A PDU without digests: a header that says how long the data is, and the data.
fn pdu(header: &[u8; HEADER_BYTES], data: &[u8]) -> Vec<u8> {
    let mut bytes = header.to_vec();
    bytes[5..8].copy_from_slice(&(data.len() as u32).to_be_bytes()[1..]);
    bytes.extend(data);
    bytes.resize(HEADER_BYTES + padded(data.len()), 0);
    bytes
}

/// A login request that asks for the full feature phase at once.
fn login(keys: &[(&str, &str)]) -> Vec<u8> {
    login_as(1, keys)
}

/// The same, of one of several sessions of the initiator.
fn login_as(session: u8, keys: &[(&str, &str)]) -> Vec<u8> {
    let mut text = TextWriter::default();
    keys.iter().for_each(|(key, value)| text.push(key, value));
    let request = LoginRequest {
        immediate: true,
        transit: true,
        current_stage: LoginStage::Operational.into(),
        next_stage: LoginStage::FullFeature.into(),
        isid: [0x80, 0, 0, 0, 0, session],
        cmd_sn: 1,
        exp_stat_sn: 1,
        ..LoginRequest::default()
    };
    pdu(&request.to_bytes(), text.bytes())
}

/// What texts of logins are made of, beside other characters.
const TOKENS: [&str; 32] = [
    "\0",
    "=",
    ",",
    "InitiatorName=",
    INITIATOR,
    "TargetName=",
    NODE,
    "SessionType=",
    "Discovery",
    "AuthMethod=",
    "CHAP",
    "None",
    "CHAP_A=",
    "CHAP_N=",
    "CHAP_R=0x",
    "CHAP_I=",
    "CHAP_C=0b",
    "HeaderDigest=",
    "DataDigest=",
    "CRC32C",
    "MaxConnections=",
    "InitialR2T=",
    "ImmediateData=",
    "MaxRecvDataSegmentLength=",
    "MaxBurstLength=",
    "FirstBurstLength=",
    "DefaultTime2Wait=",
    "DefaultTime2Retain=",
    "MaxOutstandingR2T=",
    "ErrorRecoveryLevel=",
    "Yes",
    "Reject",
];

/// Login requests: of each piece of the bytes, the first two say stages and flags, and the rest is the text.
fn any_login(bytes: &[u8]) -> Vec<u8> {
    let mut sent = Vec::new();
    for piece in bytes.chunks(48) {
        let [stages, flags, letters @ ..] = piece else { continue };
        let mut text = Vec::new();
        for letter in letters {
            match TOKENS.get(usize::from(*letter)) {
                Some(token) => text.extend(token.as_bytes()),
                None => text.push(*letter),
            }
        }
        let request = LoginRequest {
            immediate: true,
            transit: flags & 1 != 0,
            is_continued: flags & 2 != 0,
            current_stage: stages & 3,
            next_stage: stages >> 2 & 3,
            version_min: u8::from(flags & 4 != 0),
            isid: [0x80, 0, 0, 0, 0, 1],
            tsih: u16::from(flags & 8 != 0),
            cmd_sn: 1,
            exp_stat_sn: 1,
            ..LoginRequest::default()
        };
        sent.extend(pdu(&request.to_bytes(), &text));
    }
    sent
}

/// The configuration with a node, and discovery, for which initiators may have to authenticate.
fn config_with_chap(required: bool) -> IscsiConfig {
    let mut config = config(DigestPolicy::default());
    let mutual = Some(("target".to_string(), Secret::new("fedcba9876543210")));
    let secret = Secret::new("0123456789abcdef");
    let credentials = vec![ChapCredentials { user: "h".to_string(), secret, mutual }];
    config.auth_groups = vec![Arc::new(AuthGroup { tag: 1, credentials })];
    config.discovery_auth = AuthPolicy { required, group: 1, ..AuthPolicy::default() };
    let node = TargetNode { auth: config.discovery_auth, ..TargetNode::clone(&config.nodes[0]) };
    config.nodes = vec![Arc::new(node)];
    config
}

/// The traffic of an initiator: the first byte selects how far it is valid. The target must not panic, and
/// must free everything of an initiator that disconnects.
pub fn any_bytes(bytes: &[u8]) {
    let Some((&how, bytes)) = bytes.split_first() else { return };
    let mut target = SimulatedTarget::new(u64::from(how), NetworkFaults::default());
    target.moves = how & 128 != 0;
    let id = target.connect();
    let mut sent = Vec::new();
    if how & 1 != 0 {
        let mut keys = vec![("InitiatorName", INITIATOR)];
        if how & 2 != 0 {
            keys.push(("SessionType", "Discovery"));
        } else {
            keys.extend([("TargetName", NODE), ("InitialR2T", "No"), ("MaxBurstLength", "4096")]);
        }
        sent = login(&keys);
    }
    if how & 4 != 0 {
        // PDUs with arbitrary fields, but numbers and lengths that get them past the first checks.
        let mut cmd_sn = 1u32;
        for chunk in bytes.chunks(HEADER_BYTES) {
            let mut header = [0; HEADER_BYTES];
            header[..chunk.len()].copy_from_slice(chunk);
            let data = [header[47]; 600];
            let length = usize::from(header[7]) * 2;
            header[4] = 0;
            header[24..28].copy_from_slice(&cmd_sn.to_be_bytes());
            cmd_sn += u32::from(header[0] & 0x40 == 0 && header[0] & 0x3f != 5);
            if header[0] & 0x3f == 1 {
                // To the unit that is there, and not further than its end.
                header[8..16].fill(0);
                header[20..22].fill(0);
            }
            sent.extend(pdu(&header, &data[..length]));
        }
    } else if how & 32 != 0 {
        let core = target.reactor.core();
        target.group.apply(&core, Arc::new(config_with_chap(how & 64 != 0)), 2);
        sent.extend(any_login(bytes));
    } else {
        sent.extend(bytes);
    }
    let mut received = Vec::new();
    let mut rest = &sent[..];
    // More polls than any input has bytes of requests.
    for _ in 0..2000 {
        if let TransferResult::Bytes(count) = target.send(id, rest) {
            rest = &rest[count..];
        }
        target.poll();
        // Every other initiator does not read.
        if how & 8 == 0 && target.receive(id, &mut received).is_none() {
            break;
        }
        received.clear();
        if rest.is_empty() && how & 16 != 0 {
            break;
        }
    }
    target.initiators.close(id);
    for _ in 0..20_000 {
        if target.group.connections().is_empty() {
            return;
        }
        target.poll();
    }
    panic!("a connection is left");
}

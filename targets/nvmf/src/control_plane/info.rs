//! Read-only queries for the management interface (RPC).

use std::collections::BTreeMap;

use reactor::ReactorHandle;
use sockets::{SendStats, ServerNetwork};

use super::{HostKeyNames, ListenAddress, NvmfTarget, Uuid};
use crate::queue_report::QueueReport;
use crate::queue_totals::QueueTotalsSnapshot;
use crate::transport::{CoreQueues, Counters, Listening};
use crate::transports;

/// A subsystem as it is configured.
#[derive(Clone, Debug)]
pub struct SubsystemInfo {
    /// Subsystem NQN.
    pub nqn: String,
    /// Whether it is the discovery subsystem.
    pub discovery: bool,
    /// Serial number.
    pub serial_number: String,
    /// Model number.
    pub model_number: String,
    /// Any host may connect.
    pub allow_any_host: bool,
    /// Hosts that may connect.
    pub hosts: Vec<String>,
    /// The names of the keys of those that have to authenticate, by their NQN.
    pub host_keys: BTreeMap<String, HostKeyNames>,
    /// Addresses of its listeners.
    pub listeners: Vec<ListenAddress>,
    /// Those of them that have TLS.
    pub secure_listeners: Vec<ListenAddress>,
    /// Namespaces in ascending order of NSID.
    pub namespaces: Vec<TargetNamespaceInfo>,
    /// Maximum number of namespaces.
    pub max_namespaces: u32,
    /// Smallest controller identifier (CNTLID) that is assigned.
    pub min_cntlid: u16,
    /// Largest controller identifier (CNTLID) that is assigned.
    pub max_cntlid: u16,
    /// Asymmetric Namespace Access (ANA) is reported.
    pub ana_reporting: bool,
    /// Most blocks of a range of Dataset Management (DMRSL); 0 for no limit.
    pub dmrsl: u32,
    /// Most bytes of a Write Zeroes as a power of two of 4 KiB (WZSL); 0 for no limit.
    pub wzsl: u8,
    /// A host may reset all controllers of the subsystem (NSSR).
    pub enable_nssr: bool,
    /// Text in extended entries of the discovery log.
    pub admin_label: Option<String>,
}

/// A namespace as it is configured.
#[derive(Clone, Debug)]
pub struct TargetNamespaceInfo {
    /// Namespace identifier.
    pub nsid: u32,
    /// Name of the block device.
    pub bdev_name: String,
    /// NGUID.
    pub nguid: [u8; 16],
    /// EUI-64; zero for none.
    pub eui64: [u8; 8],
    /// UUID.
    pub uuid: Uuid,
    /// ANA group identifier.
    pub anagrpid: u32,
    /// File that persists reservations through power loss.
    pub ptpl_file: Option<String>,
    /// Hosts do not see the protection information of the device.
    pub hide_metadata: bool,
    /// The hosts that see it; `None` for all that may connect.
    pub visible_hosts: Option<Vec<String>>,
    /// Size in blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_size: u32,
}

/// A controller: the association of one host with one subsystem.
#[derive(Clone, Debug)]
pub struct TargetControllerInfo {
    /// Controller identifier.
    pub cntlid: u16,
    /// Host NQN.
    pub hostnqn: String,
    /// Host identifier (HOSTID).
    pub hostid: [u8; 16],
    /// I/O queues that are connected.
    pub num_io_qpairs: usize,
}

/// A queue pair of a controller.
#[derive(Clone, Debug)]
pub struct QpairInfo {
    /// Controller identifier.
    pub cntlid: u16,
    /// Queue identifier; 0 is the admin queue.
    pub qid: u16,
    /// Index of the reactor that polls it.
    pub reactor: usize,
    /// The host's address.
    pub peer: ListenAddress,
    /// The listener's address.
    pub local: ListenAddress,
    /// Submission queue entries.
    pub queue_depth: u32,
    /// Commands received.
    pub commands: u64,
    /// Commands completed with an error status.
    pub errors: u64,
}

/// What a transport counts.
#[derive(Clone, Debug)]
pub struct TransportStats {
    /// Its `trtype`.
    pub trtype: &'static str,
    /// For each reactor: counters that only this transport has, by name.
    pub reactors: Vec<Counters>,
}

/// Distribution of connections over the reactors that have poll groups.
#[derive(Clone, Debug, Default)]
pub struct TargetStats {
    /// Index of each of these reactors.
    pub reactors: Vec<usize>,
    /// For each reactor: admin queues, I/O queues, and connections before Connect.
    pub groups: Vec<(usize, usize, usize)>,
    /// For each reactor: what its queues have done, those that have closed included.
    pub totals: Vec<PollGroupTotals>,
    /// For each transport: its own counters.
    pub transports: Vec<TransportStats>,
    /// For each reactor: how often it polled vfio-user's clients; empty without that transport.
    pub vfio_user_polls: Vec<PollCounts>,
    /// For each reactor: how data was sent by those connections of NVMe/TCP that may send without a copy;
    /// empty without that transport.
    pub tcp_sends: Vec<SendStats>,
}

/// How often a reactor polled a transport's connections since the transport was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollCounts {
    /// All polls.
    pub polls: u64,
    /// Polls that found work.
    pub busy: u64,
}

/// What the queues of a reactor have done since the target started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollGroupTotals {
    /// Admin queues that were connected.
    pub admin_queues: u64,
    /// I/O queues that were connected.
    pub io_queues: u64,
    /// Commands that I/O queues have completed; over TCP with Connect.
    pub completed_commands: u64,
    /// How often a command waited for a buffer.
    pub buffer_waits: u64,
}

impl PollGroupTotals {
    fn add(&mut self, totals: &QueueTotalsSnapshot) {
        self.admin_queues += totals.admin_queues;
        self.io_queues += totals.io_queues;
        self.completed_commands += totals.closed_commands;
        self.buffer_waits += totals.buffer_waits;
    }
}

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Number of subsystems, the discovery subsystem not counted.
    pub fn subsystem_count(&self) -> usize {
        self.lock_any().subsystems.len()
    }

    /// All subsystems, the discovery subsystem first.
    pub fn subsystems(&self) -> Vec<SubsystemInfo> {
        let state = self.lock_any();
        let secure: Vec<_> = state.ports.iter().filter(|port| port.secure).collect();
        let mut all = vec![SubsystemInfo {
            nqn: wire_nvme::fabrics::DISCOVERY_NQN.into(),
            discovery: true,
            serial_number: String::new(),
            model_number: String::new(),
            allow_any_host: true,
            hosts: Vec::new(),
            host_keys: BTreeMap::new(),
            listeners: state
                .ports
                .iter()
                .filter(|port| port.kind.listening() == Listening::Shared)
                .map(|port| port.address.clone())
                .collect(),
            secure_listeners: secure.iter().map(|port| port.address.clone()).collect(),
            namespaces: Vec::new(),
            max_namespaces: 0,
            min_cntlid: 1,
            max_cntlid: 0xffef,
            ana_reporting: false,
            dmrsl: 0,
            wzsl: 0,
            enable_nssr: false,
            admin_label: None,
        }];
        all.extend(state.subsystems.iter().map(|(nqn, configured)| {
            let subsystem = &configured.subsystem;
            SubsystemInfo {
                nqn: nqn.as_str().into(),
                discovery: false,
                serial_number: subsystem.serial.clone(),
                model_number: subsystem.model.clone(),
                allow_any_host: subsystem.allow_any_host,
                hosts: subsystem.hosts.iter().map(|host| host.as_str().into()).collect(),
                host_keys: configured.key_names(),
                listeners: configured.listeners.clone(),
                secure_listeners: secure
                    .iter()
                    .filter(|port| configured.listeners.contains(&port.address))
                    .map(|port| port.address.clone())
                    .collect(),
                namespaces: subsystem
                    .namespaces
                    .iter()
                    .map(|namespace| TargetNamespaceInfo {
                        nsid: namespace.nsid,
                        bdev_name: namespace.bdev.clone(),
                        nguid: namespace.nguid,
                        eui64: namespace.eui64,
                        uuid: namespace.uuid,
                        anagrpid: namespace.anagrpid,
                        ptpl_file: configured.ptpl_files.get(&namespace.nsid).cloned(),
                        hide_metadata: !namespace.hidden_protection.is_empty(),
                        visible_hosts: namespace
                            .visible_hosts
                            .as_ref()
                            .map(|hosts| hosts.iter().map(|host| host.as_str().into()).collect()),
                        blocks: namespace.blocks,
                        block_size: namespace.block_size,
                    })
                    .collect(),
                max_namespaces: subsystem.namespaces_max,
                min_cntlid: subsystem.cntlid_min,
                max_cntlid: subsystem.cntlid_max,
                ana_reporting: subsystem.ana_reporting,
                dmrsl: subsystem.unmap_range_max_blocks,
                wzsl: subsystem.write_zeroes_max_log2,
                enable_nssr: subsystem.subsystem_reset,
                admin_label: subsystem.admin_label.clone(),
            }
        }));
        all
    }

    /// The controllers of a subsystem.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn controllers(&self, nqn: &str) -> Result<Vec<TargetControllerInfo>, crate::NvmfTargetError> {
        let nqn = super::parse_nqn(nqn)?;
        if !nqn.is_discovery() && !self.lock_any().subsystems.contains_key(&nqn) {
            return Err(super::no_subsystem(&nqn));
        }
        let controllers = self.0.shared().controllers(&nqn);
        Ok(controllers
            .iter()
            .map(|association| TargetControllerInfo {
                cntlid: association.cntlid(),
                hostnqn: association.hostnqn().as_str().into(),
                hostid: association.host_id(),
                num_io_qpairs: association.queues().len(),
            })
            .collect())
    }

    /// The queue pairs of a subsystem's controllers. Asks every poll group.
    ///
    /// # Errors
    /// There is no such subsystem, or the target is stopping.
    pub fn qpairs(&self, nqn: &str) -> Result<Vec<QpairInfo>, crate::NvmfTargetError> {
        let nqn = super::parse_nqn(nqn)?;
        if !nqn.is_discovery() && !self.lock_any().subsystems.contains_key(&nqn) {
            return Err(super::no_subsystem(&nqn));
        }
        let mut qpairs = Vec::new();
        let state = self.lock()?;
        let reactors = self.poll_group_reactors(&state);
        for transport in state.transports.values() {
            for (reactor, queues) in reactors.iter().zip(transport.queues()?) {
                let ours = queues.open.into_iter().filter(|queue| queue.subnqn.as_ref() == Some(&nqn));
                qpairs.extend(ours.filter_map(|queue| QpairInfo::new(reactor.index(), queue)));
            }
        }
        Ok(qpairs)
    }

    /// Distribution of connections over the reactors. Asks every poll group.
    pub fn stats(&self) -> Result<TargetStats, crate::NvmfTargetError> {
        let state = self.lock()?;
        let reactors = self.poll_group_reactors(&state);
        let mut stats = TargetStats {
            reactors: reactors.iter().map(ReactorHandle::index).collect(),
            groups: vec![(0, 0, 0); reactors.len()],
            totals: vec![PollGroupTotals::default(); reactors.len()],
            ..TargetStats::default()
        };
        for transport in state.transports.values() {
            let groups = stats.groups.iter_mut().zip(&mut stats.totals);
            for ((group, totals), queues) in groups.zip(transport.queues()?) {
                count(group, totals, &queues);
            }
        }
        for (position, created) in &state.transports {
            let reactors = created.counters(&reactors, &mut stats)?;
            let trtype = transports::TRANSPORTS.get(*position).map_or("", |kind| kind.name());
            stats.transports.push(TransportStats { trtype, reactors });
        }
        Ok(stats)
    }
}

/// Counts a transport's queues of a core.
fn count(group: &mut (usize, usize, usize), totals: &mut PollGroupTotals, queues: &CoreQueues) {
    totals.add(&queues.totals);
    for queue in &queues.open {
        match queue.qid {
            Some(0) => group.0 += 1,
            Some(_) => {
                group.1 += 1;
                totals.completed_commands += queue.completed;
            }
            None => group.2 += 1,
        }
    }
}

impl QpairInfo {
    /// `None` for a connection that is no queue yet.
    fn new(reactor: usize, queue: QueueReport) -> Option<QpairInfo> {
        Some(QpairInfo {
            cntlid: queue.cntlid,
            qid: queue.qid?,
            reactor,
            peer: queue.peer,
            local: queue.local,
            queue_depth: queue.entries,
            commands: queue.commands,
            errors: queue.errors,
        })
    }
}

//! Read-only queries for the management interface (RPC).

use sockets::{CoreNetwork, SendStats};
use target_shell::{Protocol, ShellError};

use super::{ListenAddress, NvmfTarget, Uuid};
use crate::queue::QueueTotalsSnapshot;
use crate::tcp::{self, ConnectionReport};
use crate::vfio_user::{self, VfioUserProtocol};

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
    /// Addresses of its listeners.
    pub listeners: Vec<ListenAddress>,
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

/// Distribution of connections over the reactors.
#[derive(Clone, Debug, Default)]
pub struct TargetStats {
    /// For each reactor: admin queues, I/O queues, and connections before Connect.
    pub groups: Vec<(usize, usize, usize)>,
    /// For each reactor: what its queues have done, those that have closed included.
    pub totals: Vec<PollGroupTotals>,
    /// For each reactor: how often it polled vfio-user's clients; empty without that transport.
    pub vfio_user_polls: Vec<PollCounts>,
    /// For each reactor: how data was sent by those connections of NVMe/TCP that may send without a copy; empty without
    /// that transport.
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

/// What the queues of a core have done, and those that are open.
type CoreReport<T> = (QueueTotalsSnapshot, Vec<T>);

impl<N: CoreNetwork> NvmfTarget<N> {
    /// Number of subsystems, the discovery subsystem not counted.
    pub fn subsystem_count(&self) -> usize {
        self.lock_any().subsystems.len()
    }

    /// All subsystems, the discovery subsystem first.
    pub fn subsystems(&self) -> Vec<SubsystemInfo> {
        let state = self.lock_any();
        let mut all = vec![SubsystemInfo {
            nqn: wire_nvme::fabrics::DISCOVERY_NQN.into(),
            discovery: true,
            serial_number: String::new(),
            model_number: String::new(),
            allow_any_host: true,
            hosts: Vec::new(),
            listeners: state
                .ports
                .iter()
                .filter(|port| !port.address.is_vfio_user())
                .map(|port| port.address.clone())
                .collect(),
            namespaces: Vec::new(),
            max_namespaces: 0,
            min_cntlid: 1,
            max_cntlid: 0xffef,
            ana_reporting: false,
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
                listeners: configured.listeners.clone(),
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
        let controllers = self.0.directory.controllers(&nqn);
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
        for (core, (_, reports)) in self.tcp_cores()?.iter().enumerate() {
            let in_subsystem = reports.iter().filter(|report| report.subnqn.as_ref() == Some(&nqn));
            qpairs.extend(in_subsystem.filter_map(|report| connection_qpair(core, report)));
        }
        for (core, (_, clients)) in self.vfio_user_cores()?.iter().enumerate() {
            for client in clients.iter().filter(|client| client.subnqn == nqn) {
                qpairs.extend(client.queues.iter().map(|queue| client_qpair(core, client, queue)));
            }
        }
        Ok(qpairs)
    }

    /// Distribution of connections over the reactors. Asks every poll group.
    pub fn stats(&self) -> Result<TargetStats, crate::NvmfTargetError> {
        let cores = self.0.remotes.len();
        let (mut groups, mut totals) = (vec![(0, 0, 0); cores], vec![PollGroupTotals::default(); cores]);
        let counted = groups.iter_mut().zip(&mut totals);
        for ((group, total), (queues, reports)) in counted.zip(self.tcp_cores()?) {
            total.add(&queues);
            for report in reports {
                match report.qid {
                    Some(0) => group.0 += 1,
                    Some(_) => {
                        group.1 += 1;
                        total.completed_commands += report.completed;
                    }
                    None => group.2 += 1,
                }
            }
        }
        let counted = groups.iter_mut().zip(&mut totals);
        for ((group, total), (queues, clients)) in counted.zip(self.vfio_user_cores()?) {
            total.add(&queues);
            for queue in clients.iter().flat_map(|client| &client.queues) {
                if queue.qid == 0 {
                    group.0 += 1;
                } else {
                    group.1 += 1;
                    total.completed_commands += queue.completed;
                }
            }
        }
        let (vfio_user_polls, tcp_sends) = (self.vfio_user_polls()?, self.tcp_sends()?);
        Ok(TargetStats { groups, totals, vfio_user_polls, tcp_sends })
    }

    fn tcp_sends(&self) -> Result<Vec<SendStats>, crate::NvmfTargetError> {
        let state = self.lock()?;
        let Some(transport) = &state.transport else { return Ok(Vec::new()) };
        Ok(transport.cores.send_stats()?)
    }

    fn vfio_user_polls(&self) -> Result<Vec<PollCounts>, crate::NvmfTargetError> {
        if self.lock()?.vfio_user.is_none() {
            return Ok(Vec::new());
        }
        let mut counts = Vec::new();
        for (index, reactor) in self.0.remotes.iter().enumerate() {
            let stats = reactor.stats().map_err(|_| ShellError::Stopped(index))?;
            let ours = stats.pollers.iter().find(|poller| poller.name == VfioUserProtocol::NAME);
            counts.push(
                ours.map(|poller| PollCounts { polls: poller.runs, busy: poller.busy_runs })
                    .unwrap_or_default(),
            );
        }
        Ok(counts)
    }

    /// The vfio-user clients of each core.
    fn vfio_user_cores(&self) -> Result<Vec<CoreReport<vfio_user::ClientReport>>, crate::NvmfTargetError> {
        let state = self.lock()?;
        let Some(transport) = &state.vfio_user else { return Ok(Vec::new()) };
        Ok(transport
            .cores
            .query(|protocol, connections| (protocol.totals.snapshot(), vfio_user::report(connections)))?)
    }

    /// The TCP connections of each core.
    fn tcp_cores(&self) -> Result<Vec<CoreReport<ConnectionReport>>, crate::NvmfTargetError> {
        let state = self.lock()?;
        let Some(transport) = &state.transport else { return Ok(Vec::new()) };
        let report = transport
            .cores
            .query(|protocol, connections| (protocol.totals.snapshot(), tcp::report(connections)));
        Ok(report?)
    }
}

fn client_qpair(
    core: usize,
    client: &vfio_user::ClientReport,
    queue: &vfio_user::ClientQueueReport,
) -> QpairInfo {
    let vfio_user::ClientQueueReport { qid, entries: queue_depth, commands, errors, .. } = *queue;
    let local = ListenAddress::vfio_user(&client.directory);
    QpairInfo {
        cntlid: client.cntlid,
        qid,
        reactor: core,
        peer: local.clone(),
        local,
        queue_depth,
        commands,
        errors,
    }
}

fn connection_qpair(core: usize, report: &ConnectionReport) -> Option<QpairInfo> {
    let local = ListenAddress {
        trtype: "TCP".into(),
        adrfam: if report.peer.is_ipv4() { "IPv4" } else { "IPv6" }.into(),
        traddr: report.local.traddr.clone(),
        trsvcid: report.local.trsvcid.clone(),
    };
    Some(QpairInfo {
        cntlid: report.cntlid,
        qid: report.qid?,
        reactor: core,
        peer: ListenAddress::from_socket(report.peer),
        local,
        queue_depth: report.entries,
        commands: report.counters.commands,
        errors: report.counters.errors,
    })
}

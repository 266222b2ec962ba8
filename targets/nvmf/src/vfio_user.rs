//! The vfio-user transport: an NVMe controller as a PCI function behind a UNIX socket, with queues and data
//! in memory that the client shares.
//!
//! Each listener is an endpoint with its own socket and at most one client at a time. A client gets a
//! [`function`], which runs on one core with all its queues; the controller logic is shared with the other
//! transports. The shell drives the clients' connections ([`protocol`], [`connection`]). Configuration uses
//! messages ([`session`], [`socket`]). I/O does not: submission queue entries are read from client memory,
//! contiguous data is lent to block devices without a copy ([`data`], [`memory`]), and completions are
//! written to client memory ([`queue`]).

mod connection;
mod data;
mod doorbells;
mod function;
mod inject;
mod interrupts;
mod limits;
mod memory;
mod parameters;
mod pci;
mod protocol;
mod queue;
mod seats;
mod session;
mod socket;

use std::sync::Arc;

use control::json::{Map, Value};
use control::{BalancedTarget, DecodeLog, Method, ParameterError};
use reactor::{Core, ReactorHandle};
use sockets::ServerNetwork;
use target_shell::{
    ConnectionLimits, ConnectionTotals, GroupLimits, GroupWaker, Protocol, ShellError, TargetCores,
};
use uuid::Uuid;
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::TransportAddress;

pub use limits::VfioUserConfig;
pub use protocol::VfioUserFault;
use protocol::{ClientQueueReport, ClientReport, VfioUserProtocol};
use seats::Seats;

use crate::module::NvmfModule;
use crate::queue_report::{DRAIN_TIMEOUT_NS, QueueReport};
use crate::transport::{
    AddressText, CoreQueues, Counters, Listening, Transport, TransportConfig, TransportKind,
    TransportParameters, TransportParts,
};
use crate::{ListenAddress, NvmfTarget, NvmfTargetError, PollCounts, TargetStats};

/// `trtype` of the transport.
const NAME: &str = "VFIOUSER";
/// Clients: as many as sockets to listen on.
const CLIENTS_MAX: u32 = 1024;
/// Clients that wait for others to leave their endpoints, on all cores together.
const WAITING_MAX: u32 = 256;
/// The path of a UNIX socket has at most 107 bytes, and "/cntrl" is appended.
const DIRECTORY_BYTES_MAX: usize = 100;

/// vfio-user, as a type of transport.
pub(crate) struct VfioUser;

impl TransportKind for VfioUser {
    fn name(&self) -> &'static str {
        NAME
    }

    fn address_text(&self) -> AddressText {
        AddressText { traddr: "directory of the vfio-user socket", trsvcid: None }
    }

    fn listening(&self) -> Listening {
        Listening::Exclusive
    }

    fn normalize(&self, address: &ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        let directory = &address.traddr;
        let is_valid =
            directory.starts_with('/') && directory.len() <= DIRECTORY_BYTES_MAX && !directory.contains('\0');
        if !is_valid {
            return Err(NvmfTargetError::Address(format!("{directory} (an absolute directory)")));
        }
        let directory = directory.trim_end_matches('/');
        Ok(ListenAddress::vfio_user(if directory.is_empty() { "/" } else { directory }))
    }

    fn discovery_address(&self, _address: &ListenAddress) -> Option<TransportAddress> {
        None
    }

    fn parameters(&self) -> TransportParameters {
        parameters::declaration()
    }

    fn decode(
        &self,
        object: &mut Map<String, Value>,
        log: &mut DecodeLog,
    ) -> Result<Box<dyn TransportConfig>, ParameterError> {
        Ok(Box::new(parameters::decode(object, log)?))
    }

    fn methods(&self) -> Vec<Method<NvmfModule>> {
        inject::methods()
    }

    fn counters_text(&self) -> &'static str {
        " Over vfio-user, `polls` counts how often a reactor looked for commands, and `polls_spurious` how often there \
         were none."
    }
}

impl<N: ServerNetwork> TransportConfig<N> for VfioUserConfig {
    fn kind(&self) -> &'static dyn TransportKind {
        &VfioUser
    }

    fn check(&self) -> Result<(), NvmfTargetError> {
        self.limits().map(drop)
    }

    fn to_object(&self) -> Map<String, Value> {
        parameters::to_object(self)
    }

    fn start(&self, parts: &TransportParts<'_>) -> Result<Box<dyn Transport>, NvmfTargetError> {
        let mut limits = self.limits()?;
        parts.masked.apply_to(&mut limits.controller);
        let group_limits = GroupLimits {
            connections: ConnectionLimits::new(CLIENTS_MAX),
            // Clients that wait until others have gone.
            logins_max: WAITING_MAX,
            drain_timeout_ns: DRAIN_TIMEOUT_NS,
            registry: Some(parts.registry.clone()),
            ..GroupLimits::default()
        };
        let (directory, seats) = (parts.directory.clone(), Seats::default());
        let protocol = move |_: &Core, waker: &GroupWaker| {
            let woken = waker.clone();
            let notifier = directory.add_notifier(Box::new(move || woken.wake()));
            let (limits, directory) = (limits.clone(), directory.clone());
            VfioUserProtocol::new(limits, directory, notifier, waker.clone(), seats.clone())
        };
        let cores = TargetCores::start(parts.reactors, parts.publisher, group_limits, protocol)?;
        Ok(Box::new(VfioUserCores { config: self.clone(), cores }))
    }
}

/// The transport with its groups on all cores.
struct VfioUserCores {
    config: VfioUserConfig,
    cores: TargetCores<VfioUserProtocol>,
}

impl Transport for VfioUserCores {
    fn options(&self) -> Map<String, Value> {
        parameters::to_object(&self.config)
    }

    fn listen(
        &self,
        address: &ListenAddress,
        portid: u16,
        _secure: bool,
    ) -> Result<ListenAddress, NvmfTargetError> {
        self.cores.listen(&socket::endpoint_address(&address.traddr), portid)?;
        Ok(address.clone())
    }

    fn stop_listening(&self, portid: u16) -> Result<(), ShellError> {
        self.cores.unlisten(Some(portid))
    }

    fn shutdown(&self) -> Result<(), ShellError> {
        self.cores.drain()
    }

    /// Its connections stay, but others can be kept away from a reactor.
    fn balanced(&self) -> Option<Arc<dyn BalancedTarget>> {
        Some(Arc::new(self.cores.clone()))
    }

    fn connections(&self) -> (&'static str, ConnectionTotals) {
        (VfioUserProtocol::NAME, self.cores.totals())
    }

    fn queues(&self) -> Result<Vec<CoreQueues>, ShellError> {
        let reports = self
            .cores
            .query(|protocol, connections| (protocol.totals.snapshot(), protocol::report(connections)))?;
        let queues = |(totals, clients): (_, Vec<ClientReport>)| CoreQueues {
            totals,
            open: clients.iter().flat_map(ClientReport::queues).collect(),
        };
        Ok(reports.into_iter().map(queues).collect())
    }

    fn counters(
        &self,
        reactors: &[ReactorHandle],
        stats: &mut TargetStats,
    ) -> Result<Vec<Counters>, ShellError> {
        for (index, reactor) in reactors.iter().enumerate() {
            let of_reactor = reactor.stats().map_err(|_| ShellError::Stopped(index))?;
            let ours = of_reactor.pollers.iter().find(|poller| poller.name == VfioUserProtocol::NAME);
            let counts = ours.map(|poller| PollCounts { polls: poller.runs, busy: poller.busy_runs });
            stats.vfio_user_polls.push(counts.unwrap_or_default());
        }
        let counters = stats.vfio_user_polls.iter().map(|PollCounts { polls, busy }| {
            vec![("polls", *polls), ("polls_spurious", polls.saturating_sub(*busy))]
        });
        Ok(counters.collect())
    }
}

impl ClientReport {
    fn queues(&self) -> impl Iterator<Item = QueueReport> + '_ {
        let address = ListenAddress::vfio_user(&self.directory);
        self.queues.iter().map(move |queue: &ClientQueueReport| QueueReport {
            subnqn: Some(self.subnqn.clone()),
            cntlid: self.cntlid,
            qid: Some(queue.qid),
            peer: address.clone(),
            local: address.clone(),
            entries: queue.entries,
            commands: queue.commands,
            errors: queue.errors,
            completed: queue.completed,
        })
    }
}

impl ListenAddress {
    /// The directory of a vfio-user socket.
    pub fn vfio_user(traddr: &str) -> ListenAddress {
        ListenAddress {
            trtype: NAME.into(),
            adrfam: String::new(),
            traddr: traddr.into(),
            trsvcid: "0".into(),
        }
    }
}

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Creates the vfio-user transport, with a poll group on every reactor.
    ///
    /// # Errors
    /// As [`create_transport`](Self::create_transport).
    pub fn create_vfio_user(&self, config: VfioUserConfig) -> Result<(), NvmfTargetError> {
        self.create_transport(config)
    }

    /// Options of the vfio-user transport; `None` before it is created.
    pub fn vfio_user_config(&self) -> Option<VfioUserConfig> {
        self.with_transport(|transport: &VfioUserCores| transport.config.clone())
    }
}

/// Host identifier of the client of a socket. vfio-user has no host identity, so it is derived from the path
/// of the directory.
pub(crate) fn host_uuid(directory: &str) -> Uuid {
    Uuid::new_v5(&Uuid::NAMESPACE_URL, format!("vfio-user:{directory}").as_bytes())
}

/// Host NQN of the client of a socket.
pub(crate) fn host_nqn(directory: &str) -> Nqn {
    let name = format!("nqn.2014-08.org.nvmexpress:uuid:{}", host_uuid(directory));
    name.parse().expect("a UUID makes a valid NQN")
}

//! What controllers are, for the control plane.

use std::path::PathBuf;

use reactor::ReactorHandle;

use crate::coalescing::Coalescing;
use crate::worker::ConnectionPlace;

/// A controller to create: a virtio block device.
#[derive(Clone, Debug)]
pub struct VhostBlkConfig {
    /// Name of the controller, unique in the target: the file name of its socket in the target's directory, or an
    /// absolute path.
    pub name: String,
    /// Name, alias or UUID of the block device.
    pub bdev_name: String,
    /// Whether writes are rejected.
    pub read_only: bool,
    /// Whether packed virtqueues are offered.
    pub packed_ring: bool,
    /// The CPUs whose reactors serve it, in SPDK's format; all if `None`.
    pub cpumask: Option<String>,
}

impl VhostBlkConfig {
    /// A writable controller with split virtqueues, on all reactors.
    pub fn new(name: &str, bdev_name: &str) -> VhostBlkConfig {
        VhostBlkConfig {
            name: name.into(),
            bdev_name: bdev_name.into(),
            read_only: false,
            packed_ring: false,
            cpumask: None,
        }
    }
}

/// A controller as it is.
#[derive(Clone, Debug)]
pub struct VhostControllerInfo {
    /// Its name.
    pub name: String,
    /// Path of its socket.
    pub socket: PathBuf,
    /// Open connections, on all cores.
    pub sessions: Vec<VhostSessionInfo>,
    /// The CPUs whose reactors may serve it.
    pub cpumask: String,
    /// As it was created with a CPU mask.
    pub configured_cpumask: Option<String>,
    /// How it notifies drivers.
    pub coalescing: Coalescing,
    /// Its bdev was deleted, and its requests fail.
    pub is_without_bdev: bool,
    /// What it is.
    pub backend: VhostBackendInfo,
}

/// A connection of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostSessionInfo {
    /// Identifies it on its core.
    pub id: u64,
    /// A virtqueue of it runs.
    pub is_started: bool,
    /// Virtqueues that the front-end has set.
    pub queues: usize,
    /// Requests in flight.
    pub requests: usize,
    /// The virtqueues that run, in ascending order: index, and the CPU of the reactor that serves it.
    pub running: Vec<(usize, u32)>,
}

/// What one core knows of a connection.
#[derive(Clone, Debug)]
pub(crate) struct SessionShare {
    pub(crate) controller_id: u64,
    pub(crate) place: ConnectionPlace,
    /// It is a worker's, not the connection's own.
    pub(crate) is_worker: bool,
    pub(crate) core: usize,
    /// Indexes of virtqueues that run there.
    pub(crate) running: Vec<usize>,
    pub(crate) queues: usize,
    pub(crate) requests: usize,
}

impl SessionShare {
    /// The controller of each connection, and what is reported of it. A worker's connection may have been closed.
    pub(crate) fn merge(shares: &[SessionShare], reactors: &[ReactorHandle]) -> Vec<(u64, VhostSessionInfo)> {
        let cpu = |core: usize| reactors.get(core).map_or(0, ReactorHandle::cpu);
        let of_connection = |own: &SessionShare| {
            let all = || shares.iter().filter(|share| share.place == own.place);
            let of_core = |share: &SessionShare| {
                share.running.iter().map(|index| (*index, cpu(share.core))).collect::<Vec<_>>()
            };
            let mut running: Vec<(usize, u32)> = all().flat_map(of_core).collect();
            running.sort_unstable();
            let session = VhostSessionInfo {
                id: own.place.token,
                is_started: !running.is_empty(),
                queues: all().map(|share| share.queues).max().unwrap_or(0),
                requests: all().map(|share| share.requests).sum(),
                running,
            };
            (own.controller_id, session)
        };
        shares.iter().filter(|share| !share.is_worker).map(of_connection).collect()
    }
}

impl VhostControllerInfo {
    /// Whether its socket is there.
    pub fn is_listening(&self) -> bool {
        !matches!(self.backend, VhostBackendInfo::Scsi { is_started: false, .. })
    }
}

/// A target of a virtio SCSI host.
#[derive(Clone, Debug)]
pub struct VhostScsiTargetInfo {
    /// Its number.
    pub number: u8,
    /// The bdev that is its LUN 0.
    pub bdev_name: String,
    /// The file with the bdev's reservations that persist through power loss.
    pub ptpl_file: Option<PathBuf>,
}

/// What a controller is.
#[derive(Clone, Debug)]
pub enum VhostBackendInfo {
    /// A virtio block device.
    Blk {
        /// As it was created, with the bdev's own name.
        config: VhostBlkConfig,
        /// Whether writes are rejected, by configuration or by the device.
        read_only: bool,
    },
    /// A virtio SCSI host.
    Scsi {
        /// Its socket is there.
        is_started: bool,
        /// In ascending order of their numbers.
        targets: Vec<VhostScsiTargetInfo>,
    },
}

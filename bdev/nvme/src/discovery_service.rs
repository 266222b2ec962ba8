//! A discovery service, as it is configured and as the initiator knows it while it runs.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::multipath::Policy;
use crate::path::{ControllerPath, PathConfig, TransportId};

/// Configuration of a discovery service.
#[derive(Clone, Debug)]
pub struct DiscoveryConfig {
    /// Name of the service; the subsystems that it finds are named NAME0, NAME1 and so on.
    pub name: String,
    /// Address of the discovery controller, and configuration of the paths that are attached.
    pub path: PathConfig,
    /// Maximum retries of an I/O for errors that are not path related.
    pub retries_max: u16,
    /// Path selection policy of the discovered subsystems.
    pub policy: Policy,
}

/// Information about a discovery service.
#[derive(Clone, Debug)]
pub struct DiscoveryInfo {
    /// Name of the service.
    pub name: String,
    /// Address of the discovery controller.
    pub id: TransportId,
    /// The subsystems of the latest log page, referrals followed.
    pub entries: Vec<TransportId>,
    /// The last error, if the log page could not be read.
    pub failure: Option<String>,
}

/// A message from the discovery task, or the stop request, to the service's thread.
pub(crate) enum DiscoveryUpdate {
    Entries(Vec<TransportId>),
    Failed(String),
    Stop,
}

/// A running discovery service.
pub(crate) struct DiscoveryService {
    pub(crate) discovery: DiscoveryConfig,
    pub(crate) path: Arc<ControllerPath>,
    pub(crate) updates: Sender<DiscoveryUpdate>,
    pub(crate) state: Arc<Mutex<DiscoveryState>>,
    pub(crate) thread: JoinHandle<Vec<(String, TransportId)>>,
}

#[derive(Default)]
pub(crate) struct DiscoveryState {
    pub(crate) entries: Vec<TransportId>,
    pub(crate) failure: Option<String>,
}

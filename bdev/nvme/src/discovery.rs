//! Discovery: attaches the subsystems in the discovery log page, and detaches those that are removed from it.
//!
//! A task on the control core keeps an association with the discovery controller and reads its log page after
//! every change. A thread of each service attaches and detaches controllers, which blocks on the control
//! core.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

use control::JobHandle;
use nvme::fabrics::discovery::read_log;
use nvme::fabrics::{Association, FabricsQueue};
use nvme::{Options, RdmaConnection, RdmaUri, TcpConnection, TcpUri, Uri};
use reactor::Core;
use wire_nvme::fabrics::Nqn;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::log::{AddressFamily, DiscoveryEntry, SubsystemType, TransportType};

use crate::attach::Attach;
use crate::discovery_service::{
    DiscoveryConfig, DiscoveryInfo, DiscoveryService, DiscoveryState, DiscoveryUpdate,
};
use crate::initiator::{Initiator, InitiatorError};
use crate::path::{
    ControllerPath, OnLossTimeout, PathConfig, PathInput, PathNotice, PathSession, ResultSender, TransportId,
    run,
};

/// Maximum number of discovery services, and of discovery controllers of one service, referrals included.
const SERVICES_MAX: usize = 16;
/// Interval between attempts to attach a controller.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The address in an entry; `None` if it is not TCP or RDMA over IPv4 or IPv6.
pub(crate) fn uri_of(entry: &DiscoveryEntry) -> Option<Uri> {
    let address = &entry.address;
    if !matches!(address.adrfam, AddressFamily::Ipv4 | AddressFamily::Ipv6) {
        return None;
    }
    let host = TcpUri::host_of(address.traddr.trim())?;
    let port = address.trsvcid.trim().parse().ok()?;
    let subnqn = entry.subnqn.clone();
    match address.trtype {
        TransportType::Tcp => Some(Uri::Tcp(TcpUri { host, port, ..TcpUri::new(subnqn) })),
        TransportType::Rdma => Some(Uri::Rdma(RdmaUri { host, port, subnqn, nsid: 1, hostnqn: None })),
        _ => None,
    }
}

/// Reads the entries of a discovery controller: connects, reads the log page and disconnects.
///
/// # Errors
/// It is reached over neither TCP nor RDMA, does not answer, or its log page cannot be read.
pub async fn discover(core: &Core, uri: &Uri, options: &Options) -> Result<Vec<DiscoveryEntry>, String> {
    match uri {
        Uri::Tcp(uri) => discover_over::<TcpConnection>(core, uri, options).await,
        Uri::Rdma(uri) => discover_over::<RdmaConnection>(core, uri, options).await,
        _ => Err(TRANSPORTS.to_string()),
    }
}

const TRANSPORTS: &str = "discovery controllers are reached over TCP or RDMA";

async fn discover_over<Q: FabricsQueue>(
    core: &Core,
    uri: &Q::Uri,
    options: &Options,
) -> Result<Vec<DiscoveryEntry>, String> {
    let opened = Association::<Q>::open_over(core, uri, options, 0).await;
    read_log(&mut opened.map_err(|error| error.to_string())?).await
}

/// Transport, host and port.
type Portal = (TransportType, String, u16);

fn portal_of(uri: &Uri) -> Option<Portal> {
    match uri {
        Uri::Tcp(uri) => Some((TransportType::Tcp, uri.host.clone(), uri.port)),
        Uri::Rdma(uri) => Some((TransportType::Rdma, uri.host.clone(), uri.port)),
        _ => None,
    }
}

/// Follows the referrals of a discovery controller, at most [`SERVICES_MAX`] and each once; returns the
/// subsystems that are reached over the same transport: the machine need not have a device for others.
async fn follow_referrals(core: &Core, first: Vec<DiscoveryEntry>, own: &Uri, options: &Options) -> Vec<Uri> {
    let Some(own) = portal_of(own) else { return Vec::new() };
    let transport = own.0;
    let (mut found, mut seen) = (Vec::<Uri>::new(), vec![own]);
    let mut pages = VecDeque::from([first]);
    while let Some(entries) = pages.pop_front() {
        for entry in entries {
            let Some(mut uri) = uri_of(&entry) else { continue };
            let Some(portal) = portal_of(&uri).filter(|portal| portal.0 == transport) else { continue };
            match entry.subtype {
                SubsystemType::Nvm if !found.contains(&uri) => found.push(uri),
                SubsystemType::Referral => {
                    if seen.len() == SERVICES_MAX || seen.contains(&portal) {
                        continue;
                    }
                    seen.push(portal);
                    match &mut uri {
                        Uri::Tcp(TcpUri { subnqn, .. }) | Uri::Rdma(RdmaUri { subnqn, .. }) => {
                            *subnqn = Nqn::discovery();
                        }
                        _ => continue,
                    }
                    // A referral that is not reachable is ignored.
                    if let Ok(entries) = discover(core, &uri, options).await {
                        pages.push_back(entries);
                    }
                }
                _ => {}
            }
        }
    }
    found
}

/// What a path to a discovery controller does: it sends the log page after every change.
struct DiscoverySession<Q: FabricsQueue> {
    core: Core,
    path: Arc<ControllerPath>,
    uri: Q::Uri,
    updates: Sender<DiscoveryUpdate>,
}

impl<Q: FabricsQueue> PathSession for DiscoverySession<Q> {
    type Connection = Association<Q>;

    async fn connect(&mut self, _epoch: u64) -> Result<Association<Q>, String> {
        let options = self.path.driver_options();
        let opened = Association::<Q>::open_over(&self.core, &self.uri, options, 0).await;
        let mut association = opened.map_err(|error| error.to_string())?;
        // A controller without events is accepted; changes are then not noticed.
        let _ = association.enable_events(AsyncEventConfiguration::DISCOVERY).await;
        Ok(association)
    }

    async fn serve(&mut self, association: &mut Association<Q>, _epoch: u64) -> PathInput<ResultSender> {
        let DiscoverySession { core, path, updates, .. } = self;
        let own = path.config.id.0.clone();
        loop {
            let page = path.unless_stopped(async {
                let entries = read_log(association).await?;
                Ok::<_, String>(follow_referrals(core, entries, &own, path.driver_options()).await)
            });
            match page.await {
                None => return PathInput::Stop,
                Some(Ok(found)) => {
                    let found = found.into_iter().map(TransportId);
                    let _ = updates.send(DiscoveryUpdate::Entries(found.collect()));
                }
                Some(Err(why)) => return PathInput::Lost(why),
            }
            // Reading the log page re-enabled its event; other events need no action.
            while association.next_event().is_none() {
                if path.is_stopping() {
                    return PathInput::Stop;
                }
                if let Some(failure) = association.failure() {
                    return PathInput::Lost(failure.to_string());
                }
                path.wait_for_command_or(association.wait_event()).await;
            }
        }
    }

    fn notify(&mut self, notice: PathNotice) {
        if let PathNotice::Lost { why, .. } = notice {
            let _ = self.updates.send(DiscoveryUpdate::Failed(why));
        }
    }
}

/// Attaches and detaches controllers so that they match the log page, until the service stops; returns those
/// that it has attached. Runs on the service's thread.
pub(crate) fn apply_updates(
    initiator: &Initiator,
    discovery: &DiscoveryConfig,
    path: &ControllerPath,
    updates: &Receiver<DiscoveryUpdate>,
    state: &std::sync::Mutex<DiscoveryState>,
    mut first: Option<std::sync::mpsc::SyncSender<Result<(), String>>>,
) -> Vec<(String, TransportId)> {
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    let mut name_count = 0;
    let mut wanted: Vec<TransportId> = Vec::new();
    let mut attached: Vec<(String, TransportId)> = Vec::new();
    loop {
        match updates.recv_timeout(RETRY_INTERVAL) {
            Ok(DiscoveryUpdate::Entries(entries)) => {
                let mut state = sync::lock(state);
                (state.entries, state.failure) = (entries.clone(), None);
                wanted = entries;
            }
            Ok(DiscoveryUpdate::Failed(why)) => {
                sync::lock(state).failure = Some(why.clone());
                if let Some(reply) = first.take() {
                    let _ = reply.send(Err(why));
                }
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(DiscoveryUpdate::Stop) | Err(RecvTimeoutError::Disconnected) => return attached,
        }
        attached.retain(|(name, id)| {
            let stays = wanted.contains(id);
            if !stays {
                // Fails only if it is detached already.
                let _ = initiator.detach(name, |other| other == id, &JobHandle::standalone());
            }
            // A controller whose reconnection timed out is attached again.
            let controllers = initiator.controllers();
            let is_attached =
                controllers.iter().any(|one| one.paths.iter().any(|path| path.config.id == *id));
            stays && is_attached
        });
        for id in &wanted {
            // Each attempt may take a connection timeout: a stop must not wait for all of them.
            if path.is_stopping() {
                break;
            }
            if attached.iter().any(|(_, other)| other == id) {
                continue;
            }
            let subnqn = id.subnqn().unwrap_or_default().to_string();
            let name = names.entry(subnqn).or_insert_with(|| {
                name_count += 1;
                format!("{}{}", discovery.name, name_count - 1)
            });
            let mut attach = Attach::new(name, PathConfig { id: id.clone(), ..discovery.path.clone() });
            (attach.discovered, attach.retries_max, attach.policy) =
                (true, discovery.retries_max, discovery.policy);
            match initiator.attach(attach) {
                Ok(_) => attached.push((name.clone(), id.clone())),
                // Attached by the user, who then also detaches it.
                Err(InitiatorError::Exists(_)) => {}
                Err(error) => {
                    log::warn!(target: "bdev_nvme", "{}: {}: {error}", discovery.name, id.0.controller())
                }
            }
        }
        if let Some(reply) = first.take() {
            let _ = reply.send(Ok(()));
        }
    }
}

/// Starts the task of a discovery service on its core.
fn spawn<Q: FabricsQueue>(
    core: &Core,
    path: Arc<ControllerPath>,
    uri: Q::Uri,
    updates: Sender<DiscoveryUpdate>,
) {
    let session = DiscoverySession::<Q> { core: core.clone(), path: path.clone(), uri, updates };
    core.spawn(run(core.clone(), path, session, OnLossTimeout::Restart));
}

impl Initiator {
    /// Starts a discovery service. With `wait` it blocks until the subsystems of the first log page are
    /// attached, or the discovery controller could not be reached.
    pub fn start_discovery(
        &self,
        discovery: DiscoveryConfig,
        wait: Option<Duration>,
    ) -> Result<(), InitiatorError> {
        let reactor = self.control_reactor()?;
        let uri = discovery.path.id.0.clone();
        if portal_of(&uri).is_none() {
            return Err(InitiatorError::Invalid(TRANSPORTS.into()));
        }
        let mut services = self.discovery_services();
        if services.contains_key(&discovery.name) {
            return Err(InitiatorError::Exists(format!("discovery service {} exists", discovery.name)));
        }
        if services.len() >= SERVICES_MAX {
            return Err(InitiatorError::Invalid(format!(
                "the maximum of {SERVICES_MAX} discovery services is reached"
            )));
        }
        let path = Arc::new(ControllerPath::new(discovery.path.clone()));
        let (updates, update_receiver) = channel();
        let state = Arc::new(std::sync::Mutex::new(DiscoveryState::default()));
        let (reply, answer) = sync_channel(1);
        let (initiator, service, own_state, own_path) =
            (self.clone(), discovery.clone(), state.clone(), path.clone());
        let thread = std::thread::Builder::new()
            .name("bdev_nvme disc".into())
            .spawn(move || {
                apply_updates(&initiator, &service, &own_path, &update_receiver, &own_state, Some(reply))
            })
            .map_err(|error| InitiatorError::Attach(format!("no thread can be started: {error}")))?;
        let (task_path, sender) = (path.clone(), updates.clone());
        let posted = reactor.post(move |core| {
            // If the core rejects the task, its sender is dropped, and the service ends.
            match uri {
                Uri::Tcp(uri) => spawn::<TcpConnection>(core, task_path, uri, sender),
                Uri::Rdma(uri) => spawn::<RdmaConnection>(core, task_path, uri, sender),
                _ => {}
            }
        });
        let name = discovery.name.clone();
        services.insert(name.clone(), DiscoveryService { discovery, path, updates, state, thread });
        drop(services);
        let outcome = match (posted, wait) {
            (Err(_), _) => Err(InitiatorError::NoReactor),
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(timeout)) => match reactor::blocking::receive_timeout(&answer, timeout) {
                Ok(outcome) => outcome.map_err(InitiatorError::Attach),
                Err(_) => Err(InitiatorError::Timeout("discovery")),
            },
        };
        if outcome.is_err() {
            let _ = self.stop_discovery(&name, &JobHandle::standalone());
        }
        outcome
    }

    /// Stops a discovery service, then detaches the controllers that it attached, one after the other. If
    /// `job` is cancelled, the remaining ones stay.
    pub fn stop_discovery(&self, name: &str, job: &JobHandle) -> Result<(), InitiatorError> {
        let service = self.discovery_services().remove(name);
        let service = service.ok_or_else(|| InitiatorError::NotFound(name.to_string()))?;
        service.path.stop();
        let _ = service.updates.send(DiscoveryUpdate::Stop);
        // A panic has already been printed.
        let attached = service.thread.join().unwrap_or_default();
        job.set_total(attached.len() as u64, "controllers");
        for (name, id) in attached {
            if job.is_cancelled() {
                return Err(InitiatorError::Cancelled);
            }
            // Fails only if it is detached already.
            let _ = self.detach(&name, |other| *other == id, &JobHandle::standalone());
            job.advance(1);
        }
        Ok(())
    }

    /// All discovery services, sorted by name.
    pub fn discoveries(&self) -> Vec<DiscoveryInfo> {
        let services = self.discovery_services();
        let info_of = |service: &DiscoveryService| {
            let state = sync::lock(&service.state);
            DiscoveryInfo {
                name: service.discovery.name.clone(),
                id: service.discovery.path.id.clone(),
                entries: state.entries.clone(),
                failure: state.failure.clone(),
            }
        };
        services.values().map(info_of).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn stop_waits_for_at_most_one_attach() {
        let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default()).unwrap();
        let initiator = Initiator::new(bdev::Registry::new(), reactors.handles());
        // They accept connections and never reply.
        let silent: Vec<_> = (0..12).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let wanted = silent.iter().map(|listener| {
            let port = listener.local_addr().unwrap().port();
            TransportId(
                format!("nvme+tcp://127.0.0.1:{port}/nqn.2016-06.io.spdk:cnode{port}").parse().unwrap(),
            )
        });
        let wanted: Vec<TransportId> = wanted.collect();
        let mut config = PathConfig::new(wanted[0].clone());
        config.options.timeout_ns = 1_000_000_000;
        let path = Arc::new(ControllerPath::new(config.clone()));
        let policy = crate::multipath::Policy::ActivePassive;
        let discovery = DiscoveryConfig { name: "Found".into(), path: config, retries_max: 0, policy };
        let (updates, update_receiver) = channel();
        updates.send(DiscoveryUpdate::Entries(wanted)).unwrap();
        let (own, own_path) = (initiator.clone(), path.clone());
        let state = std::sync::Mutex::default();
        let thread = std::thread::spawn(move || {
            apply_updates(&own, &discovery, &own_path, &update_receiver, &state, None)
        });
        let began = Instant::now();
        while initiator.controllers().is_empty() {
            assert!(began.elapsed() < Duration::from_secs(30), "no attach has started");
            std::thread::yield_now();
        }
        path.stop();
        updates.send(DiscoveryUpdate::Stop).unwrap();
        thread.join().unwrap();
        assert!(began.elapsed() < Duration::from_secs(9), "{:?}", began.elapsed());
        initiator.shutdown();
    }
}

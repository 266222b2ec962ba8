//! Discovery: attaching whatever a discovery controller tells of, and detaching what it tells of no more.
//!
//! A task on the control core keeps an association with the discovery controller and reads its log page at
//! every change; a thread of its own attaches and detaches, which waits for the control core.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

use nvme::{AdminError, Association, Options, TcpUri, Uri};
use reactor::Core;
use sys::clock::now_ns;
use wire_nvme::admin::GetLogPage;
use wire_nvme::fabrics::Nqn;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::log::{AddressFamily, DiscoveryEntry, DiscoveryHeader, LogId, SubsystemType, TransportType};

use crate::initiator::{Attach, Initiator, InitiatorError};
use crate::path::{PathConfig, PathStatus, TransportId};
use crate::reconnect::{Next, Reconnect};

/// Most records that are read of one discovery controller.
const RECORDS_MAX: u64 = 1024;
/// Most discovery controllers that one service follows, referrals included.
const SERVICES_MAX: usize = 16;
/// Times that a log page which changes while it is read is read again.
const READS_MAX: u32 = 8;
/// Time between tries to attach what could not be attached.
const AGAIN: Duration = Duration::from_secs(5);

/// What a discovery service is made of.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// Its name; the subsystems that it finds are called NAME0, NAME1 and so on.
    pub name: String,
    /// The discovery controller, and how the paths that it leads to are kept.
    pub path: PathConfig,
    /// Times that an I/O is tried again for reasons that are not the path.
    pub retries_max: u16,
    /// Policy of what is found.
    pub policy: crate::multipath::Policy,
}

/// A discovery service, to be shown.
#[derive(Clone, Debug)]
pub struct DiscoveryInfo {
    /// Its name.
    pub name: String,
    /// The discovery controller.
    pub id: TransportId,
    /// What it told of last.
    pub entries: Vec<TransportId>,
    /// What went wrong last, if it is not there.
    pub failure: Option<String>,
}

/// What the discovery controller told.
pub(crate) enum Told {
    Entries(Vec<TransportId>),
    Failed(String),
    Stop,
}

/// A running service.
pub(crate) struct Service {
    pub(crate) discovery: Discovery,
    pub(crate) path: Arc<crate::path::Path>,
    pub(crate) told: Sender<Told>,
    pub(crate) state: Arc<std::sync::Mutex<ServiceState>>,
    pub(crate) thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Default)]
pub(crate) struct ServiceState {
    pub(crate) entries: Vec<TransportId>,
    pub(crate) failure: Option<String>,
}

/// Reads the log page of a discovery controller, at one generation.
pub(crate) async fn read(association: &mut Association) -> Result<Vec<DiscoveryEntry>, String> {
    let page = |offset, length| GetLogPage {
        lid: LogId::Discovery.to_wire(),
        offset,
        length_bytes: length,
        ..GetLogPage::default()
    };
    let failed = |error: AdminError| format!("the discovery log page: {error}");
    for _ in 0..READS_MAX {
        let header = page(0, DiscoveryHeader::SIZE as u64).to_sqe(0);
        let (_, data) = association.read(header, DiscoveryHeader::SIZE).await.map_err(failed)?;
        let header = header_of(&data)?;
        let count = header.numrec.min(RECORDS_MAX);
        let mut entries = Vec::new();
        for record in 0..count {
            let offset = DiscoveryHeader::SIZE as u64 + record * DiscoveryEntry::SIZE as u64;
            let sqe = page(offset, DiscoveryEntry::SIZE as u64).to_sqe(0);
            let (_, data) = association.read(sqe, DiscoveryEntry::SIZE).await.map_err(failed)?;
            let bytes: &[u8; DiscoveryEntry::SIZE] = data.first_chunk().expect("a record was asked for");
            // A record of a kind that is unknown is none of ours.
            entries.extend(DiscoveryEntry::decode(bytes));
        }
        let again = page(0, DiscoveryHeader::SIZE as u64).to_sqe(0);
        let (_, data) = association.read(again, DiscoveryHeader::SIZE).await.map_err(failed)?;
        if header_of(&data)?.genctr == header.genctr {
            return Ok(entries);
        }
    }
    Err("the discovery log page changes faster than it can be read".into())
}

fn header_of(data: &[u8]) -> Result<DiscoveryHeader, String> {
    let bytes: &[u8; DiscoveryHeader::SIZE] = data.first_chunk().expect("a header was asked for");
    DiscoveryHeader::decode(bytes).map_err(|error| format!("the discovery log page makes no sense: {error}"))
}

/// Where a record leads, if it is one that this initiator can follow.
pub(crate) fn uri_of(entry: &DiscoveryEntry) -> Option<TcpUri> {
    let address = &entry.address;
    let family = matches!(address.adrfam, AddressFamily::Ipv4 | AddressFamily::Ipv6);
    if address.trtype != TransportType::Tcp || !family {
        return None;
    }
    Some(TcpUri {
        host: address.traddr.trim().to_string(),
        port: address.trsvcid.trim().parse().ok()?,
        subnqn: entry.subnqn.clone(),
        nsid: 1,
        header_digest: false,
        data_digest: false,
    })
}

/// One discovery controller's records, for a tool: connects, reads and lets go.
pub async fn discover(core: &Core, uri: &TcpUri, options: &Options) -> Result<Vec<DiscoveryEntry>, String> {
    let mut association =
        Association::open(core, uri, options, 0).await.map_err(|error| error.to_string())?;
    read(&mut association).await
}

/// Follows referrals from one discovery controller, each of at most [`SERVICES_MAX`] once; returns subsystems.
async fn follow(core: &Core, first: Vec<DiscoveryEntry>, own: &TcpUri, options: &Options) -> Vec<TcpUri> {
    let (mut found, mut seen) = (Vec::<TcpUri>::new(), BTreeSet::from([(own.host.clone(), own.port)]));
    let mut pages = VecDeque::from([first]);
    while let Some(entries) = pages.pop_front() {
        for entry in entries {
            let Some(uri) = uri_of(&entry) else { continue };
            match entry.subtype {
                SubsystemType::Nvm if !found.contains(&uri) => found.push(uri),
                SubsystemType::Referral => {
                    let is_new = seen.len() < SERVICES_MAX && seen.insert((uri.host.clone(), uri.port));
                    let uri = TcpUri { subnqn: Nqn::discovery(), ..uri };
                    // A referral that does not answer leads nowhere at the moment.
                    if is_new && let Ok(entries) = discover(core, &uri, options).await {
                        pages.push_back(entries);
                    }
                }
                _ => {}
            }
        }
    }
    found
}

/// Keeps an association with the discovery controller and tells what it says.
pub(crate) async fn run(core: Core, path: Arc<crate::path::Path>, uri: TcpUri, told: Sender<Told>) {
    let options = path.driver_options().clone();
    let mut reconnect = Reconnect::lost(path.config.reconnect, now_ns());
    'service: while !path.is_stopping() {
        let due_ns = match reconnect.next() {
            Next::TryAt(due_ns) => due_ns,
            // A discovery service is never given up: what it led to lives on its own.
            Next::GiveUpAt(_) => {
                reconnect = Reconnect::lost(path.config.reconnect, now_ns() + 1_000_000_000);
                continue;
            }
        };
        if due_ns > now_ns() {
            path.asked_or(core.sleep_ns(due_ns - now_ns())).await;
            continue;
        }
        reconnect.tried(now_ns());
        let opened = path.unless_stopped(Association::open(&core, &uri, &options, 0)).await;
        let mut association = match opened {
            None => break,
            Some(Ok(association)) => association,
            Some(Err(error)) => {
                let _ = told.send(Told::Failed(error.to_string()));
                continue;
            }
        };
        // Without events what changes is not noticed, which is the controller's choice.
        let _ = association.listen(AsyncEventConfiguration::DISCOVERY).await;
        loop {
            let outcome = path.unless_stopped(async {
                let entries = read(&mut association).await?;
                Ok::<_, String>(follow(&core, entries, &uri, &options).await)
            });
            match outcome.await {
                None => break 'service,
                Some(Ok(found)) => {
                    path.set_status(PathStatus::Enabled, None);
                    let found = found.into_iter().map(|uri| TransportId(Uri::Tcp(uri)));
                    let _ = told.send(Told::Entries(found.collect()));
                }
                Some(Err(why)) => {
                    let _ = told.send(Told::Failed(why));
                    break;
                }
            }
            // Reading the page let its event come again; whatever else is told needs no answer here.
            while association.next_event().is_none() && association.failure().is_none() && !path.is_stopping()
            {
                path.asked_or(association.news()).await;
            }
            if association.failure().is_some() || path.is_stopping() {
                break;
            }
        }
        reconnect = Reconnect::lost(path.config.reconnect, now_ns());
        // The first try after a loss is not at once: who is told to come back comes with everybody else.
        reconnect.tried(now_ns());
    }
}

/// Attaches what was told of and is not there, and detaches what is not told of any more.
pub(crate) fn keep(
    initiator: &Initiator,
    discovery: &Discovery,
    path: &crate::path::Path,
    told: &Receiver<Told>,
    state: &std::sync::Mutex<ServiceState>,
    mut first: Option<std::sync::mpsc::SyncSender<Result<(), String>>>,
) {
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    let mut made = 0;
    let mut wanted: Vec<TransportId> = Vec::new();
    let mut attached: Vec<(String, TransportId)> = Vec::new();
    loop {
        match told.recv_timeout(AGAIN) {
            Ok(Told::Entries(entries)) => {
                let mut state = crate::path::lock(state);
                (state.entries, state.failure) = (entries.clone(), None);
                wanted = entries;
            }
            Ok(Told::Failed(why)) => {
                crate::path::lock(state).failure = Some(why.clone());
                if let Some(reply) = first.take() {
                    let _ = reply.send(Err(why));
                }
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Told::Stop) | Err(RecvTimeoutError::Disconnected) => break,
        }
        attached.retain(|(name, id)| {
            let stays = wanted.contains(id);
            if !stays {
                // Gone already, then.
                let _ = initiator.detach(name, |other| other == id);
            }
            // What was given up meanwhile may be attached again.
            let controllers = initiator.controllers();
            let there = controllers.iter().any(|one| one.paths.iter().any(|path| path.config.id == *id));
            stays && there
        });
        for id in &wanted {
            // Each may take as long as a connection that nobody answers: whoever stops the service is not to wait
            // for all of them.
            if path.is_stopping() {
                break;
            }
            if attached.iter().any(|(_, other)| other == id) {
                continue;
            }
            let subnqn = id.subnqn().unwrap_or_default().to_string();
            let name = names.entry(subnqn).or_insert_with(|| {
                made += 1;
                format!("{}{}", discovery.name, made - 1)
            });
            let mut attach = Attach::new(name, PathConfig { id: id.clone(), ..discovery.path.clone() });
            (attach.discovered, attach.retries_max, attach.policy) =
                (true, discovery.retries_max, discovery.policy);
            match initiator.attach(attach) {
                Ok(_) => attached.push((name.clone(), id.clone())),
                // Somebody attached it by hand: then it is theirs.
                Err(InitiatorError::Exists(_)) => {}
                Err(error) => eprintln!("bdev_nvme: {}: {}: {error}", discovery.name, id.0.controller()),
            }
        }
        if let Some(reply) = first.take() {
            let _ = reply.send(Ok(()));
        }
    }
    for (name, id) in attached {
        // Gone already, then.
        let _ = initiator.detach(&name, |other| *other == id);
    }
}

impl Initiator {
    /// Starts to follow a discovery controller. With `wait` it returns when what it told first is attached,
    /// or when it could not be reached.
    pub fn start_discovery(
        &self,
        discovery: Discovery,
        wait: Option<Duration>,
    ) -> Result<(), InitiatorError> {
        let remote = self.remote()?;
        let Uri::Tcp(uri) = discovery.path.id.0.clone() else {
            return Err(InitiatorError::Invalid("discovery controllers are reached over TCP".into()));
        };
        let mut services = self.services();
        if services.contains_key(&discovery.name) {
            return Err(InitiatorError::Exists(format!("discovery service {} exists", discovery.name)));
        }
        if services.len() >= SERVICES_MAX {
            return Err(InitiatorError::Invalid(format!(
                "there are {SERVICES_MAX} discovery services already"
            )));
        }
        let path = Arc::new(crate::path::Path::new(discovery.path.clone()));
        let (told, hears) = channel();
        let state = Arc::new(std::sync::Mutex::new(ServiceState::default()));
        let (reply, answer) = sync_channel(1);
        let (weak, service, own_state, own_path) =
            (self.clone(), discovery.clone(), state.clone(), path.clone());
        let thread = std::thread::Builder::new()
            .name("bdev_nvme disc".into())
            .spawn(move || keep(&weak, &service, &own_path, &hears, &own_state, Some(reply)))
            .map_err(|error| InitiatorError::Attach(format!("no thread can be started: {error}")))?;
        let (task_path, sender) = (path.clone(), told.clone());
        let posted = remote.post(move |core| {
            // A core with too many tasks refuses one; its sender is then gone, and the service with it.
            core.spawn(run(core.clone(), task_path, uri, sender));
        });
        let name = discovery.name.clone();
        services.insert(name.clone(), Service { discovery, path, told, state, thread: Some(thread) });
        drop(services);
        if posted.is_err() {
            let _ = self.stop_discovery(&name);
            return Err(InitiatorError::NoReactor);
        }
        let Some(timeout) = wait else { return Ok(()) };
        match answer.recv_timeout(timeout) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => {
                let _ = self.stop_discovery(&name);
                Err(InitiatorError::Attach(why))
            }
            Err(_) => {
                let _ = self.stop_discovery(&name);
                Err(InitiatorError::Timeout("discovery"))
            }
        }
    }

    /// Stops following a discovery controller and detaches what it led to.
    pub fn stop_discovery(&self, name: &str) -> Result<(), InitiatorError> {
        let service = self.services().remove(name);
        let mut service = service.ok_or_else(|| InitiatorError::NotFound(name.to_string()))?;
        service.path.stop();
        let _ = service.told.send(Told::Stop);
        if let Some(thread) = service.thread.take() {
            // It has said why if it panicked.
            let _ = thread.join();
        }
        Ok(())
    }

    /// Every discovery service.
    pub fn discoveries(&self) -> Vec<DiscoveryInfo> {
        let services = self.services();
        let of = |service: &Service| {
            let state = crate::path::lock(&service.state);
            DiscoveryInfo {
                name: service.discovery.name.clone(),
                id: service.discovery.path.id.clone(),
                entries: state.entries.clone(),
                failure: state.failure.clone(),
            }
        };
        services.values().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn stopping_waits_for_one_attach_at_most() {
        let reactors = reactor::Reactors::start(&reactor::Config::default()).unwrap();
        let initiator = Initiator::new(bdev::Registry::new(), reactors.remotes());
        // They take connections and say nothing.
        let mute: Vec<_> = (0..12).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let wanted = mute.iter().map(|listener| {
            let port = listener.local_addr().unwrap().port();
            TransportId(
                format!("nvme+tcp://127.0.0.1:{port}/nqn.2016-06.io.spdk:cnode{port}").parse().unwrap(),
            )
        });
        let wanted: Vec<TransportId> = wanted.collect();
        let mut config = PathConfig::new(wanted[0].clone());
        config.options.timeout_ns = 1_000_000_000;
        let path = Arc::new(crate::path::Path::new(config.clone()));
        let policy = crate::multipath::Policy::ActivePassive;
        let discovery = Discovery { name: "Found".into(), path: config, retries_max: 0, policy };
        let (told, hears) = channel();
        told.send(Told::Entries(wanted)).unwrap();
        let (own, own_path) = (initiator.clone(), path.clone());
        let state = std::sync::Mutex::default();
        let keeper = std::thread::spawn(move || keep(&own, &discovery, &own_path, &hears, &state, None));
        let began = Instant::now();
        while initiator.controllers().is_empty() {
            assert!(began.elapsed() < Duration::from_secs(30), "nothing is being attached");
            std::thread::yield_now();
        }
        path.stop();
        told.send(Told::Stop).unwrap();
        keeper.join().unwrap();
        assert!(began.elapsed() < Duration::from_secs(9), "{:?}", began.elapsed());
        initiator.shutdown();
    }
}

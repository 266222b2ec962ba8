//! Attaching an image for writing: its lock in the map, and the attach epoch, which logical groups refuse
//! what is older than.
//!
//! The lock names who has the image. A process renews a lease in the map while it has some; one whose lease
//! has ended, or that is gone from this machine, is taken over. The lock keeps people from mistakes. What
//! keeps data whole is the attach epoch: it is raised with each holder, and a group that has seen a higher
//! one takes no write of a lower one.

use std::collections::{BTreeMap, HashMap};
use std::net::UdpSocket;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime};

use cluster_map::{ClusterMap, ImageEntry, ImageHolder, ImageLock, MapError};
use uuid::Uuid;

use crate::{ClientError, Cluster};

/// A process that has not renewed its lease for this time may be taken over.
const LEASE_SECONDS: u32 = 10;
const RENEW: Duration = Duration::from_secs(3);
/// While a holder may be gone, the map is asked this often.
const ASK_AGAIN: Duration = Duration::from_millis(300);
/// What a map reports of a lease is in whole seconds.
const AGE_PRECISION: Duration = Duration::from_millis(1500);
/// Attempts to change a lock that others change at the same time.
const ATTEMPTS_MAX: usize = 32;
/// An image that the map does not have counts as removed after this time, or if the map says so. A map that
/// was put back from an older copy does not have it either, and nodes say within this time that it is older.
const MISSING_MAX: Duration = Duration::from_secs(4);

/// How an image is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttachOptions {
    /// Others may attach it as well, if they share it. All write whole blocks of 4 KiB only.
    pub shared: bool,
    /// Takes it from its holder. What that one has in flight is refused from the first request of this one
    /// on.
    pub force: bool,
    /// Only reads, beside its holder.
    pub read_only: bool,
    /// Shares it with this process, and with others of the same program that the same process of it started:
    /// the workers of one run.
    pub same_run: bool,
}

/// Whether an attachment serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum AttachStatus {
    Live = 0,
    /// Another one has attached the image, or it was removed.
    Fenced = 1,
    /// Its bdev was deleted.
    Closed = 2,
}

/// What the channels of an attached image share.
pub(crate) struct AttachState {
    /// 0 for one that only reads.
    epoch: AtomicU32,
    /// The highest epoch that this attachment has asked the map for.
    claimed_epoch: AtomicU32,
    /// Counts how often requests in flight were aborted.
    aborts: AtomicU32,
    status: AtomicU8,
    first_group: u32,
    /// The epoch that each group has heard of from this attachment; 0 for none.
    known: Box<[AtomicU32]>,
}

impl AttachState {
    pub(crate) fn new(epoch: u32, groups: std::ops::Range<u32>) -> AttachState {
        AttachState {
            epoch: AtomicU32::new(epoch),
            claimed_epoch: AtomicU32::new(epoch),
            aborts: AtomicU32::new(0),
            status: AtomicU8::new(AttachStatus::Live as u8),
            first_group: groups.start,
            known: groups.map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// The attach epoch of requests from now on.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// How often [`abort`](Self::abort) was called. A channel that has seen fewer fails what it has in
    /// flight.
    pub(crate) fn aborts(&self) -> u32 {
        self.aborts.load(Ordering::Acquire)
    }

    /// Requests that are in flight now fail, and are never sent again. Later ones have this attach epoch.
    fn abort(&self, epoch: u32) {
        self.epoch.store(epoch, Ordering::Release);
        self.aborts.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn status(&self) -> AttachStatus {
        match self.status.load(Ordering::Acquire) {
            0 => AttachStatus::Live,
            1 => AttachStatus::Fenced,
            _ => AttachStatus::Closed,
        }
    }

    /// Requests fail from now on. Returns whether it served before.
    pub(crate) fn end(&self, status: AttachStatus) -> bool {
        let live = AttachStatus::Live as u8;
        self.status.compare_exchange(live, status as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn group(&self, group: u32) -> Option<&AtomicU32> {
        self.known.get(group.checked_sub(self.first_group)? as usize)
    }

    /// Whether a group refuses attach epochs before `epoch`.
    pub(crate) fn is_known_in(&self, group: u32, epoch: u32) -> bool {
        self.group(group).is_some_and(|known| known.load(Ordering::Acquire) >= epoch)
    }

    pub(crate) fn set_known_in(&self, group: u32, epoch: u32) {
        if let Some(known) = self.group(group) {
            known.fetch_max(epoch, Ordering::AcqRel);
        }
    }
}

/// An image that this process has attached. Dropped, it is detached.
pub(crate) struct Attachment {
    pub(crate) state: Arc<AttachState>,
    lock: Option<Arc<HeldLock>>,
}

/// The place of an attachment in the lock of its image.
pub(crate) struct HeldLock {
    pool: String,
    /// The head of the image, which another one becomes with a snapshot.
    volume: Arc<AtomicU64>,
    holder: ImageHolder,
    state: Arc<AttachState>,
    process: Arc<HolderProcess>,
    /// Locked while the lock is changed, so that what was detached is not put back.
    is_detached: Mutex<bool>,
}

/// One that is told of the record of an image that is attached.
pub(crate) trait EntryFollower: Send + Sync {
    /// The identity of the image.
    fn image(&self) -> Uuid;

    /// The record, as it is now. Must not wait.
    fn read(&self, entry: &ImageEntry);
}

/// What is told of changes of an image that is attached.
pub(crate) struct ImageWatch {
    pub(crate) pool: String,
    pub(crate) image: String,
    pub(crate) uuid: Uuid,
    /// Its head.
    pub(crate) volume: Arc<AtomicU64>,
    pub(crate) state: Arc<AttachState>,
    /// Since when the map does not have it.
    pub(crate) missing_since: Mutex<Option<Instant>>,
    pub(crate) resized: Box<dyn Fn(u64) + Send + Sync>,
}

/// The lease of this process in a map, which a thread renews while an image is attached.
struct HolderProcess {
    lease: Uuid,
    map: Arc<dyn ClusterMap>,
    watched: Mutex<Vec<Weak<ImageWatch>>>,
    held: Mutex<Vec<Weak<HeldLock>>>,
    /// Those that are told of the records of images.
    followers: Mutex<Vec<Weak<dyn EntryFollower>>>,
    /// The highest revision of the map that was seen.
    revision: AtomicU64,
}

/// Those of this process, by cluster.
static PROCESSES: Mutex<BTreeMap<Uuid, Weak<HolderProcess>>> = Mutex::new(BTreeMap::new());

impl Attachment {
    /// Attaches an image.
    ///
    /// # Errors
    /// [`ClientError::InUse`] if another one has it.
    pub(crate) fn new(
        cluster: &Cluster,
        pool: &str,
        image: &str,
        entry: &ImageEntry,
        groups: std::ops::Range<u32>,
        options: AttachOptions,
    ) -> Result<Attachment, ClientError> {
        if options.read_only {
            return Ok(Attachment { state: Arc::new(AttachState::new(0, groups)), lock: None });
        }
        let process = HolderProcess::of(cluster)?;
        let holder = own_holder(cluster, process.lease, options.shared);
        let epoch = attach(cluster.map().as_ref(), (pool, image), entry.volume, &holder, options)?;
        let state = Arc::new(AttachState::new(epoch, groups));
        let (pool, of_process) = (pool.to_string(), process.clone());
        let volume = Arc::new(AtomicU64::new(entry.volume));
        let is_detached = Mutex::new(false);
        let lock = HeldLock { pool, volume, holder, state: state.clone(), process, is_detached };
        let lock = Arc::new(lock);
        sync::lock(&of_process.held).push(Arc::downgrade(&lock));
        Ok(Attachment { state, lock: Some(lock) })
    }

    /// Has changes of the image told.
    pub(crate) fn watch(&self, watch: &Arc<ImageWatch>) {
        if let Some(lock) = &self.lock {
            sync::lock(&lock.process.watched).push(Arc::downgrade(watch));
        }
    }

    /// Its place in the lock of the image; `None` if it only reads.
    pub(crate) fn lock(&self) -> Option<&Arc<HeldLock>> {
        self.lock.as_ref()
    }

    /// Fails what is in flight, which is never sent again, and fences what was sent: groups refuse it once
    /// they hear of a later request. Waits for the map.
    ///
    /// # Errors
    /// The map cannot be changed: the requests fail, and what was sent may still be written.
    pub(crate) fn abort_in_flight(&self) -> Result<(), MapError> {
        match &self.lock {
            Some(lock) => lock.abort_in_flight(),
            None => {
                self.state.abort(0);
                Ok(())
            }
        }
    }

    /// Others may attach the image. Waits for the map.
    pub(crate) fn detach(&self) {
        if let Some(lock) = &self.lock {
            lock.detach();
        }
    }
}

impl HeldLock {
    /// The head of the image.
    pub(crate) fn volume(&self) -> &Arc<AtomicU64> {
        &self.volume
    }

    /// Has one told of the record of its image, each time that the map changes.
    pub(crate) fn follow(&self, follower: Weak<dyn EntryFollower>) {
        sync::lock(&self.process.followers).push(follower);
    }

    /// Has the lock of another volume, of which no image is yet, at an attach epoch. Returns whether it has.
    pub(crate) fn hold_volume(&self, volume: u64, attach_epoch: u32) -> Result<bool, MapError> {
        let lock = ImageLock { attach_epoch, holders: vec![self.holder.clone()] };
        self.process.map.change_image_lock(&self.pool, volume, None, &lock)
    }

    /// Does something while the image stays attached; `None` if it is not. Detaching waits for that.
    pub(crate) fn while_attached<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let is_detached = sync::lock(&self.is_detached);
        (!*is_detached).then(change)
    }

    /// Whether this one alone has the image.
    pub(crate) fn is_only_holder(&self) -> Result<bool, MapError> {
        let lock = self.process.map.image_lock(&self.pool, self.current())?.unwrap_or_default();
        let is_own = |holder: &ImageHolder| holder.id == self.holder.id && !holder.shared;
        Ok(matches!(&lock.holders[..], [only] if is_own(only)) && lock.attach_epoch == self.state.epoch())
    }

    /// The image has another head, whose lock this has already. Within
    /// [`while_attached`](Self::while_attached).
    pub(crate) fn move_to(&self, volume: u64) {
        let before = self.volume.swap(volume, Ordering::AcqRel);
        self.release_volume(before);
    }

    /// Has the lock of a volume no more.
    pub(crate) fn release_volume(&self, volume: u64) {
        if let Err(error) = detach(self.process.map.as_ref(), &self.pool, volume, self.holder.id) {
            log::warn!("volume {volume} of pool {} is not detached: {error}", self.pool);
        }
    }

    fn current(&self) -> u64 {
        self.volume.load(Ordering::Acquire)
    }

    /// Raises the attach epoch, which only others do otherwise. Those that share an image have one epoch: it
    /// stays, so that theirs is not fenced.
    pub(crate) fn abort_in_flight(&self) -> Result<(), MapError> {
        let is_detached = sync::lock(&self.is_detached);
        let known = self.state.epoch();
        let raised = match self.holder.shared || *is_detached {
            true => Ok(known),
            false => self.raise_epoch(),
        };
        self.state.abort(*raised.as_ref().unwrap_or(&known));
        raised.map(drop)
    }

    fn raise_epoch(&self) -> Result<u32, MapError> {
        let map = self.process.map.as_ref();
        for _ in 0..ATTEMPTS_MAX {
            let known = map.image_lock(&self.pool, self.current())?;
            let lock = known.clone().unwrap_or_default();
            let own = self.state.epoch();
            if lock.attach_epoch > own || !lock.holders.iter().any(|holder| holder.id == self.holder.id) {
                // Another one has attached it, or the map has forgotten it and it is put back.
                return Ok(own);
            }
            let to = ImageLock { attach_epoch: own.saturating_add(1), ..lock };
            self.state.claimed_epoch.fetch_max(to.attach_epoch, Ordering::AcqRel);
            if map.change_image_lock(&self.pool, self.current(), known.as_ref(), &to)? {
                return Ok(to.attach_epoch);
            }
        }
        let what = format!("of volume {} of pool {}", self.current(), self.pool);
        Err(MapError::Storage { what, reason: "others change its lock all the time".to_string() })
    }

    fn detach(&self) {
        let mut is_detached = sync::lock(&self.is_detached);
        if !std::mem::replace(&mut *is_detached, true)
            && let Err(error) = detach(self.process.map.as_ref(), &self.pool, self.current(), self.holder.id)
        {
            // Its lease ends with the process.
            log::warn!("an image of pool {} is not detached: {error}", self.pool);
        }
    }

    /// Puts it back into a map that has forgotten it. If another one has the image now, this one has it no
    /// more.
    fn put_back(&self) -> Result<(), MapError> {
        let is_detached = sync::lock(&self.is_detached);
        if *is_detached || self.state.status() != AttachStatus::Live {
            return Ok(());
        }
        let map = self.process.map.as_ref();
        let has_it = put_back(map, &self.pool, self.current(), &self.holder, self.state.epoch())?;
        if !has_it && self.state.end(AttachStatus::Fenced) {
            log::error!("an image of pool {} was attached elsewhere: its requests fail here", self.pool);
        }
        Ok(())
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if let Some(lock) = self.lock.take() {
            // This may be a core, which does not wait for the map.
            std::thread::spawn(move || lock.detach());
        }
    }
}

/// How sure it is that a holder lives.
enum Liveness {
    Lives,
    /// It renewed its lease this long ago.
    Renewed(Duration),
    Gone,
}

fn liveness(map: &dyn ClusterMap, holder: &ImageHolder) -> Result<Liveness, MapError> {
    let started = (holder.machine == machine()).then(|| process_start(holder.process));
    Ok(match started {
        Some(started) if started == Some(holder.started) => Liveness::Lives,
        Some(_) => Liveness::Gone,
        None => map.holder_age(holder.lease)?.map_or(Liveness::Gone, Liveness::Renewed),
    })
}

/// The attach epoch after one. A map that is an older copy of itself has forgotten some that groups have
/// seen, and that a holder which lives may have: the seconds since 1970 are higher than these.
fn next_epoch(known: u32, seconds: u64) -> u32 {
    known.saturating_add(1).max(u32::try_from(seconds).unwrap_or(0))
}

/// Puts a holder into the lock of an image. Returns its attach epoch.
fn attach(
    map: &dyn ClusterMap,
    (pool, image): (&str, &str),
    volume: u64,
    own: &ImageHolder,
    options: AttachOptions,
) -> Result<u32, ClientError> {
    let began = Instant::now();
    let mut suspect: Option<(Uuid, Duration, Instant)> = None;
    let mut attempts = 0;
    loop {
        let known = map.image_lock(pool, volume)?;
        let lock = known.clone().unwrap_or_default();
        let mut holders = Vec::new();
        let mut refused: Option<(&ImageHolder, Liveness)> = None;
        for holder in lock.holders.iter().filter(|_| !options.force) {
            match liveness(map, holder)? {
                Liveness::Gone => {}
                _ if (holder.shared && own.shared) || (options.same_run && is_same_run(holder)) => {
                    holders.push(holder.clone())
                }
                liveness => refused = Some((holder, liveness)),
            }
        }
        if let Some((holder, liveness)) = refused {
            let is_renewed = match (liveness, suspect) {
                (Liveness::Renewed(age), Some((id, first, at))) if id == holder.id => {
                    age + AGE_PRECISION < first + at.elapsed()
                }
                (Liveness::Renewed(age), _) => {
                    suspect = Some((holder.id, age, Instant::now()));
                    false
                }
                _ => true,
            };
            let limit = Duration::from_secs(u64::from(LEASE_SECONDS) + 2);
            if is_renewed || began.elapsed() > limit {
                return Err(in_use(pool, image, holder));
            }
            std::thread::sleep(ASK_AGAIN);
            continue;
        }
        if holders.len() >= ImageLock::HOLDERS_MAX {
            return Err(in_use(pool, image, &holders[0]));
        }
        let joins = !holders.is_empty();
        let attach_epoch = if joins { lock.attach_epoch } else { next_epoch(lock.attach_epoch, own.since) };
        holders.push(own.clone());
        if map.change_image_lock(pool, volume, known.as_ref(), &ImageLock { attach_epoch, holders })? {
            return Ok(attach_epoch);
        }
        attempts += 1;
        if attempts >= ATTEMPTS_MAX {
            let reason = "others attach it all the time".to_string();
            return Err(MapError::Storage { what: format!("of image {pool}/{image}"), reason }.into());
        }
    }
}

fn detach(map: &dyn ClusterMap, pool: &str, volume: u64, id: Uuid) -> Result<(), MapError> {
    for _ in 0..ATTEMPTS_MAX {
        let Some(lock) = map.image_lock(pool, volume)? else { return Ok(()) };
        if !lock.holders.iter().any(|holder| holder.id == id) {
            return Ok(());
        }
        let holders = lock.holders.iter().filter(|holder| holder.id != id).cloned().collect();
        let to = ImageLock { holders, ..lock };
        if map.change_image_lock(pool, volume, Some(&lock), &to)? {
            return Ok(());
        }
    }
    Ok(())
}

/// Puts a holder that lives back into the lock of its image, if the map is an older copy of itself that has
/// forgotten it: another one is refused again, with its name. Returns whether it has the image still.
fn put_back(
    map: &dyn ClusterMap,
    pool: &str,
    volume: u64,
    own: &ImageHolder,
    attach_epoch: u32,
) -> Result<bool, MapError> {
    let known = map.image_lock(pool, volume)?;
    let lock = known.clone().unwrap_or_default();
    if lock.holders.iter().any(|holder| holder.id == own.id) {
        return Ok(true);
    }
    // At a higher attach epoch another one has it. Those of a lower one are fenced by this one. At the same
    // one came who attached it in the same second as this one, when the map had forgotten it.
    let mut holders = match lock.attach_epoch {
        newer if newer > attach_epoch => return Ok(false),
        same if same == attach_epoch => lock.holders,
        _ => Vec::new(),
    };
    if !(own.shared || holders.is_empty()) || holders.iter().any(|holder| !holder.shared) {
        return Ok(false);
    }
    if holders.len() < ImageLock::HOLDERS_MAX {
        holders.push(own.clone());
        // If others change it at the same time, it is looked at again.
        map.change_image_lock(pool, volume, known.as_ref(), &ImageLock { attach_epoch, holders })?;
    }
    Ok(true)
}

fn in_use(pool: &str, image: &str, holder: &ImageHolder) -> ClientError {
    ClientError::InUse {
        pool: pool.to_string(),
        image: image.to_string(),
        holder: holder.name.clone(),
        process: holder.process,
        address: holder.address.clone(),
        seconds: seconds_since_1970().saturating_sub(holder.since),
    }
}

fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn own_holder(cluster: &Cluster, lease: Uuid, shared: bool) -> ImageHolder {
    let process = std::process::id();
    ImageHolder {
        id: Uuid::new_v4(),
        lease,
        name: std::fs::read_to_string("/proc/sys/kernel/hostname")
            .map_or_else(|_| "an unknown host".to_string(), |name| name.trim().to_string()),
        address: own_address(cluster).unwrap_or_else(|| "127.0.0.1".to_string()),
        since: seconds_since_1970(),
        shared,
        machine: machine(),
        process,
        started: process_start(process).unwrap_or(0),
    }
}

/// The address from which this machine reaches a node; nothing is sent.
fn own_address(cluster: &Cluster) -> Option<String> {
    let nodes = cluster.map().nodes().ok()?;
    let node = nodes.values().find_map(|node| node.addresses.first())?;
    let node: std::net::SocketAddr = node.parse().ok()?;
    let any = if node.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(node).ok()?;
    Some(socket.local_addr().ok()?.ip().to_string())
}

/// Names the boot of this machine, and which of its processes this one sees.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let processes = std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
    format!("{}-{processes}", boot.trim())
}

/// When a process of this machine began; `None` if there is none.
fn process_start(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Its name, in parentheses, may have spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    let is_dead = matches!(fields.next(), Some("Z" | "X" | "x"));
    fields.nth(18)?.parse().ok().filter(|_| !is_dead)
}

/// Whether a holder is a process of the same program that the same process of this program started, as the
/// workers of one run of `perf`: they are one user of the image.
fn is_same_run(holder: &ImageHolder) -> bool {
    if holder.machine != machine() {
        return false;
    }
    if holder.process == std::process::id() {
        return true;
    }
    let program = |process: u32| std::fs::read_link(format!("/proc/{process}/exe")).ok();
    let parent = std::os::unix::process::parent_id();
    let is_of_parent = parent_of(holder.process) == Some(parent) || holder.process == parent;
    is_of_parent && program(parent).is_some_and(|it| Some(it) == program(std::process::id()))
}

fn parent_of(process: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

impl HolderProcess {
    /// That of this process in the map of a cluster.
    fn of(cluster: &Cluster) -> Result<Arc<HolderProcess>, ClientError> {
        let id = cluster.map().cluster()?;
        let mut processes = sync::lock(&PROCESSES);
        processes.retain(|_, process| process.strong_count() > 0);
        if let Some(process) = processes.get(&id).and_then(Weak::upgrade) {
            return Ok(process);
        }
        let (lease, map) = (Uuid::new_v4(), cluster.map().clone());
        map.renew_holder(lease, LEASE_SECONDS)?;
        let process = Arc::new(HolderProcess {
            lease,
            map: map.clone(),
            watched: Mutex::default(),
            held: Mutex::default(),
            followers: Mutex::default(),
            revision: AtomicU64::new(0),
        });
        processes.insert(id, Arc::downgrade(&process));
        let weak = Arc::downgrade(&process);
        std::thread::spawn(move || keep(map.as_ref(), &weak));
        Ok(process)
    }

    /// Reads what is attached, and tells what has changed. Returns whether it is to be read again soon.
    fn refresh(&self) -> Result<bool, MapError> {
        let (watched, held) = (live(&self.watched), live(&self.held));
        if watched.is_empty() && held.is_empty() {
            return Ok(false);
        }
        let is_older = self.is_map_older()?;
        let images = self.map.images()?;
        let by_uuid: HashMap<Uuid, &ImageEntry> = images.values().map(|image| (image.uuid, image)).collect();
        for follower in live(&self.followers) {
            if let Some(entry) = by_uuid.get(&follower.image()) {
                follower.read(entry);
            }
        }
        let mut is_doubtful = false;
        for watch in watched {
            let (pool, image) = (&watch.pool, &watch.image);
            let lock = self.map.image_lock(pool, watch.volume.load(Ordering::Acquire))?;
            if lock.is_some_and(|lock| lock.attach_epoch > watch.state.claimed_epoch.load(Ordering::Acquire))
                && watch.state.end(AttachStatus::Fenced)
            {
                log::error!("image {pool}/{image} was attached elsewhere by force: its requests fail here");
            }
            // It may have another name by now.
            if let Some(entry) = by_uuid.get(&watch.uuid) {
                *sync::lock(&watch.missing_since) = None;
                (watch.resized)(entry.bytes);
            } else if !is_older && self.is_removed(&watch)? {
                if watch.state.end(AttachStatus::Fenced) {
                    log::error!(
                        "image {pool}/{image} was removed, or the map that counts lacks it: its requests fail"
                    );
                }
            } else {
                is_doubtful |= watch.state.status() == AttachStatus::Live;
            }
        }
        // The lock of an image that is gone goes too.
        let is_there = |lock: &&Arc<HeldLock>| images.values().any(|image| image.volume == lock.current());
        held.iter().filter(is_there).try_for_each(|lock| lock.put_back())?;
        Ok(is_doubtful)
    }

    /// Whether the map is an older copy of itself, which does not know what it has forgotten.
    fn is_map_older(&self) -> Result<bool, MapError> {
        let position = self.map.position()?;
        let known = self.revision.fetch_max(position.revision, Ordering::AcqRel);
        Ok(position.is_older() || position.revision < known)
    }

    /// Whether an image was removed that the map does not have.
    fn is_removed(&self, watch: &ImageWatch) -> Result<bool, MapError> {
        let since = *sync::lock(&watch.missing_since).get_or_insert_with(Instant::now);
        Ok(since.elapsed() >= MISSING_MAX
            || self.map.removed_images()?.contains_key(&watch.volume.load(Ordering::Acquire)))
    }
}

/// Those that are not dropped.
fn live<T: ?Sized>(all: &Mutex<Vec<Weak<T>>>) -> Vec<Arc<T>> {
    let mut all = sync::lock(all);
    all.retain(|one| one.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

impl Drop for HolderProcess {
    fn drop(&mut self) {
        // Without the map it ends by itself.
        let _ = self.map.end_holder(self.lease);
    }
}

/// Renews the lease of a process, and follows the images that it has attached, until it has none.
fn keep(map: &dyn ClusterMap, process: &Weak<HolderProcess>) {
    let mut changes = map.changes();
    let (mut renewed, mut is_doubtful) = (Instant::now(), false);
    loop {
        let waited = changes.wait(RENEW.saturating_sub(renewed.elapsed()));
        let Some(process) = process.upgrade() else { return };
        let now = Instant::now();
        let due = now.duration_since(renewed) >= RENEW;
        let outcome = match &waited {
            Ok(changes) if changes.is_empty() && !is_doubtful => Ok(()),
            Ok(_) => process.refresh().map(|again| is_doubtful = again),
            Err(error) => Err(error.clone()),
        };
        let lease = if due { map.renew_holder(process.lease, LEASE_SECONDS) } else { Ok(()) };
        if due {
            renewed = now;
        }
        if let Err(error) = outcome.and(lease) {
            log::debug!("images that are attached: {error}");
            std::thread::sleep(changes.retry_after().min(RENEW));
        }
    }
}

#[cfg(test)]
mod tests;

//! The thread that scrubs the groups whose primary is on this node, one after another, and part by part.
//!
//! What was found is kept in the map, by group, so that every node that becomes the primary knows when its
//! group is due again. A node reads no faster than the cluster's settings say; each part yields to clients
//! besides ([`CopyPacer`](replica::CopyPacer)).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cluster_map::{ClusterMap, GroupId, GroupScrub, ScrubDifference, ScrubSettings};
use reactor::blocking;
use replica::ObjectPart;

use crate::shard::scrub_state::ScrubStep;
use crate::{ReplicaNode, StoreError};

/// A group whose primary was elsewhere, or that could not be scrubbed, is tried again after this time; and
/// whether a group is due is looked at so often: no event says when a clock reaches a time.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// After this time of scrubbing comes a rest, in which the usual latency of clients is measured.
const WORK_TIME: Duration = Duration::from_secs(10);
const REST_TIME: Duration = Duration::from_secs(1);
/// Differences of a group that are logged one by one.
const LOGGED_MAX: u64 = 16;

/// What the thread is told.
pub(super) enum ScrubInput {
    /// The cluster's settings, and the groups of each pool.
    Settings(ScrubSettings, BTreeMap<String, Range<u32>>),
    /// Ends.
    Stop,
}

/// What scrubs of a node do, and did since it started.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScrubStatus {
    /// The group, when its scrub began, and the bytes of it that were compared.
    pub(crate) current: Option<(u32, Instant, u64)>,
    /// Groups that were finished.
    pub(crate) groups: u64,
    /// Bytes that were compared.
    pub(crate) bytes: u64,
    /// Copies of blocks that could not be read, those that were written again, and those with other data than
    /// the primary's.
    pub(crate) damaged: u64,
    pub(crate) repaired: u64,
    pub(crate) differing: u64,
}

/// The thread.
pub(super) struct Scrubber {
    pub(super) inputs: Sender<ScrubInput>,
    pub(super) status: Arc<Mutex<ScrubStatus>>,
    thread: JoinHandle<()>,
}

/// A scrub of a group.
struct GroupRun {
    group: u32,
    pool: String,
    after: Option<ObjectPart>,
    begun: Instant,
    found: GroupScrub,
}

struct ScrubThread {
    map: Arc<dyn ClusterMap>,
    node: u32,
    /// When it started, in seconds since 1970.
    since_s: u64,
    replicas: Arc<ReplicaNode>,
    status: Arc<Mutex<ScrubStatus>>,
    settings: ScrubSettings,
    pools: BTreeMap<String, Range<u32>>,
    run: Option<GroupRun>,
    /// Groups that were tried, and when they may be tried again.
    elsewhere: BTreeMap<u32, Instant>,
    /// Results that the map did not take.
    unsaved: BTreeMap<u32, GroupScrub>,
    /// When it does something next.
    next_at: Instant,
    /// When it rests next.
    rest_at: Instant,
}

impl Scrubber {
    pub(super) fn start(map: Arc<dyn ClusterMap>, node: u32, replicas: Arc<ReplicaNode>) -> Scrubber {
        let (inputs, receiver) = channel();
        let status: Arc<Mutex<ScrubStatus>> = Arc::default();
        let now = Instant::now();
        let mut thread = ScrubThread {
            map,
            node,
            since_s: seconds_since_1970(),
            replicas,
            status: status.clone(),
            settings: ScrubSettings::default(),
            pools: BTreeMap::new(),
            run: None,
            elsewhere: BTreeMap::new(),
            unsaved: BTreeMap::new(),
            next_at: now,
            rest_at: now + WORK_TIME,
        };
        let thread = std::thread::spawn(move || thread.work(&receiver));
        Scrubber { inputs, status, thread }
    }

    /// It begins nothing any more.
    pub(super) fn stop(&self) {
        let _ = self.inputs.send(ScrubInput::Stop);
    }

    /// Waits for its end: what it waits for ends with the replicas, which are closed.
    pub(super) fn join(self) {
        let _ = self.thread.join();
    }
}

fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl ScrubThread {
    fn work(&mut self, inputs: &Receiver<ScrubInput>) {
        loop {
            match inputs.recv_timeout(self.next_at.saturating_duration_since(Instant::now())) {
                Ok(ScrubInput::Settings(settings, pools)) => {
                    (self.settings, self.pools) = (settings, pools);
                    self.elsewhere.clear();
                    self.end_if_stopped();
                    if self.run.is_none() {
                        self.next_at = Instant::now();
                    }
                }
                Ok(ScrubInput::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => match self.run.take() {
                    Some(run) => self.step(run),
                    None => self.choose(),
                },
            }
            let current = self.run.as_ref().map(|run| (run.group, run.begun, run.found.bytes));
            sync::lock(&self.status).current = current;
        }
    }

    /// When a group is to be scrubbed, in seconds since 1970: 0 if an operator has said so.
    fn due_s(&self, group: u32, pool: &str, last: Option<&GroupScrub>) -> Option<u64> {
        match self.settings.is_started(pool, self.node, last) {
            true => Some(0),
            false => self.settings.due_s(group, self.since_s, last),
        }
    }

    fn pool_of(&self, group: u32) -> Option<&str> {
        let found = self.pools.iter().find(|(_, groups)| groups.contains(&group));
        found.map(|(pool, _)| pool.as_str())
    }

    /// Begins the scrub of the group that has been due for the longest time.
    fn choose(&mut self) {
        let now = Instant::now();
        self.next_at = now + LOOK_AGAIN;
        let mut known = match self.map.group_scrubs() {
            Ok(known) => known,
            Err(error) => return log::debug!("when groups were scrubbed is not known: {error}"),
        };
        self.save();
        known.extend(self.unsaved.iter().map(|(group, scrub)| (GroupId(*group), scrub.clone())));
        self.elsewhere.retain(|_, until| *until > now);
        let groups = self.replicas.groups().into_iter().filter(|it| !self.elsewhere.contains_key(it));
        let due = groups.filter_map(|group| {
            let pool = self.pool_of(group)?;
            Some((self.due_s(group, pool, known.get(&GroupId(group)))?, group, pool))
        });
        let Some((due_s, group, pool)) = due.min() else { return };
        let waits = Duration::from_secs(due_s.saturating_sub(seconds_since_1970()));
        if !waits.is_zero() {
            self.next_at = now + waits.min(LOOK_AGAIN);
            return;
        }
        let found = GroupScrub { number: self.settings.number, node: self.node, ..GroupScrub::default() };
        self.run = Some(GroupRun { group, pool: pool.to_string(), after: None, begun: now, found });
        self.next_at = now;
    }

    /// Writes the results that the map did not take.
    fn save(&mut self) {
        let map = &self.map;
        self.unsaved.retain(|group, scrub| {
            let saved = map.put_group_scrub(GroupId(*group), scrub);
            saved.inspect_err(|error| log::debug!("the scrub of group {group} is not kept: {error}")).is_err()
        });
    }

    /// An operator may have stopped what runs.
    fn end_if_stopped(&mut self) {
        let Some(run) = &self.run else { return };
        // What began under an earlier command was not finished under it.
        let last = self.map.group_scrubs().ok().and_then(|mut known| known.remove(&GroupId(run.group)));
        let due_s = self.due_s(run.group, &run.pool, last.as_ref());
        if due_s.is_none_or(|due_s| due_s > seconds_since_1970()) {
            log::info!("group {}: its scrub was stopped", run.group);
            self.run = None;
        }
    }

    /// Compares the next part.
    fn step(&mut self, mut run: GroupRun) {
        let now = Instant::now();
        let step = match self.replicas.replica(run.group) {
            Some(replica) => blocking::block_on(replica.scrub(run.after)),
            None => Ok(Err(StoreError::Closed)),
        };
        let step = match step.map_err(|_| StoreError::Closed).flatten() {
            Ok(step) if !step.is_elsewhere => step,
            // Another node does it, or this one later.
            _ => {
                self.elsewhere.insert(run.group, now + LOOK_AGAIN);
                self.next_at = now;
                return;
            }
        };
        let Some(part) = step.part else { return self.finish(run) };
        self.add(&mut run, part, &step);
        run.after = Some(part);
        let takes =
            Duration::from_nanos(step.bytes.saturating_mul(1_000_000_000) / self.settings.rate.max(1));
        self.next_at = self.next_at.max(now) + takes;
        if now >= self.rest_at {
            self.next_at = self.next_at.max(now + REST_TIME);
            self.rest_at = self.next_at + WORK_TIME;
        }
        self.run = Some(run);
    }

    fn add(&self, run: &mut GroupRun, part: ObjectPart, step: &ScrubStep) {
        let (group, ObjectPart { object, .. }) = (run.group, part);
        for (offset, node) in &step.differing {
            let difference =
                ScrubDifference { node: *node, volume: object.volume, index: object.index, offset: *offset };
            if run.found.differing < LOGGED_MAX {
                log::error!(
                    "group {group}: object {} of volume {} has other data at {offset} on node {node} than on \
                     node {}, and both have their checksums: neither is changed",
                    object.index,
                    object.volume,
                    self.node
                );
            }
            if run.found.differences.len() < GroupScrub::DIFFERENCES_MAX {
                run.found.differences.push(difference);
            }
            run.found.differing += 1;
        }
        run.found.bytes += step.bytes;
        run.found.damaged += step.damaged;
        run.found.repaired += step.repaired;
        run.found.uncompared += u64::from(step.is_uncompared);
        let mut status = sync::lock(&self.status);
        status.bytes += step.bytes;
        status.damaged += step.damaged;
        status.repaired += step.repaired;
        status.differing += step.differing.len() as u64;
    }

    fn finish(&mut self, run: GroupRun) {
        let took_s = run.begun.elapsed().as_secs();
        let found = GroupScrub { ended_s: seconds_since_1970(), took_s, ..run.found };
        log::info!(
            "group {} was scrubbed: {} bytes in {took_s} s, {} copies of blocks damaged, {} of them written \
             again, {} differ, {} parts were not compared",
            run.group,
            found.bytes,
            found.damaged,
            found.repaired,
            found.differing,
            found.uncompared
        );
        sync::lock(&self.status).groups += 1;
        self.unsaved.insert(run.group, found);
        self.save();
        self.next_at = Instant::now();
    }
}

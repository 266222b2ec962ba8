//! Replicas of a logical group, while nodes crash, pause and lose their disks, links are cut, lose, delay,
//! repeat and reorder messages, clocks have different rates, the map is out of reach, and placement prefers
//! one primary or another.

mod clients;
mod cluster;
mod disk;
mod log_medium;
mod placed;
mod register;

use cluster_map::ClusterSettings;
use random::WyRand;
use replica::{PlantedReplicaFault, ReplicaId, ReplicaSettings};

use crate::scenario::{RunFailure, SeedReport};
use clients::Clients;
use cluster::{Happening, ReplicaCluster};
use disk::Blocks;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
/// After the last fault, everything works again within this time: takeovers, copies and retries, each some
/// seconds.
const RECOVERY_NS_MAX: u64 = 30_000 * MS;

/// Happenings of a run, some times more than the busiest run has: more are a loop of messages.
const TURNS_MAX: u64 = 8_000_000;

struct Run {
    cluster: ReplicaCluster,
    clients: Clients,
    faults: u64,
    chaos_interval_ns: u64,
    chaos_end_ns: u64,
    /// The node whose disk damages blocks: what two disks lost is lost.
    damaged_node: usize,
}

/// The lease and grace of a run. Odd seeds have the default, and even ones any that a cluster may have; half
/// of these have the shortest grace that its lease permits. They are drawn apart, so that seeds which failed
/// before settings varied repeat.
fn lease_and_grace(seed: u64) -> ReplicaSettings {
    let mut random = WyRand::new(!seed);
    let mut settings = ClusterSettings::default();
    if seed.is_multiple_of(2) {
        let (lease_min, limit) = (ClusterSettings::LEASE_MS_MIN, ClusterSettings::SUM_MS_LIMIT);
        let lease_max = (lease_min..limit / 2)
            .rfind(|lease_ms| lease_ms + ClusterSettings::grace_ms_min(*lease_ms) < limit)
            .expect("the shortest lease has a grace");
        settings.lease_ms = lease_min + random.below(u64::from(lease_max - lease_min) + 1) as u32;
        let grace_min = ClusterSettings::grace_ms_min(settings.lease_ms);
        let more = if random.happens(500) { limit - 1 - settings.lease_ms - grace_min } else { 0 };
        settings.grace_ms = grace_min + random.below(u64::from(more) + 1) as u32;
    }
    settings.check().expect("a cluster may have them");
    ReplicaSettings::with_lease(u64::from(settings.lease_ms) * MS, u64::from(settings.grace_ms) * MS)
}

/// Whether placement prefers a primary. Seeds that failed before it did have none, so that they repeat.
fn prefers_a_primary(seed: u64) -> bool {
    !matches!(seed % 8, 1 | 7)
}

/// Whether clients have sessions, and come and go. Seeds that failed before they did have none, so that they
/// repeat.
fn has_sessions(seed: u64) -> bool {
    matches!(seed % 5, 0 | 2 | 4)
}

/// Whether primaries scrub blocks. Seeds that failed before they did are odd.
fn scrubs(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

/// Drawn apart, as leases are. Some clients lose their sessions while they are cut off, others do not.
fn session_timeout_ns(seed: u64) -> u64 {
    300 * MS + WyRand::new(seed.rotate_left(32)).below(3000 * MS)
}

pub(crate) fn run(seed: u64, fault: Option<PlantedReplicaFault>) -> Result<SeedReport, RunFailure> {
    let mut random = WyRand::new(seed);
    let nodes = 2 + random.index(3);
    let settings = ReplicaSettings {
        group: cluster::GROUP,
        in_sync_min: 1 + random.index(nodes - 1),
        checkpoint_entries: 1 + random.below(16),
        retained_entries: random.below(40),
        entries_max: 64 + random.index(100),
        block_bytes: clients::VALUE_BYTES,
        in_place: random.happens(700),
        session_timeout_ns: session_timeout_ns(seed),
        ..lease_and_grace(seed)
    };
    let mut cluster = ReplicaCluster::new(nodes, settings, fault, prefers_a_primary(seed), random.split());
    cluster.link_faults_per_mille = if random.happens(700) { random.below(30) as u32 } else { 0 };
    for node in 0..nodes {
        cluster.schedule(random.below(50 * MS), Happening::Start { node });
    }
    let clients = Clients::new(&mut cluster, has_sessions(seed));
    let chaos_interval_ns = 20 * MS + random.below(600 * MS);
    let chaos_end_ns = 1000 * MS + random.below(5000 * MS);
    cluster.schedule(random.below(500 * MS), Happening::Chaos);
    cluster.remind_of_preference();
    // Drawn apart, so that seeds repeat that failed before pools could change.
    cluster.random_demand = (seed % 3 == 1).then(|| WyRand::new(seed.rotate_left(17)));
    cluster.change_demand();
    if scrubs(seed) {
        cluster.random_scrub = Some(WyRand::new(seed.rotate_left(47)));
        cluster.schedule(0, Happening::Scrub);
    }
    let damaged_node = random.index(nodes);
    let mut run = Run { cluster, clients, faults: 0, chaos_interval_ns, chaos_end_ns, damaged_node };
    let outcome = run.carry_out();
    let at_ns = run.cluster.now_ns;
    outcome.map_err(|why| RunFailure { seed, at_ns, why })?;
    Ok(SeedReport {
        succeeded: run.clients.succeeded,
        failed: run.clients.abandoned,
        faults: run.faults,
        transfers: run.cluster.transfers,
        aged: run.cluster.aged,
        scrubbed: run.cluster.scrubbed,
        scrub_repairs: run.cluster.scrub_repairs,
        may_have_lost: run.cluster.may_have_lost,
        simulated_ns: at_ns,
        turns: run.cluster.turns,
        trace: run.cluster.trace,
    })
}

impl Run {
    fn carry_out(&mut self) -> Result<(), String> {
        self.run_until(self.chaos_end_ns, |_| false);
        self.heal();
        let end_ns = self.cluster.now_ns + RECOVERY_NS_MAX;
        self.clients.stopped = true;
        let recovered = self.run_until(end_ns, |run| run.clients.pending() == 0 && run.is_back());
        if recovered {
            self.clients.read_all(&mut self.cluster);
            // A member that was silent just before may still leave, and comes back.
            self.run_until(end_ns, |run| run.clients.pending() == 0 && run.is_at_rest() && run.is_back());
        }
        if self.cluster.may_have_lost {
            // What the guarantees leave out has happened.
            return Ok(());
        }
        // What was wrong before it stood still is the better answer.
        let unanswered = self.clients.pending();
        self.clients.check(self.cluster.has_revived)?;
        self.cluster.scrub_difference.take().map_or(Ok(()), Err)?;
        if (unanswered > 0 || !self.is_back()) && self.has_lost_block() {
            return Ok(());
        }
        if self.cluster.turns >= TURNS_MAX {
            return Err(format!("messages cause each other without end: {}", self.state()));
        }
        if unanswered > 0 || !self.is_back() || !self.is_at_rest() {
            return Err(format!(
                "{unanswered} requests got no answer, a replica is not back, or the preferred one not primary: {}",
                self.state()
            ));
        }
        self.compare_replicas()
    }

    /// Runs until a time or a condition; says whether the condition holds.
    fn run_until(&mut self, end_ns: u64, done: impl Fn(&Run) -> bool) -> bool {
        while self.cluster.now_ns < end_ns && self.cluster.turns < TURNS_MAX {
            if done(self) {
                return true;
            }
            let Some(happening) = self.cluster.next() else {
                break;
            };
            match self.cluster.carry_out(happening) {
                Some(Happening::Client { client, attempt }) => {
                    self.clients.act(&mut self.cluster, client, attempt);
                }
                Some(Happening::Reply { client, number, from, reply }) => {
                    self.clients.reply(&mut self.cluster, (client, number), from, reply);
                }
                Some(Happening::Start { node }) => self.cluster.start(node),
                Some(Happening::Resume { node, pause }) if self.cluster.nodes[node].paused == Some(pause) => {
                    self.cluster.resume(node);
                }
                Some(Happening::LeaveEnds { node, incarnation, .. })
                    if self.cluster.leaves && self.cluster.is_current(node, incarnation) =>
                {
                    let away_ns = self.cluster.away_ns();
                    self.crash(node, away_ns);
                }
                Some(Happening::Preference) => self.cluster.remind_of_preference(),
                Some(Happening::Demand) => self.cluster.change_demand(),
                Some(Happening::Scrub) => self.cluster.scrub(self.clients.blocks()),
                Some(Happening::LeaveCut { node }) if self.cluster.leaves => {
                    self.cluster.cut_from_others(node)
                }
                Some(Happening::Chaos) => self.chaos(),
                Some(Happening::Cut) => {
                    let failing = std::mem::take(&mut self.cluster.failing);
                    self.cluster.cut.extend(failing.into_keys());
                }
                _ => {}
            }
        }
        done(self)
    }

    /// One fault, or the end of cuts.
    fn chaos(&mut self) {
        let now_ns = self.cluster.now_ns;
        if now_ns >= self.chaos_end_ns {
            return;
        }
        self.faults += 1;
        self.cluster.change_room();
        self.cluster.leave();
        self.cluster.change_preference();
        self.age();
        let wait_ns = self.cluster.random.below(2 * self.chaos_interval_ns);
        self.cluster.schedule(wait_ns, Happening::Chaos);
        let nodes = self.cluster.nodes.len();
        let random = &mut self.cluster.random;
        let node = random.index(nodes);
        // Short enough to be back within a lease, or longer than a takeover.
        let length_ns = if random.happens(500) { random.below(200 * MS) } else { random.below(2500 * MS) };
        match random.below(11) {
            0 | 1 => self.crash(node, length_ns),
            2 => (0..nodes).for_each(|node| self.crash(node, length_ns)),
            3 | 4 => {
                let pause = self.cluster.order_number();
                self.cluster.nodes[node].paused = Some(pause);
                self.cluster.schedule(length_ns, Happening::Resume { node, pause });
            }
            5 | 6 => self.cut(node),
            7 => self.mend_links(),
            8 => {
                let slowness = if self.cluster.random.happens(500) { 1 } else { 2000 };
                self.cluster.nodes[node].disk_slowness = slowness;
            }
            9 => self.replace_disk(node, length_ns),
            _ => self.damage(),
        }
    }

    fn crash(&mut self, node: usize, length_ns: u64) {
        self.cluster.stop(node);
        self.cluster.schedule(length_ns, Happening::Start { node });
    }

    fn mend_links(&mut self) {
        self.cluster.cut.clear();
        self.cluster.failing.clear();
    }

    /// Cuts a node from another, from the map, or from all, in one or both directions. Before that, what it
    /// sends or gets may be late for a time: an answer arrives when its sender has heard nothing for long.
    fn cut(&mut self, node: usize) {
        let (client, map) = (self.cluster.client_index(), self.cluster.map_index());
        let random = &mut self.cluster.random;
        let others: Vec<usize> = match random.below(4) {
            0 => (0..client).collect(),
            1 => vec![map],
            2 => (0..client).chain([map]).collect(),
            _ => vec![random.index(client + 2)],
        };
        let directions = random.below(3);
        let mut links = Vec::new();
        for other in others.into_iter().filter(|other| *other != node) {
            if directions != 1 {
                links.push((node, other));
            }
            if directions != 2 {
                links.push((other, node));
            }
        }
        if self.cluster.random.happens(300) {
            let late_from_node = self.cluster.random.happens(500);
            let links = links.into_iter().map(|link| (link, (link.0 == node) == late_from_node));
            self.cluster.failing.extend(links);
            let late_ns = self.cluster.random.below(300 * MS);
            self.cluster.schedule(late_ns, Happening::Cut);
        } else {
            self.cluster.cut.extend(links);
        }
    }

    /// Whether another member than a node has all data.
    fn has_other_sound_member(&mut self, node: usize) -> bool {
        let members: Vec<usize> = self.cluster.map.in_sync.iter().map(|id| id.0 as usize).collect();
        members.into_iter().any(|member| member != node && self.cluster.is_sound(member))
    }

    /// Replaces the disk of a node, if another one has all data.
    fn replace_disk(&mut self, node: usize, length_ns: u64) {
        if self.has_other_sound_member(node) {
            self.crash(node, length_ns);
            self.cluster.replace_disk(node);
        }
    }

    /// Copies a disk, puts one back from its copy, or damages the end of a log, if another member has all
    /// data: a fault now and then. All nodes may be down then.
    fn age(&mut self) {
        if !self.cluster.ages {
            return;
        }
        let nodes = self.cluster.nodes.len();
        let random = &mut self.cluster.random_age;
        let (node, kind) = (random.index(nodes), random.below(4));
        let length_ns = if random.happens(500) { random.below(200 * MS) } else { random.below(2500 * MS) };
        // The others go on, return with it, or later.
        let (go_on, are_late) = (random.happens(400), random.happens(500));
        let others_ns = length_ns + if are_late { random.below(2500 * MS) } else { 0 };
        if kind < 2 {
            self.cluster.copy_disk(node);
        } else if self.has_other_sound_member(node) {
            self.crash(node, length_ns);
            let others: Vec<usize> = (0..nodes).filter(|other| *other != node && !go_on).collect();
            others.into_iter().for_each(|other| self.crash(other, others_ns));
            match kind {
                2 => self.cluster.roll_back(node),
                _ => self.cluster.damage_log(node),
            }
        }
    }

    /// Damages a block of the disk that may have such.
    fn damage(&mut self) {
        let blocks = self.clients.blocks();
        let block = blocks[self.cluster.random.index(blocks.len())];
        self.cluster.nodes[self.damaged_node].disk.damage(block);
    }

    /// Ends all faults.
    fn heal(&mut self) {
        self.mend_links();
        self.cluster.link_faults_per_mille = 0;
        self.cluster.set_without_room(None);
        for node in 0..self.cluster.nodes.len() {
            self.cluster.nodes[node].disk_slowness = 1;
            if self.cluster.nodes[node].paused.is_some() {
                self.cluster.resume(node);
            }
            self.cluster.start(node);
        }
        self.cluster.stay();
    }

    /// All replicas are in sync, and the preferred one is the primary.
    fn is_back(&self) -> bool {
        self.cluster.map.in_sync.len() == self.cluster.nodes.len() && self.cluster.is_primary_preferred()
    }

    /// Every replica has and knows as committed what the primary has.
    fn is_at_rest(&self) -> bool {
        let statuses = self.cluster.nodes.iter().map(|node| node.replica.as_ref().map(|it| it.status()));
        let epoch = self.cluster.map.epoch;
        let ends = statuses.map(|status| {
            let status = status.filter(|it| {
                it.complete && it.epoch == epoch && it.log_end == it.commit_point && it.unsettled == 0
            });
            status.map(|it| it.commit_point)
        });
        let ends: Vec<Option<u64>> = ends.collect();
        ends[0].is_some() && ends.iter().all(|end| *end == ends[0])
    }

    /// Whether no replica has what was committed in a block: the only one that had it has lost it, and the
    /// others have an entry there whose client is gone.
    fn has_lost_block(&self) -> bool {
        let is_lost = |block| self.cluster.nodes.iter().all(|node| !node.disk.has(block));
        self.clients.blocks().iter().any(is_lost)
    }

    fn compare_replicas(&self) -> Result<(), String> {
        let first = &self.cluster.nodes[0];
        for (index, node) in self.cluster.nodes.iter().enumerate() {
            let (blocks, of_first) = (node.disk.blocks(), first.disk.blocks());
            if let Some(key) =
                blocks.keys().chain(of_first.keys()).find(|key| blocks.get(key) != of_first.get(key))
            {
                let value = |blocks: &Blocks| {
                    blocks.get(key).map_or("nothing".to_string(), |value| format!("{value:#x}"))
                };
                return Err(format!(
                    "block {} of object {}: {} at replica {index}, {} at replica 0",
                    key.1 / clients::VALUE_BYTES,
                    key.0.index,
                    value(blocks),
                    value(of_first)
                ));
            }
            let applied = node.replica.as_ref().map(|replica| replica.applied());
            if applied != first.replica.as_ref().map(|replica| replica.applied()) {
                return Err(format!("replica {index} knows other requests of clients than replica 0"));
            }
        }
        Ok(())
    }

    fn state(&self) -> String {
        let members: Vec<ReplicaId> = self.cluster.map.in_sync.clone();
        let statuses = self.cluster.nodes.iter().map(|node| node.replica.as_ref().map(|it| it.status()));
        let statuses: Vec<_> = statuses.collect();
        format!(
            "epoch {}, primary {:?}, in sync {members:?}, {statuses:?}",
            self.cluster.map.epoch, self.cluster.map.primary
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_the_default_and_other_leases_down_to_the_shortest_grace() {
        let all: Vec<(u64, u64)> = (0..2000)
            .map(lease_and_grace)
            .map(|ReplicaSettings { lease_ns, grace_ns, .. }| (lease_ns / MS, grace_ns / MS))
            .collect();
        let default = all.iter().filter(|times| **times == (400, 450)).count();
        assert!((1000..1100).contains(&default), "{default}");
        let shortest = |(lease_ms, grace_ms): &&(u64, u64)| {
            *grace_ms == u64::from(ClusterSettings::grace_ms_min(*lease_ms as u32))
        };
        assert!(all.iter().filter(shortest).count() > 400);
        assert!(
            all.iter().any(|(lease_ms, _)| *lease_ms < 60) && all.iter().any(|(lease_ms, _)| *lease_ms > 470)
        );
        assert!(all.iter().any(|(lease_ms, grace_ms)| lease_ms + grace_ms > 950 && *lease_ms < 200));
    }
}

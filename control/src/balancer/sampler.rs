//! What reactors and connections did in a period.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use reactor::{ReactorHandle, ReactorStats};

use super::decision::{CoreLoad, Decision, LoadedConnection, decide};
use super::masks::ThreadMasks;
use super::target::{BalancedTarget, ConnectionLoad, ConnectionMove};

/// Time that a reactor has to report. One that does not is blocked, and nothing is decided.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Compares each report with the one before, and decides.
#[derive(Default)]
pub(super) struct Sampler {
    /// The last reports; empty before the first.
    before: Vec<ReactorStats>,
    /// Connections have moved since the last report, so that it does not say how the cores are now.
    is_settling: bool,
}

impl Sampler {
    /// Ends the present period: has targets move what is to move.
    pub(super) fn end_period(
        &mut self,
        reactors: &[ReactorHandle],
        handles: &[Arc<dyn BalancedTarget>],
        masks: &ThreadMasks,
    ) {
        let reports = reactors.iter().map(|reactor| reactor.stats_within(REPORT_TIMEOUT));
        let loads = handles.iter().map(|target| target.loads());
        let (Ok(reports), Some(loads)) =
            (reports.collect::<Result<Vec<_>, _>>(), loads.collect::<Option<Vec<_>>>())
        else {
            *self = Sampler::default();
            return;
        };
        let excluded = handles.iter().zip(&loads).map(|(target, loads)| {
            let moves = masks.moves(&target.reactors(), loads);
            if !moves.is_empty() {
                target.move_connections(&moves);
            }
            moves.len()
        });
        let has_excluded = excluded.sum::<usize>() > 0;
        let before = std::mem::replace(&mut self.before, reports);
        let was_settling = std::mem::take(&mut self.is_settling);
        if was_settling || has_excluded || before.len() != self.before.len() {
            self.is_settling = has_excluded;
            return;
        }
        let targets: Vec<TargetLoads> = handles
            .iter()
            .zip(loads)
            .map(|(target, loads)| TargetLoads { name: target.name(), reactors: target.reactors(), loads })
            .collect();
        let decisions = decide_in_period(&before, &self.before, &targets, masks);
        self.is_settling = !decisions.is_empty();
        let mut by_target: HashMap<usize, Vec<ConnectionMove>> = HashMap::new();
        for Decision { target, id, from, to } in decisions {
            by_target.entry(target).or_default().push(ConnectionMove { id, from, to });
        }
        for (target, moves) in by_target {
            log::debug!(target: "scheduler", "{}: {} connections move", handles[target].name(), moves.len());
            handles[target].move_connections(&moves);
        }
    }
}

/// What the connections of a target did in a period.
struct TargetLoads {
    name: &'static str,
    /// [`BalancedTarget::reactors`].
    reactors: Vec<usize>,
    /// By place in `reactors`.
    loads: Vec<Vec<ConnectionLoad>>,
}

impl TargetLoads {
    /// The connections on a reactor.
    fn on(&self, reactor: usize) -> &[ConnectionLoad] {
        let place = self.reactors.iter().position(|one| *one == reactor);
        place.and_then(|place| self.loads.get(place)).map_or(&[], |connections| connections)
    }
}

/// Decides for the targets that share a set of reactors, and for those with another set only if nothing moves
/// before: what moves changes how busy the reactors are that both have.
fn decide_in_period(
    before: &[ReactorStats],
    now: &[ReactorStats],
    targets: &[TargetLoads],
    masks: &ThreadMasks,
) -> Vec<Decision> {
    let sets: BTreeSet<&[usize]> = targets.iter().map(|target| &target.reactors[..]).collect();
    // The largest first, as it can make more of them even.
    let mut sets: Vec<&[usize]> = sets.into_iter().collect();
    sets.sort_by_key(|reactors| std::cmp::Reverse(reactors.len()));
    let mut decisions = sets.into_iter().map(|reactors| {
        let load = |reactor: &usize| {
            let load = core_load(*reactor, reactors, before, now, targets)?;
            Some(CoreLoad { is_excluded: masks.excludes(*reactor), ..load })
        };
        reactors.iter().map(load).collect::<Option<Vec<_>>>().map_or(Vec::new(), decide)
    });
    decisions.find(|decisions| !decisions.is_empty()).unwrap_or_default()
}

/// What a reactor did, with the connections of the targets that have this set of reactors. `None` if there is
/// no such reactor.
fn core_load(
    reactor: usize,
    reactors: &[usize],
    before: &[ReactorStats],
    now: &[ReactorStats],
    targets: &[TargetLoads],
) -> Option<CoreLoad> {
    let (before, now) = (before.get(reactor)?, now.get(reactor)?);
    let mut load = busy_time(before, now);
    for (index, target) in targets.iter().enumerate().filter(|(_, target)| target.reactors == reactors) {
        let time_ppm = ppm(poller_ns(now, target.name), poller_ns(before, target.name), before, now);
        // Pollers of several targets have one name, and their time is not known apart.
        let same = targets.iter().filter(|other| other.name == target.name);
        let total: u64 = same.flat_map(|other| other.on(reactor)).map(|connection| connection.work).sum();
        let costs = target.on(reactor).iter().filter(|connection| connection.work > 0);
        load.connections.extend(costs.map(|connection| LoadedConnection {
            target: index,
            id: connection.id,
            cost_ppm: (u128::from(time_ppm) * u128::from(connection.work) / u128::from(total)) as u32,
            is_movable: connection.is_movable,
        }));
    }
    Some(load)
}

fn busy_time(before: &ReactorStats, now: &ReactorStats) -> CoreLoad {
    CoreLoad { busy_ppm: ppm(now.busy_ns, before.busy_ns, before, now), ..CoreLoad::default() }
}

/// A part of a reactor's time between two reports, in millionths.
fn ppm(now_ns: u64, before_ns: u64, before: &ReactorStats, now: &ReactorStats) -> u32 {
    let all_ns = |stats: &ReactorStats| stats.busy_ns + stats.idle_ns + stats.sleep_ns;
    let elapsed_ns = all_ns(now).saturating_sub(all_ns(before)).max(1);
    let part = u128::from(now_ns.saturating_sub(before_ns)) * 1_000_000 / u128::from(elapsed_ns);
    part.min(1_000_000) as u32
}

fn poller_ns(stats: &ReactorStats, name: &str) -> u64 {
    stats.pollers.iter().filter(|poller| poller.name == name).map(|poller| poller.busy_ns).sum()
}

#[cfg(test)]
mod tests {
    use reactor::PollerStats;

    use super::*;

    #[test]
    fn times_are_parts_of_what_has_passed_since_the_last_report() {
        let stats =
            |busy_ns, idle_ns, sleep_ns| ReactorStats { busy_ns, idle_ns, sleep_ns, ..Default::default() };
        let (before, now) = (stats(1000, 500, 0), stats(1300, 800, 600));
        assert_eq!(busy_time(&before, &now).busy_ppm, 250_000);
        assert_eq!(busy_time(&now, &now).busy_ppm, 0, "no time has passed");
    }

    /// A reactor that was busy for a part of a period of 1000 ns, with all of it in the poller `tcp`.
    fn busy(busy_ns: u64) -> ReactorStats {
        let poller = PollerStats { name: "tcp".to_string(), busy_ns, runs: 1, busy_runs: 1 };
        ReactorStats { busy_ns, idle_ns: 1000 - busy_ns, pollers: vec![poller], ..Default::default() }
    }

    fn target(reactors: &[usize], works: &[&[u64]]) -> TargetLoads {
        let load = |(id, work): (usize, &u64)| ConnectionLoad {
            id: id as u64,
            work: *work,
            is_movable: true,
            can_begin: true,
        };
        let loads = works.iter().map(|works| works.iter().enumerate().map(load).collect()).collect();
        TargetLoads { name: "tcp", reactors: reactors.to_vec(), loads }
    }

    #[test]
    fn connections_move_between_the_reactors_of_their_target_only() {
        let before = vec![ReactorStats::default(); 3];
        let now = [busy(0), busy(800), busy(200)];
        let some = target(&[1, 2], &[&[3, 1], &[1]]);
        // Reactor 0, the least busy, is none of them. Places count among those of the target.
        assert_eq!(
            decide_in_period(&before, &now, &[some], &ThreadMasks::default()),
            [Decision { target: 0, id: 1, from: 0, to: 1 }]
        );
        let all = target(&[0, 1, 2], &[&[], &[3, 1], &[1]]);
        let decisions = decide_in_period(&before, &now, &[all], &ThreadMasks::default());
        assert!(decisions.iter().any(|one| one.from == 1 && one.to == 0), "{decisions:?}");
        let absent = target(&[1, 3], &[&[3, 1], &[]]);
        assert!(decide_in_period(&before, &now, &[absent], &ThreadMasks::default()).is_empty());
    }

    #[test]
    fn targets_with_one_name_share_its_time() {
        let before = vec![ReactorStats::default(); 2];
        let now = [busy(900), busy(0)];
        let targets = [target(&[0, 1], &[&[2], &[]]), target(&[0, 1], &[&[1], &[]]), target(&[0], &[&[3]])];
        let load = core_load(0, &[0, 1], &before, &now, &targets).unwrap();
        let costs: Vec<(usize, u32)> =
            load.connections.iter().map(|one| (one.target, one.cost_ppm)).collect();
        assert_eq!((load.busy_ppm, costs), (900_000, vec![(0, 300_000), (1, 150_000)]));
        // A target with one reactor has no choice; those with two are decided about first.
        let decisions = decide_in_period(&before, &now, &targets, &ThreadMasks::default());
        assert!(!decisions.is_empty() && decisions.iter().all(|one| one.target < 2 && one.to == 1));
    }
}

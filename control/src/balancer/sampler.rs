//! What reactors and connections did in a period.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use reactor::{ReactorHandle, ReactorStats};

use super::decision::{CoreLoad, Decision, LoadedConnection, decide};
use super::target::{BalancedTarget, ConnectionMove};

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
    pub(super) fn end_period(&mut self, reactors: &[ReactorHandle], targets: &[Arc<dyn BalancedTarget>]) {
        let reports = reactors.iter().map(|reactor| reactor.stats_within(REPORT_TIMEOUT));
        let loads = targets.iter().map(|target| target.loads());
        let (Ok(reports), Some(loads)) =
            (reports.collect::<Result<Vec<_>, _>>(), loads.collect::<Option<Vec<_>>>())
        else {
            *self = Sampler::default();
            return;
        };
        let before = std::mem::replace(&mut self.before, reports);
        let was_settling = std::mem::take(&mut self.is_settling);
        if was_settling || before.len() != self.before.len() {
            return;
        }
        let mut cores: Vec<CoreLoad> =
            before.iter().zip(&self.before).map(|(before, now)| busy_time(before, now)).collect();
        for (target, (balanced, loads)) in targets.iter().zip(loads).enumerate() {
            for (core, connections) in loads.into_iter().enumerate() {
                let (Some(load), Some(before), Some(now)) =
                    (cores.get_mut(core), before.get(core), self.before.get(core))
                else {
                    continue;
                };
                let poller = balanced.name();
                let time_ppm = ppm(poller_ns(now, poller), poller_ns(before, poller), before, now);
                let total: u64 = connections.iter().map(|connection| connection.work).sum();
                let costs = connections.into_iter().filter(|connection| connection.work > 0);
                load.connections.extend(costs.map(|connection| LoadedConnection {
                    target,
                    id: connection.id,
                    cost_ppm: (u128::from(time_ppm) * u128::from(connection.work) / u128::from(total)) as u32,
                    is_movable: connection.is_movable,
                }));
            }
        }
        let decisions = decide(cores);
        self.is_settling = !decisions.is_empty();
        let mut by_target: HashMap<usize, Vec<ConnectionMove>> = HashMap::new();
        for Decision { target, id, from, to } in decisions {
            by_target.entry(target).or_default().push(ConnectionMove { id, from, to });
        }
        for (target, moves) in by_target {
            log::debug!(target: "scheduler", "{}: {} connections move", targets[target].name(), moves.len());
            targets[target].move_connections(&moves);
        }
    }
}

fn busy_time(before: &ReactorStats, now: &ReactorStats) -> CoreLoad {
    CoreLoad { busy_ppm: ppm(now.busy_ns, before.busy_ns, before, now), connections: Vec::new() }
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
    use super::*;

    #[test]
    fn times_are_parts_of_what_has_passed_since_the_last_report() {
        let stats =
            |busy_ns, idle_ns, sleep_ns| ReactorStats { busy_ns, idle_ns, sleep_ns, ..Default::default() };
        let (before, now) = (stats(1000, 500, 0), stats(1300, 800, 600));
        assert_eq!(busy_time(&before, &now).busy_ppm, 250_000);
        assert_eq!(busy_time(&now, &now).busy_ppm, 0, "no time has passed");
    }
}

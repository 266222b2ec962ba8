//! The steady state of reporting groups: the samples of a group's jobs are added up, second by second.

use std::collections::{BTreeMap, VecDeque};

use super::{SteadyDetector, SteadyOptions, SteadyResult};

/// The groups of the jobs that run together, by number. A job [joins](Self::join) before it starts and
/// [leaves](Self::leave) when it has finished; [`record`](Self::record) takes its samples.
#[derive(Default)]
pub(crate) struct SteadyGroups(BTreeMap<u32, SteadyGroup>);

struct SteadyGroup {
    detector: SteadyDetector,
    /// By member: samples that wait for those of the others; whether it has finished.
    members: Vec<(VecDeque<(u64, u64)>, bool)>,
}

impl SteadyGroups {
    /// Adds a job to a group; returns its number there.
    pub(crate) fn join(&mut self, group: u32, options: SteadyOptions) -> usize {
        let new = || SteadyGroup { detector: SteadyDetector::new(options), members: Vec::new() };
        let members = &mut self.0.entry(group).or_insert_with(new).members;
        members.push((VecDeque::new(), false));
        members.len() - 1
    }

    /// Adds samples of a job: I/Os and bytes a second. Returns whether the group is steady from now on.
    pub(crate) fn record(
        &mut self,
        group: u32,
        member: usize,
        samples: impl IntoIterator<Item = (u64, u64)>,
    ) -> bool {
        let Some(state) = self.0.get_mut(&group) else { return false };
        state.members[member].0.extend(samples);
        state.judge()
    }

    /// A job has finished: the others are judged without it.
    pub(crate) fn leave(&mut self, group: u32, member: usize) {
        if let Some(state) = self.0.get_mut(&group) {
            state.members[member].1 = true;
        }
    }

    /// The results of the groups, by number.
    pub(crate) fn into_results(self) -> impl Iterator<Item = (u32, SteadyResult)> {
        self.0.into_iter().map(|(group, state)| (group, state.detector.into_result()))
    }
}

impl SteadyGroup {
    /// Judges each second of which all running jobs have a sample.
    fn judge(&mut self) -> bool {
        let is_running = |(_, finished): &&(VecDeque<(u64, u64)>, bool)| !finished;
        while !self.detector.result.attained
            && self.members.iter().any(|member| is_running(&member))
            && self.members.iter().filter(is_running).all(|(samples, _)| !samples.is_empty())
        {
            let of_second = self.members.iter_mut().filter_map(|(samples, _)| samples.pop_front());
            let (iops, bandwidth) = of_second.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            self.detector.add(iops, bandwidth);
        }
        self.detector.result.attained
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steady::SteadyCriterion;

    fn groups(members: usize) -> SteadyGroups {
        let criterion =
            SteadyCriterion { of_bandwidth: false, of_slope: false, limit: 5.0, in_percent: true };
        let options = SteadyOptions { criterion, duration_s: 3, ramp_ns: 0, of_group: true };
        let mut groups = SteadyGroups::default();
        (0..members).for_each(|member| assert_eq!(groups.join(7, options), member));
        groups
    }

    #[test]
    fn the_sum_of_a_group_is_judged() {
        // Each job varies by half, and their sum not at all.
        let mut groups = groups(2);
        assert!(!groups.record(7, 0, [(100, 1), (50, 1), (100, 1)]), "the other has no samples");
        assert!(!groups.record(7, 1, [(50, 2), (100, 2)]));
        assert!(groups.record(7, 1, [(50, 2)]));
        let results: Vec<_> = groups.into_results().collect();
        assert_eq!((results.len(), results[0].0), (1, 7));
        assert_eq!((&results[0].1.iops, &results[0].1.bandwidth), (&vec![150; 3], &vec![3; 3]));
        assert!(results[0].1.attained);
    }

    #[test]
    fn a_finished_job_is_not_waited_for() {
        let mut groups = groups(2);
        assert!(!groups.record(7, 0, [(10, 0)]) && !groups.record(7, 1, [(10, 0); 3]));
        groups.leave(7, 0);
        // One second with both, and then with the one that is left.
        assert!(!groups.record(7, 1, []));
        assert!(groups.record(7, 1, [(10, 0)]));
        groups.leave(7, 1);
        assert!(!groups.record(8, 0, [(1, 1)]), "there is no such group");
    }
}

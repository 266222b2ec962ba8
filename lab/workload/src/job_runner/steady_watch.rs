//! Judges the steady state of the reporting groups of the jobs that run.

use std::sync::Arc;

use super::{FinishedJob, JobCopy};
use crate::job_groups::JobGroups;
use crate::jobfile::PerfJob;
use crate::poller::Progress;
use crate::run::RunningJob;
use crate::steady::SteadyGroups;

/// The jobs of a phase whose groups are judged.
pub(super) struct SteadyWatch {
    groups: SteadyGroups,
    /// Each job: its group, its number there, and its shared state.
    members: Vec<(u32, usize, Arc<Progress>)>,
}

impl SteadyWatch {
    pub(super) fn new(
        jobs: &[PerfJob],
        groups: &JobGroups,
        copies: &[JobCopy],
        reactor_jobs: &[(usize, RunningJob)],
    ) -> SteadyWatch {
        let mut watch = SteadyWatch { groups: SteadyGroups::default(), members: Vec::new() };
        let on_reactors = reactor_jobs
            .iter()
            .flat_map(|(job, running)| running.progress().iter().map(|progress| (*job, progress)));
        for (job, progress) in copies.iter().map(|copy| (copy.job, &copy.progress)).chain(on_reactors) {
            if let Some(options) = jobs[job].spec.steady.filter(|options| options.of_group) {
                let group = groups.of(job);
                watch.members.push((group, watch.groups.join(group, options), progress.clone()));
            }
        }
        watch
    }

    /// Takes the jobs' samples; returns the groups that are steady.
    pub(super) fn poll(&mut self) -> impl Iterator<Item = u32> {
        let mut steady = Vec::new();
        for (group, member, progress) in &self.members {
            // First, so that no sample of a job that has ended is lost.
            let has_ended = progress.has_ended();
            if self.groups.record(*group, *member, progress.take_rates()) {
                steady.push(*group);
            }
            if has_ended {
                self.groups.leave(*group, *member);
            }
        }
        steady.into_iter()
    }

    /// Adds each group's result to that of one of its jobs, from which reports of the group have it.
    pub(super) fn add_results(self, finished: &mut [FinishedJob]) {
        for (group, result) in self.groups.into_results() {
            if let Some(one) = finished.iter_mut().find(|one| one.group == group) {
                one.result.steady = Some(result);
            }
        }
    }
}

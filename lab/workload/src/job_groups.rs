//! Reporting groups, and which jobs stop because another has finished: fio's `exitall`, `exit_what` and
//! `exit_on_io_done`.

use std::collections::BTreeSet;

use crate::jobfile::{EngineName, ExitScope, PerfJob};

/// The groups of a run's jobs, and what has been asked to stop.
pub(crate) struct JobGroups {
    /// By job.
    of_job: Vec<u32>,
    ended: BTreeSet<u32>,
    /// Those whose running jobs have the steady state that ends them.
    steady: BTreeSet<u32>,
    /// All jobs that run now.
    running_end: bool,
    /// All jobs, also those that have not started.
    rest_ends: bool,
}

impl JobGroups {
    /// `stonewall` and `new_group` start a new group, as in fio.
    pub(crate) fn new(jobs: &[PerfJob]) -> JobGroups {
        let mut group = 0;
        let mut of_job = Vec::with_capacity(jobs.len());
        for (index, job) in jobs.iter().enumerate() {
            group += u32::from(index > 0 && (job.stonewall || job.new_group));
            of_job.push(group);
        }
        JobGroups {
            of_job,
            ended: BTreeSet::new(),
            steady: BTreeSet::new(),
            running_end: false,
            rest_ends: false,
        }
    }

    pub(crate) fn of(&self, job: usize) -> u32 {
        self.of_job[job]
    }

    /// The jobs of a phase start.
    pub(crate) fn begin_phase(&mut self) {
        self.running_end = false;
        self.steady.clear();
    }

    /// The running jobs of a group stop.
    pub(crate) fn end_steady(&mut self, group: u32) {
        self.steady.insert(group);
    }

    /// A job has finished.
    pub(crate) fn finished(&mut self, jobs: &[PerfJob], job: usize) {
        match jobs[job].exit_scope {
            _ if !jobs[job].exitall => {}
            ExitScope::Group => drop(self.ended.insert(self.of(job))),
            ExitScope::Running => self.running_end = true,
            ExitScope::All => (self.running_end, self.rest_ends) = (true, true),
        }
    }

    /// Whether a job must stop, or must not start.
    pub(crate) fn stops(&self, job: usize) -> bool {
        let group = self.of(job);
        self.running_end || self.ended.contains(&group) || self.steady.contains(&group)
    }

    /// Whether no further job starts.
    pub(crate) fn rest_ends(&self) -> bool {
        self.rest_ends
    }
}

/// Whether a job stops when only jobs without I/O are left.
pub(crate) fn ends_with_io(job: &PerfJob) -> bool {
    matches!(job.engine, Some(EngineName::Work(_))) && job.work.ends_with_io
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_stops_its_group_or_all() {
        let job = |new_group, exitall, exit_scope| {
            let mut job = PerfJob::default();
            (job.new_group, job.exitall, job.exit_scope) = (new_group, exitall, exit_scope);
            job
        };
        let jobs = [
            job(false, true, ExitScope::Group),
            job(false, true, ExitScope::Running),
            job(true, true, ExitScope::All),
            job(false, false, ExitScope::All),
        ];
        let stopped = |finished: usize| {
            let mut groups = JobGroups::new(&jobs);
            groups.finished(&jobs, finished);
            let stopped: Vec<usize> = (0..4).filter(|job| groups.stops(*job)).collect();
            groups.begin_phase();
            (stopped, (0..4).filter(|job| groups.stops(*job)).count(), groups.rest_ends())
        };
        assert_eq!(stopped(0), (vec![0, 1], 2, false));
        assert_eq!(stopped(1), (vec![0, 1, 2, 3], 0, false));
        assert_eq!(stopped(2), (vec![0, 1, 2, 3], 0, true));
        assert_eq!(stopped(3), (vec![], 0, false));
    }
}

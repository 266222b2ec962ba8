//! Jobs on reactors, from start to merged result.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use bdev::Registry;
use reactor::{Core, Gone, Period, Remote};

use crate::generator::Generator;
use crate::place::{Geometry, SetupError};
use crate::poller::{DynChannel, JobPoller, Progress};
use crate::result::JobResult;
use crate::source::{self, Prepared, Source, SourceError};
use crate::spec::JobSpec;

/// Why jobs could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// What is driven cannot be.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The job does not fit it.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// A reactor ended.
    #[error(transparent)]
    Gone(#[from] Gone),
}

/// Jobs that run.
pub struct Running {
    progress: Vec<Arc<Progress>>,
    results: mpsc::Receiver<JobResult>,
    finished: Vec<JobResult>,
}

/// One job's way to its reactor.
struct Order {
    spec: JobSpec,
    device: Option<bdev::Descriptor>,
    uri: Option<nvme::Uri>,
    progress: Arc<Progress>,
    results: mpsc::Sender<JobResult>,
    answers: mpsc::Sender<Result<(), RunError>>,
}

/// Starts `jobs` copies of `spec` on the reactors in turn; all begin together. Not for reactors.
pub fn start(
    spec: &JobSpec,
    jobs: u32,
    source: &Source,
    registry: &Registry,
    remotes: &[Remote],
) -> Result<Running, RunError> {
    assert!(!remotes.is_empty() && jobs > 0, "{jobs} jobs on {} reactors", remotes.len());
    let prepared = source.prepare(registry)?;
    let (results, receiver) = mpsc::channel();
    let (answers, answered) = mpsc::channel();
    let mut progress = Vec::new();
    for number in 0..jobs {
        let mine = Arc::new(Progress::default());
        progress.push(mine.clone());
        let (device, uri, device_bytes) = match &prepared {
            Prepared::Bdev { name } => {
                let device = source::open(registry, name, spec)?;
                let bytes = device.device().geometry().bytes();
                (Some(device), None, bytes)
            }
            Prepared::NvmeTcp { uri } => (None, Some(uri.clone()), spec.size_bytes.unwrap_or(0)),
        };
        let spec = spec.for_thread(number, jobs, device_bytes);
        let order =
            Order { spec, device, uri, progress: mine, results: results.clone(), answers: answers.clone() };
        remotes[number as usize % remotes.len()].post(move |core| order.place(core))?;
    }
    drop(answers);
    let mut outcome = Ok(());
    for _ in 0..jobs {
        // A core that took an order and gives no answer has ended.
        outcome = outcome.and(answered.recv().unwrap_or(Err(RunError::Gone(Gone))));
    }
    if let Err(error) = outcome {
        progress.iter().for_each(|progress| progress.stop());
        return Err(error);
    }
    progress.iter().for_each(|progress| progress.go());
    Ok(Running { progress, results: receiver, finished: Vec::new() })
}

/// Runs jobs to their end; the results in the order in which they ended.
pub fn run(
    spec: &JobSpec,
    jobs: u32,
    source: &Source,
    registry: &Registry,
    remotes: &[Remote],
) -> Result<Vec<JobResult>, RunError> {
    let mut running = start(spec, jobs, source, registry, remotes)?;
    while !running.wait(Duration::from_secs(3600)) {}
    Ok(running.into_results())
}

impl Running {
    /// Waits until every job is over, at most so long; whether they are.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        let end = std::time::Instant::now() + timeout;
        while self.finished.len() < self.progress.len() {
            let left = end.saturating_duration_since(std::time::Instant::now());
            match self.results.recv_timeout(left) {
                Ok(result) => self.finished.push(result),
                Err(mpsc::RecvTimeoutError::Timeout) => return false,
                // The reactors ended under the jobs: there is no more to wait for.
                Err(mpsc::RecvTimeoutError::Disconnected) => return true,
            }
        }
        true
    }

    /// I/Os that completed so far, and faults.
    pub fn totals(&self) -> (u64, u64) {
        let add = |(ios, faults): (u64, u64), one: &Arc<Progress>| (ios + one.ios(), faults + one.faults());
        self.progress.iter().fold((0, 0), add)
    }

    /// Asks every job to end.
    pub fn stop(&self) {
        self.progress.iter().for_each(|progress| progress.stop());
    }

    /// What has been measured by the jobs that are over.
    pub fn into_results(self) -> Vec<JobResult> {
        self.finished
    }
}

impl Order {
    fn place(mut self, core: &Core) {
        if let Some(device) = self.device.take() {
            let outcome = self.place_on(core, &device);
            // Whoever waited for the answer has given up; then the job never starts.
            let _ = self.answers.send(outcome);
        } else if let Some(uri) = self.uri.take() {
            let (core, task) = (core.clone(), core.clone());
            // Refused only by a core with thousands of tasks; the answer's sender is dropped then, too.
            core.spawn(async move {
                let outcome = self.place_far(&task, uri).await;
                let _ = self.answers.send(outcome);
            });
        }
    }

    fn place_on(&self, core: &Core, device: &bdev::Descriptor) -> Result<(), RunError> {
        let geometry = device.device().geometry();
        let geometry = Geometry { block_bytes: geometry.block_size, blocks: geometry.blocks };
        let channel = device.channel(core).map_err(SourceError::from)?;
        self.add(core, geometry, Box::new(channel))
    }

    /// Connects with a queue as deep as the job.
    async fn place_far(&self, core: &Core, uri: nvme::Uri) -> Result<(), RunError> {
        let options = nvme::Options { queue_depth: self.spec.io_depth.clamp(1, 1023), ..Default::default() };
        let namespace = nvme::Namespace::open(core, &uri, &options)
            .await
            .map_err(|source| SourceError::Fabric { uri: Box::new(uri), source: Box::new(source) })?;
        let (bs, max) = (self.spec.block_bytes, namespace.transfer_max_bytes());
        if bs > max {
            return Err(SetupError::BlockTooLarge { bs, max: max as usize }.into());
        }
        let geometry = Geometry { block_bytes: namespace.block_size(), blocks: namespace.blocks() };
        self.add(core, geometry, Box::new(namespace))
    }

    fn add(&self, core: &Core, geometry: Geometry, channel: Box<DynChannel>) -> Result<(), RunError> {
        let generator = Generator::new(self.spec.clone(), geometry, core.pool())?;
        let poller = JobPoller::new(generator, channel, self.progress.clone(), self.results.clone());
        core.add_poller(Box::new(poller), Period::EveryTurn);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Verify, Workload};

    fn reactors(count: usize) -> reactor::Reactors {
        let cpu = sys::CpuSet::allowed().cpus()[0];
        let cpus = sys::CpuSet::new((0..count as u32).map(|offset| cpu + offset).collect()).unwrap();
        reactor::Reactors::start(&reactor::Config { cpus, ..Default::default() }).unwrap()
    }

    #[test]
    fn jobs_on_two_reactors_verify_their_own_halves() {
        let (reactors, registry) = (reactors(2), Registry::new());
        let spec = JobSpec {
            workload: Workload::RandWrite,
            io_depth: 16,
            verify: Verify::Pattern,
            ..JobSpec::default()
        };
        let source = Source::parse("malloc:4m").unwrap();
        let results = run(&spec, 2, &source, &registry, reactors.remotes()).unwrap();
        let merged = JobResult::merged(&results).unwrap();
        assert!(merged.is_clean(), "{:?}", merged.mismatches);
        assert_eq!((merged.jobs, merged.sides[1].total_ios), (2, 1024));
        assert!(merged.checked_blocks > 4000, "{}", merged.checked_blocks);
    }

    #[test]
    fn a_job_that_does_not_fit_starts_nothing() {
        let (reactors, registry) = (reactors(1), Registry::new());
        let spec = JobSpec { block_bytes: 1000, ..JobSpec::default() };
        let source = Source::parse("null:1m").unwrap();
        let error = start(&spec, 3, &source, &registry, reactors.remotes()).err().unwrap();
        assert!(error.to_string().contains("--bs=1000"), "{error}");
    }

    #[test]
    fn an_endless_job_stops_when_asked() {
        let (reactors, registry) = (reactors(1), Registry::new());
        let endless = Some(u64::MAX / 8);
        let spec = JobSpec { time_based: true, runtime_ns: endless, ..JobSpec::default() };
        let source = Source::parse("null:1m").unwrap();
        let mut running = start(&spec, 1, &source, &registry, reactors.remotes()).unwrap();
        assert!(!running.wait(Duration::from_millis(20)));
        assert!(running.totals().0 > 0);
        running.stop();
        assert!(running.wait(Duration::from_secs(10)));
        assert!(running.into_results()[0].is_clean());
    }
}

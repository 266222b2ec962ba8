//! Jobs on reactors, from start to merged result.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use bdev::Registry;
use reactor::{Core, Gone, Period, Remote};

use crate::fan::Fan;
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
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] engines::FileError),
    /// An engine cannot be opened.
    #[error(transparent)]
    Engine(#[from] engines::OpenError),
    /// The options ask for what is not there, or do not fit each other.
    #[error("{0}")]
    Options(String),
    /// The machine refuses something.
    #[error("{what}: {error}")]
    Machine {
        /// What.
        what: String,
        /// Why.
        error: std::io::Error,
    },
    /// A job's process failed; its own words.
    #[error("{message}")]
    Worker {
        /// Whether the options are at fault, and not the machine.
        usage: bool,
        /// What it said.
        message: String,
    },
}

impl RunError {
    /// Whether what was asked for is at fault, and not the machine.
    pub fn is_usage(&self) -> bool {
        match self {
            RunError::Source(_) | RunError::Setup(_) | RunError::File(_) | RunError::Options(_) => true,
            RunError::Engine(error) => !matches!(error, engines::OpenError::Kernel { .. }),
            RunError::Gone(_) | RunError::Machine { .. } => false,
            RunError::Worker { usage, .. } => *usage,
        }
    }
}

/// Jobs that run.
pub struct Running {
    progress: Vec<Arc<Progress>>,
    results: mpsc::Receiver<(u32, JobResult)>,
    finished: Vec<(u32, JobResult)>,
}

/// One job's way to its reactor.
struct Order {
    spec: JobSpec,
    number: u32,
    jobs: u32,
    log_number: u32,
    targets: Vec<Target>,
    progress: Arc<Progress>,
    results: mpsc::Sender<(u32, JobResult)>,
    answers: mpsc::Sender<Result<(), RunError>>,
}

/// One file of a job.
enum Target {
    Device(bdev::Descriptor),
    Far(nvme::Uri),
}

/// What a job is driven over: its channels and what they are of.
type Opened = Vec<(Geometry, Box<DynChannel>)>;

/// Starts `jobs` copies of `spec` on the reactors in turn; all begin together. Not for reactors.
pub fn start(
    spec: &JobSpec,
    jobs: u32,
    source: &Source,
    registry: &Registry,
    remotes: &[Remote],
) -> Result<Running, RunError> {
    let running = place(spec, jobs, 1, std::slice::from_ref(source), registry, remotes)?;
    running.go();
    Ok(running)
}

/// As [`start`], over several sources and not yet begun: [`Running::go`] lets all of them begin.
/// `first_log` is the number of the first job's logs.
pub(crate) fn place(
    spec: &JobSpec,
    jobs: u32,
    first_log: u32,
    sources: &[Source],
    registry: &Registry,
    remotes: &[Remote],
) -> Result<Running, RunError> {
    assert!(!remotes.is_empty() && jobs > 0, "{jobs} jobs on {} reactors", remotes.len());
    let prepared = sources.iter().map(|source| source.prepare(registry)).collect::<Result<Vec<_>, _>>()?;
    let (results, receiver) = mpsc::channel();
    let (answers, answered) = mpsc::channel();
    let mut progress = Vec::new();
    for number in 0..jobs {
        let mine = Arc::new(Progress::default());
        progress.push(mine.clone());
        let target = |prepared: &Prepared| match prepared {
            Prepared::Bdev { name } => source::open(registry, name, spec).map(Target::Device),
            Prepared::Nvme { uri } => Ok(Target::Far(uri.clone())),
        };
        let targets = prepared.iter().map(target).collect::<Result<Vec<_>, _>>()?;
        let order = Order {
            spec: spec.clone(),
            number,
            jobs,
            log_number: first_log + number,
            targets,
            progress: mine,
            results: results.clone(),
            answers: answers.clone(),
        };
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

    /// What has been measured by the jobs that are over, in the order in which they ended.
    pub fn into_results(self) -> Vec<JobResult> {
        self.finished.into_iter().map(|(_, result)| result).collect()
    }

    /// The same with each job's number.
    pub(crate) fn into_numbered(self) -> Vec<(u32, JobResult)> {
        self.finished
    }

    /// Lets the jobs begin.
    pub(crate) fn go(&self) {
        self.progress.iter().for_each(|progress| progress.go());
    }

    /// Whether any job is over.
    pub(crate) fn any_over(&self) -> bool {
        !self.finished.is_empty()
    }
}

impl Order {
    fn place(self, core: &Core) {
        if self.targets.iter().all(|target| matches!(target, Target::Device(_))) {
            let outcome = self.open_near(core).and_then(|opened| self.add(core, opened));
            // Whoever waited for the answer has given up; then the job never starts.
            let _ = self.answers.send(outcome);
            return;
        }
        let (core, task) = (core.clone(), core.clone());
        // Refused only by a core with thousands of tasks; the answer's sender is dropped then, too.
        core.spawn(async move {
            let opened = self.open_far(&task).await;
            let _ = self.answers.send(opened.and_then(|opened| self.add(&task, opened)));
        });
    }

    fn open_near(&self, core: &Core) -> Result<Opened, RunError> {
        let devices = self.targets.iter().filter_map(|target| match target {
            Target::Device(device) => Some(device),
            Target::Far(_) => None,
        });
        devices.map(|device| open_device(core, device)).collect()
    }

    /// Connects with queues as deep as the job.
    async fn open_far(&self, core: &Core) -> Result<Opened, RunError> {
        let options = nvme::Options { queue_depth: self.spec.io_depth.clamp(1, 1023), ..Default::default() };
        let mut opened: Opened = Vec::new();
        for target in &self.targets {
            let uri = match target {
                Target::Device(device) => {
                    opened.push(open_device(core, device)?);
                    continue;
                }
                Target::Far(uri) => uri,
            };
            let failed =
                |source| SourceError::Fabric { uri: Box::new(uri.clone()), source: Box::new(source) };
            let namespace = nvme::Namespace::open(core, uri, &options).await.map_err(failed)?;
            let (bs, max) = (self.spec.block_bytes, namespace.transfer_max_bytes());
            if bs > max {
                return Err(SetupError::BlockTooLarge { bs, max: max as usize }.into());
            }
            let geometry = Geometry { block_bytes: namespace.block_size(), blocks: namespace.blocks() };
            opened.push((geometry, Box::new(namespace)));
        }
        Ok(opened)
    }

    fn add(&self, core: &Core, opened: Opened) -> Result<(), RunError> {
        let (files, mut channels): (Vec<Geometry>, Vec<Box<DynChannel>>) = opened.into_iter().unzip();
        let first = files.first().map_or(0, |file| file.blocks.saturating_mul(u64::from(file.block_bytes)));
        let spec = self.spec.for_thread(self.number, self.jobs, first);
        let generator = Generator::over(spec, &files, core.pool())?;
        let channel: Box<DynChannel> = match channels.len() {
            1 => channels.swap_remove(0),
            _ => Box::new(Fan::new(channels)),
        };
        let seat = (self.number, self.log_number);
        let poller = JobPoller::new(generator, channel, self.progress.clone(), self.results.clone(), seat);
        core.add_poller(Box::new(poller), Period::EveryTurn);
        Ok(())
    }
}

fn open_device(core: &Core, device: &bdev::Descriptor) -> Result<(Geometry, Box<DynChannel>), RunError> {
    let geometry = device.device().geometry();
    let geometry = Geometry { block_bytes: geometry.block_size, blocks: geometry.blocks };
    let channel = device.channel(core).map_err(SourceError::from)?;
    Ok((geometry, Box::new(channel)))
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

//! Jobs on reactors, from start to result.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use bdev::Registry;
use reactor::{Core, Period, ReactorHandle, ReactorUnavailable};

use crate::access_pattern::{Geometry, SetupError};
use crate::generator::Generator;
use crate::multi_channel::MultiChannel;
use crate::poller::{DynChannel, JobPoller, Progress};
use crate::result::JobResult;
use crate::source::{self, PreparedSource, Source, SourceError};
use crate::spec::JobSpec;

/// Why jobs could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The device or target cannot be opened.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The job does not fit the device.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// A reactor has stopped.
    #[error(transparent)]
    ReactorUnavailable(#[from] ReactorUnavailable),
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] io_engines::EngineFileError),
    /// An engine cannot be opened.
    #[error(transparent)]
    Engine(#[from] io_engines::EngineOpenError),
    /// Options name something that does not exist, or contradict each other.
    #[error("{0}")]
    Options(String),
    /// A system call or a write to sysfs, procfs or a cgroup failed.
    #[error("{what}: {error}")]
    Machine {
        /// The operation that failed.
        what: String,
        /// The operating system's error.
        error: std::io::Error,
    },
    /// A job's process failed.
    #[error("{message}")]
    Worker {
        /// Whether the options caused the failure, not the system.
        usage: bool,
        /// The error message of the process.
        message: String,
    },
}

impl RunError {
    /// Whether the options caused the error, not the system.
    pub fn is_usage(&self) -> bool {
        match self {
            RunError::Source(SourceError::Fabric { .. } | SourceError::Store(_)) => false,
            RunError::Source(_) | RunError::Setup(_) | RunError::File(_) | RunError::Options(_) => true,
            RunError::Engine(error) => !matches!(error, io_engines::EngineOpenError::Kernel { .. }),
            RunError::ReactorUnavailable(_) | RunError::Machine { .. } => false,
            RunError::Worker { usage, .. } => *usage,
        }
    }
}

/// The copies of a job that run on reactors. Each publishes its counters in a [`Progress`] and sends its
/// result once, when it finishes.
pub struct RunningJob {
    progress: Vec<Arc<Progress>>,
    results: mpsc::Receiver<(u32, JobResult)>,
    finished: Vec<(u32, JobResult)>,
}

/// One copy of a job, posted to its reactor, which opens the files and adds the poller.
struct JobSetup {
    spec: JobSpec,
    number: u32,
    jobs: u32,
    log_number: u32,
    files: Vec<JobFile>,
    progress: Arc<Progress>,
    results: mpsc::Sender<(u32, JobResult)>,
    replies: mpsc::Sender<Result<(), RunError>>,
}

/// One file of a job: a bdev of this process, or a namespace that the reactor connects to.
enum JobFile {
    Bdev(bdev::Descriptor),
    Remote(nvme::Uri),
}

/// The channels of a job with the geometry of their devices, in the order of its files.
type OpenedFiles = Vec<(Geometry, Box<DynChannel>)>;

/// Starts `jobs` copies of `spec` on the reactors round-robin; all start I/O together. Blocks, so it must not
/// be called on a reactor.
pub fn start(
    spec: &JobSpec,
    jobs: u32,
    source: &Source,
    registry: &Registry,
    reactors: &[ReactorHandle],
) -> Result<RunningJob, RunError> {
    let running = prepare(spec, jobs, 1, std::slice::from_ref(source), registry, reactors)?;
    running.start_io();
    Ok(running)
}

/// Like [`start`], with several sources, but no I/O starts before [`RunningJob::start_io`].
/// `first_log` is the number in the names of the first copy's log files.
pub(crate) fn prepare(
    spec: &JobSpec,
    jobs: u32,
    first_log: u32,
    sources: &[Source],
    registry: &Registry,
    reactors: &[ReactorHandle],
) -> Result<RunningJob, RunError> {
    assert!(!reactors.is_empty() && jobs > 0, "{jobs} jobs on {} reactors", reactors.len());
    let writes = spec.workload.writes();
    let prepared =
        sources.iter().map(|source| source.prepare(registry, writes)).collect::<Result<Vec<_>, _>>()?;
    let (results, receiver) = mpsc::channel();
    let (reply_sender, reply_receiver) = mpsc::channel();
    let mut progress = Vec::new();
    for number in 0..jobs {
        let job_progress = Arc::new(Progress::default());
        progress.push(job_progress.clone());
        let file = |prepared: &PreparedSource| match prepared {
            PreparedSource::Bdev { name } => source::open(registry, name, spec).map(JobFile::Bdev),
            PreparedSource::Nvme { uri } => Ok(JobFile::Remote(uri.clone())),
        };
        let files = prepared.iter().map(file).collect::<Result<Vec<_>, _>>()?;
        let setup = JobSetup {
            spec: spec.clone(),
            number,
            jobs,
            log_number: first_log + number,
            files,
            progress: job_progress,
            results: results.clone(),
            replies: reply_sender.clone(),
        };
        reactors[number as usize % reactors.len()].post(move |core| setup.set_up(core))?;
    }
    drop(reply_sender);
    let mut outcome = Ok(());
    for _ in 0..jobs {
        // A core that took the setup and sends no reply has stopped.
        outcome = outcome
            .and(reply_receiver.recv().unwrap_or(Err(RunError::ReactorUnavailable(ReactorUnavailable))));
    }
    if let Err(error) = outcome {
        progress.iter().for_each(|progress| progress.stop());
        return Err(error);
    }
    Ok(RunningJob { progress, results: receiver, finished: Vec::new() })
}

/// Runs jobs until all finish; returns the results in the order in which the jobs finished.
pub fn run(
    spec: &JobSpec,
    jobs: u32,
    source: &Source,
    registry: &Registry,
    reactors: &[ReactorHandle],
) -> Result<Vec<JobResult>, RunError> {
    let mut running = start(spec, jobs, source, registry, reactors)?;
    while !running.wait(Duration::from_secs(3600)) {}
    Ok(running.into_results())
}

impl RunningJob {
    /// Waits up to `timeout` until every job has finished or its reactor has stopped; returns false on
    /// timeout.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        let end = std::time::Instant::now() + timeout;
        while self.finished.len() < self.progress.len() {
            let left = end.saturating_duration_since(std::time::Instant::now());
            match self.results.recv_timeout(left) {
                Ok(result) => self.finished.push(result),
                Err(mpsc::RecvTimeoutError::Timeout) => return false,
                // The reactors stopped before the jobs finished: no more results will arrive.
                Err(mpsc::RecvTimeoutError::Disconnected) => return true,
            }
        }
        true
    }

    /// Completed I/Os, and the sum of failed I/Os and verification mismatches, so far.
    pub fn totals(&self) -> (u64, u64) {
        let add = |(ios, faults): (u64, u64), one: &Arc<Progress>| (ios + one.ios(), faults + one.faults());
        self.progress.iter().fold((0, 0), add)
    }

    /// Asks every job to stop; each drains its I/O first.
    pub fn stop(&self) {
        self.progress.iter().for_each(|progress| progress.stop());
    }

    /// The results of the jobs that have finished, in the order in which they finished.
    pub fn into_results(self) -> Vec<JobResult> {
        self.finished.into_iter().map(|(_, result)| result).collect()
    }

    /// Like [`into_results`](Self::into_results), with the number of each copy.
    pub(crate) fn into_numbered(self) -> Vec<(u32, JobResult)> {
        self.finished
    }

    /// Lets the jobs start I/O.
    pub(crate) fn start_io(&self) {
        self.progress.iter().for_each(|progress| progress.begin());
    }

    /// The shared state of each copy.
    pub(crate) fn progress(&self) -> &[Arc<Progress>] {
        &self.progress
    }

    /// Whether any job has finished.
    pub(crate) fn any_finished(&self) -> bool {
        !self.finished.is_empty()
    }
}

impl JobSetup {
    fn set_up(self, core: &Core) {
        if self.files.iter().all(|file| matches!(file, JobFile::Bdev(_))) {
            let outcome = self.open_bdevs(core).and_then(|opened| self.add(core, opened));
            // If the receiver is gone, `prepare` failed, and the job never starts.
            let _ = self.replies.send(outcome);
            return;
        }
        let (core, task) = (core.clone(), core.clone());
        // Fails only on a core with thousands of tasks; then the reply's sender is dropped too.
        core.spawn(async move {
            let opened = self.open_remotes(&task).await;
            let _ = self.replies.send(opened.and_then(|opened| self.add(&task, opened)));
        });
    }

    fn open_bdevs(&self, core: &Core) -> Result<OpenedFiles, RunError> {
        let devices = self.files.iter().filter_map(|file| match file {
            JobFile::Bdev(device) => Some(device),
            JobFile::Remote(_) => None,
        });
        devices.map(|device| Ok(source::open_device(core, device)?)).collect()
    }

    /// Opens all files; connects to namespaces with a queue depth equal to the job's I/O depth.
    async fn open_remotes(&self, core: &Core) -> Result<OpenedFiles, RunError> {
        let options = nvme::Options { queue_depth: self.spec.io_depth.clamp(1, 1023), ..Default::default() };
        let mut opened: OpenedFiles = Vec::new();
        for file in &self.files {
            let uri = match file {
                JobFile::Bdev(device) => {
                    opened.push(source::open_device(core, device)?);
                    continue;
                }
                JobFile::Remote(uri) => uri,
            };
            let failed =
                |source| SourceError::Fabric { uri: Box::new(uri.clone()), source: Box::new(source) };
            let connected = match self.spec.reconnects_for_ns() {
                0 => nvme::Namespace::open(core, uri, &options).await,
                outage_ns_max => nvme::Namespace::open_reconnecting(core, uri, &options, outage_ns_max).await,
            };
            let namespace = connected.map_err(failed)?;
            let (bs, max) = (self.spec.block_bytes, namespace.transfer_max_bytes());
            if bs > max {
                return Err(SetupError::BlockTooLarge { bs, max: max as usize }.into());
            }
            let geometry = Geometry { block_bytes: namespace.block_size(), blocks: namespace.blocks() };
            opened.push((geometry, Box::new(namespace)));
        }
        Ok(opened)
    }

    fn add(&self, core: &Core, opened: OpenedFiles) -> Result<(), RunError> {
        let (files, mut channels): (Vec<Geometry>, Vec<Box<DynChannel>>) = opened.into_iter().unzip();
        let first = files.first().map_or(0, |file| file.blocks.saturating_mul(u64::from(file.block_bytes)));
        let spec = self.spec.for_thread(self.number, self.jobs, first);
        if spec.block_bytes as usize > dma::BUFFER_BYTES_MAX {
            let (bs, max) = (spec.block_bytes, dma::BUFFER_BYTES_MAX);
            return Err(SetupError::BlockTooLarge { bs, max }.into());
        }
        let generator = Generator::with_files(spec, &files, core.pool())?;
        let channel: Box<DynChannel> = match channels.len() {
            1 => channels.swap_remove(0),
            _ => Box::new(MultiChannel::new(channels)),
        };
        let numbers = (self.number, self.log_number);
        let poller = JobPoller::new(generator, channel, self.progress.clone(), self.results.clone(), numbers);
        core.add_poller(Box::new(poller), Period::EveryTurn);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Verify, Workload};

    fn reactors(count: usize) -> reactor::Reactors {
        let cpu = os::CpuSet::allowed().cpus()[0];
        let cpus = os::CpuSet::new((0..count as u32).map(|offset| cpu + offset).collect()).unwrap();
        reactor::Reactors::start(&reactor::ReactorConfig { cpus, ..Default::default() }).unwrap()
    }

    #[test]
    fn jobs_on_two_reactors_verify_disjoint_ranges() {
        let (reactors, registry) = (reactors(2), Registry::new());
        let spec = JobSpec {
            workload: Workload::RandWrite,
            io_depth: 16,
            verify: Verify::Pattern,
            ..JobSpec::default()
        };
        let source = Source::parse("malloc:4m").unwrap();
        let results = run(&spec, 2, &source, &registry, reactors.handles()).unwrap();
        let merged = JobResult::merged(&results).unwrap();
        assert!(merged.is_clean(), "{:?}", merged.mismatches);
        assert_eq!((merged.jobs, merged.directions[1].total_ios), (2, 1024));
        assert!(merged.checked_blocks > 4000, "{}", merged.checked_blocks);
    }

    #[test]
    fn a_job_with_a_wrong_block_size_fails_to_start() {
        let (reactors, registry) = (reactors(1), Registry::new());
        let spec = JobSpec { block_bytes: 1000, ..JobSpec::default() };
        let source = Source::parse("null:1m").unwrap();
        let error = start(&spec, 3, &source, &registry, reactors.handles()).err().unwrap();
        assert!(error.to_string().contains("--bs=1000"), "{error}");
    }

    #[test]
    fn stop_ends_a_job_without_a_time_limit() {
        let (reactors, registry) = (reactors(1), Registry::new());
        let endless = Some(u64::MAX / 8);
        let spec = JobSpec { time_based: true, runtime_ns: endless, ..JobSpec::default() };
        let source = Source::parse("null:1m").unwrap();
        let mut running = start(&spec, 1, &source, &registry, reactors.handles()).unwrap();
        assert!(!running.wait(Duration::from_millis(20)));
        assert!(running.totals().0 > 0);
        running.stop();
        assert!(running.wait(Duration::from_secs(10)));
        assert!(running.into_results()[0].is_clean());
    }
}

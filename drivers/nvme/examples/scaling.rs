//! Measures how the driver scales over cores: queue pairs of one controller, each on its own core.
//!
//! `scaling CPUS [DEPTH [SECONDS]]` creates a queue pair on each CPU of a list such as `0-3,5`. Each reads 4 KiB blocks
//! at queue depth DEPTH from a simulated controller, of which each core steps its own queue. Only the driver's time in
//! submission and completion is measured, not the controller's. The result is the sum of the rates of all cores.

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use block_io::{Channel, Completion, Request, Tag};
use dma::Data;
use nvme::testing::{SimulatedConfig, SimulatedController};
use nvme::{Controller, InterruptMode, Namespace, Options};
use reactor::{Core, IdlePolicy, Period, PollResult, Poller, Reactors, Shutdown};

const BLOCKS: u64 = 1 << 15;
const START_MAX: Duration = Duration::from_secs(10);

type CoreResult<T> = Result<T, String>;

/// Executes the admin queue of the simulated controller.
struct AdminStepper(SimulatedController);

impl Poller for AdminStepper {
    fn name(&self) -> &str {
        "admin queue"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        PollResult::from_count(self.0.step_queue(0))
    }
}

/// The read load of one core.
struct ReadLoad {
    device: SimulatedController,
    namespace: Namespace,
    qid: u16,
    batch: Vec<Request<Data>>,
    sink: Vec<Completion<Data>>,
    started_at: Instant,
    time: Duration,
    driver_time: Duration,
    count: u64,
    /// Receives the reads per second at the end.
    result_sender: Option<Sender<CoreResult<f64>>>,
}

impl ReadLoad {
    async fn new(
        core: &Core,
        device: SimulatedController,
        controller: &Controller,
        depth: u64,
    ) -> CoreResult<ReadLoad> {
        let mut namespace =
            Namespace::of(controller, core, 1, &options(depth)).await.map_err(|error| error.to_string())?;
        let qid = namespace.queue_pair().ok_or("the simulated controller has queue pairs")?.qid();
        let read = |tag| Some(Request::read(Tag(tag), tag, 1, core.pool().take(4096)?));
        let batch = (0..depth).map(read).collect::<Option<Vec<_>>>().ok_or("no memory")?;
        let (started_at, sink) = (Instant::now(), Vec::with_capacity(batch.len()));
        let (time, driver_time) = (Duration::ZERO, Duration::ZERO);
        Ok(ReadLoad {
            device,
            namespace,
            qid,
            batch,
            sink,
            started_at,
            time,
            driver_time,
            count: 0,
            result_sender: None,
        })
    }

    fn round(&mut self) -> CoreResult<()> {
        let submitting = Instant::now();
        self.namespace.submit(&mut self.batch);
        self.driver_time += submitting.elapsed();
        self.device.step_queue(self.qid);
        let polling = Instant::now();
        self.count += self.namespace.poll(&mut self.sink) as u64;
        self.driver_time += polling.elapsed();
        if let Some(bad) = self.sink.iter().find(|completion| !completion.status().is_success()) {
            return Err(bad.status().to_string());
        }
        self.batch.extend(self.sink.drain(..).map(Completion::into_request));
        Ok(())
    }
}

impl Poller for ReadLoad {
    fn name(&self) -> &str {
        "reads"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        if self.result_sender.is_some() {
            let outcome = self.round();
            if outcome.is_err() || self.started_at.elapsed() >= self.time {
                let rate = self.count as f64 / self.driver_time.as_secs_f64();
                if let Some(sender) = self.result_sender.take() {
                    let _ = sender.send(outcome.map(|()| rate));
                }
            }
        }
        PollResult::Busy(1)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

fn options(depth: u64) -> Options {
    Options { queue_depth: depth as u32, interrupts: InterruptMode::Off, ..Options::default() }
}

/// Receives the next result from a core.
fn next_result<T>(results: &Receiver<CoreResult<T>>, limit: Duration) -> CoreResult<T> {
    results.recv_timeout(limit).map_err(|error| format!("a core does not respond: {error}"))?
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let cpus: os::CpuSet = arguments.first().ok_or("usage: scaling CPUS [DEPTH [SECONDS]]")?.parse()?;
    let depth: u64 = arguments.get(1).map_or(Ok(128), |text| text.parse())?;
    let time = Duration::from_secs(arguments.get(2).map_or(Ok(2), |text| text.parse())?);
    let depth = depth.clamp(1, 1023);
    let arena = dma::Arena::new(dma::ArenaConfig { shared: true, hugepages: false, ..Default::default() });
    let idle = IdlePolicy::Spin;
    let reactors = Reactors::start(&reactor::ReactorConfig { cpus, arena, idle, ..Default::default() })?;
    let device = SimulatedController::new(SimulatedConfig::new(BLOCKS, 4096));

    let (sender, attached) = channel();
    let admin = device.clone();
    reactors.handles()[0].post(move |core| {
        core.add_poller(Box::new(AdminStepper(admin.clone())), Period::EveryTurn);
        let core = core.clone();
        core.clone().spawn(async move {
            let attached = Controller::attach_device(&core, admin.device(), &options(depth)).await;
            let _ = sender.send(attached.map_err(|error| error.to_string()));
        });
    })?;
    let controller = next_result(&attached, START_MAX)?;

    let (ready, started) = channel();
    let (sender, rates) = channel();
    let mut cores = Vec::new();
    for remote in reactors.handles() {
        let (device, controller) = (device.clone(), controller.clone());
        let (ready, sender) = (ready.clone(), sender.clone());
        let (go, begin) = channel::<()>();
        cores.push(go);
        remote.post(move |core| {
            let core = core.clone();
            core.clone().spawn(async move {
                let reads = ReadLoad::new(&core, device, &controller, depth).await;
                let Ok(mut reads) = reads.map_err(|error| drop(ready.send(Err(error)))) else { return };
                let _ = ready.send(Ok(()));
                while begin.try_recv().is_err() {
                    core.sleep_ns(1_000_000).await;
                }
                (reads.started_at, reads.time, reads.result_sender) = (Instant::now(), time, Some(sender));
                core.add_poller(Box::new(reads), Period::EveryTurn);
            });
        })?;
    }
    for _ in &cores {
        next_result(&started, START_MAX)?;
    }
    for core in &cores {
        core.send(())?;
    }
    let mut sum = 0.0;
    for _ in &cores {
        sum += next_result(&rates, START_MAX + time)?;
    }
    println!("{} queue pairs at depth {depth}, in the driver alone: {sum:.0} reads/s", cores.len());
    Ok(())
}

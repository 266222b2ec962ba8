//! How the driver scales: queue pairs of one controller, each on a core of its own.
//!
//! `scaling CPUS [DEPTH [SECONDS]]` has a queue pair on each CPU of a list as `0-3,5` read blocks of 4 KiB, DEPTH at a
//! time, from a controller in software that each core steps for its own queue. Only the driver's time counts, from
//! submission to completion, and not the controller's: what is told is the sum of the rates that the cores reach.

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use memory::Buffer;
use nvme::simulated::{Config, Simulated};
use nvme::{Controller, Interrupts, Namespace, Options};
use reactor::{Core, IdlePolicy, Period, Poller, Reactors, Shutdown, Work};
use ring::{Channel, Completion, Request, Tag};

const BLOCKS: u64 = 1 << 15;
const START_MAX: Duration = Duration::from_secs(10);

type Outcome<T> = Result<T, String>;

/// The admin queue of a controller in software.
struct Admin(Simulated);

impl Poller for Admin {
    fn name(&self) -> &str {
        "admin queue"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        Work::count(self.0.step_queue(0))
    }
}

/// Reads that one core does.
struct Reads {
    device: Simulated,
    namespace: Namespace,
    qid: u16,
    batch: Vec<Request<Buffer>>,
    sink: Vec<Completion<Buffer>>,
    begun: Instant,
    time: Duration,
    spent: Duration,
    count: u64,
    /// Reads a second go here at the end.
    answer: Option<Sender<Outcome<f64>>>,
}

impl Reads {
    async fn new(core: &Core, device: Simulated, controller: &Controller, depth: u64) -> Outcome<Reads> {
        let mut namespace =
            Namespace::of(controller, core, 1, &options(depth)).await.map_err(|error| error.to_string())?;
        let qid = namespace.queue_pair().ok_or("a controller in software has queue pairs")?.qid();
        let read = |tag| Some(Request::read(Tag(tag), tag, 1, core.pool().take(4096)?));
        let batch = (0..depth).map(read).collect::<Option<Vec<_>>>().ok_or("no memory")?;
        let (begun, sink) = (Instant::now(), Vec::with_capacity(batch.len()));
        let (time, spent) = (Duration::ZERO, Duration::ZERO);
        Ok(Reads { device, namespace, qid, batch, sink, begun, time, spent, count: 0, answer: None })
    }

    fn round(&mut self) -> Outcome<()> {
        let submitting = Instant::now();
        self.namespace.submit(&mut self.batch);
        self.spent += submitting.elapsed();
        self.device.step_queue(self.qid);
        let polling = Instant::now();
        self.count += self.namespace.poll(&mut self.sink) as u64;
        self.spent += polling.elapsed();
        if let Some(bad) = self.sink.iter().find(|completion| !completion.status().is_success()) {
            return Err(bad.status().to_string());
        }
        self.batch.extend(self.sink.drain(..).map(Completion::into_request));
        Ok(())
    }
}

impl Poller for Reads {
    fn name(&self) -> &str {
        "reads"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        if self.answer.is_some() {
            let outcome = self.round();
            if outcome.is_err() || self.begun.elapsed() >= self.time {
                let rate = self.count as f64 / self.spent.as_secs_f64();
                if let Some(answer) = self.answer.take() {
                    let _ = answer.send(outcome.map(|()| rate));
                }
            }
        }
        Work::Some(1)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

fn options(depth: u64) -> Options {
    Options { queue_depth: depth as u32, interrupts: Interrupts::Off, ..Options::default() }
}

/// The next of what the cores have to say.
fn next<T>(answers: &Receiver<Outcome<T>>, limit: Duration) -> Outcome<T> {
    answers.recv_timeout(limit).map_err(|error| format!("a core does not answer: {error}"))?
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let cpus: sys::CpuSet = arguments.first().ok_or("usage: scaling CPUS [DEPTH [SECONDS]]")?.parse()?;
    let depth: u64 = arguments.get(1).map_or(Ok(128), |text| text.parse())?;
    let time = Duration::from_secs(arguments.get(2).map_or(Ok(2), |text| text.parse())?);
    let depth = depth.clamp(1, 1023);
    let arena = memory::Arena::new(memory::Config { shared: true, hugepages: false, ..Default::default() });
    let idle = IdlePolicy::Spin;
    let reactors = Reactors::start(&reactor::Config { cpus, arena, idle, ..Default::default() })?;
    let device = Simulated::new(Config::new(BLOCKS, 4096));

    let (sender, attached) = channel();
    let admin = device.clone();
    reactors.remotes()[0].post(move |core| {
        core.add_poller(Box::new(Admin(admin.clone())), Period::EveryTurn);
        let core = core.clone();
        core.clone().spawn(async move {
            let attached = Controller::attach_device(&core, admin.device(), &options(depth)).await;
            let _ = sender.send(attached.map_err(|error| error.to_string()));
        });
    })?;
    let controller = next(&attached, START_MAX)?;

    let (ready, started) = channel();
    let (sender, rates) = channel();
    let mut cores = Vec::new();
    for remote in reactors.remotes() {
        let (device, controller) = (device.clone(), controller.clone());
        let (ready, sender) = (ready.clone(), sender.clone());
        let (go, begin) = channel::<()>();
        cores.push(go);
        remote.post(move |core| {
            let core = core.clone();
            core.clone().spawn(async move {
                let reads = Reads::new(&core, device, &controller, depth).await;
                let Ok(mut reads) = reads.map_err(|error| drop(ready.send(Err(error)))) else { return };
                let _ = ready.send(Ok(()));
                while begin.try_recv().is_err() {
                    core.sleep_ns(1_000_000).await;
                }
                (reads.begun, reads.time, reads.answer) = (Instant::now(), time, Some(sender));
                core.add_poller(Box::new(reads), Period::EveryTurn);
            });
        })?;
    }
    for _ in &cores {
        next(&started, START_MAX)?;
    }
    for core in &cores {
        core.send(())?;
    }
    let mut sum = 0.0;
    for _ in &cores {
        sum += next(&rates, START_MAX + time)?;
    }
    println!("{} queue pairs at depth {depth}, in the driver alone: {sum:.0} reads/s", cores.len());
    Ok(())
}

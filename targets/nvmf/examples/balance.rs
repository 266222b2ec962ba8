//! What the scheduler `dynamic` makes of I/O queues that all begin on one of two reactors.
//!
//! `balance [QUEUES [ROUNDS]]` serves a malloc device on two reactors over the loopback interface, to QUEUES
//! (16) hosts in two threads, each with 8 reads of 4 KiB in flight. The target assigns connections by their
//! number, and each host has an admin queue first, so that all I/O queues begin on one reactor. In each of
//! ROUNDS (5) they stay there, are divided at once by hand, or are left to `dynamic` for a second; then the
//! reads of a second count, of each of the three in turn. Prints the medians, and how many queues `dynamic`
//! had on each reactor after a second.

#[path = "../../shell/tests/moves/mod.rs"]
mod moves;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bdev::{Registry, malloc};
use block_io::{Channel, Request, Tag};
use control::json::json;
use control::{BalancedTarget, ConnectionMove, ControlPlane};
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, TcpTransportConfig};
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig};

type ExampleError = Box<dyn std::error::Error + Send + Sync>;

const NQN: &str = "nqn.2026-11.io.ringbolt:balance";
const DEPTH: u64 = 8;
const HOST_THREADS: usize = 2;
/// Time that `dynamic` has, and time in which reads count.
const SECOND: Duration = Duration::from_secs(1);
/// Time in which hosts have connected, or queues moved.
const PATIENCE: Duration = Duration::from_secs(10);

/// How queues get to their reactors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// They stay on the one on which they begin.
    OneSided,
    /// Half of them are moved at once, by hand.
    Even,
    /// The scheduler moves them.
    Dynamic,
}

const STARTS: [Start; 3] = [Start::OneSided, Start::Even, Start::Dynamic];

/// What the threads of hosts share.
#[derive(Default)]
struct Hosts {
    reads: AtomicU64,
    stop: AtomicBool,
}

/// Connects hosts and reads until they are stopped. Reports when they have connected.
async fn read(
    core: Core,
    uri: nvme::Uri,
    count: usize,
    hosts: Arc<Hosts>,
    connected: Sender<()>,
) -> Result<(), ExampleError> {
    let mut namespaces = Vec::new();
    for _ in 0..count {
        namespaces.push(nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await?);
    }
    let mut batches = Vec::new();
    for namespace in &namespaces {
        let blocks = namespace.blocks() / 8;
        let mut batch = Vec::new();
        for number in 0..DEPTH {
            let buffer = core.pool().take(4096).ok_or("there is no memory")?;
            batch.push(Request::read(Tag(number), number % blocks * 8, 8, buffer));
        }
        batches.push(batch);
    }
    connected.send(())?;
    let mut completions = Vec::new();
    while !hosts.stop.load(Ordering::Relaxed) {
        let (mut done, mut may_sleep) = (0, true);
        for (namespace, batch) in namespaces.iter_mut().zip(&mut batches) {
            namespace.submit(batch);
            done += namespace.poll(&mut completions);
            may_sleep &= namespace.deadline() != Some(0);
            for completion in completions.drain(..) {
                if !completion.status().is_success() {
                    return Err(format!("a read failed: {}", completion.status()).into());
                }
                batch.push(completion.into_request());
            }
        }
        hosts.reads.fetch_add(done as u64, Ordering::Relaxed);
        if done == 0 && may_sleep {
            core.next_event().await;
        }
    }
    Ok(())
}

type HostThread = JoinHandle<Result<(), ExampleError>>;

/// Starts a thread of hosts.
fn start(uri: &nvme::Uri, count: usize, hosts: &Arc<Hosts>) -> (HostThread, Receiver<()>) {
    let (sender, receiver) = channel();
    let (uri, hosts) = (uri.clone(), hosts.clone());
    let run = move || {
        let reactor = Reactor::new(&ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() })?;
        let core = reactor.core();
        reactor.block_on(read(core, uri, count, hosts, sender))
    };
    (std::thread::spawn(run), receiver)
}

/// I/O queues on each reactor.
fn queues(target: &dyn BalancedTarget) -> Vec<usize> {
    target.loads().unwrap_or_default().iter().map(Vec::len).collect()
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) -> Result<(), ExampleError> {
    let begun = Instant::now();
    while !is_so() {
        if begun.elapsed() > PATIENCE {
            return Err(format!("not in time: {what}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Moves half of the queues of a reactor that has all.
fn divide(target: &dyn BalancedTarget, count: usize) -> Result<(), ExampleError> {
    let loads = target.loads().ok_or("a reactor does not answer")?;
    let from = usize::from(loads[0].is_empty());
    let to = 1 - from;
    let half = loads[from].iter().take(count / 2);
    let moves: Vec<ConnectionMove> = half.map(|one| ConnectionMove { id: one.id, from, to }).collect();
    target.move_connections(&moves);
    wait_until("half of the queues move", || {
        let missing = count / 2 - queues(target)[to].min(count / 2);
        let Some(loads) = target.loads().filter(|_| missing > 0) else { return missing == 0 };
        let again = loads[from].iter().take(missing);
        let moves: Vec<ConnectionMove> = again.map(|one| ConnectionMove { id: one.id, from, to }).collect();
        target.move_connections(&moves);
        false
    })
}

/// The target and its control plane.
struct Served {
    target: NvmfTarget,
    balanced: Arc<dyn BalancedTarget>,
    plane: Arc<ControlPlane>,
    uri: nvme::Uri,
}

impl Served {
    /// Reads in a second after such a start, and the queues on each reactor before it.
    fn measure(&self, start_as: Start, count: usize) -> Result<(u64, Vec<usize>), ExampleError> {
        let hosts = Arc::new(Hosts::default());
        let mut threads = Vec::new();
        for _ in 0..HOST_THREADS {
            let (thread, connected) = start(&self.uri, count / HOST_THREADS, &hosts);
            threads.push(thread);
            if connected.recv_timeout(PATIENCE).is_err() {
                hosts.stop.store(true, Ordering::Relaxed);
                return Err("hosts do not connect".into());
            }
        }
        let measured = self.measure_connected(start_as, count, &hosts);
        hosts.stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| "a thread of hosts has failed")??;
        }
        wait_until("all queues close", || queues(&*self.balanced).iter().sum::<usize>() == 0)?;
        measured
    }

    fn measure_connected(
        &self,
        start_as: Start,
        count: usize,
        hosts: &Hosts,
    ) -> Result<(u64, Vec<usize>), ExampleError> {
        let begin = queues(&*self.balanced);
        if !begin.contains(&count) {
            return Err(format!("queues begin on both reactors: {begin:?}").into());
        }
        let set = |name: &str| {
            let set = self.plane.invoke("framework_set_scheduler", json!({ "name": name }));
            set.map_err(|error| error.message)
        };
        match start_as {
            Start::OneSided => {}
            Start::Even => divide(&*self.balanced, count)?,
            Start::Dynamic => drop(set("dynamic")?),
        }
        std::thread::sleep(SECOND);
        let on_reactors = queues(&*self.balanced);
        let (before, begun) = (hosts.reads.load(Ordering::Relaxed), Instant::now());
        std::thread::sleep(SECOND);
        let reads = hosts.reads.load(Ordering::Relaxed) - before;
        let rate = reads as f64 / begun.elapsed().as_secs_f64();
        set("static")?;
        Ok((rate as u64, on_reactors))
    }
}

fn main() -> Result<(), ExampleError> {
    let mut arguments = std::env::args().skip(1);
    let count: usize = arguments.next().map_or(Ok(16), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(5), |text| text.parse())?;
    if count == 0 || !count.is_multiple_of(HOST_THREADS) || rounds == 0 {
        return Err(format!("QUEUES: expected a multiple of {HOST_THREADS}; ROUNDS: at least 1").into());
    }
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 16384, 512))?;
    let reactors = moves::reactors().ok_or("two reactors need two processors")?;
    let target = NvmfTarget::new(registry, reactors.handles());
    target.create_transport(TcpTransportConfig::default())?;
    target.create_subsystem(NQN, SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() })?;
    target.add_namespace(NQN, NamespaceConfig::new("Malloc0"))?;
    let address = target.add_listener(NQN, ListenAddress::tcp("127.0.0.1", "0"))?;
    let uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", address.trsvcid).parse()?;
    let balanced = target.balanced().pop().ok_or("NVMe/TCP is not balanced")?;
    let plane = moves::plane(&reactors, balanced.clone());

    let served = Served { target, balanced, plane, uri };
    let mut rates = vec![Vec::new(); STARTS.len()];
    for round in 0..rounds {
        for (start_as, rates) in STARTS.iter().zip(&mut rates) {
            let (rate, on_reactors) = served.measure(*start_as, count)?;
            println!("round {}: {start_as:?}: {rate} reads/s, queues {on_reactors:?}", round + 1);
            rates.push(rate);
        }
    }
    let medians: Vec<u64> = rates
        .iter_mut()
        .map(|rates| {
            rates.sort_unstable();
            rates[rates.len() / 2]
        })
        .collect();
    println!(
        "one reactor {} reads/s, even {} reads/s, dynamic {} reads/s: {:.3} of even",
        medians[0],
        medians[1],
        medians[2],
        medians[2] as f64 / medians[1].max(1) as f64
    );
    served.plane.drain();
    served.target.shutdown();
    Ok(())
}

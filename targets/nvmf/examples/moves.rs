//! How long a move to another reactor keeps an I/O queue from answering.
//!
//! `moves [DEPTH [MOVES]]` serves a malloc device on two reactors over the loopback interface, and keeps
//! DEPTH (1) reads of 4 KiB in flight on one queue, which moves to the other reactor MOVES (200) times, every
//! 10 ms. It prints the longest pause between two answers in the 5 ms after a move was asked for, as median
//! and maximum of all moves, beside the same for as many times at which the queue stays.

#[path = "../../shell/tests/moves/mod.rs"]
mod moves;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use bdev::{Registry, malloc};
use block_io::{Channel, Request, Tag};
use control::{BalancedTarget, ConnectionMove};
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, TcpTransportConfig};
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig};

type ExampleError = Box<dyn std::error::Error>;

const NQN: &str = "nqn.2026-11.io.ringbolt:moves";
const INTERVAL: Duration = Duration::from_millis(10);
/// The part of an interval in which pauses count.
const WINDOW_NS: u64 = 5_000_000;

/// When a move was asked for, or not.
struct Asked {
    at_ns: u64,
    moves: bool,
}

/// Asks for a move in every other interval.
fn ask(target: &dyn BalancedTarget, times: usize) -> Vec<Asked> {
    let mut asked = Vec::new();
    for number in 0..2 * times {
        std::thread::sleep(INTERVAL);
        let Some(loads) = target.loads() else { break };
        let moves = number % 2 == 0;
        let of_reactor = |(from, connections): (usize, &Vec<control::ConnectionLoad>)| {
            let to = 1 - from;
            connections.iter().map(|one| ConnectionMove { id: one.id, from, to }).collect::<Vec<_>>()
        };
        let all: Vec<ConnectionMove> = loads.iter().enumerate().flat_map(of_reactor).collect();
        asked.push(Asked { at_ns: os::clock::now_ns(), moves });
        if moves {
            target.move_connections(&all);
        }
    }
    asked
}

/// Reads until `done` has something. Returns the times of the answers.
async fn read(
    core: Core,
    uri: nvme::Uri,
    depth: u64,
    done: Receiver<Vec<Asked>>,
) -> Result<(Vec<u64>, Vec<Asked>), ExampleError> {
    let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await?;
    let blocks = namespace.blocks() / 8;
    let mut batch = Vec::new();
    for number in 0..depth {
        let buffer = core.pool().take(4096).ok_or("there is no memory")?;
        batch.push(Request::read(Tag(number), number % blocks * 8, 8, buffer));
    }
    let (mut answers, mut completions) = (Vec::new(), Vec::new());
    loop {
        if let Ok(asked) = done.try_recv() {
            return Ok((answers, asked));
        }
        namespace.submit(&mut batch);
        if namespace.poll(&mut completions) == 0 {
            if namespace.deadline() != Some(0) {
                core.next_event().await;
            }
            continue;
        }
        answers.push(os::clock::now_ns());
        for completion in completions.drain(..) {
            if !completion.status().is_success() {
                return Err(format!("a read failed: {}", completion.status()).into());
            }
            batch.push(completion.into_request());
        }
    }
}

/// The longest pause between two answers in the window after a time.
fn longest_pause_ns(answers: &[u64], at_ns: u64) -> u64 {
    let first = answers.partition_point(|answer| *answer < at_ns).saturating_sub(1);
    let last = answers.partition_point(|answer| *answer < at_ns + WINDOW_NS);
    answers[first..last].windows(2).map(|two| two[1] - two[0]).max().unwrap_or(WINDOW_NS)
}

fn main() -> Result<(), ExampleError> {
    let mut arguments = std::env::args().skip(1);
    let depth: u64 = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let times: usize = arguments.next().map_or(Ok(200), |text| text.parse())?;
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 16384, 512))?;
    let reactors = moves::reactors().ok_or("two reactors need two processors")?;
    let target = NvmfTarget::new(registry, reactors.handles());
    target.create_transport(TcpTransportConfig::default())?;
    target.create_subsystem(NQN, SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() })?;
    target.add_namespace(NQN, NamespaceConfig::new("Malloc0"))?;
    let address = target.add_listener(NQN, ListenAddress::tcp("127.0.0.1", "0"))?;
    let uri: nvme::Uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", address.trsvcid).parse()?;

    let balanced: Arc<dyn BalancedTarget> = target.balanced().pop().ok_or("NVMe/TCP is not balanced")?;
    let (sender, receiver) = channel();
    let asking = std::thread::spawn(move || _ = sender.send(ask(&*balanced, times)));
    let host = Reactor::new(&ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() })?;
    let core = host.core();
    let (answers, asked) = host.block_on(read(core, uri, depth, receiver))?;
    asking.join().map_err(|_| "the thread that asks for moves has failed")?;

    for (what, moves) in [("moves", true), ("stays", false)] {
        let times = asked.iter().filter(|one| one.moves == moves);
        let mut pauses: Vec<u64> = times.map(|one| longest_pause_ns(&answers, one.at_ns)).collect();
        pauses.sort_unstable();
        let (Some(median), Some(longest)) = (pauses.get(pauses.len() / 2), pauses.last()) else { continue };
        println!("{what}: median {} us, maximum {} us, of {}", median / 1000, longest / 1000, pauses.len());
    }
    let moved: u64 = target.connection_totals().iter().map(|(_, totals)| totals.moved).sum();
    println!("{moved} moves took place; {} answers", answers.len());
    target.shutdown();
    Ok(())
}

//! `ringbolt store demo`: a cluster under a verified load, of which a node is killed.

use std::time::{Duration, Instant};

use clap::Args;
use cluster_map::EtcdOptions;
use os::clock;
use reactor::ReactorHandle;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use workload::units::{format_count, format_ns, format_rate};
use workload::{Direction, JobResult, JobSpec, Source, Verify, Workload};

use super::arguments::{NewCluster, NodeOptions, NodeReactors, POOL};
use super::layout::ClusterLayout;
use super::nodes::RunningNodes;
use super::status::status;
use crate::command_error::CommandError;
use crate::commands::demo::{TemporaryDirectory, check};
use crate::console::stdout_line;
use crate::options::{EngineChoice, Idle, ReactorOptions, parse_time};
use crate::reactor_runtime::ReactorRuntime;

const IMAGE: &str = "vol";
const IMAGE_BYTES: u64 = 256 << 20;
const NODE_BYTES: u64 = 1 << 30;
const IO_DEPTH: u32 = 16;
/// The node that is killed: not the first, whose groups would be as good.
const VICTIM: u32 = 2;
/// How long the cluster may take to be healthy again.
const RECOVERY: Duration = Duration::from_secs(60);

/// Arguments of `ringbolt store demo`.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Duration of the load
    #[arg(long, default_value = "10s", value_parser = parse_time)]
    runtime: u64,
}

pub(super) fn run(options: &DemoArgs) -> Result<(), CommandError> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(CommandError::environment)?;
    let scratch = TemporaryDirectory::new().map_err(CommandError::environment)?;
    let new = NewCluster {
        nodes: Some(3),
        devices: Vec::new(),
        logs: Vec::new(),
        replicas: Some(3),
        groups: 8,
        lease: None,
        grace: None,
        node: NodeOptions::local(NODE_BYTES),
    };
    let layout = ClusterLayout::create(&scratch.0.join("cluster"), &EtcdOptions::default(), &new)?;
    let mut nodes = RunningNodes::start(&layout, &NodeReactors::default(), true)?;
    stdout_line!("{}, on files in {}", layout.describe()?, layout.directory.display());
    layout.map.create_image(POOL, IMAGE, IMAGE_BYTES).map_err(CommandError::operation)?;
    stdout_line!(
        "load: random 4 KiB reads and writes of an image of {} MiB, queue depth {IO_DEPTH}, every block verified",
        IMAGE_BYTES >> 20
    );
    let reactor_options =
        ReactorOptions { idle: Idle::Adaptive, memory: Some("128m".to_string()), engine: EngineChoice::Auto };
    let runtime = ReactorRuntime::start(&reactor_options, None, 1)?;
    let [client] = runtime.handles() else {
        return Err(CommandError::environment("the load needs a reactor"));
    };
    let (result, pause) = run_load(options.runtime, &layout, &mut nodes, &runtime, client, &mut signals)?;
    print_result(&result);
    check(&result)?;
    stdout_line!("no request failed; the longest took {}", format_ns(pause as f64));
    wait_until_healthy(&layout)?;
    nodes.stop();
    runtime.reactors.stop();
    Ok(())
}

/// Runs the load; a node is killed after a third of it, and comes back after two. Returns the longest latency
/// too.
fn run_load(
    runtime_ns: u64,
    layout: &ClusterLayout,
    nodes: &mut RunningNodes,
    runtime: &ReactorRuntime,
    client: &ReactorHandle,
    signals: &mut Signals,
) -> Result<(JobResult, u64), CommandError> {
    let spec = JobSpec {
        name: "demo".to_string(),
        workload: Workload::RandRw,
        io_depth: IO_DEPTH,
        read_percent: 50,
        runtime_ns: Some(runtime_ns),
        time_based: true,
        verify: Verify::Crc32c,
        ..JobSpec::default()
    };
    let uri = format!("store:{POOL}/{IMAGE}?cluster={}", layout.directory.display());
    let source = Source::parse(&uri).map_err(CommandError::environment)?;
    let registry = runtime.registry();
    let mut running = workload::start(&spec, 1, &source, &registry, std::slice::from_ref(client))
        .map_err(CommandError::operation)?;
    let started = Instant::now();
    let third = Duration::from_nanos(runtime_ns / 3);
    let (mut is_killed, mut is_back) = (false, false);
    while !running.wait(Duration::from_millis(50)) {
        if signals.pending().next().is_some() {
            running.stop();
        }
        if !is_killed && started.elapsed() >= third {
            nodes.kill(VICTIM)?;
            is_killed = true;
            stdout_line!("{:.1} s: node {VICTIM} is killed (SIGKILL)", started.elapsed().as_secs_f64());
        }
        if is_killed && !is_back && started.elapsed() >= 2 * third {
            nodes.start_node(VICTIM)?;
            is_back = true;
            stdout_line!("{:.1} s: node {VICTIM} is back", started.elapsed().as_secs_f64());
        }
    }
    let result = running.into_results().pop();
    let result =
        result.ok_or_else(|| CommandError::environment("the reactor of the load ended before its job"))?;
    let longest = [Direction::Read, Direction::Write].map(|side| result.direction(side).latency_ticks.max());
    Ok((result, clock::ticks_to_ns(longest.into_iter().max().unwrap_or(0))))
}

fn print_result(result: &JobResult) {
    for direction in [Direction::Read, Direction::Write] {
        let side = result.direction(direction);
        let ns = |ticks: u64| format_ns(clock::ticks_to_ns(ticks) as f64);
        stdout_line!(
            "{}: {} IOPS, {}, latency mean {}, p99 {}",
            direction.name(),
            format_count(side.iops()),
            format_rate(side.bytes_per_second()),
            ns(side.latency_ticks.mean() as u64),
            ns(side.latency_ticks.percentile(99.0)),
        );
    }
    stdout_line!("verified: {} blocks, {} wrong", result.checked_blocks, result.mismatch_count);
}

fn wait_until_healthy(layout: &ClusterLayout) -> Result<(), CommandError> {
    let started = Instant::now();
    loop {
        let status = status(layout)?;
        if status["healthy"] == true {
            stdout_line!("{}", status["summary"].as_str().unwrap_or_default());
            return Ok(());
        }
        if started.elapsed() > RECOVERY {
            return Err(CommandError::operation(format!("it does not recover: {}", status["summary"])));
        }
        // Another process recovers, and tells when it is asked.
        std::thread::sleep(Duration::from_millis(100));
    }
}

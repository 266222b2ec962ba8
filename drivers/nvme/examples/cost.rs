//! Measures the CPU cost of the driver: submission and completion of 4 KiB reads on a simulated controller.
//!
//! `cost [DEPTH [ROUNDS]]` executes ROUNDS batches of DEPTH reads each. The controller's own time is excluded. To
//! count instructions, run it with two values of ROUNDS and divide the difference by the additional reads:
//! `valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*submit_batch*' --toggle-collect='*poll_batch*' …`

use block_io::{Channel, Completion, Request, Tag};
use dma::Data;
use nvme::testing::{SimulatedConfig, SimulatedController};
use nvme::{Controller, InterruptMode, Namespace, Options};

#[inline(never)]
fn submit_batch(namespace: &mut Namespace, batch: &mut Vec<Request<Data>>) {
    namespace.submit(batch);
}

#[inline(never)]
fn poll_batch(namespace: &mut Namespace, sink: &mut Vec<Completion<Data>>) {
    namespace.poll(sink);
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<u64> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let depth = arguments.first().copied().unwrap_or(128).clamp(1, 1023);
    let rounds = arguments.get(1).copied().unwrap_or(10_000);
    let arena = dma::Arena::new(dma::ArenaConfig { shared: true, hugepages: false, ..Default::default() });
    let idle = reactor::IdlePolicy::Spin;
    let reactor = reactor::Reactor::new(&reactor::ReactorConfig { arena, idle, ..Default::default() })?;
    let core = reactor.core();
    let device = SimulatedController::new(SimulatedConfig::new(1 << 15, 4096));
    core.add_poller(device.poller(), reactor::Period::EveryTurn);
    reactor.block_on(async move {
        let interrupts = InterruptMode::Off;
        let options = Options { queue_depth: depth as u32, interrupts, ..Options::default() };
        let controller = Controller::attach_device(&core, device.device(), &options).await?;
        let mut namespace = Namespace::of(&controller, &core, 1, &options).await?;
        let buffer = || core.pool().take(4096).expect("the arena limit is not reached");
        let mut batch: Vec<_> = (0..depth).map(|tag| Request::read(Tag(tag), tag, 1, buffer())).collect();
        let mut sink = Vec::with_capacity(depth as usize);
        let (mut submit_ns, mut poll_ns) = (0, 0);
        for _ in 0..rounds {
            let start = std::time::Instant::now();
            submit_batch(&mut namespace, &mut batch);
            submit_ns += start.elapsed().as_nanos() as u64;
            device.step();
            let start = std::time::Instant::now();
            poll_batch(&mut namespace, &mut sink);
            poll_ns += start.elapsed().as_nanos() as u64;
            assert_eq!(
                sink.len(),
                depth as usize,
                "the simulated controller completes every read in one step"
            );
            batch.extend(sink.drain(..).map(Completion::into_request));
        }
        let reads = (rounds * depth).max(1);
        let (host_bytes, device_bytes) = namespace.queue_pair().map_or((0, 0), |pair| pair.memory_bytes());
        println!(
            "{reads} reads at depth {depth}: submit {} ns, complete {} ns each",
            submit_ns / reads,
            poll_ns / reads
        );
        println!("memory of the queue pair: {host_bytes} bytes host, {device_bytes} bytes device-visible");
        Ok(())
    })
}

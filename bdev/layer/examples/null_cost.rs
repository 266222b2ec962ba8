//! The cost of the block-device layer: I/Os on a null device, from submit to completion.
//!
//! `null_cost [BATCH [ROUNDS]]` measures rounds of one batch each and prints the median of 21 runs; without arguments
//! with batches of 1 and 128. A round at batch 1 reads the clock twice; the cost of a clock read is printed too, as it
//! differs much between machines. With `TRACE` in the environment, all trace points are enabled. To count instructions:
//! `valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*submit_and_poll*' …`

use bdev::{Access, BdevChannel, Completion, Registry, Request, TraceGroup, null};
use block_io::{Channel as _, Tag};

/// The measured part: the layer and the module, without the caller's reuse of the buffers.
#[inline(never)]
fn submit_and_poll(channel: &mut BdevChannel, batch: &mut Vec<Request>, sink: &mut Vec<Completion>) {
    channel.submit(batch);
    channel.poll(sink);
}

fn median_ns(channel: &mut BdevChannel, batch: &mut Vec<Request>, count: u64) -> (f64, f64, f64) {
    let mut sink = Vec::with_capacity(batch.len());
    let mut runs: Vec<f64> = (0..21)
        .map(|_| {
            let start = std::time::Instant::now();
            for _ in 0..count {
                submit_and_poll(channel, batch, &mut sink);
                batch.extend(sink.drain(..).map(Completion::into_request));
            }
            start.elapsed().as_nanos() as f64 / (count * batch.len() as u64) as f64
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    (runs[10], runs[2], runs[18])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<u64> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let registry = Registry::new();
    null::create(&registry, null::NullConfig::new("Null0", 1 << 20, 512))?;
    let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default())?;
    let core = reactor.core();
    let mut channel = registry.open("Null0", Access::ReadWrite)?.channel(&core)?;
    if std::env::var_os("TRACE").is_some() {
        registry.set_trace_mask(TraceGroup::Bdev, u64::MAX);
    }
    let batches = arguments.first().map_or(vec![1, 128], |batch| vec![*batch]);
    let start = std::time::Instant::now();
    (0..1_000_000).for_each(|_| {
        std::hint::black_box(os::clock::ticks());
    });
    println!("the clock: {:.1} ns a reading", start.elapsed().as_nanos() as f64 / 1e6);
    for size in batches {
        let buffer = || core.pool().take(4096).expect("4 KiB are below the limit");
        let mut batch: Vec<Request> =
            (0..size).map(|tag| Request::read(Tag(tag), tag * 8, 8, buffer())).collect();
        let count = arguments.get(1).copied().unwrap_or(2_000_000 / size);
        let (median, low, high) = median_ns(&mut channel, &mut batch, count);
        println!("batch {size}: {median:.1} ns an I/O (p10 {low:.1}, p90 {high:.1})");
    }
    Ok(())
}

//! What the layer costs: I/Os on a null device, from submit to completion.
//!
//! `null_cost [BATCH [ROUNDS]]` measures rounds of one batch each, the median of 21 runs; without
//! arguments batches of 1 and 128. A round at batch 1 has two readings of the clock, whose price
//! is printed too, as it differs a lot between machines. To count instructions:
//! `valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*submit_and_poll*' …`

use bdev::{Access, Channel, Completion, Registry, Request, null};
use ring::{Channel as _, Tag};

/// The layer's and the module's part. Taking the buffers back is the caller's.
#[inline(never)]
fn submit_and_poll(channel: &mut Channel, batch: &mut Vec<Request>, sink: &mut Vec<Completion>) {
    channel.submit(batch);
    channel.poll(sink);
}

fn median_ns(channel: &mut Channel, batch: &mut Vec<Request>, count: u64) -> (f64, f64, f64) {
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
    let reactor = reactor::Reactor::new(&reactor::Config::default())?;
    let core = reactor.core();
    let mut channel = registry.open("Null0", Access::ReadWrite)?.channel(&core)?;
    let batches = arguments.first().map_or(vec![1, 128], |batch| vec![*batch]);
    let start = std::time::Instant::now();
    (0..1_000_000).for_each(|_| {
        std::hint::black_box(sys::clock::ticks());
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

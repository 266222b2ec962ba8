//! What the generator costs: a job over the null device of the block layer, or over the null engine.
//!
//! `cost WORDS…` takes the options of `ringbolt perf` for one job, as `--filename=null:1g` or `--ioengine=null`, and
//! `--number_ios`. To count instructions, run it with N and with 2 N I/Os and divide the difference by N:
//! `valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*drive_*' cost …`

use engines::{AnyEngine, File};
use reactor::{IdlePolicy, Reactor};
use workload::jobfile::{self, EngineName, Lookup};
use workload::{DynChannel, Generator, Geometry, IoChannel};

/// Options come from the command line alone.
struct Nothing;

impl Lookup for Nothing {
    fn file(&self, path: &str) -> Result<String, String> {
        Err(format!("{path}: job files are for ringbolt perf"))
    }

    fn variable(&self, _: &str) -> Option<String> {
        None
    }
}

/// As a reactor does it: the channel is known when the program runs.
#[inline(never)]
fn drive_device(generator: &mut Generator, channel: &mut DynChannel) {
    turns(generator, channel);
}

/// As a thread does it: the engine is known when the program is compiled.
#[inline(never)]
fn drive_engine(generator: &mut Generator, engine: &mut engines::Null) {
    turns(generator, engine);
}

fn turns<C: IoChannel + ?Sized>(generator: &mut Generator, channel: &mut C) {
    while !generator.is_over() {
        generator.turn(channel);
    }
}

const BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut plan = jobfile::plan(&words, &Nothing)?;
    let job =
        plan.jobs.pop().ok_or("no job; for example --filename=null:1g --rw=randread --number_ios=1m")?;
    let arena = memory::Arena::new(memory::Config { hugepages: false, ..Default::default() });
    let reactor = Reactor::new(&reactor::Config { arena, idle: IdlePolicy::Spin, ..Default::default() })?;
    let core = reactor.core();
    let geometry = Geometry { block_bytes: 512, blocks: BYTES / 512 };
    let mut generator = Generator::new(job.spec.clone(), geometry, core.pool())?;
    if let Some(EngineName::Kernel(_)) = job.engine {
        let files = vec![File::nothing(geometry.block_bytes, BYTES)?];
        match engines::open(&job.engine_config, files, generator.requests())? {
            AnyEngine::Null(mut engine) => drive_engine(&mut generator, &mut engine),
            _ => return Err("--ioengine is null here; the others cost what the kernel does".into()),
        }
    } else {
        let registry = bdev::Registry::new();
        let config = bdev::null::NullConfig::new("null", geometry.blocks, geometry.block_bytes);
        bdev::null::create(&registry, config)?;
        let channel = registry.open("null", bdev::Access::ReadWrite)?.channel(&core)?;
        // The compiler would see which channel it is, and a reactor's job does not.
        let mut channel: Box<DynChannel> = std::hint::black_box(Box::new(channel));
        drive_device(&mut generator, &mut *channel);
    }
    let result = generator.into_result();
    let ios = result.total_ios();
    println!("{ios} I/Os, {:.1} ns of a processor each", result.cpu_ns_per_io());
    Ok(())
}

//! Measures the cost of the generator: runs a job on the block layer's null bdev or on the null engine.
//!
//! `cost OPTIONS…` takes the options of `ringbolt perf` for one job, such as `--filename=null:1g` or
//! `--ioengine=null`, and `--number_ios`. To count instructions, run it with N and with 2 N I/Os and divide the
//! difference by N:
//! `valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*drive_*' cost …`

use io_engines::{AnyEngine, EngineFile};
use reactor::{IdlePolicy, Reactor};
use workload::jobfile::{self, EngineName, Lookup};
use workload::{DynChannel, Generator, Geometry, IoChannel};

/// Rejects job files: options come from the command line only.
struct NoFiles;

impl Lookup for NoFiles {
    fn file(&self, path: &str) -> Result<String, String> {
        Err(format!("{path}: job files are for ringbolt perf"))
    }

    fn variable(&self, _: &str) -> Option<String> {
        None
    }
}

/// Like a reactor, with dynamic dispatch to the channel.
#[inline(never)]
fn drive_device(generator: &mut Generator, channel: &mut DynChannel) {
    run_to_end(generator, channel);
}

/// Like a job's thread, with static dispatch to the engine.
#[inline(never)]
fn drive_engine(generator: &mut Generator, engine: &mut io_engines::NullEngine) {
    run_to_end(generator, engine);
}

fn run_to_end<C: IoChannel + ?Sized>(generator: &mut Generator, channel: &mut C) {
    while !generator.is_finished() {
        generator.turn(channel);
    }
}

const BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut plan = jobfile::plan(&words, &NoFiles)?;
    let job =
        plan.jobs.pop().ok_or("no job; for example --filename=null:1g --rw=randread --number_ios=1m")?;
    let arena = dma::Arena::new(dma::ArenaConfig { hugepages: false, ..Default::default() });
    let reactor =
        Reactor::new(&reactor::ReactorConfig { arena, idle: IdlePolicy::Spin, ..Default::default() })?;
    let core = reactor.core();
    let geometry = Geometry { block_bytes: 512, blocks: BYTES / 512 };
    let mut generator = Generator::new(job.spec.clone(), geometry, core.pool())?;
    if let Some(EngineName::Kernel(_)) = job.engine {
        let files = vec![EngineFile::null(geometry.block_bytes, BYTES)?];
        match io_engines::open(&job.engine_config, files, generator.requests())? {
            AnyEngine::Null(mut engine) => drive_engine(&mut generator, &mut engine),
            _ => {
                return Err(
                    "only --ioengine=null is supported: other engines add the cost of the kernel".into()
                );
            }
        }
    } else {
        let registry = bdev::Registry::new();
        let config = bdev::null::NullConfig::new("null", geometry.blocks, geometry.block_bytes);
        bdev::null::create(&registry, config)?;
        let channel = registry.open("null", bdev::Access::ReadWrite)?.channel(&core)?;
        // Keep the compiler from devirtualizing the channel, as it cannot in a reactor.
        let mut channel: Box<DynChannel> = std::hint::black_box(Box::new(channel));
        drive_device(&mut generator, &mut *channel);
    }
    let result = generator.into_result();
    let ios = result.total_ios();
    println!("{ios} I/Os, {:.1} ns of processor time each", result.cpu_ns_per_io());
    Ok(())
}

//! Cost of an engine: 4 KiB reads at varying offsets at the maximum rate.
//!
//! ```text
//! truncate -s 16M /dev/shm/data
//! cargo run --release -p ringbolt-io-engines --example cost -- io_uring 32 1000000 /dev/shm/data
//! valgrind --tool=callgrind target/release/examples/cost io_uring 32 20000 /dev/shm/data
//! ```
//!
//! The arguments are the ioengine, the depth, the number of reads, the file, and `fixed` for registered
//! buffers and files. The difference of two runs under callgrind, of N and 2N reads, divided by N, is the
//! instructions per read.

use std::error::Error;
use std::time::Instant;

use block_io::{Completion, Request, Tag};
use dma::{Arena, Data, Pool};
use io_engines::{
    AnyEngine, EngineConfig, EngineFile, EngineKind, FileAccess, FileOpenOptions, IoEngine, SyncMode,
};

const BLOCK: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [engine, depth, count, path, more @ ..] = arguments.as_slice() else {
        return Err("usage: cost ENGINE DEPTH COUNT FILE [fixed]".into());
    };
    let kind = EngineKind::from_name(engine).ok_or("no such engine")?;
    let (depth, count): (u32, u64) = (depth.parse()?, count.parse()?);
    let layout = FileOpenOptions {
        access: FileAccess::ReadOnly,
        direct: false,
        sync: SyncMode::None,
        buffered_block_bytes: BLOCK as u32,
        allow_mounted_write: false,
        grows_to: 0,
    };
    let file = EngineFile::open(path, &layout)?;
    let blocks = file.bytes() / BLOCK as u64;
    if blocks == 0 {
        return Err("the file is shorter than a block".into());
    }
    let pool = Pool::new(&Arena::new(dma::ArenaConfig { hugepages: false, ..dma::ArenaConfig::default() }));
    let read = |tag: u64| Some(Request::read(Tag(tag), tag % blocks, 1, pool.take(BLOCK)?));
    let batch: Option<Vec<Request<Data>>> = (0..depth.into()).map(read).collect();
    let batch = batch.ok_or("not enough memory for the buffers")?;
    let is_fixed = more.iter().any(|argument| argument == "fixed");
    let config = EngineConfig {
        kind,
        depth,
        fixed_buffers: is_fixed,
        register_files: is_fixed,
        ..EngineConfig::default()
    };
    let start = Instant::now();
    let done = match io_engines::open(&config, vec![file], &batch)? {
        AnyEngine::Null(engine) => drive(engine, batch, blocks, count),
        AnyEngine::Sync(engine) => drive(engine, batch, blocks, count),
        AnyEngine::Aio(engine) => drive(engine, batch, blocks, count),
        AnyEngine::Uring(engine) => drive(engine, batch, blocks, count),
        AnyEngine::Passthrough(engine) => drive(engine, batch, blocks, count),
        AnyEngine::PosixAio(engine) => drive(engine, batch, blocks, count),
        AnyEngine::File(engine) => drive(engine, batch, blocks, count),
    };
    let ns = start.elapsed().as_nanos() as f64 / done as f64;
    println!("{engine} at {depth}: {done} reads, {ns:.0} ns each");
    Ok(())
}

/// Keeps all requests in flight until `count` have completed successfully.
#[inline(never)]
fn drive<E: IoEngine>(mut engine: E, mut batch: Vec<Request<Data>>, blocks: u64, count: u64) -> u64 {
    let (mut done, mut completed, mut block) = (Vec::with_capacity(batch.len()), 0, 0);
    while completed < count {
        engine.submit(&mut batch);
        if engine.poll(&mut done) == 0 {
            engine.wait(1_000_000_000);
        }
        for one in done.drain(..) {
            assert!(one.status().is_success(), "{:?}", one.status());
            completed += 1;
            let mut request = Completion::into_request(one);
            block = (block + 37) % blocks;
            request.lba = block;
            batch.push(request);
        }
    }
    completed
}

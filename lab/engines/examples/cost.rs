//! What an engine costs by itself: reads of 4 KiB at places that differ, as fast as they go, and nothing else.
//!
//! ```text
//! truncate -s 16M /dev/shm/data
//! cargo run --release -p ringbolt-engines --example cost -- io_uring 32 1000000 /dev/shm/data
//! valgrind --tool=callgrind target/release/examples/cost io_uring 32 20000 /dev/shm/data
//! ```
//!
//! The words are the engine by fio's name, its depth, how many reads, the file, and `fixed` for registered
//! buffers and files. The difference of two runs under callgrind, of N and 2N reads, divided by N, is the
//! instructions of a read.

use std::error::Error;
use std::time::Instant;

use engines::{Access, AnyEngine, Config, Engine, File, Kind, Layout, SyncMode};
use memory::{Arena, Buffer, Pool};
use ring::{Completion, Request, Tag};

const BLOCK: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [engine, depth, count, path, more @ ..] = words.as_slice() else {
        return Err("usage: cost ENGINE DEPTH COUNT FILE [fixed]".into());
    };
    let kind = Kind::from_name(engine).ok_or("no such engine")?;
    let (depth, count): (u32, u64) = (depth.parse()?, count.parse()?);
    let layout = Layout {
        access: Access::Read,
        direct: false,
        sync: SyncMode::None,
        unit_bytes: BLOCK as u32,
        allow_mounted_write: false,
    };
    let file = File::open(path, &layout)?;
    let blocks = file.bytes() / BLOCK as u64;
    if blocks == 0 {
        return Err("the file is shorter than a block".into());
    }
    let pool = Pool::new(&Arena::new(memory::Config { hugepages: false, ..memory::Config::default() }));
    let read = |tag: u64| Some(Request::read(Tag(tag), tag % blocks, 1, pool.take(BLOCK)?));
    let batch: Option<Vec<Request<Buffer>>> = (0..depth.into()).map(read).collect();
    let batch = batch.ok_or("not enough memory for the buffers")?;
    let is_fixed = more.iter().any(|word| word == "fixed");
    let config =
        Config { kind, depth, fixed_buffers: is_fixed, register_files: is_fixed, ..Config::default() };
    let begun = Instant::now();
    let done = match engines::open(&config, vec![file], &batch)? {
        AnyEngine::Null(engine) => drive(engine, batch, blocks, count),
        AnyEngine::Sync(engine) => drive(engine, batch, blocks, count),
        AnyEngine::Aio(engine) => drive(engine, batch, blocks, count),
        AnyEngine::Uring(engine) => drive(engine, batch, blocks, count),
        AnyEngine::Passthrough(engine) => drive(engine, batch, blocks, count),
    };
    let ns = begun.elapsed().as_nanos() as f64 / done as f64;
    println!("{engine} at {depth}: {done} reads, {ns:.0} ns each");
    Ok(())
}

/// Keeps everything in flight until so many have ended well.
#[inline(never)]
fn drive<E: Engine>(mut engine: E, mut batch: Vec<Request<Buffer>>, blocks: u64, count: u64) -> u64 {
    let (mut done, mut ended, mut place) = (Vec::with_capacity(batch.len()), 0, 0);
    while ended < count {
        engine.submit(&mut batch);
        if engine.poll(&mut done) == 0 {
            engine.wait(1_000_000_000);
        }
        for one in done.drain(..) {
            assert!(one.status().is_success(), "{:?}", one.status());
            ended += 1;
            let mut request = Completion::into_request(one);
            place = (place + 37) % blocks;
            request.lba = place;
            batch.push(request);
        }
    }
    ended
}

//! The control path: `async` I/O on a block device.

use bdev::{Access, AsyncChannel, Registry, malloc};
use block_io::Op;
use reactor::{Reactor, ReactorConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = Registry::new();
    let device = malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 4096))?;
    let reactor = Reactor::new(&ReactorConfig::default())?;
    let core = reactor.core();
    let io = AsyncChannel::new(&core, registry.open("Malloc0", Access::ReadWrite)?.channel(&core)?);
    reactor.block_on(async move {
        let mut buffer = core.pool().take(8192).expect("8 KiB are below the limit");
        buffer.as_mut_slice().fill(7);
        let buffer = io.write(10, buffer).await.expect("written");
        io.flush().await.expect("flushed");
        io.unmap(11, 1).await.expect("unmapped");
        let buffer = io.read(10, buffer).await.expect("read");
        println!("block 10 holds {}, block 11 holds {}", buffer.as_slice()[0], buffer.as_slice()[4096]);
        let (status, _) = io.read(5000, buffer).await.expect_err("the device has 2048 blocks");
        println!("block 5000: {status}");
    });
    println!("{} reads, {} failed", device.stats().op(Op::Read).ops, device.stats().errors());
    Ok(())
}

//! A module of its own crate: mirrors of two bdevs, created and deleted by RPC methods.
//!
//! `mirror.rs` is what such a crate has; this program registers its module beside that of the block layer, as
//! `ringbolt serve` does, and calls its methods. `tests/mirror.rs` shows that a mirror survives the loss of a
//! base.

mod mirror;

use bdev::rpc::BdevModule;
use bdev::{Access, AsyncChannel, Registry};
use control::ControlPlane;
use control::json::json;
use reactor::{Reactor, ReactorConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let reactor = Reactor::new(&ReactorConfig::default())?;
    let registry = Registry::new();
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let mirrors = mirror::MirrorModule::new(bdevs.clone(), reactor.handle());
    let plane = builder.module(&bdevs).module(&mirrors).start(None)?;

    // In any order: it is created when both of its bases are there.
    plane.invoke("bdev_mirror_create", json!({ "name": "Mirror0", "base_bdevs": ["A", "B"] }))?;
    for name in ["A", "B"] {
        let malloc = json!({ "name": name, "num_blocks": 2048, "block_size": 512 });
        plane.invoke("bdev_malloc_create", malloc)?;
    }
    plane.invoke("bdev_wait_for_examine", json!({}))?;
    println!("{:#}", plane.invoke("bdev_get_bdevs", json!({ "name": "Mirror0" }))?[0]["driver_specific"]);

    let core = reactor.core();
    let io = AsyncChannel::new(&core, registry.open("Mirror0", Access::ReadWrite)?.channel(&core)?);
    let (lost, devices) = (registry.clone(), registry.clone());
    reactor.block_on(async move {
        let mut buffer = core.pool().take(4096).expect("4 KiB are below the limit");
        buffer.as_mut_slice().fill(7);
        let buffer = io.write(0, buffer).await.expect("written to both");
        lost.unregister("A").expect("it is there");
        let buffer = io.read(0, buffer).await.expect("read from the other");
        println!("block 0 holds {} without A", buffer.as_slice()[0]);
    });
    let state = devices.find("Mirror0").expect("it survives").bdev().driver_specific();
    println!("{state:?}");
    plane.stop();
    Ok(())
}

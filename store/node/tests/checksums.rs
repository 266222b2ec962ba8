//! What reads need of the checksum table while memory is short.
#![allow(clippy::unwrap_used)]

mod process;

use std::task::Poll;

use bdev::error::{ErrorConfig, FaultAction, FaultInjection};
use bdev::testing::CrashDisk;
use bdev::{Access, AsyncChannel, Registry, error};
use block_io::{Op, Status};
use control::JobHandle;
use dma::Buffer;
use os::clock::VirtualClock;
use process::{Process, TestDisks};
use random::WyRand;
use store_node::{
    FormatOptions, StoreCores, StoreError, StoreNode, StoreOptions, StoreThreads, StoreTuning, format_device,
};

/// Reads a block while the pool has memory for one.
fn read_with_last_memory<'a>(
    io: &'a AsyncChannel,
    buffers: &mut Vec<Buffer>,
    lba: u64,
) -> impl Future<Output = Result<Buffer, (Status, Buffer)>> + use<'a> {
    let of_request = buffers.pop().unwrap();
    // For the data.
    buffers.pop().unwrap();
    io.read(lba, of_request)
}

fn check(read: Result<Buffer, (Status, Buffer)>) {
    assert!(read.unwrap().as_slice().iter().all(|byte| *byte == 7));
}

/// The pool has memory for the data of a read, and none for its checksums: they have their own.
#[test]
fn a_read_ends_when_it_has_the_last_memory() {
    let (clock, mut random) = (VirtualClock::default(), WyRand::new(1));
    let disks = TestDisks::from(CrashDisk::create(&Registry::new(), "Disk", 32 << 8, 4096, 1).unwrap());
    let memory = || dma::ArenaConfig { limit_bytes: 16 << 20, hugepages: false, ..Default::default() };
    let mut process = Process::with_memory(&disks, &clock, &mut random, memory());
    let options = || StoreOptions {
        name: "s",
        tuning: StoreTuning { checksum_cache_bytes: 0, ..StoreTuning::default() },
        threads: StoreThreads::default(),
    };
    let (registry, core) = (process.registry.clone(), process.reactor.core());
    let opened = process.run(async move {
        let (cores, job) = (StoreCores::This(&core), JobHandle::standalone());
        let format = FormatOptions { partitions: Some(1), ..FormatOptions::default() };
        format_device(&registry, "Disk", &cores, format, &job).await?;
        let node = StoreNode::open(&registry, "Disk", options(), &cores, &job).await?;
        node.create_preallocated_image("vol", 12 << 20, &job).await?;
        let descriptor = registry.open("s/vol", Access::ReadWrite)?;
        let io = AsyncChannel::new(&core, descriptor.channel(&core)?);
        for lba in [0, 8192, 16_384] {
            let mut buffer = core.pool().take(4096).unwrap();
            buffer.as_mut_slice().fill(7);
            io.write(lba, buffer).await.unwrap();
        }
        drop((io, descriptor));
        node.close().await;
        Ok::<_, StoreError>(())
    });
    opened.unwrap();
    // Nothing is in memory.
    process.discard();
    process = Process::with_memory(&disks, &clock, &mut random, memory());
    let (registry, core) = (process.registry.clone(), process.reactor.core());
    let opened = process.run(async move {
        let (cores, job) = (StoreCores::This(&core), JobHandle::standalone());
        error::create(&registry, ErrorConfig::new("Disk"))?;
        let node = StoreNode::open(&registry, "EE_Disk", options(), &cores, &job).await?;
        let descriptor = registry.open("s/vol", Access::ReadWrite)?;
        let io = AsyncChannel::new(&core, descriptor.channel(&core)?);
        Ok::<_, StoreError>((node, io, core))
    });
    let (node, io, core) = opened.unwrap();
    let registry = process.registry.clone();
    let node = process.run(async move {
        let pool = core.pool();
        let mut buffers: Vec<_> = std::iter::from_fn(|| pool.take(4096)).collect();
        for lba in [0, 8192] {
            check(read_with_last_memory(&io, &mut buffers, lba).await);
            buffers.extend(std::iter::from_fn(|| pool.take(4096)));
        }
        // The table is read for one read while another one, which has its data, needs the same memory for
        // that.
        let superblock = node.superblock();
        let table = superblock.partition_start(0) + superblock.layout().unwrap().checksums_start;
        let pending = FaultInjection {
            range: Some(table..table + 1),
            ..FaultInjection::once(Some(Op::Read), FaultAction::Pending)
        };
        error::inject(&registry, "EE_Disk", pending).unwrap();
        let mut reads = Vec::new();
        for lba in [0, 16_384] {
            let mut read = Box::pin(read_with_last_memory(&io, &mut buffers, lba));
            let begun = std::future::poll_fn(|context| Poll::Ready(read.as_mut().poll(context).is_pending()));
            assert!(begun.await);
            core.sleep_ns(10_000_000).await;
            reads.push(read);
        }
        error::resume_pending(&registry, "EE_Disk").unwrap();
        for read in reads {
            check(read.await);
        }
        node
    });
    let status = process.run(async move { node.status().await }).unwrap();
    // Each object's are in another block of the table, of which one is in memory.
    assert_eq!(status[0].stats.checksum_misses, 4, "{:?}", status[0].stats);
    assert_eq!(status[0].checksum_cache_bytes, 4096);
    process.discard();
}

/// What changed is in memory until a checkpoint: with one block of the table, that of 1,024 blocks and one
/// batch.
#[test]
fn many_changed_checksums_make_a_checkpoint_however_large_the_log_is() {
    let (clock, mut random) = (VirtualClock::default(), WyRand::new(1));
    let disks = TestDisks::from(CrashDisk::create(&Registry::new(), "Disk", 48 << 8, 4096, 1).unwrap());
    let mut process = Process::start(&disks, &clock, &mut random);
    let (registry, core) = (process.registry.clone(), process.reactor.core());
    let run = process.run(async move {
        let (cores, job) = (StoreCores::This(&core), JobHandle::standalone());
        let format =
            FormatOptions { partitions: Some(1), log_bytes: Some(24 << 20), ..FormatOptions::default() };
        format_device(&registry, "Disk", &cores, format, &job).await?;
        let options = StoreOptions {
            name: "s",
            tuning: StoreTuning { checksum_cache_bytes: 0, ..StoreTuning::default() },
            threads: StoreThreads::default(),
        };
        let node = StoreNode::open(&registry, "Disk", options, &cores, &job).await?;
        node.create_image("vol", 12 << 20).await?;
        let descriptor = registry.open("s/vol", Access::ReadWrite)?;
        let io = AsyncChannel::new(&core, descriptor.channel(&core)?);
        let mut checkpoints = Vec::new();
        for index in 0..40 {
            let mut buffer = core.pool().take(128 << 10).unwrap();
            buffer.as_mut_slice().fill(7);
            io.write(index * 256, buffer).await.unwrap();
            while node.status().await?[0].entries_to_place > 0 {
                core.sleep_ns(1_000_000).await;
            }
            checkpoints.push(node.status().await?[0].stats.checkpoints);
        }
        Ok::<_, StoreError>(checkpoints)
    });
    let checkpoints = run.unwrap();
    assert_eq!((checkpoints[31], checkpoints[34], checkpoints[39]), (0, 1, 1), "{checkpoints:?}");
    process.discard();
}

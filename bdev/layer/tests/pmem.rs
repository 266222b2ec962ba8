//! The pmem device, on files that are not on persistent memory but for the refusal of them.
#![allow(clippy::unwrap_used)]

mod rig;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use bdev::pmem::{self, PmemConfig};
use bdev::testing::create_volatile_pmem;
use bdev::uring::{self, UringConfig};
use bdev::{Access, BdevChannel, BdevError, Durability};
use block_io::{Op, RequestFlags, Status};
use rig::Rig;

/// A file of 4 MiB, removed at the end of the test.
struct TestFile(PathBuf);

impl TestFile {
    fn new(name: &str) -> TestFile {
        let name = format!("pmem-{name}-{}", std::process::id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        TestFile(path)
    }

    fn bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        File::open(&self.0).unwrap().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A channel of a device on the file, or `None` on a processor that cannot flush its caches.
fn device(rig: &Rig, file: &TestFile) -> Option<BdevChannel> {
    match create_volatile_pmem(&rig.registry, "P", &file.0) {
        Ok(_) => {}
        Err(error @ BdevError::File { .. }) if cfg!(not(target_arch = "x86_64")) => {
            eprintln!("SKIPPED: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    }
    Some(rig.registry.open("P", Access::ReadWrite).unwrap().channel(&rig.core).unwrap())
}

#[test]
fn what_is_written_is_in_the_file_at_once() {
    let (mut rig, file) = (Rig::new(), TestFile::new("written"));
    let Some(mut channel) = device(&rig, &file) else { return };
    let geometry = rig.registry.find("P").unwrap().geometry();
    assert_eq!((geometry.blocks, geometry.physical_block_size), (8192, 512));
    assert!(!geometry.write_cache && geometry.atomic_write_blocks == 0);
    assert_eq!(rig.write(&mut channel, 3, 1000, 7), Status::SUCCESS);
    assert_eq!(file.bytes(3 * 512, 1000 * 512), vec![7; 1000 * 512]);
    assert_eq!(rig.read(&mut channel, 2, 2).unwrap(), [vec![0; 512], vec![7; 512]].concat());
    // More than is done in one poll.
    File::options().write(true).open(&file.0).unwrap().write_all_at(&vec![7; 5000 * 512], 3 * 512).unwrap();
    assert_eq!(rig.simple(&mut channel, Op::WriteZeroes, 4, 4998, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(file.bytes(3 * 512, 512), vec![7; 512]);
    assert_eq!(file.bytes(4 * 512, 4998 * 512), vec![0; 4998 * 512]);
    assert_eq!(file.bytes(5002 * 512, 1024), [vec![7; 512], vec![0; 512]].concat());
    assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::SUCCESS);
    let unmapped = rig.simple(&mut channel, Op::Unmap, 0, 8, RequestFlags::NONE);
    assert!(unmapped.same_code(Status::INVALID_OPCODE), "{unmapped}");
}

/// A file that shrinks takes its pages with it: requests fail, and the process goes on.
#[test]
fn a_truncated_file_fails_the_device_and_not_the_process() {
    let (mut rig, file) = (Rig::new(), TestFile::new("truncated"));
    let Some(mut channel) = device(&rig, &file) else { return };
    assert_eq!(rig.write(&mut channel, 0, 8, 7), Status::SUCCESS);
    File::options().write(true).open(&file.0).unwrap().set_len(1 << 20).unwrap();
    assert_eq!(rig.read(&mut channel, 0, 8).unwrap(), vec![7; 4096], "what is there is read");
    assert_eq!(rig.write(&mut channel, 8000, 8, 8), Status::WRITE_FAULT);
    // The whole region is replaced: nothing else is read from it either.
    assert_eq!(rig.read(&mut channel, 0, 8), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::WRITE_FAULT);
    assert_eq!(file.bytes(0, 4096), vec![7; 4096]);
    let shown = format!("{:?}", rig.registry.find("P").unwrap().bdev().driver_specific());
    assert!(shown.contains("(\"failed\", Bool(true))"), "{shown}");
}

#[test]
fn a_file_without_persistent_memory_is_refused_by_name() {
    let (rig, file) = (Rig::new(), TestFile::new("refused"));
    assert!(!pmem::is_persistent(&file.0));
    let refused = pmem::create(&rig.registry, PmemConfig::new("P", &file.0)).err().unwrap();
    assert!(matches!(refused, BdevError::File { .. }), "{refused:?}");
    let text = refused.to_string();
    assert!(text.contains(file.0.to_str().unwrap()) && text.contains("mount -o dax"), "{text}");
    let directory =
        pmem::create(&rig.registry, PmemConfig::new("P", env!("CARGO_TARGET_TMPDIR"))).err().unwrap();
    assert!(directory.to_string().contains("is no file"), "{directory}");
    let config = PmemConfig { block_size: 520, ..PmemConfig::new("P", &file.0) };
    assert!(pmem::create(&rig.registry, config).err().unwrap().to_string().contains("multiple of 512"));
    assert!(rig.registry.find("P").is_none());
}

/// A file has one user; what is not on persistent memory does not say that it is.
#[test]
fn a_file_is_used_once_and_as_durable_as_it_is() {
    let (rig, file) = (Rig::new(), TestFile::new("claimed"));
    let Some(channel) = device(&rig, &file) else { return };
    assert!(rig.registry.find("P").unwrap().durability() <= Durability::Memory);
    match uring::create(&rig.registry, UringConfig::new("U", &file.0)) {
        Err(BdevError::NoFileIo { .. }) => {}
        refused => assert!(matches!(refused, Err(BdevError::Claimed { .. })), "{:?}", refused.err()),
    }
    let uuid = rig.registry.find("P").unwrap().uuid();
    drop(channel);
    rig.registry.unregister("P").unwrap();
    let again = create_volatile_pmem(&rig.registry, "P", &file.0).unwrap();
    let specific = format!("{:?}", again.bdev().driver_specific());
    // Not every file system keeps the attribute that has it.
    assert!(again.uuid() == uuid || specific.contains("random"), "{specific}");
}

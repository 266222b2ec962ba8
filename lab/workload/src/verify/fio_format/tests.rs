//! Headers as fio 3.33 writes them, and both programs reading what the other wrote.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::job_runner::JobRunner;
use crate::jobfile::{Lookup, plan};

struct NoFiles;

impl Lookup for NoFiles {
    fn file(&self, path: &str) -> Result<String, String> {
        Err(format!("{path}: no such file"))
    }

    fn variable(&self, _: &str) -> Option<String> {
        None
    }
}

/// The second 512 bytes of an I/O by fio 3.33: header and digest, of `fio --bs=1k --size=1k --rw=write --verify=…
/// --verify_pattern=0xaa555aa5 --verify_interval=512`.
const GOLDEN: [(FioVerify, &str); 15] = [
    (FioVerify::Crc7, "caac080000020000000000000000000000020000000000000000000035818c06010000003b01aa3e35"),
    (
        FioVerify::Crc16,
        "caac0700000200000000000000000000000200000000000000000000e3efb30601000000730a9b7c3aaa",
    ),
    (
        FioVerify::Crc32,
        "caac04000002000000000000000000000002000000000000000000007dec8d060100000069a92d4a64054e94",
    ),
    (
        FioVerify::Crc64,
        "caac03000002000000000000000000000002000000000000000000001843a506010000004ff320368fe4d6a9c0fea432",
    ),
    (
        FioVerify::Sha3_224,
        "caac0b00000200000000000000000000000200000000000000000000ffda8e06010000009eebbd8849e2606d239f14230ab67fa77be2bc61ebb3c23bd06ad165cadf4731",
    ),
    (
        FioVerify::Sha3_256,
        "caac0c00000200000000000000000000000200000000000000000000c2850507010000005c0275934d2a43a236b449fc0bc016bbb171e03706435fd93df1728f4f6a27c7846d857c",
    ),
    (
        FioVerify::Sha3_384,
        "caac0d000002000000000000000000000002000000000000000000003e67a406010000000c488905f0bba4185849ada0654db550a48729bf9bb37c411aa8509b5771884101373c178ee55c750c99bac84ef8e215cb36a97a",
    ),
    (
        FioVerify::Sha3_512,
        "caac0e0000020000000000000000000000020000000000000000000049a2b70601000000176d31598b552efcb29e5ecaa4cde46bba462a10081dd32925b1a53dd242bf9c1aab6dd8cb64a2b8b3f25e85ec09e6db34699af52c08ffafa32785860b8bf23316ae45b1",
    ),
    (
        FioVerify::Md5,
        "caac02000002000000000000000000000002000000000000000000003120ae0801000000d92c80b05c78648b6dda4ae1f25e1132037f89a3",
    ),
    (
        FioVerify::Crc32c,
        "caac0500000200000000000000000000000200000000000000000000fdc2060a010000004187d86bc36cc57e",
    ),
    (
        FioVerify::Xxhash,
        "caac0f00000200000000000000000000000200000000000000000000ae87380801000000b48862a192cea9a8",
    ),
    (
        FioVerify::Sha1,
        "caac1000000200000000000000000000000200000000000000000000c1bb9c07010000003b08ab70a962966f309e387bbd1c2d89720cb54ee3b3f3f0",
    ),
    (
        FioVerify::Sha256,
        "caac0900000200000000000000000000000200000000000000000000ad288c07010000009e221864442b7703bb5f8721aa555aa5aa555aa5aa555aa5aa555aa58000000000000000000000000000000000000000000000000000000000000000c00c000000000000",
    ),
    (
        FioVerify::Sha512,
        "caac0a0000020000000000000000000000020000000000000000000090b0d908010000003f12ad9daa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5aa555aa5",
    ),
    (FioVerify::Meta, "caac010000020000000000000000000000020000000000000000000055a87307010000006cf2113c"),
];

fn format(kind: FioVerify) -> FioFormat {
    FioFormat { kind, pattern: vec![0xaa, 0x55, 0x5a, 0xa5], interval: 512 }
}

#[test]
fn blocks_of_fio_verify_and_those_written_here_differ_only_in_unverified_fields() {
    for (kind, golden) in GOLDEN {
        let byte = |at: usize| u8::from_str_radix(&golden[at..at + 2], 16).unwrap();
        let head: Vec<u8> = (0..golden.len()).step_by(2).map(byte).collect();
        let mut block: Vec<u8> = [0xaa, 0x55, 0x5a, 0xa5].into_iter().cycle().take(512).collect();
        block[..head.len()].copy_from_slice(&head);
        let format = format(kind);
        assert!(format.has_header(&block), "{kind:?}");
        assert_eq!(format.check(&block, 512, 512, Some(0)), Ok(()), "{kind:?}");
        let mut written = vec![0; 1024];
        format.fill(&mut written, 0, 0);
        let written = &mut written[512..];
        written[24..DIGEST_AT].copy_from_slice(&block[24..DIGEST_AT]);
        assert_eq!(written, block, "{kind:?}");
        for byte in [0, 2, 4, 8, 16, 24, 36] {
            block[byte] ^= 1;
            assert!(format.check(&block, 512, 512, None).is_err(), "{kind:?}: byte {byte}");
            block[byte] ^= 1;
        }
        block[511] ^= 1;
        assert!(format.check(&block, 512, 512, None).is_err(), "{kind:?}");
    }
}

#[test]
fn every_length_of_payload_is_written_and_verified() {
    for (kind, _) in GOLDEN {
        for length in kind.block_bytes_min()..kind.block_bytes_min() + 300 {
            let format = FioFormat { kind, pattern: Vec::new(), interval: length };
            let mut block = vec![0; length];
            format.fill(&mut block, 4096, 7);
            assert_eq!(format.check(&block, 0, 4096, Some(7)), Ok(()), "{kind:?}, {length}");
            let other = format.check(&block, 0, 4096, Some(8)).unwrap_err();
            assert_eq!(other, VerifyFault::Header { field: FioHeaderField::Seed, expected: 8, got: 7 });
        }
    }
}

/// Runs a job over 64 KiB of a file; returns the numbers of verified and of mismatching blocks.
fn perf(file: &Path, options: &str) -> (u64, u64) {
    let line = format!("--name=a --thread --filename={} --size=64k --bs=4k {options}", file.display());
    let words: Vec<String> = line.split_whitespace().map(str::to_string).collect();
    let plan = plan(&words, &NoFiles).unwrap_or_else(|error| panic!("{options}: {error}"));
    let stop = Arc::new(AtomicBool::new(false));
    let runner = JobRunner { plan: &plan, bdev_reactors: None, worker: Vec::new(), stop };
    let finished = runner.run(&mut |_| ()).unwrap();
    (finished[0].result.checked_blocks, finished[0].result.mismatch_count)
}

fn damage(file: &Path, at: usize) {
    let mut bytes = std::fs::read(file).unwrap();
    bytes[at] ^= 1;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn fio_verifies_what_perf_wrote_and_perf_what_fio_wrote() {
    if Command::new("fio").arg("--version").output().is_err() {
        eprintln!("SKIPPED: fio is not installed");
        return;
    }
    let directory = std::env::temp_dir().join(format!("ringbolt-fio-verify-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join("data");
    let fio = |options: &str| {
        let mut command = Command::new("fio");
        command.current_dir(&directory).args(["--name=b", "--filename=data", "--size=64k", "--bs=4k"]);
        command.args(["--ioengine=psync", "--output=/dev/null"]).args(options.split_whitespace());
        command.output().unwrap().status.success()
    };
    for (_, name, _) in FioVerify::NAMES {
        for more in ["", " --verify_interval=1k", " --verify_pattern=0xdeadbeef01"] {
            let needs_pattern = name == "pattern";
            // What is between headers does not depend on the kind: one kind suffices for it.
            if name != "md5" && (more.contains("interval") || needs_pattern != more.contains("pattern")) {
                continue;
            }
            let options = format!("--verify={name}{more}");
            // Damage that the kind detects: in the header, or at the end of the fourth block.
            let at = if name == "meta" { 3 * 4096 + 8 } else { 4 * 4096 - 1 };
            let blocks = if more.contains("interval") { 64 } else { 16 };
            let _ = std::fs::remove_file(&file);
            assert_eq!(perf(&file, &format!("--rw=randwrite {options}")), (blocks, 0), "{options}");
            assert!(fio(&format!("--rw=read {options}")), "fio refuses what perf wrote: {options}");
            damage(&file, at);
            assert!(!fio(&format!("--rw=read {options}")), "fio misses damage: {options}");
            std::fs::remove_file(&file).unwrap();
            assert!(fio(&format!("--rw=randwrite --do_verify=0 {options}")), "{options}");
            assert_eq!(perf(&file, &format!("--rw=read {options}")), (blocks, 0), "{options}");
            damage(&file, at);
            assert_eq!(perf(&file, &format!("--rw=randread {options}")), (blocks, 1), "{options}");
        }
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

//! Encrypted volumes: those of SPDK, what reaches the base, and what comes back.
#![allow(clippy::unwrap_used)]

mod rig;

use bdev::testing::CrashDisk;
use block_io::{Op, Request, RequestFlags, Status, Tag};
use control::json::{Value, json};
use dma::{Buffer, Data};
use proptest::prelude::*;
use rig::{KEY, KEY2, Program, golden, image};
use sha2::{Digest, Sha256};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(blocks: usize) -> Vec<u8> {
    (0..blocks * 512).map(|at| (at % 251) as u8 + 1).collect()
}

#[test]
fn volumes_that_spdk_wrote_open() {
    for name in ["crypto-128", "crypto-256"] {
        let described = std::fs::read(golden(&format!("{name}.json"))).unwrap();
        let described: Value = serde_json::from_slice(&described).unwrap();
        let program = Program::start();
        program.malloc("disk", 32_768, 512);
        program.write_image("disk", &image(name));
        let digits = |member: &str| described[member].as_str().unwrap();
        program.key("k", digits("key"), digits("key2"));
        program.crypto("c", "disk", "k");
        let shown = program.show("c");
        for member in ["driver_specific", "product_name", "block_size", "num_blocks"] {
            assert_eq!(shown[member], described["bdev"][0][member], "{name} {member}");
        }
        let sums = &described["sha256"];
        for (what, lba) in [("first 64 KiB", 0), ("64 KiB at 15 MiB", (15 << 20) / 512)] {
            let data = program.read("c", lba, 64 << 10);
            assert_eq!(hex(&Sha256::digest(&data)), sums[what].as_str().unwrap(), "{name} {what}");
            // And what is written over it is what SPDK has written.
            let stored = program.read("disk", lba, 64 << 10);
            program.write("c", lba, &vec![9; 64 << 10]);
            assert_ne!(program.read("disk", lba, 64 << 10), stored);
            program.write("c", lba, &data);
            assert_eq!(program.read("disk", lba, 64 << 10), stored, "{name} {what}");
        }
    }
}

#[test]
fn uuids_are_those_that_spdk_derives() {
    let program = Program::start();
    let uuid = "e5e5e5e5-0000-4000-8000-000000000001";
    let params = json!({ "name": "b", "num_blocks": 8, "block_size": 512, "uuid": uuid });
    program.call("bdev_malloc_create", params);
    program.key("k", KEY, KEY2);
    program.crypto("c", "b", "k");
    // Version 5 in the name space of SPDK's module, by Python's uuid.
    assert_eq!(program.show("c")["uuid"], "a4a49b24-e3c9-5615-a44e-e93454a49125");
}

#[test]
fn the_base_has_no_plain_text_and_the_callers_buffer_stays_as_it_is() {
    let program = Program::with_device(256);
    let data = text(16);
    program.write("c", 8, &data);
    let stored = program.read("base", 8, data.len());
    assert!(stored.chunks(16).zip(data.chunks(16)).all(|(stored, data)| stored != data));
    assert_eq!(program.read("c", 8, data.len()), data);
    // The same data is other data in another block.
    program.write("c", 100, &data);
    assert_ne!(program.read("base", 100, data.len()), stored);
}

#[test]
fn zeroes_are_written_as_encrypted_zeroes() {
    let program = Program::with_device(2048);
    let data = text(2045);
    program.write("c", 0, &data);
    // More than one piece, and not a multiple of one.
    let status = program.with_channel("c", |_, io| async move { io.write_zeroes(3, 1900).await });
    assert_eq!(status, Ok(()));
    assert_eq!(program.read("c", 0, 3 * 512), data[..3 * 512]);
    assert!(program.read("c", 3, 1900 * 512).iter().all(|byte| *byte == 0));
    assert_eq!(program.read("c", 1903, 142 * 512), data[1903 * 512..]);
    let stored = program.read("base", 3, 1900 * 512);
    assert!(stored.chunks(512).all(|block| block.iter().any(|byte| *byte != 0)));
    // As a write of zeroes.
    program.write("c", 3, &vec![0; 1900 * 512]);
    assert_eq!(program.read("base", 3, 1900 * 512), stored);
}

#[test]
fn blocks_that_were_never_written_or_were_unmapped_read_as_zeroes() {
    let program = Program::with_device(256);
    assert_eq!(program.read("c", 0, 256 * 512), vec![0; 256 * 512]);
    let data = text(256);
    program.write("c", 0, &data);
    let status = program.with_channel("c", |_, io| async move { io.unmap(10, 100).await });
    assert_eq!(status, Ok(()));
    let after = program.read("c", 0, 256 * 512);
    assert!(after[10 * 512..110 * 512].iter().all(|byte| *byte == 0));
    assert!(after[..10 * 512] == data[..10 * 512] && after[110 * 512..] == data[110 * 512..]);
    // The space is the base's again.
    assert_eq!(program.read("base", 10, 100 * 512), vec![0; 100 * 512]);
}

#[test]
fn another_key_reads_noise_without_an_error() {
    let program = Program::with_device(64);
    let data = text(8);
    program.write("c", 0, &data);
    program.call("bdev_crypto_delete", json!({ "name": "c" }));
    program.key("other", KEY2, KEY);
    program.crypto("c", "base", "other");
    let noise = program.read("c", 0, data.len());
    assert!(noise.chunks(16).zip(data.chunks(16)).all(|(noise, data)| noise != data));
    let ones: u32 = noise.iter().map(|byte| byte.count_ones()).sum();
    assert!((15_000..17_800).contains(&ones), "{ones} of 32768 bits");
    // Nothing is harmed by looking.
    program.call("bdev_crypto_delete", json!({ "name": "c" }));
    program.crypto("c", "base", "k");
    assert_eq!(program.read("c", 0, data.len()), data);
}

#[test]
fn a_durable_write_is_durable_on_the_base() {
    let program = Program::start();
    let disk = CrashDisk::create(&program.registry, "disk", 64, 512, 3).unwrap();
    program.key("k", KEY, KEY2);
    program.crypto("c", "disk", "k");
    assert_eq!(program.show("c")["driver_specific"]["crypto"]["base_bdev_name"], "disk");
    let data = text(4);
    let copy = data.clone();
    program.with_channel("c", move |core, io| async move {
        let mut buffer = core.pool().take(copy.len()).unwrap();
        buffer.as_mut_slice().copy_from_slice(&copy);
        io.write_durable(1, buffer).await.map(drop).map_err(|(status, _)| status).unwrap();
        io.flush().await.unwrap();
    });
    let stored = disk.image(disk.log_len(), 9)[512..512 + data.len()].to_vec();
    assert_eq!(stored, program.read("disk", 1, data.len()));
    assert_ne!(stored, data);
    assert_eq!(program.read("c", 1, data.len()), data);
}

#[test]
fn requests_outside_of_the_device_or_of_other_sizes_are_refused() {
    let program = Program::with_device(64);
    assert_eq!(program.try_read("c", 64, 512).unwrap_err().without_retry(), Status::LBA_OUT_OF_RANGE);
    assert_eq!(program.try_read("c", 63, 1024).unwrap_err().without_retry(), Status::LBA_OUT_OF_RANGE);
    assert_eq!(
        program.try_write("c", u64::MAX, &[1; 512]).unwrap_err().without_retry(),
        Status::LBA_OUT_OF_RANGE
    );
    let partly = program.try_write("c", 0, &[1; 513]).unwrap_err();
    assert!(!partly.is_success());
    let status = program.with_channel("c", |_, io| async move { io.write_zeroes(60, 5).await });
    assert_eq!(status.unwrap_err().without_retry(), Status::LBA_OUT_OF_RANGE);
    // All of it at once.
    program.write("c", 0, &text(64));
    assert_eq!(program.read("c", 0, 64 * 512), text(64));
}

/// Ignores the bit that says that a retry is in vain.
trait WithoutRetry {
    fn without_retry(self) -> Status;
}

impl WithoutRetry for Status {
    fn without_retry(self) -> Status {
        [Status::LBA_OUT_OF_RANGE, Status::INVALID_FIELD, Status::INTERNAL_ERROR]
            .into_iter()
            .find(|status| status.do_not_retry() == self)
            .unwrap_or(self)
    }
}

#[test]
fn a_request_of_slices_that_cut_blocks_is_as_one_of_one_slice() {
    let program = Program::with_device(4096);
    let data = text(2048);
    program.write("c", 0, &data);
    let stored = program.read("base", 0, data.len());
    let copy = data.clone();
    program.with_channel("c", move |core, io| async move {
        let make = |fill: Option<&[u8]>| {
            let mut whole = Data::from(core.pool().take(copy.len()).unwrap());
            if let Some(fill) = fill {
                whole.copy_from(0, fill);
            }
            let mut parts = vec![whole];
            for cut in [1, 511, 700, 4096, 5000, 65_537] {
                let rest = parts.last_mut().unwrap().split_off(cut);
                parts.push(rest);
            }
            // In another order they are no neighbours; the data is what they have in this order.
            let order = [3, 1, 0, 6, 2, 5, 4];
            let mut slots: Vec<Option<Data>> = parts.into_iter().map(Some).collect();
            let buffers = order.into_iter().flat_map(|at| slots[at].take().unwrap().into_slices()).collect();
            Data::gather(buffers).unwrap()
        };
        let mut read = make(None);
        read.clear();
        let request = Request::read(Tag(1), 0, 2048, read);
        let completion = io.submit(request).await;
        assert!(completion.status().is_success());
        let read = completion.into_data().unwrap();
        assert!(read.slices().len() > 3);
        let mut found = vec![0; copy.len()];
        read.copy_to(0, &mut found);
        assert_eq!(found, copy);
        let completion = io.submit(Request::write(Tag(2), 2048, 2048, read)).await;
        assert!(completion.status().is_success());
        // The caller's data is as it was.
        completion.into_data().unwrap().copy_to(0, &mut found);
        assert_eq!(found, copy);
    });
    assert_eq!(program.read("c", 2048, data.len()), data);
    assert_ne!(program.read("base", 2048, data.len()), stored);
}

#[test]
fn writes_go_on_without_memory_for_private_copies() {
    let program = Program::with_device(4096);
    let data = text(1024);
    let copy = data.clone();
    program.with_channel("c", move |core, io| async move {
        let mut buffer = core.pool().take(copy.len()).unwrap();
        buffer.as_mut_slice().copy_from_slice(&copy);
        // All that there is, in pieces of every size.
        let mut taken = Vec::new();
        let mut bytes = 1 << 20;
        while bytes >= 512 {
            match core.pool().take(bytes) {
                Some(buffer) => taken.push(buffer),
                None => bytes /= 2,
            }
        }
        assert!(core.pool().take_data(512).is_none());
        let buffer = io.write(5, buffer).await.map_err(|(status, _)| status).unwrap();
        assert_eq!(buffer.as_slice(), copy);
        io.write_zeroes(2000, 700).await.unwrap();
        let atomic = |blocks: u32, mut buffer: Buffer| {
            buffer.resize(blocks as usize * 512);
            let mut atomic = Request::write(Tag(3), 3000, blocks, buffer);
            atomic.flags |= RequestFlags::ATOMIC;
            atomic
        };
        // It cannot be divided, and may be tried again.
        let refused = io.submit(atomic(64, buffer)).await;
        assert_eq!(refused.status(), Status::COMMAND_INTERRUPTED);
        // One that the memory of the channel suffices for is written.
        let data = refused.into_request().take_data().unwrap();
        let written = io.submit(atomic(8, data.into_single().ok().unwrap())).await;
        assert!(written.status().is_success());
        drop(taken);
    });
    assert_eq!(program.read("c", 3000, 4096), data[..4096]);
    assert_eq!(program.read("c", 5, data.len()), data);
    assert!(
        program.read("base", 2000, 700 * 512).chunks(512).all(|block| block.iter().any(|byte| *byte != 0))
    );
    assert!(program.read("c", 2000, 700 * 512).iter().all(|byte| *byte == 0));
}

/// What is done to a volume, in blocks.
#[derive(Clone, Debug)]
enum Step {
    Write { lba: u64, blocks: u32, fill: u8 },
    Zeroes { lba: u64, blocks: u32 },
    Unmap { lba: u64, blocks: u32 },
    Copy { from: u64, lba: u64, blocks: u32 },
    Read { lba: u64, blocks: u32 },
}

const BLOCKS: u64 = 96;

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BLOCKS, 1..40u32).prop_map(|(lba, blocks)| (lba, blocks.min((BLOCKS - lba) as u32)));
    prop_oneof![
        (range(), any::<u8>()).prop_map(|((lba, blocks), fill)| Step::Write { lba, blocks, fill }),
        range().prop_map(|(lba, blocks)| Step::Zeroes { lba, blocks }),
        range().prop_map(|(lba, blocks)| Step::Unmap { lba, blocks }),
        (range(), 0..BLOCKS).prop_map(|((lba, blocks), from)| {
            let from = from.min(BLOCKS - u64::from(blocks));
            Step::Copy { from, lba, blocks }
        }),
        range().prop_map(|(lba, blocks)| Step::Read { lba, blocks }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_volume_has_what_was_written_last(
        steps in proptest::collection::vec(step(), 1..30),
        block in prop_oneof![Just(512usize), Just(4096), Just(1536)],
        mode in prop_oneof![Just("SIMPLE_LBA"), Just("JOIN_NEG_LBA_WITH_LBA"), Just("INCR_512_FULL_LBA"),
            Just("INCR_512_UPPER_LBA")],
    ) {
        let program = Program::start();
        program.malloc("base", BLOCKS, block);
        let key = json!({ "cipher": "AES_XTS", "key": KEY, "key2": KEY2, "name": "k", "tweak_mode": mode });
        program.call("accel_crypto_key_create", key);
        program.crypto("c", "base", "k");
        let mut model = vec![0u8; BLOCKS as usize * block];
        let range = |lba: u64, blocks: u32| lba as usize * block..(lba as usize + blocks as usize) * block;
        for step in steps {
            match step {
                Step::Write { lba, blocks, fill } => {
                    let data: Vec<u8> =
                        (0..blocks as usize * block).map(|at| fill.wrapping_add((at / 16) as u8)).collect();
                    program.write("c", lba, &data);
                    model[range(lba, blocks)].copy_from_slice(&data);
                }
                Step::Zeroes { lba, blocks } | Step::Unmap { lba, blocks } => {
                    let op = if matches!(step, Step::Unmap { .. }) { Op::Unmap } else { Op::WriteZeroes };
                    let status = program.with_channel("c", move |_, io| async move {
                        io.submit(Request::new(Tag(0), op, lba, blocks)).await.status()
                    });
                    prop_assert!(status.is_success());
                    model[range(lba, blocks)].fill(0);
                }
                Step::Copy { from, lba, blocks } => {
                    let status = program.with_channel("c", move |_, io| async move {
                        io.submit(Request::copy(Tag(0), from, lba, blocks)).await.status()
                    });
                    prop_assert!(status.is_success());
                    model.copy_within(range(from, blocks), range(lba, blocks).start);
                }
                Step::Read { lba, blocks } => {
                    let bytes = blocks as usize * block;
                    prop_assert_eq!(&program.read("c", lba, bytes)[..], &model[range(lba, blocks)]);
                }
            }
        }
        prop_assert_eq!(&program.read("c", 0, model.len())[..], &model[..]);
    }
}

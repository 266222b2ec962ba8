use wire_nvme::protection::{GuardFormat, Protection, ProtectionType};

use super::*;
use crate::{Accel, AccelOpStats, Cipher, Engine, Injection, TweakMode};

fn executed(accel: &Accel, op: AccelOp) -> (u64, u64, u64) {
    let AccelOpStats { executed, failed, bytes } = accel.stats()[op.index()];
    (executed, failed, bytes)
}

fn key() -> CryptoKey {
    let (key, key2) = (b"000102030405060708090a0b0c0d0e0f", b"6465666768696a6b6c6d6e6f70717273");
    CryptoKey::from_hex("k", Cipher::AesXts, TweakMode::SimpleLba, key, Some(key2)).unwrap()
}

const FORMAT: MetadataFormat = MetadataFormat {
    bytes: 8,
    extended: true,
    protection: Some(Protection::new(ProtectionType::Type1, false)),
};

/// Executes every operation that an engine has. Returns what each gave, in short: the first byte or a
/// checksum.
fn execute_all(channel: &AccelChannel) -> Vec<(AccelOp, Result<u64, AccelFailure>)> {
    let from: Vec<u8> = (0..1024).map(|at: u32| (at * 3 + 1) as u8).collect();
    let other = vec![0xf0; 1024];
    let (mut to, mut second, mut blocks, mut metadata) =
        (vec![0; 1024], vec![0; 1024], vec![0; 1040], vec![0; 16]);
    let tags = Tags { reference: 5, storage: 0, application: 0, application_mask: 0 };
    let (key, first) = (key(), |bytes: &[u8]| u64::from(bytes[0]));
    let mut results = Vec::new();
    let mut add = |op, result| results.push((op, result));
    add(AccelOp::Copy, channel.copy(&mut to, &from).map(|()| first(&to)));
    add(AccelOp::Fill, channel.fill(&mut to, 9).map(|()| first(&to)));
    add(AccelOp::Dualcast, channel.dualcast(&mut to, &mut second, &from).map(|()| first(&to)));
    add(AccelOp::Compare, channel.compare(&from, &from).map(u64::from));
    add(AccelOp::Crc32c, channel.crc32c(&from).map(u64::from));
    add(AccelOp::CopyCrc32c, channel.copy_crc32c(&mut to, &from).map(u64::from));
    to.copy_from_slice(&from);
    add(AccelOp::Encrypt, channel.encrypt(&key, &mut to, 512, 7).map(|()| first(&to)));
    key.encrypt_to(&mut to, &from, 512, 7);
    add(AccelOp::Decrypt, channel.decrypt(&key, &mut to, 512, 7).map(|()| first(&to)));
    add(AccelOp::Xor, channel.xor(&mut to, &[&from, &other, &from]).map(|()| first(&to)));
    add(
        AccelOp::DifGenerateCopy,
        channel.dif_generate_copy(&FORMAT, 512, &mut blocks, &from, &tags).map(|()| first(&blocks)),
    );
    software::insert_metadata(&mut blocks, &from, 512, 8);
    add(
        AccelOp::DifGenerate,
        channel.dif_generate(&FORMAT, 512, &mut blocks, &tags).map(|()| first(&blocks)),
    );
    software::insert_metadata(&mut blocks, &from, 512, 8);
    protection::generate_extended(&FORMAT, 512, &mut blocks, &tags);
    add(AccelOp::DifVerify, channel.dif_verify(&FORMAT, 512, &blocks, &tags).map(|()| 0));
    add(
        AccelOp::DifVerifyCopy,
        channel.dif_verify_copy(&FORMAT, 512, &mut to, &blocks, &tags).map(|()| first(&to)),
    );
    add(
        AccelOp::DixGenerate,
        channel.dix_generate(&FORMAT, 512, &from, &mut metadata, &tags).map(|()| first(&metadata)),
    );
    protection::generate(&FORMAT, 512, &from, &mut metadata, &tags);
    add(AccelOp::DixVerify, channel.dix_verify(&FORMAT, 512, &from, &metadata, &tags).map(|()| 0));
    results
}

#[test]
fn results_are_those_of_simple_loops() {
    let accel = Accel::default();
    let channel = accel.channel(0);
    let from: Vec<u8> = (0..9000).map(|at: u32| (at * at) as u8).collect();
    let other: Vec<u8> = (0..9000).map(|at: u32| (at * 7) as u8).collect();
    let mut to = vec![0; 9000];
    let expected: Vec<u8> = from.iter().zip(&other).map(|(one, other)| one ^ other).collect();
    channel.xor(&mut to, &[&from, &other]).unwrap();
    assert_eq!(to, expected);
    channel.xor(&mut to, &[&from, &other, &from]).unwrap();
    assert_eq!(to, other);
    channel.xor(&mut to, &[&from]).unwrap();
    assert_eq!(to, from);
    let mut second = vec![0; 9000];
    channel.dualcast(&mut to, &mut second, &other).unwrap();
    assert_eq!((&to, &second), (&other, &other));
    assert_eq!(channel.compare(&to, &second), Ok(true));
    second[8999] ^= 1;
    assert_eq!(channel.compare(&to, &second), Ok(false));
    assert_eq!(channel.crc32c(b"123456789"), Ok(0xe306_9283));
    assert_eq!(channel.copy_crc32c(&mut [0; 9], b"123456789"), Ok(0xe306_9283));
    channel.fill(&mut to, 3).unwrap();
    assert_eq!(to, [3; 9000]);

    // Inserted and stripped again; a block that has changed is not copied.
    let tags = Tags { reference: 77, storage: 0, application: 0, application_mask: 0 };
    let (data, mut blocks, mut stripped) = (&from[..2048], vec![0xff; 2080], vec![0; 2048]);
    channel.dif_generate_copy(&FORMAT, 512, &mut blocks, data, &tags).unwrap();
    channel.dif_verify_copy(&FORMAT, 512, &mut stripped, &blocks, &tags).unwrap();
    assert_eq!(stripped, data);
    blocks[600] ^= 4;
    let wrong = Err(AccelFailure::Protection(block_io::Status::GUARD_CHECK_ERROR));
    stripped.fill(0);
    assert_eq!(channel.dif_verify(&FORMAT, 512, &blocks, &tags), wrong);
    assert_eq!(channel.dif_verify_copy(&FORMAT, 512, &mut stripped, &blocks, &tags), wrong);
    assert_eq!(stripped, [0; 2048]);
}

#[test]
fn protection_information_of_every_guard_is_generated_and_verified() {
    let accel = Accel::default();
    let channel = accel.channel(0);
    let from: Vec<u8> = (0..2048).map(|at: u32| (at * at) as u8).collect();
    for guard in [GuardFormat::Crc16, GuardFormat::Crc32, GuardFormat::Crc64] {
        let protection = Protection::new(ProtectionType::Type1, false).with_guard(guard);
        let bytes = guard.bytes() as u16;
        let interleaved = MetadataFormat { bytes, extended: true, protection: Some(protection) };
        let separate = MetadataFormat { extended: false, ..interleaved };
        let tags = Tags { reference: u32::MAX.into(), ..Tags::default() };
        let mut blocks = vec![0xff; 4 * (512 + guard.bytes())];
        channel.dif_generate_copy(&interleaved, 512, &mut blocks, &from, &tags).unwrap();
        assert_eq!(channel.dif_verify(&interleaved, 512, &blocks, &tags), Ok(()));
        let moved = Tags { reference: 7, ..tags };
        let wrong = Err(AccelFailure::Protection(block_io::Status::REFERENCE_TAG_CHECK_ERROR));
        assert_eq!(channel.dif_verify(&interleaved, 512, &blocks, &moved), wrong, "{guard:?}");
        let mut metadata = vec![0; 4 * guard.bytes()];
        channel.dix_generate(&separate, 512, &from, &mut metadata, &tags).unwrap();
        for (block, metadata) in blocks.chunks(512 + guard.bytes()).zip(metadata.chunks(guard.bytes())) {
            assert_eq!(&block[512..], metadata, "{guard:?}");
        }
        metadata[0] ^= 1;
        let wrong = Err(AccelFailure::Protection(block_io::Status::GUARD_CHECK_ERROR));
        assert_eq!(channel.dix_verify(&separate, 512, &from, &metadata, &tags), wrong, "{guard:?}");
    }
}

#[test]
fn every_operation_is_counted_and_follows_its_engine() {
    let accel = Accel::default();
    let channel = accel.channel(3);
    let plain = execute_all(&channel);
    let done: Vec<AccelOp> = plain.iter().map(|(op, _)| *op).collect();
    for op in AccelOp::ALL {
        let is_supported = accel.engine(op).is_some();
        assert_eq!(done.contains(&op), is_supported, "{op:?}");
        let (count, failed, bytes) = executed(&accel, op);
        assert_eq!((count, failed, bytes > 0), (u64::from(is_supported), 0, is_supported), "{op:?}");
        assert_eq!(accel.assign(op, Engine::Error), is_supported, "{op:?}");
    }
    // The engine `error` does the same without faults.
    assert_eq!(execute_all(&channel), plain);
    let inject = |kind, errno| Injection { kind, count: 1, interval: 0, errno };
    for op in AccelOp::ALL {
        accel.inject(op, inject(InjectType::Failure, 28));
    }
    for (op, result) in execute_all(&channel) {
        assert_eq!(result, Err(AccelFailure::Failed { errno: 28 }), "{op:?}");
        let (count, failed, _) = executed(&accel, op);
        assert_eq!((count, failed), (2, 1), "{op:?}");
    }
    for op in AccelOp::ALL {
        accel.inject(op, inject(InjectType::Corrupt, 0));
    }
    for ((op, result), (_, right)) in execute_all(&channel).into_iter().zip(&plain) {
        assert_ne!(&result, right, "{op:?}");
    }
    // Each fault was for one operation, and none is there for those that return to the CPU.
    assert_eq!(execute_all(&channel), plain);
    for op in AccelOp::ALL {
        accel.inject(op, inject(InjectType::Failure, 0));
        accel.assign(op, Engine::Software);
    }
    assert_eq!(execute_all(&channel), plain);
    assert_eq!(accel.core_stats().len(), 1);
    assert_eq!(accel.core_stats()[0].0, 3);
}

#[test]
fn every_nth_operation_of_each_core_is_hit_until_there_were_enough() {
    let accel = Accel::default();
    let channels = [accel.channel(0), accel.channel(1)];
    assert!(accel.assign(AccelOp::Crc32c, Engine::Error));
    accel.inject(AccelOp::Crc32c, Injection { kind: InjectType::Failure, count: 2, interval: 3, errno: 0 });
    for channel in &channels {
        let hit: Vec<bool> = (0..12).map(|_| channel.crc32c(b"a").is_err()).collect();
        let places: Vec<usize> = (0..12).filter(|at| hit[*at]).collect();
        assert_eq!(places, [2, 5]);
    }
    assert_eq!(executed(&accel, AccelOp::Crc32c), (20, 4, 20));
    let cores: Vec<(usize, u64)> = accel
        .core_stats()
        .iter()
        .map(|(core, counts)| (*core, counts[AccelOp::Crc32c.index()].failed))
        .collect();
    assert_eq!(cores, [(0, 2), (1, 2)]);
    accel.inject(AccelOp::Crc32c, Injection { count: 0, ..Injection::NONE });
    assert!((0..9).all(|_| channels[0].crc32c(b"a").is_ok()));
}

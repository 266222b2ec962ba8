//! Random batches, faults, resizes and removals, compared with a `Vec<u8>`.
#![allow(clippy::unwrap_used)]

mod rig;

use std::path::PathBuf;

use bdev::{Access, BdevChannel, BdevError, delay, error, malloc, uring};
use block_io::{Channel as _, Op, Status};
use proptest::prelude::*;
use rig::{Oracle, RequestSpec, Rig};

const BLOCKS: u64 = 256;
/// Blocks of a request's stripe: requests of one batch do not overlap, as their order is undefined.
const STRIPE: u64 = 16;

fn spec() -> impl Strategy<Value = RequestSpec> {
    let ops =
        prop::sample::select(vec![Op::Read, Op::Write, Op::Write, Op::Flush, Op::Unmap, Op::WriteZeroes]);
    let location = (prop::bool::weighted(0.05), 0..STRIPE, 0..=STRIPE as u32);
    (ops, location, any::<u8>(), any::<bool>(), any::<bool>(), 0..4u16).prop_map(
        |(op, (outside, within, blocks), fill, fua, deallocate, flow)| {
            let room = (STRIPE - within) as u32;
            let (lba, blocks) =
                if outside { (u64::MAX - within, blocks) } else { (within, blocks.min(room)) };
            RequestSpec { op, lba, blocks, fill, fua, deallocate, flow }
        },
    )
}

fn batches() -> impl Strategy<Value = Vec<Vec<RequestSpec>>> {
    let batch = prop::collection::vec(spec(), 1..(BLOCKS / STRIPE) as usize);
    prop::collection::vec(batch.prop_map(assign_stripes), 1..12)
}

/// Moves each request to its stripe.
fn assign_stripes(mut batch: Vec<RequestSpec>) -> Vec<RequestSpec> {
    for (index, spec) in batch.iter_mut().enumerate() {
        if spec.lba < STRIPE {
            spec.lba += index as u64 * STRIPE;
        }
    }
    batch
}

/// Runs one batch on the device and on the oracle. `fault` is the status of injected failures.
fn round(
    rig: &mut Rig,
    channel: &mut BdevChannel,
    oracle: &mut Oracle,
    batch: &[RequestSpec],
    fault: Option<Status>,
) {
    let block_size = channel.block_size();
    let mut pending = batch.len();
    let mut requests: Vec<_> =
        batch.iter().enumerate().map(|(tag, spec)| spec.request(rig, tag as u64, block_size)).collect();
    let mut seen = vec![false; batch.len()];
    let mut sink = Vec::new();
    let start = std::time::Instant::now();
    while pending > 0 {
        channel.submit(&mut requests);
        rig.reactor.turn();
        channel.poll(&mut sink);
        assert!(start.elapsed().as_secs() < 30, "{pending} of {batch:?} never complete");
        for completion in sink.drain(..) {
            let tag = completion.tag().0 as usize;
            assert!(!std::mem::replace(&mut seen[tag], true), "{tag} completed twice");
            pending -= 1;
            let spec = &batch[tag];
            let status = completion.status();
            match oracle.expected_error(spec) {
                Some(expected) => assert!(status.same_code(expected), "{spec:?}: {status}, not {expected}"),
                None if fault.is_some_and(|fault| status.same_code(fault)) => {}
                None => {
                    assert!(status.is_success(), "{spec:?}: {status}");
                    if spec.op == Op::Read {
                        let buffer = completion.into_request().take_data().unwrap().into_single().unwrap();
                        assert_eq!(buffer.as_slice(), oracle.range(spec), "{spec:?}");
                    }
                    oracle.apply(spec);
                }
            }
        }
    }
    assert_eq!(channel.outstanding(), 0);
}

fn read_all(blocks: u64) -> Vec<RequestSpec> {
    let read = |stripe| RequestSpec {
        op: Op::Read,
        lba: stripe * STRIPE,
        blocks: STRIPE as u32,
        fill: 0xcc,
        fua: false,
        deallocate: false,
        flow: 0,
    };
    (0..blocks / STRIPE).map(read).collect()
}

fn open(rig: &Rig, name: &str) -> BdevChannel {
    rig.registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn malloc_behaves_as_a_vec(batches in batches(), large in any::<bool>()) {
        let block_size = if large { 4096 } else { 512 };
        let mut rig = Rig::new();
        malloc::create(&rig.registry, malloc::MallocConfig::new("M", BLOCKS, block_size)).unwrap();
        let mut channel = open(&rig, "M");
        let mut oracle = Oracle::new(BLOCKS, block_size);
        for batch in &batches {
            round(&mut rig, &mut channel, &mut oracle, batch, None);
        }
        round(&mut rig, &mut channel, &mut oracle, &read_all(BLOCKS), None);
    }

    #[test]
    fn faults_and_delays_neither_lose_nor_duplicate_io(
        batches in batches(),
        per_mille in 0..500u16,
        seed in any::<u64>(),
        latency_us in 0..30u64,
    ) {
        let mut rig = Rig::new();
        malloc::create(&rig.registry, malloc::MallocConfig::new("M", BLOCKS, 512)).unwrap();
        error::create(&rig.registry, error::ErrorConfig { seed, ..error::ErrorConfig::new("M") }).unwrap();
        let slow = delay::DelayConfig {
            p99_read_latency_us: 200,
            seed,
            ..delay::DelayConfig::new("EE_M", "D", latency_us)
        };
        delay::create(&rig.registry, slow).unwrap();
        let fault = Status::INTERNAL_ERROR;
        let injection = error::FaultInjection {
            chance: error::Chance::PerMille(per_mille),
            count: None,
            ..error::FaultInjection::once(None, error::FaultAction::Fail(fault))
        };
        error::inject(&rig.registry, "EE_M", injection).unwrap();
        let mut channel = open(&rig, "D");
        let mut oracle = Oracle::new(BLOCKS, 512);
        for batch in &batches {
            round(&mut rig, &mut channel, &mut oracle, batch, Some(fault));
        }
        error::clear(&rig.registry, "EE_M").unwrap();
        round(&mut rig, &mut channel, &mut oracle, &read_all(BLOCKS), None);
    }

    #[test]
    fn removal_at_any_time_completes_each_io_once(
        batches in batches(),
        polls in 0..4usize,
        stacked in any::<bool>(),
    ) {
        let mut rig = Rig::new();
        malloc::create(&rig.registry, malloc::MallocConfig::new("M", BLOCKS, 512)).unwrap();
        let top = if stacked {
            error::create(&rig.registry, error::ErrorConfig::new("M")).unwrap();
            delay::create(&rig.registry, delay::DelayConfig::new("EE_M", "D", 20)).unwrap();
            "D"
        } else {
            "M"
        };
        let device = rig.registry.find(top).unwrap();
        let mut channel = open(&rig, top);
        let mut requests: Vec<_> = Vec::new();
        for batch in &batches {
            let first = requests.len();
            let tagged = batch.iter().enumerate();
            requests.extend(tagged.map(|(index, spec)| spec.request(&rig, (first + index) as u64, 512)));
        }
        let total = requests.len();
        let (mut sink, mut late) = (Vec::new(), requests.split_off(total / 2));
        channel.submit(&mut requests);
        for _ in 0..polls {
            channel.poll(&mut sink);
        }
        rig.registry.unregister("M").unwrap();
        assert!(channel.is_removed());
        let before = sink.len();
        while sink.len() < total {
            channel.submit(&mut requests);
            channel.submit(&mut late);
            rig.reactor.turn();
            channel.poll(&mut sink);
        }
        let mut tags: Vec<u64> = sink.iter().map(|completion| completion.tag().0).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..total as u64).collect::<Vec<_>>());
        for completion in &sink[before..] {
            if completion.tag().0 >= (total / 2) as u64 {
                assert!(completion.status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT));
            }
        }
        drop(channel);
        assert!(device.wait_closed(std::time::Duration::ZERO));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_file_behaves_as_a_vec_through_resizes(
        batches in batches(),
        sizes in prop::collection::vec(8..BLOCKS, 1..12),
        direct in any::<bool>(),
    ) {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("oracle-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut rig = Rig::new();
        let config = uring::UringConfig {
            create_bytes: Some(BLOCKS * 512),
            direct,
            ..uring::UringConfig::new("F", &path)
        };
        match uring::create(&rig.registry, config) {
            Ok(_) => {}
            Err(error @ BdevError::NoFileIo { .. }) => {
                eprintln!("SKIPPED: {error}");
                return Ok(());
            }
            Err(error) => panic!("{error}"),
        }
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let mut channel = open(&rig, "F");
        let mut oracle = Oracle::new(BLOCKS, 512);
        for (batch, blocks) in batches.iter().zip(sizes.iter().cycle()) {
            round(&mut rig, &mut channel, &mut oracle, batch, None);
            file.set_len(blocks * 512).unwrap();
            uring::rescan(&rig.registry, "F", uring::FileModule::Uring).unwrap();
            oracle.contents.resize((blocks * 512) as usize, 0);
        }
        let blocks = channel.blocks();
        round(&mut rig, &mut channel, &mut oracle, &read_all(blocks), None);
        std::fs::remove_file(path).unwrap();
    }
}

//! I/O sizes, files and regions.

mod fio;

use block_io::Tag;

use super::*;
use crate::Distribution;
use crate::spec::{FileService, OffsetSequence};

const BLOCK: u32 = 512;

fn geometry(bytes: u64) -> Geometry {
    Geometry { block_bytes: BLOCK, blocks: bytes / u64::from(BLOCK) }
}

fn generate(spec: &JobSpec, files: &[Geometry], count: usize) -> Vec<(u16, u64, u64)> {
    let mut pattern = AccessPattern::new(spec, files).unwrap();
    let mut request = Request::new(Tag(0), Op::Read, 0, 0);
    let mut one = || {
        pattern.next_with_op(&mut request, None);
        (request.flow, request.lba * u64::from(BLOCK), u64::from(request.blocks * BLOCK))
    };
    (0..count).map(|_| one()).collect()
}

#[test]
fn split_sizes_follow_their_weights() {
    let split = BlockSizes::Split(vec![(4096, 10), (65_536, 50), (32_768, 40)]);
    let sizes = Some(Box::new([split.clone(), split.clone(), split]));
    let spec = JobSpec { workload: Workload::RandRead, block_bytes: 65_536, sizes, ..JobSpec::default() };
    let drawn = generate(&spec, &[geometry(1 << 30)], 100_000);
    for (bytes, share) in [(4096, 0.1), (65_536, 0.5), (32_768, 0.4)] {
        let count = drawn.iter().filter(|(_, _, size)| *size == bytes).count() as f64;
        assert!((count / 100_000.0 - share).abs() < 0.01, "{bytes}: {count}");
    }
    assert!(drawn.iter().all(|(_, offset, size)| offset % 4096 == 0 && offset + size <= 1 << 30));
}

#[test]
fn range_sizes_stay_in_range_and_sequential_io_is_contiguous() {
    let range = BlockSizes::Range { min: 4096, max: 16_384 };
    let sizes = Some(Box::new([range.clone(), range.clone(), range]));
    let spec = JobSpec { block_bytes: 16_384, sizes, ..JobSpec::default() };
    let drawn = generate(&spec, &[geometry(1 << 20)], 10_000);
    for pair in drawn.windows(2) {
        let end = pair[0].1 + pair[0].2;
        assert!(pair[1].1 == end || (pair[1].1 == 0 && end + pair[1].2 > 1 << 20), "{pair:?}");
        assert!((4096..=16_384).contains(&pair[0].2) && pair[0].2 % 4096 == 0);
    }
}

#[test]
fn file_service_selects_files() {
    let files = [geometry(1 << 20), geometry(1 << 20), geometry(2 << 20)];
    let spec =
        |service| JobSpec { file_service: service, workload: Workload::RandRead, ..JobSpec::default() };
    let turns = |service, count| -> Vec<u16> {
        generate(&spec(service), &files, count).into_iter().map(|(file, _, _)| file).collect()
    };
    assert_eq!(turns(FileService::RoundRobin(1), 5), [0, 1, 2, 0, 1]);
    assert_eq!(turns(FileService::RoundRobin(2), 7), [0, 0, 1, 1, 2, 2, 0]);
    let any = turns(FileService::Random(1), 3000);
    assert!((0..3).all(|file| (900..1100).contains(&any.iter().filter(|one| **one == file).count())));
    let sequential = JobSpec { file_service: FileService::Sequential, ..JobSpec::default() };
    let drawn = generate(&sequential, &files, 1024);
    assert_eq!((drawn[255].0, drawn[256].0, drawn[511].0, drawn[512].0, drawn[1023].0), (0, 1, 1, 2, 2));
}

#[test]
fn regions_may_be_percentages_of_each_device() {
    let spec = JobSpec {
        workload: Workload::RandRead,
        size_percent: Some(10),
        offset_percent: 50,
        ..JobSpec::default()
    };
    let drawn = generate(&spec, &[geometry(100 << 20)], 5000);
    let (low, high) =
        (drawn.iter().map(|one| one.1).min().unwrap(), drawn.iter().map(|one| one.1).max().unwrap());
    assert!(low >= 50 << 20 && high < 60 << 20 && high > 59 << 20, "{low} {high}");
    let two = JobSpec { size_bytes: Some(2 << 20), workload: Workload::RandRead, ..JobSpec::default() };
    let drawn = generate(&two, &[geometry(10 << 20), geometry(10 << 20)], 2000);
    assert!(drawn.iter().all(|(_, offset, _)| *offset < 1 << 20), "size is shared out among the files");
}

#[test]
fn random_map_covers_every_offset_exactly_once() {
    let spec = JobSpec { workload: Workload::RandRead, random_map: true, ..JobSpec::default() };
    let mut drawn = generate(&spec, &[geometry(4 << 20)], 1024);
    drawn.sort_unstable();
    assert!(drawn.windows(2).all(|pair| pair[1].1 == pair[0].1 + 4096));
    let zipf = JobSpec { distribution: Distribution::Zipf { theta: 1.2 }, ..spec };
    let mut drawn = generate(&zipf, &[geometry(4 << 20)], 1024);
    drawn.sort_unstable();
    drawn.dedup();
    assert!(drawn.len() < 600, "{}", drawn.len());
}

#[test]
fn invalid_alignment_and_mixed_block_sizes_are_rejected() {
    let error =
        |spec: &JobSpec, files: &[Geometry]| AccessPattern::new(spec, files).err().unwrap().to_string();
    let odd = JobSpec { align_bytes: [Some(700); 3], ..JobSpec::default() };
    assert!(error(&odd, &[geometry(1 << 20)]).contains("--blockalign=700"));
    let large = Geometry { block_bytes: 4096, blocks: 100 };
    assert!(error(&JobSpec::default(), &[geometry(1 << 20), large]).contains("512 and of 4096"));
    let verify = JobSpec { verify: Verify::Crc32c, ..JobSpec::default() };
    assert!(error(&verify, &[geometry(1 << 20), geometry(1 << 20)]).contains("one file"));
    let aligned =
        JobSpec { align_bytes: [Some(65_536); 3], workload: Workload::RandRead, ..JobSpec::default() };
    assert!(
        generate(&aligned, &[geometry(10 << 20)], 1000).iter().all(|(_, offset, _)| offset % 65_536 == 0)
    );
}

/// Offsets in units of 4 KiB of jobs over 64 KiB; those of the first two are fio 3.33's.
#[test]
fn steps_and_sequences_follow_fio() {
    let offsets = |workload, sequence, seed, count| -> Vec<u64> {
        let spec = JobSpec { workload, sequence, seed, ..JobSpec::default() };
        let drawn = generate(&spec, &[geometry(64 << 10)], count);
        drawn.into_iter().map(|(_, offset, _)| offset / 4096).collect()
    };
    let step = |step_bytes| OffsetSequence { step_bytes, ..OffsetSequence::default() };
    let backwards = offsets(Workload::Read, step(-8192), 1, 17);
    assert_eq!(backwards, [0, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 14]);
    assert_eq!(offsets(Workload::Read, step(12_288), 1, 9), [0, 4, 8, 12, 0, 4, 8, 12, 0]);
    for seed in 0..50 {
        let sequence = OffsetSequence { length: 4, ..OffsetSequence::default() };
        let drawn = offsets(Workload::RandRead, sequence, seed, 4000);
        let follows = |turn: &[u64]| turn.windows(2).all(|pair| pair[1] == pair[0] + 1 || pair[0] == 15);
        assert!(drawn.chunks(4).all(follows), "seed {seed}");
        let firsts: std::collections::BTreeSet<u64> = drawn.chunks(4).map(|turn| turn[0]).collect();
        assert_eq!(firsts.len(), 16, "seed {seed}");
        let repeats = OffsetSequence { length: 4, repeats: true, step_bytes: 0 };
        let drawn = offsets(Workload::RandRead, repeats, seed, 4000);
        assert!(drawn.chunks(4).all(|turn| turn.iter().all(|at| *at == turn[0])), "seed {seed}");
    }
}

/// Offsets in units of 4 KiB of `--rw=read:-8k --bs=4k` with an offset and a size, by fio 3.33's `write_iolog`.
#[test]
fn steps_backwards_from_an_offset_start_where_fio_does() {
    let cases: [(u64, u64, &[u64]); 5] = [
        (4, 16, &[14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 18, 17, 16, 15, 14]),
        (4, 12, &[10, 9, 8, 7, 6, 5, 4, 14, 13, 12, 11, 10]),
        (8, 8, &[8, 14, 13, 12, 11, 10, 9, 8]),
        (12, 4, &[14, 13, 12, 14]),
        (1, 4, &[2, 1, 3, 2, 1, 3, 2, 1, 3, 2, 1, 3]),
    ];
    for (offset, size, expected) in cases {
        let spec = JobSpec {
            sequence: OffsetSequence { step_bytes: -8192, ..OffsetSequence::default() },
            offset_bytes: offset * 4096,
            size_bytes: Some(size * 4096),
            ..JobSpec::default()
        };
        let drawn = generate(&spec, &[geometry(1 << 20)], expected.len());
        let drawn: Vec<u64> = drawn.into_iter().map(|(_, offset, _)| offset / 4096).collect();
        assert_eq!(drawn, expected, "offset {offset}, size {size}");
    }
}

#[test]
fn a_step_is_whole_blocks_and_longer_than_the_region_at_most_wraps() {
    let step = |step_bytes| OffsetSequence { step_bytes, ..OffsetSequence::default() };
    let spec = JobSpec { sequence: step(100), ..JobSpec::default() };
    let error = AccessPattern::new(&spec, &[geometry(64 << 10)]).err().unwrap().to_string();
    assert!(error.contains("--rw=read:100"), "{error}");
    for bytes in [-512, -4096, -65_536, -(1 << 40), 512, 1 << 40, i64::MIN + 512 - 512] {
        let spec = JobSpec { sequence: step(bytes), ..JobSpec::default() };
        let drawn = generate(&spec, &[geometry(64 << 10)], 1000);
        assert!(drawn.iter().all(|(_, offset, size)| offset + size <= 64 << 10), "{bytes}");
    }
}

//! Offsets against those of fio: sequential, strided, zoned and mixed patterns block by block, others by
//! coverage, mix and sequential shares.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::jobfile::plan;
use crate::jobfile::tests::{TestFiles, words};

const RECORDED: &str = include_str!("fio-3.33.txt");

/// The block size of the devices.
const UNIT: u64 = 512;

fn kib(text: &str) -> u64 {
    crate::units::parse_bytes(text).unwrap() >> 10
}

/// The job of a line of options.
fn job(options: &str) -> crate::jobfile::PerfJob {
    let line = words(&format!("--name=a --ioengine=null {options}"));
    plan(&line, &TestFiles::default()).unwrap().jobs.swap_remove(0)
}

fn pattern(job: &crate::jobfile::PerfJob, file_kib: u64) -> AccessPattern {
    let file = Geometry { block_bytes: UNIT as u32, blocks: file_kib * 1024 / UNIT };
    AccessPattern::new(&job.spec, &vec![file; job.nrfiles as usize]).unwrap()
}

/// Sections of the recorded file that begin with a mark: the rest of that line, and the next line.
fn recorded(mark: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let mut lines = RECORDED.lines();
    std::iter::from_fn(move || {
        let head = lines.by_ref().find_map(|line| line.strip_prefix(mark))?;
        Some((head.trim(), lines.next()?))
    })
}

#[test]
fn sequential_strided_zoned_and_mixed_offsets_are_those_of_fio() {
    let mut cases = 0;
    for (head, ios) in recorded("=") {
        let (device, options) = head.split_once(' ').unwrap();
        let mut pattern = pattern(&job(options), kib(device));
        let mut request = Request::new(Tag(0), Op::Read, 0, 0);
        for (index, io) in ios.split(' ').enumerate() {
            let at = io.find(['r', 'w', 't']).unwrap();
            let op = match &io[at..=at] {
                "r" => Op::Read,
                "w" => Op::Write,
                _ => Op::Unmap,
            };
            let (offset, length) = io[at + 1..].split_once('+').unwrap();
            let expected: [u64; 3] = [&io[..at], offset, length].map(|number| number.parse().unwrap());
            pattern.next_with_op(&mut request, Some(op));
            let blocks = u64::from(request.blocks);
            let drawn = [request.flow.into(), request.lba * UNIT / 1024, blocks * UNIT / 1024];
            assert_eq!((drawn, request.op), (expected, op), "{options}: I/O {index}");
        }
        cases += 1;
    }
    assert!(cases > 30, "{cases} cases");
}

/// What a job did, as in the recorded file.
#[derive(Debug, Default)]
struct Summary {
    ios: u64,
    kib: u64,
    covered: u64,
    directions: [u64; 2],
    sequential: [u64; 2],
}

fn run(options: &str) -> Summary {
    let job = job(options);
    let region = job.spec.size_bytes.unwrap() / u64::from(job.nrfiles) / 1024;
    let mut pattern = pattern(&job, region);
    let pass = pattern.total_bytes(UNIT as u32);
    let total = job.spec.io_bytes.unwrap_or(pass * u64::from(job.spec.loops)) / 1024;
    let mut request = Request::new(Tag(0), Op::Read, 0, 0);
    let (mut summary, mut ends, mut covered) = (Summary::default(), BTreeMap::new(), BTreeSet::new());
    while summary.kib < total {
        pattern.next_with_op(&mut request, None);
        let direction = usize::from(request.op != Op::Read);
        let (at, length) = (request.lba * UNIT / 1024, u64::from(request.blocks) * UNIT / 1024);
        assert!(at + length <= region, "{options}: {at} + {length} KiB of {region}");
        let before = ends.insert((request.flow, direction), at + length);
        summary.sequential[direction] += u64::from(before == Some(at));
        summary.directions[direction] += 1;
        summary.ios += 1;
        summary.kib += length;
        covered.extend((at..at + length).map(|kib| (request.flow, kib)));
    }
    summary.covered = covered.len() as u64;
    summary
}

#[test]
fn random_jobs_cover_mix_and_follow_as_those_of_fio() {
    let mut cases = 0;
    for (options, facts) in recorded("~") {
        let fact = |name: &str| {
            let value = facts.split(' ').find_map(|fact| fact.strip_prefix(name)).unwrap();
            value.split(',').map(|number| number.parse().unwrap()).collect::<Vec<u64>>()
        };
        let [ios, covered, reads] = ["ios=", "covered=", "reads="].map(|name| fact(name)[0]);
        let ours = run(options);
        let near = |what: &str, ours: u64, fios: u64, whole: u64| {
            // A tenth of the whole is four standard deviations of the smallest job's mix.
            let allowed = whole / 10;
            assert!(ours.abs_diff(fios) <= allowed, "{options}: {what} {ours}, fio {fios}, of {whole}");
        };
        near("I/Os", ours.ios, ios, ios);
        near("reads", ours.directions[0], reads, ios);
        near("covered KiB", ours.covered, covered, fact("kib=")[0].max(covered));
        for direction in [0, 1] {
            let of = [reads, ios - reads][direction];
            let share = |sequential: u64, of: u64| (sequential * 1000).checked_div(of).unwrap_or(0);
            let ours = share(ours.sequential[direction], ours.directions[direction]);
            near("sequential per mille", ours, share(fact("sequential=")[direction], of), 1000);
        }
        cases += 1;
    }
    assert!(cases > 25, "{cases} cases");
}

/// Whatever sizes are drawn, each direction continues where it ended, until a pass begins again for both.
#[test]
fn each_direction_has_a_position_of_its_own() {
    for options in [
        "--rw=rw --size=1m --io_size=8m",
        "--rw=rw --size=1m --io_size=8m --bssplit=4k/30:8k/30:16k/40",
        "--rw=rw --size=1000k --io_size=8m --bsrange=4k-64k",
        "--rw=rw --size=1m --time_based --runtime=1 --bssplit=4k/50:20k/50,8k/50:16k/50",
        "--rw=rw --size=1m --io_size=8m --nrfiles=3 --bs=4k,8k",
    ] {
        let job = job(options);
        let region = job.spec.size_bytes.unwrap() / u64::from(job.nrfiles) / 1024;
        let mut pattern = pattern(&job, region);
        let mut request = Request::new(Tag(0), Op::Read, 0, 0);
        let (mut ends, mut restarts) = (BTreeMap::new(), 0);
        for _ in 0..5000 {
            pattern.next_with_op(&mut request, None);
            let stream = (request.flow, usize::from(request.op != Op::Read));
            let (at, length) = (request.lba * UNIT / 1024, u64::from(request.blocks) * UNIT / 1024);
            let end = ends.entry(stream).or_insert(0);
            if at != *end {
                assert_eq!(at, 0, "{options}: {stream:?} is at {at}, not at {end}");
                restarts += 1;
            }
            *end = at + length;
        }
        assert!(restarts > 5 && ends.len() == 2 * job.nrfiles as usize, "{options}: {restarts} {ends:?}");
    }
}

/// A job with one block size and one file draws its offsets in batches, and one by one at depth 1: both as
/// the general path.
#[test]
fn batches_and_single_draws_are_those_of_fio_too() {
    for (head, ios) in recorded("=") {
        let (device, options) = head.split_once(' ').unwrap();
        let job = job(options);
        let mut batched = pattern(&job, kib(device));
        if !batched.is_simple() {
            continue;
        }
        let ops: Vec<Op> =
            ios.split(' ').map(|io| if io.contains('r') { Op::Read } else { Op::Write }).collect();
        let offsets: Vec<u64> = ios
            .split(' ')
            .map(|io| io[2..].split_once('+').unwrap().0.parse::<u64>().unwrap() * 1024 / UNIT)
            .collect();
        if job.spec.workload == Workload::Trim {
            continue;
        }
        let mut requests: Vec<Request<Data>> = ops.iter().map(|op| Request::new(Tag(0), *op, 0, 0)).collect();
        for part in requests.chunks_mut(7) {
            batched.next_batch(part, true, |_| ());
        }
        let drawn: Vec<u64> = requests.iter().map(|request| request.lba).collect();
        assert_eq!(drawn, offsets, "{options}");
        // One by one the operations are drawn too, so that only the order within a direction can be compared.
        let mut single = pattern(&job, kib(device));
        let mut request = Request::new(Tag(0), Op::Read, 0, 0);
        let mut next = [0; 2];
        for _ in 0..offsets.len() / 2 {
            single.next_one(&mut request);
            let direction = usize::from(request.op != Op::Read);
            if request.lba != next[direction] + single.first_lba {
                assert_eq!(request.lba, single.first_lba, "{options}");
                next = if single.returns_alone { next } else { [0; 2] };
            }
            next[direction] = request.lba - single.first_lba + u64::from(request.blocks);
        }
    }
}

//! The generator over a fake device.

use std::collections::VecDeque;

use dma::{Arena, ArenaConfig, CHUNK_BYTES, Data};

use super::*;
use crate::Direction;
use crate::arrivals::{ArrivalProcess, Rates};
use crate::log::LogOptions;
use crate::spec::{BlockSizes, ErrorPolicy, FioVerify, OffsetSequence, ThinkTime};
use crate::steady::{SteadyCriterion, SteadyOptions};
use crate::verify::VerifyFault;

mod priorities;
mod zoned;

const BLOCK: usize = 512;

/// A device in memory with a queue of at most `room` requests, and with fault injection.
struct FakeDevice {
    bytes: Vec<u8>,
    queue: VecDeque<Request<Data>>,
    queue_depth: usize,
    queued_max: usize,
    fail_lba: Option<u64>,
    fail_status: Status,
    drop_write_of: Option<u64>,
    silent: bool,
    reads: u64,
    writes: u64,
    reads_before_write: Vec<u64>,
}

impl FakeDevice {
    fn new(blocks: usize, queue_depth: usize) -> FakeDevice {
        let (bytes, queue) = (vec![0; blocks * BLOCK], VecDeque::new());
        let (fail_lba, drop_write_of) = (None, None);
        FakeDevice {
            bytes,
            queue,
            queue_depth,
            queued_max: 0,
            fail_lba,
            fail_status: Status::WRITE_FAULT,
            drop_write_of,
            silent: false,
            reads: 0,
            writes: 0,
            reads_before_write: Vec::new(),
        }
    }

    fn serve(&mut self, mut request: Request<Data>) -> Completion<Data> {
        if self.fail_lba == Some(request.lba) {
            return request.complete(self.fail_status);
        }
        let start = request.lba as usize * BLOCK;
        let range = start..start + request.blocks as usize * BLOCK;
        let lba = request.lba;
        match (request.op, request.data_mut().and_then(Data::single_mut)) {
            (Op::Read, Some(buffer)) => {
                self.reads += 1;
                buffer.as_mut_slice().copy_from_slice(&self.bytes[range]);
            }
            (Op::Write, Some(buffer)) => {
                self.writes += 1;
                self.reads_before_write.push(self.reads);
                if self.drop_write_of != Some(lba) {
                    self.bytes[range].copy_from_slice(buffer.as_slice());
                }
            }
            (Op::Unmap, None) => self.bytes[range].fill(0),
            other => panic!("{other:?} does not make sense"),
        }
        request.complete(Status::SUCCESS)
    }
}

impl Channel for FakeDevice {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        let count = batch.len().min(self.queue_depth - self.queue.len());
        self.queue.extend(batch.drain(..count));
        self.queued_max = self.queued_max.max(self.queue.len());
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let count = if self.silent { 0 } else { self.queue.len().div_ceil(2) };
        for _ in 0..count {
            let request = self.queue.pop_front().unwrap();
            let completion = self.serve(request);
            sink.push(completion);
        }
        count
    }
}

fn spec(workload: Workload) -> JobSpec {
    JobSpec { workload, block_bytes: 1024, io_depth: 8, ..JobSpec::default() }
}

fn start(spec: JobSpec, blocks: u64) -> Generator {
    let pool = Pool::new(&Arena::new(ArenaConfig {
        limit_bytes: 4 * CHUNK_BYTES,
        hugepages: false,
        ..Default::default()
    }));
    Generator::new(spec, Geometry { block_bytes: BLOCK as u32, blocks }, &pool).unwrap()
}

fn run(spec: JobSpec, device: &mut FakeDevice) -> JobResult {
    let mut generator = start(spec, (device.bytes.len() / BLOCK) as u64);
    while !generator.is_finished() {
        generator.turn(device);
    }
    generator.into_result()
}

#[test]
fn a_job_without_a_time_limit_covers_the_device_once() {
    let mut device = FakeDevice::new(1000, 1000);
    let result = run(spec(Workload::Read), &mut device);
    assert_eq!((device.reads, result.direction(Direction::Read).total_ios), (500, 500));
    assert_eq!(result.direction(Direction::Read).bytes, 512_000);
    assert_eq!(device.queued_max, 8, "the queue depth is the I/O depth");
    assert!(result.is_clean() && result.elapsed_ns() > 0);
}

#[test]
fn number_ios_is_exact_even_below_the_depth() {
    for number in [0, 1, 3, 8, 9, 12_345] {
        let mut device = FakeDevice::new(64, 64);
        let result = run(JobSpec { number_ios: Some(number), ..spec(Workload::RandRead) }, &mut device);
        assert_eq!((result.total_ios(), device.reads), (number, number));
    }
}

#[test]
fn a_full_channel_loses_no_io() {
    let mut device = FakeDevice::new(64, 3);
    let result = run(JobSpec { number_ios: Some(1000), ..spec(Workload::RandWrite) }, &mut device);
    assert_eq!((result.total_ios(), device.writes, device.queued_max), (1000, 1000, 3));
}

#[test]
fn the_runtime_ends_a_job_and_excludes_the_ramp() {
    let mut device = FakeDevice::new(64, 64);
    let (ramp_ns, runtime) = (20_000_000, 30_000_000);
    let timed = JobSpec { time_based: true, runtime_ns: Some(runtime), ramp_ns, ..spec(Workload::RandRead) };
    let started_at = std::time::Instant::now();
    let result = run(timed, &mut device);
    let elapsed = result.elapsed_ns();
    // How much later it ends depends on the load of the host; that it counts from the end of the ramp does not.
    assert!(elapsed >= runtime, "{elapsed} ns");
    assert!(
        started_at.elapsed().as_nanos() as u64 >= elapsed + ramp_ns,
        "{elapsed} ns in {:?}",
        started_at.elapsed()
    );
    assert!(result.total_ios() > 0 && device.reads > result.total_ios());
    assert!(result.usage.cpu_ns > 0);
}

#[test]
fn passes_over_the_region_are_counted_through_the_ramp() {
    let mut device = FakeDevice::new(64, 64);
    let timed = JobSpec {
        time_based: true,
        runtime_ns: Some(10_000_000),
        ramp_ns: 10_000_000,
        ..spec(Workload::Read)
    };
    let mut generator = start(timed, 64);
    let mut passes = 0;
    while !generator.is_finished() {
        generator.turn(&mut device);
        let Some(pass) = generator.pass() else { continue };
        assert_eq!(pass, generator.completed() / 32);
        passes = pass;
    }
    assert!(passes > 1, "{passes}");
    assert_eq!(generator.pass(), None, "a job that has finished begins no pass");
}

#[test]
fn the_last_of_several_sizes_is_what_is_left() {
    for seed in 0..20 {
        let mut device = FakeDevice::new(1000, 1000);
        let sizes = BlockSizes::Range { min: 512, max: 4096 };
        let sizes = Some(Box::new([sizes.clone(), sizes.clone(), sizes]));
        let mixed = JobSpec { sizes, block_bytes: 4096, seed, ..spec(Workload::RandRead) };
        let result = run(mixed, &mut device);
        assert_eq!(result.direction(Direction::Read).bytes, 512_000, "{seed}");
    }
}

#[test]
fn a_share_of_the_region_ends_a_job() {
    let mut device = FakeDevice::new(1000, 1000);
    let result = run(JobSpec { io_percent: Some(25), ..spec(Workload::Read) }, &mut device);
    assert_eq!(result.total_ios(), 125);
}

#[test]
fn the_read_percentage_is_met() {
    let mut device = FakeDevice::new(64, 64);
    let mixed = JobSpec { number_ios: Some(10_000), read_percent: 70, ..spec(Workload::RandRw) };
    let result = run(mixed, &mut device);
    let reads = result.direction(Direction::Read).total_ios;
    assert!((6800..7200).contains(&reads), "{reads}");
    assert_eq!(result.total_ios(), 10_000);
}

#[test]
fn verified_writes_are_read_back() {
    for workload in [Workload::Write, Workload::RandWrite] {
        let mut device = FakeDevice::new(400, 8);
        let result = run(JobSpec { verify: Verify::Crc32c, ..spec(workload) }, &mut device);
        assert!(result.is_clean(), "{:?}", result.mismatches);
        assert_eq!(result.direction(Direction::Write).total_ios, 200);
        assert_eq!(result.checked_blocks, device.reads * 2);
        assert!(device.reads > 100, "{} read back", device.reads);
    }
}

#[test]
fn mixed_io_verifies_without_false_mismatches() {
    let mut device = FakeDevice::new(16, 8);
    let mixed = JobSpec { number_ios: Some(20_000), verify: Verify::Pattern, ..spec(Workload::RandRw) };
    let result = run(mixed, &mut device);
    assert!(result.is_clean(), "{:?}", result.mismatches);
    assert!(result.checked_blocks > 15_000, "{}", result.checked_blocks);
}

#[test]
fn a_lost_write_is_detected_and_identified() {
    let mut device = FakeDevice::new(400, 8);
    device.drop_write_of = Some(42);
    let result = run(JobSpec { verify: Verify::Crc32c, ..spec(Workload::Write) }, &mut device);
    assert_eq!((result.mismatch_count, result.is_clean()), (2, false));
    assert_eq!(result.mismatches[0].lba, 42);
    assert_eq!(result.mismatches[0].fault, VerifyFault::Magic { got: 0 });
}

#[test]
fn corruption_is_detected_by_a_later_read_only_job() {
    let mut device = FakeDevice::new(400, 8);
    assert!(run(JobSpec { verify: Verify::Crc32c, ..spec(Workload::Write) }, &mut device).is_clean());
    let read = JobSpec { verify: Verify::Crc32c, seed: 1, ..spec(Workload::Read) };
    assert!(run(read.clone(), &mut device).is_clean());
    device.bytes[77 * BLOCK + 300] ^= 1;
    let result = run(read, &mut device);
    assert_eq!((result.mismatch_count, result.mismatches[0].lba), (1, 77));
    assert!(matches!(result.mismatches[0].fault, VerifyFault::Checksum { .. }));
}

#[test]
fn the_first_error_ends_a_job_unless_continue_on_error_is_set() {
    let mut device = FakeDevice::new(400, 8);
    device.fail_lba = Some(10);
    let result = run(spec(Workload::Write), &mut device);
    assert_eq!((result.errors, result.failures[0].status), (1, Status::WRITE_FAULT));
    assert!(result.total_ios() < 30);
    let policy = |continues, ignored: [&[i32]; 2]| {
        let errors = ErrorPolicy { continues, ignored: ignored.map(<[i32]>::to_vec), omits_details: false };
        JobSpec { errors, ..spec(Workload::Write) }
    };
    let result = run(policy([false, true], [&[], &[]]), &mut device);
    assert_eq!((result.errors, result.total_ios()), (1, 199));
    // Errors of reads are another kind.
    assert!(run(policy([true, false], [&[5], &[]]), &mut device).total_ios() < 30);
    let result = run(policy([false; 2], [&[], &[28, 5]]), &mut device);
    assert_eq!((result.errors, result.total_ios()), (0, 199));
}

#[test]
fn a_full_medium_ends_a_job_that_fills_it() {
    let mut device = FakeDevice::new(400, 8);
    (device.fail_lba, device.fail_status) = (Some(300), Status::CAPACITY_EXCEEDED);
    let fill = JobSpec { fills_device: true, ..spec(Workload::Write) };
    let result = run(fill.clone(), &mut device);
    assert!(result.is_clean() && (140..=160).contains(&result.total_ios()), "{}", result.total_ios());
    assert!(!run(JobSpec { fills_device: false, ..fill.clone() }, &mut device).is_clean());
    // What was written is read back.
    let result = run(JobSpec { verify: Verify::Crc32c, ..fill }, &mut device);
    let written = result.direction(Direction::Write).total_ios;
    assert!(result.is_clean() && result.direction(Direction::Read).total_ios == written, "{result:?}");
}

#[test]
fn trims_carry_no_data() {
    let mut device = FakeDevice::new(400, 8);
    device.bytes.fill(9);
    let result = run(spec(Workload::Trim), &mut device);
    assert_eq!(result.direction(Direction::Trim).total_ios, 200);
    assert!(device.bytes.iter().all(|byte| *byte == 0));
}

/// Runs a job in virtual time: each I/O takes `service_ns`, the device is polled every 50 us, and half-way through
/// stalls for `stall_ns`. Returns the job's result and its longest latency in nanoseconds.
fn virtual_time(spec: JobSpec, service_ns: u64, stall_ns: u64) -> (JobResult, u64) {
    let runtime_ns = spec.runtime_ns.unwrap();
    let mut generator = start(spec, 4096);
    let ticks = clock::ns_to_ticks;
    let begin = ticks(5_000_000_000);
    let mut out: VecDeque<(u64, Request<Data>)> = VecDeque::new();
    generator.begin(begin);
    let (mut at_ns, mut stalled) = (0, false);
    while generator.phase <= JobPhase::Measuring || !out.is_empty() {
        if at_ns >= runtime_ns / 2 && !std::mem::replace(&mut stalled, true) {
            at_ns += stall_ns;
        }
        let now = begin + ticks(at_ns);
        while out.front().is_some_and(|(due, _)| *due <= now) {
            let (_, request) = out.pop_front().unwrap();
            generator.completions.push(request.complete(Status::SUCCESS));
        }
        if !generator.completions.is_empty() {
            generator.complete(now);
        }
        if now >= generator.event_ticks && generator.phase <= JobPhase::Measuring {
            generator.on_event(now);
        }
        generator.start_due(now);
        let due = now + ticks(service_ns);
        out.extend(generator.ready.drain(..).map(|request| (due, request)));
        generator.batches.mark_submitted(&[], now);
        at_ns += 50_000;
    }
    generator.finish_phase(begin + ticks(runtime_ns));
    let result = generator.into_result();
    let longest = result.directions.iter().map(|side| side.latency_ticks.max()).max().unwrap();
    (result, clock::ticks_to_ns(longest))
}

fn paced(arrivals: ArrivalProcess, iops: u64, seconds: u64) -> JobSpec {
    let rates = Rates { iops: [Some(iops); 3], process: arrivals, ..Rates::default() };
    let runtime_ns = Some(seconds * 1_000_000_000);
    let depth = 128;
    JobSpec { rates, runtime_ns, time_based: true, io_depth: depth, ..spec(Workload::RandRead) }
}

#[test]
fn a_rate_is_met_for_the_whole_runtime() {
    let (iops, seconds) = (2000, 20);
    for arrivals in [ArrivalProcess::Linear, ArrivalProcess::Poisson] {
        // Fast path, then general path.
        for latency_max_ns in [None, Some(u64::MAX / 2)] {
            let job = JobSpec { latency_max_ns, ..paced(arrivals, iops, seconds) };
            let (result, longest_ns) = virtual_time(job, 200_000, 0);
            let (ios, expected) = (result.total_ios(), iops * seconds);
            // Linear arrivals are exact up to the last one. The number of Poisson arrivals has a standard
            // deviation of its square root; the tolerance is five of those.
            let tolerance = match arrivals {
                ArrivalProcess::Linear => 1,
                ArrivalProcess::Poisson => 5 * expected.isqrt(),
            };
            assert!(ios.abs_diff(expected) <= tolerance, "{arrivals:?}: {ios} I/Os");
            assert!((199_999..=350_000).contains(&longest_ns), "{arrivals:?}: {longest_ns} ns");
            let drawn = result.direction(Direction::Read).latency_ticks.mean();
            let mean_ns = clock::ticks_to_ns(drawn as u64);
            assert!((199_999..=300_000).contains(&mean_ns), "{arrivals:?}: {mean_ns} ns");
        }
    }
}

#[test]
fn ios_delayed_by_a_stall_are_issued_and_their_delay_counts_as_latency() {
    let (iops, seconds, stall_ns) = (2000, 10, 1_000_000_000);
    for arrivals in [ArrivalProcess::Linear, ArrivalProcess::Poisson] {
        let (result, longest_ns) = virtual_time(paced(arrivals, iops, seconds), 200_000, stall_ns);
        let (ios, expected) = (result.total_ios(), iops * seconds);
        assert!(ios.abs_diff(expected) <= 5 * expected.isqrt(), "{arrivals:?}: {ios} I/Os");
        // An I/O scheduled at the start of the stall waits for all of it, and then in the queue.
        assert!((stall_ns..stall_ns + 50_000_000).contains(&longest_ns), "{arrivals:?}: {longest_ns} ns");
        // One second of arrivals is late, by half a second on average.
        let late_ns = stall_ns / 10;
        let read = result.direction(Direction::Read);
        let late = read.latency_ticks.iter().filter(|(ticks, _)| clock::ticks_to_ns(*ticks) > late_ns);
        let late: u64 = late.map(|(_, count)| count).sum();
        assert!(late.abs_diff(iops * 9 / 10) < iops / 10, "{arrivals:?}: {late} late");
        // From submission, latencies are the device's, except for I/Os in flight during the stall.
        let slow = read.completion_ticks.iter().filter(|(ticks, _)| clock::ticks_to_ns(*ticks) > 1_000_000);
        assert!(slow.map(|(_, count)| count).sum::<u64>() <= 5, "{arrivals:?}");
    }
}

#[test]
fn depths_and_batches_are_counted() {
    let mut device = FakeDevice::new(1000, 1000);
    let result = run(JobSpec { number_ios: Some(400), ..spec(Workload::RandRead) }, &mut device);
    let DepthCounts { level, submit, complete } = result.depths;
    // Eight are in flight until the end; each poll completes half of them, which are resubmitted.
    assert_eq!((level.iter().sum::<u64>(), level[3]), (400, 400));
    assert_eq!((submit[1..3].iter().sum::<u64>(), submit[2], submit[0]), (99, 1, 0));
    assert_eq!(complete.iter().sum::<u64>(), 102, "the last eight complete as 4, 2, 1 and 1");
    let mut device = FakeDevice::new(1000, 3);
    let result = run(JobSpec { number_ios: Some(400), ..spec(Workload::RandRead) }, &mut device);
    assert_eq!(result.depths.level[1], 400 - result.depths.level[0], "the channel has room for three");
    assert_eq!(result.depths.level.iter().sum::<u64>(), 400);
}

#[test]
fn stopping_drains_ios_in_flight() {
    let mut device = FakeDevice::new(64, 64);
    let endless = JobSpec { time_based: true, runtime_ns: Some(u64::MAX / 4), ..spec(Workload::RandRead) };
    let mut generator = start(endless, 64);
    generator.turn(&mut device);
    device.silent = true;
    generator.turn(&mut device);
    generator.stop();
    generator.turn(&mut device);
    assert!(!generator.is_finished());
    device.silent = false;
    while !generator.is_finished() {
        generator.turn(&mut device);
    }
    assert_eq!(generator.into_result().never_completed, 0);
}

#[test]
fn a_job_that_verifies_behind_an_offset_can_be_stopped_before_its_start() {
    let verify = Verify::Fio(FioVerify::Crc32c);
    let mut generator = start(JobSpec { verify, offset_bytes: 8192, ..spec(Workload::RandWrite) }, 64);
    generator.stop();
    let mut device = FakeDevice::new(64, 64);
    while !generator.is_finished() {
        generator.turn(&mut device);
    }
    assert_eq!((device.reads, device.writes), (0, 0));
}

#[test]
fn stopping_discards_requests_that_a_full_channel_did_not_accept() {
    for latency_max_ns in [None, Some(u64::MAX / 2)] {
        let mut device = FakeDevice::new(64, 3);
        let mut generator =
            start(JobSpec { number_ios: Some(1_000_000), latency_max_ns, ..spec(Workload::RandRead) }, 64);
        generator.turn(&mut device);
        assert!(!generator.ready.is_empty(), "five of eight wait for room");
        generator.stop();
        while !generator.is_finished() {
            generator.turn(&mut device);
        }
        let result = generator.into_result();
        assert_eq!((result.total_ios(), result.never_completed), (device.reads, 0));
    }
}

#[test]
fn a_job_stopped_before_its_start_does_no_io() {
    for flush_at_end in [false, true] {
        let mut device = FakeDevice::new(64, 64);
        let mut generator = start(JobSpec { flush_at_end, ..spec(Workload::RandWrite) }, 64);
        generator.stop();
        while !generator.is_finished() {
            generator.turn(&mut device);
        }
        assert_eq!((device.writes, generator.into_result().total_ios()), (0, 0));
    }
}

#[test]
fn invalid_jobs_are_rejected_before_they_run() {
    let geometry = Geometry { block_bytes: 512, blocks: 64 };
    let pool = Pool::new(&Arena::new(ArenaConfig {
        limit_bytes: CHUNK_BYTES,
        hugepages: false,
        ..Default::default()
    }));
    let base = spec(Workload::RandWrite);
    let cases = [
        (JobSpec { block_bytes: 700, ..base.clone() }, "--bs=700"),
        (JobSpec { offset_bytes: 32 << 10, ..base.clone() }, "do not fit"),
        (JobSpec { size_bytes: Some(64 << 10), ..base.clone() }, "do not fit"),
        (JobSpec { io_depth: 0, ..base.clone() }, "--iodepth=0"),
        (JobSpec { io_depth: 33, verify: Verify::Crc32c, ..base.clone() }, "raise --size"),
        (JobSpec { time_based: true, ..base.clone() }, "needs --runtime"),
        (JobSpec { io_depth: 4096, block_bytes: 512, ..base }, "no memory"),
    ];
    for (spec, message) in cases {
        let error = Generator::new(spec, geometry, &pool).err().unwrap().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn each_trim_is_followed_by_the_write_of_its_range() {
    for workload in [Workload::TrimWrite, Workload::RandTrimWrite] {
        let mut device = FakeDevice::new(1000, 1000);
        let result = run(JobSpec { random_map: true, ..spec(workload) }, &mut device);
        let ios = |direction| result.direction(direction).total_ios;
        let expected = (500, 500, 0);
        assert_eq!((ios(Direction::Trim), ios(Direction::Write), ios(Direction::Read)), expected);
        assert!(device.bytes.chunks(BLOCK).all(|block| block.iter().any(|byte| *byte != 0)), "{workload:?}");
        // fio counts pairs.
        let result = run(JobSpec { number_ios: Some(3), ..spec(workload) }, &mut device);
        let ios = |direction| result.direction(direction).total_ios;
        assert_eq!((ios(Direction::Trim), ios(Direction::Write)), (3, 3));
    }
}

#[test]
fn a_job_pauses_with_nothing_in_flight_and_after_its_last_io() {
    let think = ThinkTime { ns: 2_000_000, blocks: 4, counts_issued: true, ..ThinkTime::default() };
    let mut device = FakeDevice::new(64, 64);
    let result = run(JobSpec { think, number_ios: Some(12), ..spec(Workload::RandRead) }, &mut device);
    assert_eq!((result.total_ios(), device.queued_max), (12, 4), "the depth is 8");
    assert!(result.elapsed_ns() >= 6_000_000, "{}", result.elapsed_ns());
}

#[test]
fn histogram_logs_count_every_io() {
    let directory = std::env::temp_dir().join(format!("ringbolt-histograms-{}", std::process::id()));
    let log = LogOptions {
        histograms: Some(directory.join("h")),
        histograms_ns: 1_000_000,
        histograms_coarseness: 1,
        ..LogOptions::default()
    };
    let mut device = FakeDevice::new(64, 64);
    let mut generator = start(JobSpec { log, number_ios: Some(20_000), ..spec(Workload::RandRw) }, 64);
    while !generator.is_finished() {
        generator.turn(&mut device);
    }
    let result = generator.finish(2);
    assert_eq!((result.log_error, result.dropped_log_entries), (None, 0));
    let text = std::fs::read_to_string(directory.join("h_clat_hist.2.log")).unwrap();
    let mut ios = [0; 3];
    for line in text.lines() {
        let numbers: Vec<u64> = line.split(", ").map(|word| word.parse().unwrap()).collect();
        assert_eq!((numbers.len(), numbers[2]), (3 + 928, 1024));
        ios[numbers[1] as usize] += numbers[3..].iter().sum::<u64>();
    }
    assert_eq!((ios[0] + ios[1], ios[2]), (20_000, 0));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_steady_rate_ends_a_job() {
    let criterion = SteadyCriterion { of_bandwidth: true, of_slope: false, limit: 1e18, in_percent: false };
    let steady = Some(SteadyOptions { criterion, duration_s: 1, ramp_ns: 1_000_000, of_group: false });
    let hour_ns = Some(3_600_000_000_000);
    let mut device = FakeDevice::new(64, 64);
    let job = JobSpec { steady, time_based: true, runtime_ns: hour_ns, ..spec(Workload::RandRead) };
    let steady = run(job, &mut device).steady.unwrap();
    assert!(steady.attained && steady.iops[0] > 0, "{steady:?}");
    assert!(steady.bandwidth[0].abs_diff(steady.iops[0] * 1024) < 1024, "{steady:?}");
}

#[test]
fn written_data_is_read_back_unless_told_otherwise() {
    for (reads_back, reads) in [(true, 32), (false, 0)] {
        let mut device = FakeDevice::new(64, 64);
        let verify = Verify::Fio(FioVerify::Md5);
        let result = run(JobSpec { verify, reads_back, ..spec(Workload::Write) }, &mut device);
        assert_eq!((device.writes, device.reads, result.checked_blocks), (32, reads, reads));
        assert!(result.is_clean());
    }
}

#[test]
fn a_backlog_is_read_back_while_the_job_runs() {
    for (batch, first) in [(0, 16), (4, 4)] {
        let mut device = FakeDevice::new(400, 8);
        let job = spec(Workload::Write);
        let job =
            JobSpec { verify: Verify::Crc32c, verify_backlog: 16, verify_batch: batch, io_depth: 1, ..job };
        let result = run(job, &mut device);
        assert!(result.is_clean() && result.direction(Direction::Write).total_ios == 200, "{result:?}");
        assert_eq!(result.direction(Direction::Read).total_ios, 200, "batch {batch}: each once");
        let reads_before: Vec<u64> =
            [15, 16, 20].iter().map(|write| device.reads_before_write[*write]).collect();
        assert_eq!(reads_before, [0, first, if batch == 0 { 16 } else { 8 }]);
    }
    // A lost write is found.
    let mut device = FakeDevice::new(400, 8);
    let job = JobSpec { verify: Verify::Crc32c, verify_backlog: 1, ..spec(Workload::RandWrite) };
    assert!(run(job.clone(), &mut device).is_clean());
    device.drop_write_of = Some(10);
    assert_eq!(run(JobSpec { seed: 5, ..job }, &mut device).mismatch_count, 2);
}

#[test]
fn a_mixed_job_reads_back_what_it_wrote() {
    let mut device = FakeDevice::new(400, 8);
    let job = JobSpec { verify: Verify::Crc32c, number_ios: Some(100), ..spec(Workload::RandRw) };
    let result = run(job.clone(), &mut device);
    let [reads, writes] = [Direction::Read, Direction::Write].map(|side| result.direction(side).total_ios);
    assert!(result.is_clean() && reads > 100 - writes, "{reads} reads, {writes} writes");
    // It read all the time, so that rates of reads are of the whole time.
    let [read, write] = [Direction::Read, Direction::Write].map(|side| result.direction(side).elapsed_ns);
    assert!(read >= write, "reads took {read} ns, writes {write} ns");
    let result = run(JobSpec { reads_back: false, ..job }, &mut device);
    assert_eq!(result.total_ios(), 100);
}

#[test]
fn verified_writes_may_be_sequential_in_part() {
    let sequence = |length, repeats| OffsetSequence { length, repeats, step_bytes: 0 };
    for workload in [Workload::RandWrite, Workload::RandRw] {
        for (random_percent, sequence) in [
            ([50; 3], OffsetSequence::default()),
            ([0, 100, 100], OffsetSequence::default()),
            ([100; 3], sequence(8, false)),
            ([70; 3], sequence(3, true)),
        ] {
            let mut device = FakeDevice::new(400, 8);
            let job = JobSpec {
                verify: Verify::Pattern,
                random_percent,
                sequence,
                random_map: true,
                io_bytes: Some(1 << 20),
                ..spec(workload)
            };
            let result = run(job, &mut device);
            assert!(result.is_clean() && result.checked_blocks > 50, "{workload:?}: {result:?}");
        }
    }
    let arena =
        Arena::new(ArenaConfig { limit_bytes: 4 * CHUNK_BYTES, hugepages: false, ..ArenaConfig::default() });
    let geometry = Geometry { block_bytes: BLOCK as u32, blocks: 400 };
    let aligned = JobSpec {
        verify: Verify::Crc32c,
        align_bytes: [Some(512); 3],
        random_percent: [50; 3],
        ..spec(Workload::RandWrite)
    };
    let error = Generator::new(aligned, geometry, &Pool::new(&arena)).err().unwrap().to_string();
    assert!(error.contains("--verify excludes several block sizes and --blockalign"), "{error}");
}

#[test]
fn verified_writes_may_have_gaps() {
    let mut device = FakeDevice::new(400, 8);
    let sequence = OffsetSequence { step_bytes: 3 * 1024, ..OffsetSequence::default() };
    let job = JobSpec { verify: Verify::Crc32c, sequence, number_ios: Some(50), ..spec(Workload::Write) };
    let result = run(job.clone(), &mut device);
    assert!(result.is_clean(), "{result:?}");
    assert_eq!((device.writes, device.reads), (50, 50));
    assert!(
        device.bytes[..1024].iter().any(|byte| *byte != 0)
            && device.bytes[1024..4096].iter().all(|byte| *byte == 0)
    );
    let odd = JobSpec { sequence: OffsetSequence { step_bytes: 512, ..OffsetSequence::default() }, ..job };
    let arena =
        Arena::new(ArenaConfig { limit_bytes: 4 * CHUNK_BYTES, hugepages: false, ..ArenaConfig::default() });
    let geometry = Geometry { block_bytes: BLOCK as u32, blocks: 400 };
    assert_eq!(
        Generator::new(odd, geometry, &Pool::new(&arena)).err(),
        Some(SetupError::VerifyMixed("a step that is no multiple of --bs"))
    );
}

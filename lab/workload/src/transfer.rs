//! Serializes a job's result as JSON, from the process that ran the job to its parent. The format is internal
//! to one version of the program.

use block_io::{Op, Status};
use serde_json::{Value, json};

use crate::Histogram;
use crate::result::{DepthCounts, DirectionResult, IoFailure, JobResult, KernelThreads, Samples};
use crate::spec::FioVerify;
use crate::spec::JobSpec;
use crate::steady::SteadyResult;
use crate::timeline::TimelineEntry;
use crate::usage::Usage;
use crate::verify::{FioHeaderField, VerifyFault, VerifyMismatch};

/// Encodes a result as one line.
pub(crate) fn encode(result: &JobResult) -> String {
    let usage = result.usage;
    let failure =
        |one: &IoFailure| json!([one.op.index(), one.lba, one.blocks, one.status.field(), one.file]);
    json!({
        "directions": result.directions.iter().chain([&result.sync]).map(encode_direction).collect::<Vec<_>>(),
        "usage": [usage.cpu_ns, usage.user_ns, usage.system_ns, usage.switches, usage.minor_faults,
                  usage.major_faults],
        "errors": result.errors,
        "failures": result.failures.iter().map(failure).collect::<Vec<_>>(),
        "broken_limit": result.broken_limit,
        "mismatches": result.mismatches.iter().map(encode_mismatch).collect::<Vec<_>>(),
        "mismatch_count": result.mismatch_count,
        "checked_blocks": result.checked_blocks,
        "never_completed": result.never_completed,
        "latency_depth": result.latency_depth,
        "steady": result.steady.as_ref().map(encode_steady),
        "timeline": result.timeline.iter().map(encode_entry).collect::<Vec<_>>(),
        "depths": [result.depths.level, result.depths.submit, result.depths.complete],
        "kernel": [result.kernel.submission_ns, result.kernel.workers_ns],
        "dropped_log_entries": result.dropped_log_entries,
        "zone_resets": result.zone_resets,
        "number": result.number,
        "log_error": result.log_error,
    })
    .to_string()
}

/// Decodes the result of a job with this `spec`; `None` if the text is malformed.
pub(crate) fn decode(text: &str, spec: &JobSpec) -> Option<JobResult> {
    let value: Value = serde_json::from_str(text).ok()?;
    let mut directions =
        value["directions"].as_array()?.iter().map(decode_direction).collect::<Option<Vec<_>>>()?.into_iter();
    let usage = numbers(&value["usage"])?;
    let kernel = numbers(&value["kernel"])?;
    let depths = |index: usize| numbers(&value["depths"][index])?.try_into().ok();
    let failure = |one: &Value| {
        let one = numbers(one)?;
        let op = *Op::ALL.get(*one.first()? as usize)?;
        let status = Status::from_field(*one.get(3)? as u16);
        let file = u16::try_from(*one.get(4)?).ok()?;
        Some(IoFailure { op, file, lba: *one.get(1)?, blocks: *one.get(2)? as u32, status })
    };
    Some(JobResult {
        spec: spec.clone(),
        directions: [directions.next()?, directions.next()?, directions.next()?],
        sync: directions.next()?,
        usage: Usage {
            cpu_ns: *usage.first()?,
            user_ns: *usage.get(1)?,
            system_ns: *usage.get(2)?,
            switches: *usage.get(3)?,
            minor_faults: *usage.get(4)?,
            major_faults: *usage.get(5)?,
        },
        errors: value["errors"].as_u64()?,
        failures: value["failures"].as_array()?.iter().map(failure).collect::<Option<_>>()?,
        broken_limit: value["broken_limit"].as_str().map(str::to_string),
        mismatches: value["mismatches"].as_array()?.iter().map(decode_mismatch).collect::<Option<_>>()?,
        mismatch_count: value["mismatch_count"].as_u64()?,
        checked_blocks: value["checked_blocks"].as_u64()?,
        never_completed: value["never_completed"].as_u64()?,
        jobs: 1,
        latency_depth: value["latency_depth"].as_u64().map(|depth| depth as usize),
        steady: match &value["steady"] {
            Value::Null => None,
            steady => Some(decode_steady(steady)?),
        },
        timeline: value["timeline"].as_array()?.iter().map(decode_entry).collect::<Option<_>>()?,
        depths: DepthCounts { level: depths(0)?, submit: depths(1)?, complete: depths(2)? },
        kernel: KernelThreads { submission_ns: *kernel.first()?, workers_ns: *kernel.get(1)? },
        dropped_log_entries: value["dropped_log_entries"].as_u64()?,
        zone_resets: value["zone_resets"].as_u64(),
        number: value["number"].as_u64()? as u32,
        log_error: value["log_error"].as_str().map(str::to_string),
    })
}

fn encode_entry(one: &TimelineEntry) -> Value {
    let pairs = one.completions.iter().flat_map(|(ns, count)| [*ns, *count]);
    [one.at_ns, one.ios].into_iter().chain(pairs).collect()
}

fn decode_entry(value: &Value) -> Option<TimelineEntry> {
    let numbers = numbers(value)?;
    let (&[at_ns, ios], pairs) = numbers.split_first_chunk::<2>()?;
    let completions = pairs.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    Some(TimelineEntry { at_ns, ios, completions })
}

fn encode_steady(one: &SteadyResult) -> Value {
    json!([one.attained, one.criterion, one.deviation_max, one.slope, one.iops, one.bandwidth])
}

fn decode_steady(value: &Value) -> Option<SteadyResult> {
    Some(SteadyResult {
        attained: value.get(0)?.as_bool()?,
        criterion: value.get(1)?.as_f64()?,
        deviation_max: value.get(2)?.as_f64()?,
        slope: value.get(3)?.as_f64()?,
        iops: numbers(value.get(4)?)?,
        bandwidth: numbers(value.get(5)?)?,
    })
}

fn encode_direction(direction: &DirectionResult) -> Value {
    let samples = |one: &Samples| json!([one.count, one.min, one.max, one.sum, one.sum_of_squares]);
    json!({
        "counts": [direction.total_ios, direction.bytes, direction.errors, direction.elapsed_ns, direction.block_bytes],
        "latency": direction.latency_ticks.parts(),
        "completion": direction.completion_ticks.parts(),
        "submission": direction.submission_ticks.parts(),
        "priorities": direction.priorities.iter().map(|(one, all)| json!([one, all.parts()])).collect::<Vec<_>>(),
        "samples": [samples(&direction.iops_samples), samples(&direction.bandwidth_samples)],
    })
}

fn decode_direction(value: &Value) -> Option<DirectionResult> {
    let counts = numbers(&value["counts"])?;
    let histogram = |name: &str| Histogram::from_parts(&numbers(&value[name])?);
    let samples = |index: usize| {
        let one = value["samples"].get(index)?;
        let number = |at: usize| one.get(at)?.as_f64();
        let count = one.get(0)?.as_u64()?;
        Some(Samples { count, min: number(1)?, max: number(2)?, sum: number(3)?, sum_of_squares: number(4)? })
    };
    let priority = |one: &Value| {
        let latencies = Histogram::from_parts(&numbers(one.get(1)?)?)?;
        Some((u16::try_from(one.get(0)?.as_u64()?).ok()?, latencies))
    };
    Some(DirectionResult {
        total_ios: *counts.first()?,
        bytes: *counts.get(1)?,
        latency_ticks: histogram("latency")?,
        completion_ticks: histogram("completion")?,
        submission_ticks: histogram("submission")?,
        errors: *counts.get(2)?,
        elapsed_ns: *counts.get(3)?,
        block_bytes: *counts.get(4)? as u32,
        iops_samples: samples(0)?,
        bandwidth_samples: samples(1)?,
        priorities: value["priorities"].as_array()?.iter().map(priority).collect::<Option<_>>()?,
    })
}

/// The number of the first field of fio's header, among kinds of faults.
const FIELDS_FROM: u64 = 8;

/// A mismatch as numbers: LBA, kind of fault and its two values.
fn encode_mismatch(one: &VerifyMismatch) -> Value {
    let (kind, first, second) = match &one.fault {
        VerifyFault::Magic { got } => (0u64, *got, 0),
        VerifyFault::Lba { got } => (1, *got, 0),
        VerifyFault::Seed { expected, got } => (2, *expected, *got),
        VerifyFault::Generation { expected, got } => (3, u64::from(*expected), u64::from(*got)),
        VerifyFault::Checksum { expected, got } => (4, u64::from(*expected), u64::from(*got)),
        VerifyFault::Content { offset } => (5, u64::from(*offset), 0),
        VerifyFault::Digest { kind } => (6, u64::from(kind.number()), 0),
        VerifyFault::PatternByte { offset, expected, got } => {
            (7, u64::from(*offset), u64::from(u16::from_be_bytes([*expected, *got])))
        }
        VerifyFault::Header { field, expected, got } => (FIELDS_FROM + *field as u64, *expected, *got),
    };
    json!([one.lba, kind, first, second])
}

fn decode_mismatch(value: &Value) -> Option<VerifyMismatch> {
    let [lba, kind, first, second] = numbers(value)?.try_into().ok()?;
    let fault = match kind {
        0 => VerifyFault::Magic { got: first },
        1 => VerifyFault::Lba { got: first },
        2 => VerifyFault::Seed { expected: first, got: second },
        3 => VerifyFault::Generation { expected: first as u32, got: second as u32 },
        4 => VerifyFault::Checksum { expected: first as u32, got: second as u32 },
        5 => VerifyFault::Content { offset: first as u32 },
        6 => VerifyFault::Digest { kind: FioVerify::from_number(u16::try_from(first).ok()?)? },
        7 => {
            let [expected, got] = u16::try_from(second).ok()?.to_be_bytes();
            VerifyFault::PatternByte { offset: first as u32, expected, got }
        }
        kind => {
            let field = *FioHeaderField::ALL.get(usize::try_from(kind.checked_sub(FIELDS_FROM)?).ok()?)?;
            VerifyFault::Header { field, expected: first, got: second }
        }
    };
    Some(VerifyMismatch { lba, fault })
}

fn numbers(value: &Value) -> Option<Vec<u64>> {
    value.as_array()?.iter().map(Value::as_u64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_round_trip() {
        let mut one = DirectionResult {
            total_ios: 3,
            bytes: 12_288,
            elapsed_ns: 7,
            block_bytes: 512,
            ..DirectionResult::default()
        };
        for ticks in [1, 1000, 1 << 40] {
            one.latency_ticks.record(ticks);
            one.completion_ticks.record(ticks / 2);
        }
        one.priorities = vec![(8192, one.latency_ticks.clone()), (0, one.completion_ticks.clone())];
        one.iops_samples.add(1.5);
        one.iops_samples.add(0.1);
        let faults = [
            VerifyFault::Magic { got: u64::MAX },
            VerifyFault::Lba { got: 1 },
            VerifyFault::Seed { expected: 1, got: 2 },
            VerifyFault::Generation { expected: 3, got: 4 },
            VerifyFault::Checksum { expected: 5, got: 6 },
            VerifyFault::Content { offset: 7 },
            VerifyFault::Digest { kind: FioVerify::Sha1 },
            VerifyFault::PatternByte { offset: 8, expected: 9, got: 10 },
            VerifyFault::Header { field: FioHeaderField::Magic, expected: 11, got: 12 },
            VerifyFault::Header { field: FioHeaderField::Seed, expected: 13, got: u64::MAX },
        ];
        let status = Status::WRITE_FAULT.do_not_retry();
        let result = JobResult {
            spec: JobSpec::default(),
            directions: [one, DirectionResult::default(), DirectionResult::default()],
            sync: DirectionResult::default(),
            usage: Usage {
                cpu_ns: 1,
                user_ns: 2,
                system_ns: 3,
                switches: 4,
                minor_faults: 5,
                major_faults: 6,
            },
            errors: 1,
            failures: vec![IoFailure { op: Op::Write, file: 3, lba: 8, blocks: 8, status }],
            broken_limit: Some("slow".to_string()),
            mismatches: faults.map(|fault| VerifyMismatch { lba: 9, fault }).to_vec(),
            mismatch_count: 6,
            checked_blocks: 100,
            never_completed: 0,
            jobs: 1,
            latency_depth: Some(4),
            steady: Some(SteadyResult {
                attained: true,
                criterion: -0.25,
                deviation_max: 1.5,
                slope: -2.0,
                iops: vec![1, 2],
                bandwidth: vec![3, u64::MAX],
            }),
            timeline: vec![TimelineEntry { at_ns: 5, ios: 3, completions: vec![(1, 1), (u64::MAX, 2)] }],
            depths: DepthCounts { level: [1; 7], submit: [2, 0, 0, 0, 0, 0, 3], complete: [4; 7] },
            kernel: KernelThreads { submission_ns: 10, workers_ns: 11 },
            dropped_log_entries: 0,
            zone_resets: Some(5),
            number: 3,
            log_error: Some("full".to_string()),
        };
        let text = encode(&result);
        let back = decode(&text, &JobSpec::default()).unwrap();
        assert_eq!(encode(&back), text);
        assert_eq!((back.mismatches, back.failures), (result.mismatches, result.failures));
        assert_eq!((back.steady, back.timeline), (result.steady, result.timeline));
        assert_eq!(
            back.directions[0].latency_ticks.percentile(50.0),
            result.directions[0].latency_ticks.percentile(50.0)
        );
        assert!(decode("{}", &JobSpec::default()).is_none() && !text.contains('\n'));
    }
}

//! A job's result as JSON, from the process that ran it to the one that reports it.

use ring::{Op, Status};
use serde_json::{Value, json};

use crate::Histogram;
use crate::result::{Depths, IoFailure, JobResult, KernelThreads, Samples, SideResult};
use crate::spec::JobSpec;
use crate::usage::Usage;
use crate::verify::{Fault, Mismatch};

/// On one line.
pub(crate) fn encode(result: &JobResult) -> String {
    let usage = result.usage;
    let failure = |one: &IoFailure| json!([one.op.index(), one.lba, one.blocks, one.status.field()]);
    json!({
        "sides": result.sides.iter().chain([&result.sync]).map(side).collect::<Vec<_>>(),
        "usage": [usage.cpu_ns, usage.user_ns, usage.system_ns, usage.switches, usage.minor_faults,
                  usage.major_faults],
        "errors": result.errors,
        "failures": result.failures.iter().map(failure).collect::<Vec<_>>(),
        "mismatches": result.mismatches.iter().map(mismatch).collect::<Vec<_>>(),
        "mismatch_count": result.mismatch_count,
        "checked_blocks": result.checked_blocks,
        "stuck": result.stuck,
        "latency_depth": result.latency_depth,
        "depths": [result.depths.level, result.depths.submit, result.depths.complete],
        "kernel": [result.kernel.submission_ns, result.kernel.workers_ns],
        "lost_entries": result.lost_entries,
        "number": result.number,
        "log_error": result.log_error,
    })
    .to_string()
}

/// The result of a job that was to be `spec`; `None` for text that no process of ours wrote.
pub(crate) fn decode(text: &str, spec: &JobSpec) -> Option<JobResult> {
    let value: Value = serde_json::from_str(text).ok()?;
    let mut sides = value["sides"].as_array()?.iter().map(read_side).collect::<Option<Vec<_>>>()?.into_iter();
    let usage = numbers(&value["usage"])?;
    let kernel = numbers(&value["kernel"])?;
    let depths = |index: usize| numbers(&value["depths"][index])?.try_into().ok();
    let failure = |one: &Value| {
        let one = numbers(one)?;
        let op = *Op::ALL.get(*one.first()? as usize)?;
        let status = Status::from_field(*one.get(3)? as u16);
        Some(IoFailure { op, lba: *one.get(1)?, blocks: *one.get(2)? as u32, status })
    };
    Some(JobResult {
        spec: spec.clone(),
        sides: [sides.next()?, sides.next()?, sides.next()?],
        sync: sides.next()?,
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
        mismatches: value["mismatches"].as_array()?.iter().map(read_mismatch).collect::<Option<_>>()?,
        mismatch_count: value["mismatch_count"].as_u64()?,
        checked_blocks: value["checked_blocks"].as_u64()?,
        stuck: value["stuck"].as_u64()?,
        jobs: 1,
        latency_depth: value["latency_depth"].as_u64().map(|depth| depth as usize),
        depths: Depths { level: depths(0)?, submit: depths(1)?, complete: depths(2)? },
        kernel: KernelThreads { submission_ns: *kernel.first()?, workers_ns: *kernel.get(1)? },
        lost_entries: value["lost_entries"].as_u64()?,
        number: value["number"].as_u64()? as u32,
        log_error: value["log_error"].as_str().map(str::to_string),
    })
}

fn side(side: &SideResult) -> Value {
    let samples = |one: &Samples| json!([one.count, one.min, one.max, one.sum, one.squares]);
    json!({
        "counts": [side.total_ios, side.bytes, side.errors, side.elapsed_ns, side.block_bytes],
        "whole": side.latency_ticks.parts(),
        "completion": side.completion_ticks.parts(),
        "submission": side.submission_ticks.parts(),
        "samples": [samples(&side.iops_samples), samples(&side.bandwidth_samples)],
    })
}

fn read_side(value: &Value) -> Option<SideResult> {
    let counts = numbers(&value["counts"])?;
    let histogram = |name: &str| Histogram::from_parts(&numbers(&value[name])?);
    let samples = |index: usize| {
        let one = value["samples"].get(index)?;
        let number = |at: usize| one.get(at)?.as_f64();
        let count = one.get(0)?.as_u64()?;
        Some(Samples { count, min: number(1)?, max: number(2)?, sum: number(3)?, squares: number(4)? })
    };
    Some(SideResult {
        total_ios: *counts.first()?,
        bytes: *counts.get(1)?,
        latency_ticks: histogram("whole")?,
        completion_ticks: histogram("completion")?,
        submission_ticks: histogram("submission")?,
        errors: *counts.get(2)?,
        elapsed_ns: *counts.get(3)?,
        block_bytes: *counts.get(4)? as u32,
        iops_samples: samples(0)?,
        bandwidth_samples: samples(1)?,
    })
}

/// Kind, place and what is wrong, as numbers.
fn mismatch(one: &Mismatch) -> Value {
    let (kind, first, second) = match &one.fault {
        Fault::Magic { got } => (0u64, *got, 0),
        Fault::Lba { got } => (1, *got, 0),
        Fault::Seed { expected, got } => (2, *expected, *got),
        Fault::Generation { expected, got } => (3, u64::from(*expected), u64::from(*got)),
        Fault::Checksum { expected, got } => (4, u64::from(*expected), u64::from(*got)),
        Fault::Content { offset } => (5, u64::from(*offset), 0),
    };
    json!([one.lba, kind, first, second])
}

fn read_mismatch(value: &Value) -> Option<Mismatch> {
    let [lba, kind, first, second] = numbers(value)?.try_into().ok()?;
    let fault = match kind {
        0 => Fault::Magic { got: first },
        1 => Fault::Lba { got: first },
        2 => Fault::Seed { expected: first, got: second },
        3 => Fault::Generation { expected: first as u32, got: second as u32 },
        4 => Fault::Checksum { expected: first as u32, got: second as u32 },
        5 => Fault::Content { offset: first as u32 },
        _ => return None,
    };
    Some(Mismatch { lba, fault })
}

fn numbers(value: &Value) -> Option<Vec<u64>> {
    value.as_array()?.iter().map(Value::as_u64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_arrives_as_it_was_sent() {
        let mut one = SideResult {
            total_ios: 3,
            bytes: 12_288,
            elapsed_ns: 7,
            block_bytes: 512,
            ..SideResult::default()
        };
        for ticks in [1, 1000, 1 << 40] {
            one.latency_ticks.record(ticks);
            one.completion_ticks.record(ticks / 2);
        }
        one.iops_samples.add(1.5);
        one.iops_samples.add(0.1);
        let faults = [
            Fault::Magic { got: u64::MAX },
            Fault::Lba { got: 1 },
            Fault::Seed { expected: 1, got: 2 },
            Fault::Generation { expected: 3, got: 4 },
            Fault::Checksum { expected: 5, got: 6 },
            Fault::Content { offset: 7 },
        ];
        let status = Status::WRITE_FAULT.do_not_retry();
        let result = JobResult {
            spec: JobSpec::default(),
            sides: [one, SideResult::default(), SideResult::default()],
            sync: SideResult::default(),
            usage: Usage {
                cpu_ns: 1,
                user_ns: 2,
                system_ns: 3,
                switches: 4,
                minor_faults: 5,
                major_faults: 6,
            },
            errors: 1,
            failures: vec![IoFailure { op: Op::Write, lba: 8, blocks: 8, status }],
            mismatches: faults.map(|fault| Mismatch { lba: 9, fault }).to_vec(),
            mismatch_count: 6,
            checked_blocks: 100,
            stuck: 0,
            jobs: 1,
            latency_depth: Some(4),
            depths: Depths { level: [1; 7], submit: [2, 0, 0, 0, 0, 0, 3], complete: [4; 7] },
            kernel: KernelThreads { submission_ns: 10, workers_ns: 11 },
            lost_entries: 0,
            number: 3,
            log_error: Some("full".to_string()),
        };
        let text = encode(&result);
        let back = decode(&text, &JobSpec::default()).unwrap();
        assert_eq!(encode(&back), text);
        assert_eq!((back.mismatches, back.failures), (result.mismatches, result.failures));
        assert_eq!(
            back.sides[0].latency_ticks.percentile(50.0),
            result.sides[0].latency_ticks.percentile(50.0)
        );
        assert!(decode("{}", &JobSpec::default()).is_none() && !text.contains('\n'));
    }
}

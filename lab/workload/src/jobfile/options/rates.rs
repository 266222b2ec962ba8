//! Rates, pauses and latency targets.

use super::{MS, OptionInfo, SECOND, US, job};
use crate::arrivals::ArrivalProcess;
use crate::jobfile::job::PerfJob;
use crate::jobfile::values::*;
use crate::spec::LatencyTarget;

/// Rates, pauses and latency targets.
pub(super) const RATES: &[OptionInfo] = &[
    // Rates, pauses and latency targets.
    job(
        "rate_iops",
        &[],
        "N[,N[,N]]",
        "I/Os a second; latency counts from the scheduled start of an I/O",
        |job, v| {
            job.spec.rates.iops = per_direction(v, |part| match bytes(part, 1000)? {
                0 => Err("it is at least 1".to_string()),
                rate => Ok(rate),
            })?;
            Ok(())
        },
    ),
    job(
        "rate",
        &[],
        "SIZE[,SIZE[,SIZE]]",
        "bytes a second; latency counts from the scheduled start of an I/O",
        |job, v| {
            let base = job.kb_base;
            job.spec.rates.bytes = per_direction(v, |part| match bytes(part, base)? {
                0 => Err("it is at least 1".to_string()),
                rate => Ok(rate),
            })?;
            Ok(())
        },
    ),
    job("rate_process", &[], "poisson", "arrival process: linear or poisson", |job, v| {
        job.spec.rates.process = match v {
            "linear" => ArrivalProcess::Linear,
            "poisson" => ArrivalProcess::Poisson,
            _ => return Err("it is linear or poisson".to_string()),
        };
        Ok(())
    }),
    job(
        "thinktime",
        &[],
        "TIME",
        "pause between I/Os when none is in flight, in microseconds without a unit",
        |job, v| {
            job.spec.think.ns = time(v, US)?;
            Ok(())
        },
    ),
    job("thinktime_spin", &[], "TIME", "the part of the pause that is spent busy-waiting", |job, v| {
        job.spec.think.spin_ns = time(v, US)?;
        Ok(())
    }),
    job("thinktime_blocks", &[], "N", "I/Os between pauses", |job, v| {
        job.spec.think.blocks = number::<u32>(v)?.max(1);
        Ok(())
    }),
    job(
        "thinktime_blocks_type",
        &[],
        "issue",
        "what thinktime_blocks counts: complete, completed I/Os; issue, issued ones",
        |job, v| {
            job.spec.think.counts_issued = match v {
                "complete" => false,
                "issue" => true,
                _ => return Err("it is complete or issue".to_string()),
            };
            Ok(())
        },
    ),
    job(
        "thinktime_iotime",
        &[],
        "TIME",
        "time of I/O between pauses, in seconds without a unit; pauses come earlier only with thinktime_blocks",
        |job, v| {
            job.spec.think.interval_ns = time(v, SECOND)?;
            Ok(())
        },
    ),
    job(
        "latency_target",
        &[],
        "TIME",
        "tune the depth so that latency stays within this, in microseconds without a unit",
        |job, v| {
            let target_ns = time(v, US)?;
            latency_target(job).target_ns = target_ns;
            if target_ns == 0 {
                job.spec.latency_target = None
            }
            Ok(())
        },
    ),
    job(
        "latency_window",
        &[],
        "TIME",
        "time for which each depth is tried, in microseconds without a unit",
        |job, v| {
            latency_target(job).window_ns = time(v, US)?.max(MS);
            Ok(())
        },
    ),
    job("latency_percentile", &[], "99.9", "percentage of I/Os that must meet the target", |job, v| {
        let percentile: f64 = number(v)?;
        if !(percentile > 0.0 && percentile <= 100.0) {
            return Err("it is above 0 and at most 100".to_string());
        }
        latency_target(job).percentile = percentile;
        Ok(())
    }),
    job(
        "max_latency",
        &[],
        "TIME",
        "latency above which a job fails, in microseconds without a unit",
        |job, v| {
            job.spec.latency_max_ns = Some(time(v, US)?).filter(|ns| *ns > 0);
            Ok(())
        },
    ),
];

/// The latency target, with fio's defaults for the values that are not given.
fn latency_target(job: &mut PerfJob) -> &mut LatencyTarget {
    job.spec.latency_target.get_or_insert(LatencyTarget {
        target_ns: 0,
        window_ns: SECOND,
        percentile: 100.0,
    })
}

//! What ends a job early, and what does not: errors, a full device, and rates that are too low.

use super::{MS, OptionInfo, Support, job, switch};
use crate::jobfile::values::*;

/// What ends a job early, and what does not: errors, a full device, and rates that are too low.
pub(super) const LIMITS: &[OptionInfo] = &[
    OptionInfo {
        name: "continue_on_error",
        aliases: &[],
        value: "io",
        switch: true,
        help: "continue after I/O errors: read, write (trims, too), io, all or none; mismatches of verify never end a job",
        support: Support::PerfJob(|job, v| {
            job.spec.errors.continues = match v {
                "none" | "verify" | "0" => [false, false],
                "all" | "io" | "1" => [true, true],
                "read" => [true, false],
                "write" => [false, true],
                _ => return Err("it is none, read, write, io, verify, all, 0 or 1".to_string()),
            };
            Ok(())
        }),
    },
    job(
        "ignore_error",
        &[],
        "READ,WRITE",
        "errors that are none, of reads, and of writes and trims, separated by :, by name or number: ,ENOSPC:EIO",
        |job, v| {
            let lists: Vec<&str> = v.split(',').collect();
            if lists.len() > 2 && lists[2..].iter().any(|list| !list.trim().is_empty()) {
                return Err("mismatches of verify are never ignored".to_string());
            }
            let list = |index: usize| errors(lists.get(index).copied().unwrap_or_default());
            job.spec.errors.ignored = [list(0)?, list(1)?];
            Ok(())
        },
    ),
    OptionInfo {
        name: "fill_device",
        aliases: &["fill_fs"],
        value: "BOOL",
        switch: true,
        help: "write until the device or file system is full, which ends the job without an error; needs rw=write",
        support: Support::PerfJob(|job, v| {
            job.spec.fills_device = flag(v)?;
            Ok(())
        }),
    },
    job(
        "rate_min",
        &["ratemin"],
        "SIZE[,SIZE[,SIZE]]",
        "bytes a second below which the job fails, over each rate_cycle",
        |job, v| {
            job.spec.rate_minima.bytes = per_direction(v, |part| bytes(part, job.kb_base))?;
            Ok(())
        },
    ),
    job(
        "rate_iops_min",
        &[],
        "N[,N[,N]]",
        "I/Os a second below which the job fails, over each rate_cycle",
        |job, v| {
            job.spec.rate_minima.iops = per_direction(v, |part| bytes(part, 1000))?;
            Ok(())
        },
    ),
    job(
        "rate_cycle",
        &["ratecycle"],
        "MS",
        "time over which rate_min and rate_iops_min average rates; 1000 ms by default",
        |job, v| {
            job.spec.rate_minima.cycle_ns = in_range(v, 1, 3_600_000)? * MS;
            Ok(())
        },
    ),
    switch(
        "error_dump",
        "describe each failed I/O that does not end the job, up to 1000 a job; on by default",
        |job, v| {
            job.spec.errors.omits_details = !flag(v)?;
            Ok(())
        },
    ),
];

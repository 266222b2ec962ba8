//! Engines without I/O: `cpuio` and `exec`.

use super::{OptionInfo, SECOND, US, job, switch};
use crate::jobfile::values::*;

/// Engines without I/O: `cpuio` and `exec`.
pub(super) const WORK: &[OptionInfo] = &[
    job("cpuload", &[], "50", "percentage of a core that a job of ioengine=cpuio uses", |job, v| {
        job.work.cpu_percent = in_range(v, 0, 100)? as u8;
        Ok(())
    }),
    job(
        "cpuchunks",
        &["cpuchunk"],
        "US",
        "microseconds of a busy period of cpuio; 50000 by default",
        |job, v| {
            job.work.chunk_ns = in_range(v, 1, 10_000_000)? * US;
            Ok(())
        },
    ),
    job("cpumode", &[], "noop", "what cpuio does: noop, or qsort, which sorts numbers", |job, v| {
        job.work.sorts = match v {
            "noop" => false,
            "qsort" => true,
            _ => return Err("it is noop or qsort".to_string()),
        };
        Ok(())
    }),
    switch("exit_on_io_done", "cpuio and exec end when all jobs with I/O have finished", |job, v| {
        job.work.ends_with_io = flag(v)?;
        Ok(())
    }),
    job("program", &[], "PATH", "program that ioengine=exec runs", |job, v| {
        job.work.program = v.to_string();
        Ok(())
    }),
    job(
        "arguments",
        &[],
        "TEXT",
        "arguments of the program, separated by blanks; %r is the runtime in seconds, %n the job's name",
        |job, v| {
            job.work.arguments = v.to_string();
            Ok(())
        },
    ),
    job(
        "grace_time",
        &[],
        "S",
        "seconds between SIGTERM at the end of the runtime and SIGKILL; 1 by default",
        |job, v| {
            job.work.grace_ns = in_range(v, 0, 3600)? * SECOND;
            Ok(())
        },
    ),
    switch(
        "std_redirect",
        "the program's output goes to NAME.stdout and NAME.stderr; on by default",
        |job, v| {
            job.work.redirects = flag(v)?;
            Ok(())
        },
    ),
    // Jobs that share I/Os.
    job(
        "flow",
        &[],
        "N",
        "weight among the jobs of a flow, which share their I/Os; they run as threads",
        |job, v| {
            flow(job).weight = in_range(v, 0, 1000)? as u32;
            Ok(())
        },
    ),
    job("flow_id", &[], "N", "which flow: jobs of one identifier share", |job, v| {
        flow(job).id = number(v)?;
        Ok(())
    }),
    job("flow_sleep", &[], "US", "microseconds that a job waits when it is ahead of its share", |job, v| {
        flow(job).sleep_ns = in_range(v, 0, 60_000_000)? * US;
        Ok(())
    }),
];

/// The job's part in a flow; without a weight it has none.
fn flow(job: &mut crate::jobfile::PerfJob) -> &mut crate::FlowOptions {
    job.spec.flow.get_or_insert(crate::FlowOptions { id: 0, weight: 0, sleep_ns: 0 })
}

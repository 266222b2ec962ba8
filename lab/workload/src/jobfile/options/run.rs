//! Copies, groups, scheduling, reports, logs and the options of a run.

use super::{MS, OptionInfo, SECOND, Support, job, run, switch};
use crate::jobfile::job::ExitScope;
use crate::jobfile::values::*;
use crate::log::COARSENESS_MAX;

/// Copies, groups, scheduling, reports, logs and the options of a run.
pub(super) const RUN: &[OptionInfo] = &[
    // Copies, groups and scheduling.
    job("numjobs", &[], "N", "copies of the job", |job, v| {
        job.numjobs = in_range(v, 0, 4096)? as u32;
        Ok(())
    }),
    OptionInfo {
        name: "thread",
        aliases: &["threads"],
        value: "BOOL",
        switch: true,
        help: "run copies as threads of one process; otherwise as processes, as in fio",
        support: Support::PerfJob(|job, v| {
            job.thread = flag(v)?;
            Ok(())
        }),
    },
    switch("group_reporting", "one result for the jobs of a group", |job, v| {
        job.group_reporting = flag(v)?;
        Ok(())
    }),
    switch("new_group", "start a new reporting group", |job, v| {
        job.new_group = flag(v)?;
        Ok(())
    }),
    OptionInfo {
        name: "stonewall",
        aliases: &["wait_for_previous"],
        value: "BOOL",
        switch: true,
        help: "wait until all jobs above have finished; also starts a new reporting group",
        support: Support::PerfJob(|job, v| {
            job.stonewall = flag(v)?;
            Ok(())
        }),
    },
    job(
        "wait_for",
        &[],
        "NAME",
        "wait until the job above of this name has finished, if no other runs beside it",
        |job, v| {
            job.wait_for = Some(v.to_string());
            Ok(())
        },
    ),
    switch("exitall", "when the job finishes, stop the others that exit_what names", |job, v| {
        job.exitall = flag(v)?;
        Ok(())
    }),
    job(
        "exit_what",
        &[],
        "stonewall",
        "what exitall stops: group, the jobs of the job's reporting group, as by default; stonewall, all jobs up to the next stonewall; all, the others, too",
        |job, v| {
            job.exit_scope = match v {
                "group" => ExitScope::Group,
                "stonewall" => ExitScope::Running,
                "all" => ExitScope::All,
                _ => return Err("it is group, stonewall or all".to_string()),
            };
            Ok(())
        },
    ),
    job("cpus_allowed", &[], "0-3,5", "cores", |job, v| {
        job.cpus = Some(cpus(v)?);
        Ok(())
    }),
    job("cpumask", &[], "0x2f", "cores, as the bits of a number", |job, v| {
        let mask = bytes(v, 1024).ok().filter(|mask| *mask > 0).ok_or("it is a number above 0")?;
        job.cpus = Some(cpus(&format!("{mask:#x}"))?);
        Ok(())
    }),
    job(
        "cpus_allowed_policy",
        &[],
        "split",
        "shared: all copies on all of these cores; split: one core per copy",
        |job, v| {
            job.cpus_split = match v {
                "shared" => false,
                "split" => true,
                _ => return Err("it is shared or split".to_string()),
            };
            Ok(())
        },
    ),
    job("nice", &[], "N", "-20 to 19", |job, v| {
        job.nice = number::<i32>(v)
            .ok()
            .filter(|nice| (-20..=19).contains(nice))
            .ok_or("it is between -20 and 19")?;
        Ok(())
    }),
    job(
        "cgroup",
        &[],
        "NAME",
        "existing cgroup below /sys/fs/cgroup that a job's process joins",
        |job, v| {
            if v.split('/').any(|part| part == "..") {
                return Err("it is below /sys/fs/cgroup".to_string());
            }
            job.cgroup = Some(v.to_string());
            Ok(())
        },
    ),
    job(
        "ioscheduler",
        &[],
        "kyber",
        "I/O scheduler of the devices, set before the jobs start and read back",
        |job, v| {
            if v.is_empty()
                || !v.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            {
                return Err("it is a name, as none or mq-deadline".to_string());
            }
            job.scheduler = Some(v.to_string());
            Ok(())
        },
    ),
    job(
        "steadystate",
        &["ss"],
        "iops:5%",
        "end the job when the rate is steady: iops, iops_slope, bw or bw_slope, and a limit, absolute or in percent of the mean; needs steadystate_duration",
        |job, v| {
            job.steady.0 = Some(steady_criterion(v, job.kb_base)?);
            Ok(())
        },
    ),
    job(
        "steadystate_duration",
        &["ss_dur"],
        "TIME",
        "time for which the rate must be steady, in seconds without a unit; alone it means steadystate=iops_slope:0.01%",
        |job, v| {
            job.steady.1 = time(v, SECOND)?;
            Ok(())
        },
    ),
    job(
        "steadystate_ramp_time",
        &["ss_ramp"],
        "TIME",
        "time before the first sample of steadystate, in seconds without a unit",
        |job, v| {
            job.steady.2 = time(v, SECOND)?;
            Ok(())
        },
    ),
    // Reports and logs.
    job("percentile_list", &[], "50:99:99.9", "percentiles to report", |job, v| {
        job.percentiles = percentiles(v)?;
        Ok(())
    }),
    switch("slat_percentiles", "percentiles of submission latency", |job, v| {
        job.percentiles_of[0] = Some(flag(v)?);
        Ok(())
    }),
    switch(
        "clat_percentiles",
        "percentiles of completion latency; on by default in a closed loop",
        |job, v| {
            job.percentiles_of[1] = Some(flag(v)?);
            Ok(())
        },
    ),
    switch("lat_percentiles", "percentiles of total latency; on by default in an open loop", |job, v| {
        job.percentiles_of[2] = Some(flag(v)?);
        Ok(())
    }),
    switch("disable_slat", "do not read the clock after submission", |job, v| {
        job.spec.measure_submission = !flag(v)?;
        Ok(())
    }),
    OptionInfo {
        name: "unified_rw_reporting",
        aliases: &[],
        value: "none",
        switch: true,
        help: "mixed: report reads, writes and trims as one; none",
        support: Support::PerfJob(|job, v| {
            job.unified = match v {
                "none" | "0" => false,
                "mixed" | "1" => true,
                _ => return Err("it is none or mixed".to_string()),
            };
            Ok(())
        }),
    },
    OptionInfo {
        name: "write_lat_log",
        aliases: &[],
        value: "NAME",
        switch: false,
        help: "NAME_lat.N.log, NAME_slat.N.log, NAME_clat.N.log: latencies in nanoseconds",
        support: Support::PerfJob(|job, v| {
            job.logs.latency = Some(v.to_string());
            Ok(())
        }),
    },
    OptionInfo {
        name: "write_bw_log",
        aliases: &[],
        value: "NAME",
        switch: false,
        help: "NAME_bw.N.log: bytes by completion latency of each I/O in kB/s; with log_avg_msec, averages in KiB/s",
        support: Support::PerfJob(|job, v| {
            job.logs.bandwidth = Some(v.to_string());
            Ok(())
        }),
    },
    OptionInfo {
        name: "write_iops_log",
        aliases: &[],
        value: "NAME",
        switch: false,
        help: "NAME_iops.N.log: one line of value 1 per I/O; with log_avg_msec, I/Os a second",
        support: Support::PerfJob(|job, v| {
            job.logs.iops = Some(v.to_string());
            Ok(())
        }),
    },
    OptionInfo {
        name: "write_hist_log",
        aliases: &[],
        value: "NAME",
        switch: false,
        help: "NAME_clat_hist.N.log: histograms of completion latency in fio's buckets, one line a direction each log_hist_msec",
        support: Support::PerfJob(|job, v| {
            job.logs.histograms = Some(v.to_string());
            Ok(())
        }),
    },
    job("log_hist_msec", &[], "MS", "time between histograms of write_hist_log", |job, v| {
        job.spec.log.histograms_ns = number::<u64>(v)?.checked_mul(MS).ok_or("it is too long")?;
        Ok(())
    }),
    job(
        "log_hist_coarseness",
        &[],
        "N",
        "0 to 6: fewer buckets in histograms of write_hist_log, 1856 divided by 2 to this power",
        |job, v| {
            job.spec.log.histograms_coarseness = in_range(v, 0, u64::from(COARSENESS_MAX))? as u8;
            Ok(())
        },
    ),
    job(
        "log_avg_msec",
        &[],
        "MS",
        "average log lines over this time; also the time between samples",
        |job, v| {
            job.spec.log.average_ns = number::<u64>(v)?.checked_mul(MS).ok_or("it is too long")?;
            Ok(())
        },
    ),
    switch("log_max_value", "with log_avg_msec, log the largest latency and not the average", |job, v| {
        job.spec.log.has_maxima = flag(v)?;
        Ok(())
    }),
    switch("log_unix_epoch", "times in logs are since 1970, and not since the start of the job", |job, v| {
        job.spec.log.has_unix_times = flag(v)?;
        Ok(())
    }),
    job(
        "bwavgtime",
        &["iopsavgtime"],
        "MS",
        "time between samples, in milliseconds; 500 by default",
        |job, v| {
            job.spec.sample_ns = in_range(v, 1, 3_600_000)? * MS;
            Ok(())
        },
    ),
    job(
        "timeline",
        &[],
        "MS",
        "time between entries of the result's timeline, which has the I/Os and completion latencies over the run; costs nothing per I/O; none by default",
        |job, v| {
            job.spec.timeline_ns = in_range(v, 1, 3_600_000)? * MS;
            Ok(())
        },
    ),
    job("kb_base", &[], "1024", "value of k: 1024 or 1000", |job, v| {
        job.kb_base = match v {
            "1024" => 1024,
            "1000" => 1000,
            _ => return Err("it is 1024 or 1000".to_string()),
        };
        Ok(())
    }),
    job("unit_base", &[], "8", "rates in bytes (8, or 0) or bits (1)", |job, v| {
        job.rates_in_bits = match v {
            "0" | "8" => false,
            "1" => true,
            _ => return Err("it is 0, 8 or 1".to_string()),
        };
        Ok(())
    }),
    // The run.
    run("section", "NAME", false, "run only this section of the job files; may be repeated"),
    run("output", "FILE", false, "file for the result; standard output by default"),
    run("output_format", "json", false, "normal, json, json+ or terse; several separated by commas"),
    run("minimal", "BOOL", true, "the same as output_format=terse"),
    run("terse_version", "3", false, "version of the terse format: 2 to 5"),
    run("eta", "auto", false, "print a line each second on standard error: auto, always, never"),
    run("status_interval", "TIME", false, "interval of a line of totals on standard error"),
    run("showcmd", "BOOL", true, "print the jobs as command lines and exit"),
    run("parse_only", "BOOL", true, "check the options and exit"),
    run("readonly", "BOOL", true, "refuse jobs that write"),
    run("cmdhelp", "NAME", true, "describe this option; without a name, all"),
    run("enghelp", "ENGINE[,OPTION]", true, "list the engines, or the options of one"),
    run("version", "BOOL", true, "print the version"),
    run(
        "generator_cost",
        "BOOL",
        true,
        "measure the cost of the generator on the null engine and report it; on by default",
    ),
    OptionInfo {
        name: "config",
        aliases: &["spdk_json_conf", "spdk_conf"],
        value: "FILE",
        switch: false,
        help: "SPDK JSON configuration file that creates bdevs (-c); job files may have it",
        support: Support::Run,
    },
    run("idle", "adaptive", false, "idle policy of reactors: adaptive, spin, sleep"),
    run("memory", "1g", false, "memory limit for I/O buffers"),
    run("engine", "auto", false, "event engine of reactors: auto, uring, epoll"),
];

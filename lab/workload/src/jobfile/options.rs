//! The table of options: what is supported, what is refused and why.

use engines::{Kind, SyncMode};

use super::apply::{EngineName, Job};
use super::values::*;
use crate::pace::Arrivals;
use crate::spec::{Content, LatencyTarget, Sizes, Verify, Workload};

type Apply = fn(&mut Job, &str) -> Result<(), String>;

/// What becomes of an option.
#[derive(Clone, Copy)]
pub enum Support {
    /// It is a job's.
    Job(Apply),
    /// It is the run's, on the command line only.
    Run,
    /// It is fio's and not supported; the reason, and what to use.
    Refused(&'static str),
}

/// One option.
#[derive(Clone, Copy)]
pub struct OptionInfo {
    /// Its name.
    pub name: &'static str,
    /// Other names of it.
    pub aliases: &'static [&'static str],
    /// What its value is called; an example for options that are easier shown.
    pub value: &'static str,
    /// Whether it may stand without a value, and is 1 then.
    pub switch: bool,
    /// What it does, and where it differs from fio's.
    pub help: &'static str,
    /// What becomes of it.
    pub support: Support,
}

const fn job(
    name: &'static str,
    aliases: &'static [&'static str],
    value: &'static str,
    help: &'static str,
    apply: Apply,
) -> OptionInfo {
    OptionInfo { name, aliases, value, switch: false, help, support: Support::Job(apply) }
}

const fn switch(name: &'static str, help: &'static str, apply: Apply) -> OptionInfo {
    OptionInfo { name, aliases: &[], value: "BOOL", switch: true, help, support: Support::Job(apply) }
}

const fn run(name: &'static str, value: &'static str, switch: bool, help: &'static str) -> OptionInfo {
    OptionInfo { name, aliases: &[], value, switch, help, support: Support::Run }
}

const fn refused(name: &'static str, why: &'static str) -> OptionInfo {
    OptionInfo { name, aliases: &[], value: "", switch: true, help: why, support: Support::Refused(why) }
}

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// Every option, sorted by what it is about.
pub const OPTIONS: &[OptionInfo] = &[
    // What is driven.
    job("filename", &[], "FILE[:FILE]", "files, devices or URIs, with : between them", |job, v| {
        job.filename = Some(v.to_string());
        Ok(())
    }),
    job("name", &[], "NAME", "name of the job; the second and later begin another job", |job, v| {
        if v.is_empty() {
            return Err("a job needs a name".to_string());
        }
        job.spec.name = v.to_string();
        Ok(())
    }),
    job("description", &[], "TEXT", "text that goes into reports", |job, v| {
        job.description = v.to_string();
        Ok(())
    }),
    job("directory", &[], "DIR", "where files without a path are", |job, v| {
        job.directory = Some(v.to_string());
        Ok(())
    }),
    job("nrfiles", &["nr_files"], "N", "files where no filename is given", |job, v| {
        job.nrfiles = within(v, 1, 65_536)? as u32;
        Ok(())
    }),
    job(
        "file_service_type",
        &[],
        "roundrobin",
        "which file is next: roundrobin, random or sequential, [:N] I/Os each",
        |job, v| {
            job.spec.service = service(v)?;
            Ok(())
        },
    ),
    job(
        "ioengine",
        &[],
        "io_uring",
        "psync, pvsync2, libaio, io_uring, io_uring_cmd, null, or bdev (Ringbolt's own); iou, iou-c and iou-s are io_uring's modes",
        ioengine,
    ),
    switch("direct", "past the page cache", |job, v| {
        job.direct = flag(v)?;
        Ok(())
    }),
    switch("buffered", "through the page cache; the opposite of direct", |job, v| {
        job.direct = !flag(v)?;
        Ok(())
    }),
    job("sync", &[], "none", "what a write waits for: none, sync (O_SYNC) or dsync (O_DSYNC)", |job, v| {
        job.sync = match v {
            "none" | "0" => SyncMode::None,
            "sync" | "1" => SyncMode::Sync,
            "dsync" => SyncMode::DataSync,
            _ => return Err("it is one of none, sync, dsync".to_string()),
        };
        Ok(())
    }),
    job("fsync", &[], "N", "a flush after so many writes", |job, v| {
        flush_every(job, number(v)?, false);
        Ok(())
    }),
    job("fdatasync", &[], "N", "a flush of data after so many writes", |job, v| {
        flush_every(job, number(v)?, true);
        Ok(())
    }),
    switch("end_fsync", "a flush at the end", |job, v| {
        job.spec.flush_at_end = flag(v)?;
        Ok(())
    }),
    switch("invalidate", "forget what the page cache holds before a job begins; on by default", |job, v| {
        job.invalidate = flag(v)?;
        Ok(())
    }),
    switch("allow_file_create", "make files that are missing; on by default", |job, v| {
        job.allow_file_create = flag(v)?;
        Ok(())
    }),
    switch("allow_mounted_write", "write devices that are mounted or used otherwise", |job, v| {
        job.allow_mounted_write = flag(v)?;
        Ok(())
    }),
    switch("create_only", "make the files and do nothing else", |job, v| {
        job.create_only = flag(v)?;
        Ok(())
    }),
    // What is done.
    job(
        "rw",
        &["readwrite"],
        "randread",
        "read, write, randread, randwrite, rw, randrw, trim or randtrim",
        |job, v| {
            if v.contains(':') {
                return Err("a sequence after the colon is not supported".to_string());
            }
            job.spec.workload = Workload::from_name(v).ok_or_else(|| {
                format!("it is one of {}", Workload::NAMES.map(|(_, names)| names[0]).join(", "))
            })?;
            Ok(())
        },
    ),
    job("bs", &["blocksize"], "4k[,4k[,4k]]", "bytes of an I/O: reads, writes, trims", |job, v| {
        let base = job.kb_base;
        let sizes = triple(v, |part| match bytes_u32(part, base)? {
            0 => Err("I/Os have at least one byte".to_string()),
            bytes => Ok(Sizes::Fixed(bytes)),
        })?;
        set_sizes(job, sizes);
        Ok(())
    }),
    job(
        "bsrange",
        &["blocksize_range"],
        "4k-64k",
        "bytes of an I/O, drawn evenly in steps of the smallest",
        |job, v| {
            let base = job.kb_base;
            let sizes = triple(v, |part| range(part, base))?;
            set_sizes(job, sizes);
            Ok(())
        },
    ),
    job("bssplit", &[], "4k/60:64k/40", "bytes of an I/O, each with its percentage", |job, v| {
        let base = job.kb_base;
        let sizes = triple(v, |part| split(part, base))?;
        set_sizes(job, sizes);
        Ok(())
    }),
    job("blockalign", &["ba"], "SIZE", "what random positions are multiples of", |job, v| {
        job.spec.align_bytes = Some(bytes(v, job.kb_base)?);
        Ok(())
    }),
    job("iodepth", &[], "N", "I/Os that a job keeps in flight; 1 with psync and pvsync2", |job, v| {
        job.spec.io_depth = within(v, 1, 65_536)? as u32;
        Ok(())
    }),
    job(
        "iodepth_batch_submit",
        &["iodepth_batch"],
        "N",
        "most I/Os of one submission; 0, the default here, for as many as there are (fio's default is 1)",
        |job, v| {
            job.engine_config.batch_max = within(v, 0, 65_536)? as u32;
            Ok(())
        },
    ),
    job(
        "iodepth_batch_complete_max",
        &[],
        "N",
        "most completions that are taken at once; 0, the default here, for as many as there are (fio's default is 1)",
        |job, v| {
            job.engine_config.reap_max = within(v, 0, 65_536)? as u32;
            Ok(())
        },
    ),
    job("rwmixread", &[], "50", "percentage of reads in rw and randrw", |job, v| {
        job.spec.read_percent = within(v, 0, 100)? as u8;
        Ok(())
    }),
    job("rwmixwrite", &[], "50", "percentage of writes in rw and randrw", |job, v| {
        job.spec.read_percent = 100 - within(v, 0, 100)? as u8;
        Ok(())
    }),
    job(
        "size",
        &["filesize"],
        "SIZE|%",
        "bytes that are used, shared out among the files, or a percentage of each",
        |job, v| {
            let (size, percent) = bytes_or_percent(v, job.kb_base)?;
            if size == Some(0) || percent == Some(0) {
                return Err("nothing is used of the device then".to_string());
            }
            (job.spec.size_bytes, job.spec.size_percent) = (size, percent.filter(|percent| *percent < 100));
            Ok(())
        },
    ),
    job("offset", &["start_offset"], "SIZE|%", "where the used part begins", |job, v| {
        let (offset, percent) = bytes_or_percent(v, job.kb_base)?;
        (job.spec.offset_bytes, job.spec.offset_percent) = (offset.unwrap_or(0), percent.unwrap_or(0));
        Ok(())
    }),
    job("offset_increment", &[], "SIZE", "by how much each job of numjobs begins later", |job, v| {
        job.spec.offset_increment = bytes(v, job.kb_base)?;
        Ok(())
    }),
    job("io_size", &["io_limit"], "SIZE", "bytes after which a job ends", |job, v| {
        job.spec.io_bytes = Some(bytes(v, job.kb_base)?);
        Ok(())
    }),
    job("number_ios", &[], "N", "I/Os after which a job ends", |job, v| {
        job.spec.number_ios = Some(bytes(v, job.kb_base)?);
        Ok(())
    }),
    job("loops", &[], "N", "how often the used part is gone through", |job, v| {
        job.spec.loops = within(v, 1, u64::from(u32::MAX))? as u32;
        Ok(())
    }),
    switch("time_based", "start over until the runtime has passed", |job, v| {
        job.spec.time_based = flag(v)?;
        Ok(())
    }),
    job("runtime", &["timeout"], "10s", "longest time, the ramp not counted", |job, v| {
        job.spec.runtime_ns = Some(time(v, SECOND)?).filter(|ns| *ns > 0);
        Ok(())
    }),
    job("ramp_time", &[], "5s", "time before anything is counted", |job, v| {
        job.spec.ramp_ns = time(v, SECOND)?;
        Ok(())
    }),
    job("startdelay", &[], "5s", "time before a job begins", |job, v| {
        job.delay_ns = time(v, SECOND)?;
        Ok(())
    }),
    // Where.
    job(
        "random_distribution",
        &[],
        "zipf:1.2",
        "random, zipf:THETA, pareto:H, normal:DEVIATION, zoned:ACCESS/SIZE:…, zoned_abs:ACCESS/BYTES:…",
        |job, v| {
            job.spec.distribution = distribution(v, job.kb_base)?;
            Ok(())
        },
    ),
    job(
        "percentage_random",
        &[],
        "100",
        "percentage of I/Os that go anywhere, of a random workload; the others follow the last",
        |job, v| {
            job.spec.random_percent = within(v, 0, 100)? as u8;
            Ok(())
        },
    ),
    switch("norandommap", "random I/O may come to a place again before it has been everywhere", |job, v| {
        job.random_map = !flag(v)?;
        Ok(())
    }),
    switch("randrepeat", "the same random numbers each time; on by default", |job, v| {
        job.repeatable = flag(v)?;
        Ok(())
    }),
    job("randseed", &["seed"], "N", "seed of positions, mix and data", |job, v| {
        job.spec.seed = number(v)?;
        Ok(())
    }),
    // How fast.
    job(
        "rate_iops",
        &[],
        "N[,N[,N]]",
        "I/Os a second; latency counts from when an I/O was to start",
        |job, v| {
            job.spec.rates.iops = triple(v, |part| match bytes(part, 1000)? {
                0 => Err("it is at least 1".to_string()),
                rate => Ok(rate),
            })?;
            Ok(())
        },
    ),
    job("rate", &[], "SIZE[,SIZE[,SIZE]]", "bytes a second, likewise", |job, v| {
        let base = job.kb_base;
        job.spec.rates.bytes = triple(v, |part| match bytes(part, base)? {
            0 => Err("it is at least 1".to_string()),
            rate => Ok(rate),
        })?;
        Ok(())
    }),
    job("rate_process", &[], "poisson", "how starts are spread: linear or poisson", |job, v| {
        job.spec.rates.arrivals = match v {
            "linear" => Arrivals::Linear,
            "poisson" => Arrivals::Poisson,
            _ => return Err("it is linear or poisson".to_string()),
        };
        Ok(())
    }),
    job("thinktime", &[], "TIME", "a pause, in microseconds without a unit", |job, v| {
        job.spec.think.ns = time(v, US)?;
        Ok(())
    }),
    job("thinktime_spin", &[], "TIME", "the part of it that keeps the processor busy", |job, v| {
        job.spec.think.spin_ns = time(v, US)?;
        Ok(())
    }),
    job("thinktime_blocks", &[], "N", "after how many I/Os", |job, v| {
        job.spec.think.blocks = number(v)?;
        Ok(())
    }),
    job(
        "latency_target",
        &[],
        "TIME",
        "the depth is chosen so that latency stays below, in microseconds without a unit",
        |job, v| {
            let target_ns = time(v, US)?;
            target(job).target_ns = target_ns;
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
        "time over which that is judged, in microseconds without a unit",
        |job, v| {
            target(job).window_ns = time(v, US)?.max(MS);
            Ok(())
        },
    ),
    job("latency_percentile", &[], "99.9", "percentage of I/Os that keep it", |job, v| {
        let percentile: f64 = number(v)?;
        if !(percentile > 0.0 && percentile <= 100.0) {
            return Err("it is above 0 and at most 100".to_string());
        }
        target(job).percentile = percentile;
        Ok(())
    }),
    job(
        "max_latency",
        &[],
        "TIME",
        "latency at which a job fails, in microseconds without a unit",
        |job, v| {
            job.spec.latency_max_ns = Some(time(v, US)?).filter(|ns| *ns > 0);
            Ok(())
        },
    ),
    // Data.
    OptionInfo {
        name: "verify",
        aliases: &[],
        value: "crc32c",
        switch: true,
        help: "blocks describe themselves and are checked when read: crc32c, or pattern for every byte (formats are Ringbolt's own)",
        support: Support::Job(|job, v| {
            job.spec.verify = match v {
                "crc32c" | "1" => Verify::Crc32c,
                "pattern" => Verify::Pattern,
                "0" | "null" | "none" => Verify::Off,
                _ => return Err("it is crc32c or pattern".to_string()),
            };
            Ok(())
        }),
    },
    switch("refill_buffers", "new noise for every write", |job, v| {
        job.spec.content = if flag(v)? { Content::FreshNoise } else { Content::Noise };
        Ok(())
    }),
    switch("zero_buffers", "write zeroes", |job, v| {
        job.spec.content = if flag(v)? { Content::Zeroes } else { Content::Noise };
        Ok(())
    }),
    job("buffer_pattern", &[], "0xdeadbeef", "write these bytes again and again", |job, v| {
        job.spec.content = Content::Pattern(pattern(v)?);
        Ok(())
    }),
    OptionInfo {
        name: "continue_on_error",
        aliases: &[],
        value: "BOOL",
        switch: true,
        help: "go on after an I/O failed",
        support: Support::Job(|job, v| {
            job.spec.continue_on_error = match v {
                "none" => false,
                "all" | "io" => true,
                v => flag(v)?,
            };
            Ok(())
        }),
    },
    // io_uring and libaio.
    switch("hipri", "completions are polled for", |job, v| {
        job.engine_config.polling.completion = flag(v)?;
        Ok(())
    }),
    switch("sqthread_poll", "a kernel thread looks for submissions", |job, v| {
        job.engine_config.polling.submission = flag(v)?;
        Ok(())
    }),
    job("sqthread_poll_cpu", &[], "CORE", "where it runs", |job, v| {
        job.engine_config.polling.submission_cpu = Some(number(v)?);
        Ok(())
    }),
    job("sqthread_poll_idle", &[], "MS", "milliseconds without work after which it sleeps", |job, v| {
        job.engine_config.polling.submission_idle_ms = number(v)?;
        Ok(())
    }),
    switch("registerfiles", "files are registered with the ring", |job, v| {
        job.engine_config.register_files = flag(v)?;
        Ok(())
    }),
    switch("fixedbufs", "buffers are registered with the ring", |job, v| {
        job.engine_config.fixed_buffers = flag(v)?;
        Ok(())
    }),
    switch("nonvectored", "an address an I/O, not a vector; on by default", |job, v| {
        job.engine_config.nonvectored = flag(v)?;
        Ok(())
    }),
    switch("userspace_reap", "read libaio's events without a system call", |job, v| {
        job.engine_config.userspace_reap = flag(v)?;
        Ok(())
    }),
    job("cmd_type", &[], "nvme", "commands of io_uring_cmd; nvme only", |_, v| {
        if v == "nvme" { Ok(()) } else { Err("it is nvme".to_string()) }
    }),
    // Jobs among jobs.
    job("numjobs", &[], "N", "copies of the job", |job, v| {
        job.numjobs = within(v, 0, 4096)? as u32;
        Ok(())
    }),
    switch("thread", "threads of one process; processes otherwise, as with fio", |job, v| {
        job.thread = flag(v)?;
        Ok(())
    }),
    switch("group_reporting", "one result for the jobs of a group", |job, v| {
        job.group_reporting = flag(v)?;
        Ok(())
    }),
    switch("new_group", "begin a reporting group", |job, v| {
        job.new_group = flag(v)?;
        Ok(())
    }),
    OptionInfo {
        name: "stonewall",
        aliases: &["wait_for_previous"],
        value: "BOOL",
        switch: true,
        help: "begin when all jobs above are over; begins a reporting group too",
        support: Support::Job(|job, v| {
            job.stonewall = flag(v)?;
            Ok(())
        }),
    },
    switch("exitall", "when the job is over, all others end", |job, v| {
        job.exitall = flag(v)?;
        Ok(())
    }),
    job("cpus_allowed", &[], "0-3,5", "cores", |job, v| {
        job.cpus = Some(cpus(v)?);
        Ok(())
    }),
    job(
        "cpus_allowed_policy",
        &[],
        "split",
        "shared: all jobs on all of these cores; split: a core each",
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
    job("prio", &["ioprio"], "0-7", "I/O priority within its class", |job, v| {
        job.io_priority = Some((job.io_priority.map_or(2, |(class, _)| class), within(v, 0, 7)? as u8));
        Ok(())
    }),
    job("prioclass", &["ioprio_class"], "1-3", "I/O class: 1 real time, 2 best effort, 3 idle", |job, v| {
        job.io_priority = Some((within(v, 1, 3)? as u8, job.io_priority.map_or(4, |(_, level)| level)));
        Ok(())
    }),
    job(
        "cgroup",
        &[],
        "NAME",
        "control group below /sys/fs/cgroup that a job's process joins; it is to exist",
        |job, v| {
            if v.split('/').any(|part| part == "..") {
                return Err("it is below /sys/fs/cgroup".to_string());
            }
            job.cgroup = Some(v.to_string());
            Ok(())
        },
    ),
    job("ioscheduler", &[], "kyber", "I/O scheduler of the devices, set before and read back", |job, v| {
        if v.is_empty() || !v.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
        {
            return Err("it is a name, as none or mq-deadline".to_string());
        }
        job.scheduler = Some(v.to_string());
        Ok(())
    }),
    // What is reported.
    job("percentile_list", &[], "50:99:99.9", "percentiles that are reported", |job, v| {
        job.percentiles = percentiles(v)?;
        Ok(())
    }),
    switch("slat_percentiles", "percentiles of submission", |job, v| {
        job.percentiles_of[0] = Some(flag(v)?);
        Ok(())
    }),
    switch("clat_percentiles", "percentiles of completion; on by default in a closed loop", |job, v| {
        job.percentiles_of[1] = Some(flag(v)?);
        Ok(())
    }),
    switch("lat_percentiles", "percentiles of the whole; on by default in an open loop", |job, v| {
        job.percentiles_of[2] = Some(flag(v)?);
        Ok(())
    }),
    switch("disable_slat", "do not look at the clock after submission", |job, v| {
        job.spec.measure_submission = !flag(v)?;
        Ok(())
    }),
    OptionInfo {
        name: "unified_rw_reporting",
        aliases: &[],
        value: "none",
        switch: true,
        help: "mixed: reads, writes and trims as one; none",
        support: Support::Job(|job, v| {
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
        support: Support::Job(|job, v| {
            job.logs.latency = Some(v.to_string());
            Ok(())
        }),
    },
    OptionInfo {
        name: "write_bw_log",
        aliases: &[],
        value: "NAME",
        switch: false,
        help: "NAME_bw.N.log: KiB a second, a line a sample",
        support: Support::Job(|job, v| {
            job.logs.bandwidth = Some(v.to_string());
            Ok(())
        }),
    },
    OptionInfo {
        name: "write_iops_log",
        aliases: &[],
        value: "NAME",
        switch: false,
        help: "NAME_iops.N.log: I/Os a second, a line a sample",
        support: Support::Job(|job, v| {
            job.logs.iops = Some(v.to_string());
            Ok(())
        }),
    },
    job(
        "log_avg_msec",
        &[],
        "MS",
        "lines of logs are averages over this time; also the time between samples",
        |job, v| {
            job.spec.log.average_ns = number::<u64>(v)?.checked_mul(MS).ok_or("it is too long")?;
            Ok(())
        },
    ),
    job(
        "bwavgtime",
        &["iopsavgtime"],
        "MS",
        "time between samples, in milliseconds; 500 by default",
        |job, v| {
            job.spec.sample_ns = within(v, 1, 3_600_000)? * MS;
            Ok(())
        },
    ),
    job("kb_base", &[], "1024", "what k is: 1024 or 1000", |job, v| {
        job.kb_base = match v {
            "1024" => 1024,
            "1000" => 1000,
            _ => return Err("it is 1024 or 1000".to_string()),
        };
        Ok(())
    }),
    job("unit_base", &[], "8", "rates in bytes (8, or 0) or bits (1)", |job, v| {
        job.bits = match v {
            "0" | "8" => false,
            "1" => true,
            _ => return Err("it is 0, 8 or 1".to_string()),
        };
        Ok(())
    }),
    // The run.
    run("section", "NAME", false, "run only this section of the job files; may come again"),
    run("output", "FILE", false, "where the result is written; by default to standard output"),
    run("output_format", "json", false, "normal, json or json+; several with commas"),
    run("eta", "auto", false, "a line each second on standard error: auto, always, never"),
    run("status_interval", "TIME", false, "a line of totals on standard error this often"),
    run("showcmd", "BOOL", true, "print the jobs as command lines and end"),
    run("parse_only", "BOOL", true, "check the options and end"),
    run("readonly", "BOOL", true, "refuse jobs that write"),
    run("cmdhelp", "BOOL", true, "list the options"),
    run(
        "generator_cost",
        "BOOL",
        true,
        "measure what the generator costs on the null engine, and report it; on by default",
    ),
    run("config", "FILE", false, "SPDK JSON configuration file that makes bdevs (-c)"),
    run("idle", "adaptive", false, "what a reactor without work does: adaptive, spin, sleep"),
    run("memory", "1g", false, "most memory for I/O buffers"),
    run("engine", "auto", false, "what reactors ask the kernel with: auto, uring, epoll"),
    // fio's, and not ours.
    refused("rate_min", "a job that is too slow is seen in its result"),
    refused("rate_iops_min", "a job that is too slow is seen in its result"),
    refused("rate_cycle", "rates are kept I/O by I/O"),
    refused("rate_ignore_thinktime", "use one of rate and thinktime"),
    refused("latency_run", "the depth goes on being tuned until the runtime has passed"),
    refused("iodepth_low", "the queue is filled as soon as there is room"),
    refused("iodepth_batch_complete_min", "one completion is waited for; all that are there are taken"),
    refused("iodepth_batch_complete", "use iodepth_batch_complete_max"),
    refused("thinktime_blocks_type", "pauses count I/Os that were issued"),
    refused("thinktime_iotime", "use thinktime_blocks"),
    refused(
        "random_generator",
        "positions come from one generator, and without norandommap from an order in which each comes once",
    ),
    refused("allrandrepeat", "use randrepeat and randseed"),
    refused("softrandommap", "coverage needs no memory here"),
    refused("verify_pattern", "blocks describe themselves; verify=pattern checks every byte"),
    refused("verify_backlog", "a job that only writes reads back at its end"),
    refused("verify_fatal", "wrong blocks are counted, and the run fails"),
    refused("do_verify", "a job that only writes reads back at its end"),
    refused("verify_only", "verify with rw=read checks what another run wrote"),
    refused("unlink", "files are kept"),
    refused("overwrite", "files that are read are laid out first, others are allocated"),
    refused("fallocate", "files to be written are allocated where the file system can"),
    refused("pre_read", "use a job of its own, and stonewall"),
    refused("bs_unaligned", "I/Os are whole blocks"),
    refused("bs_is_seq_rand", "give sequential and random I/O a job each"),
    refused("rwmixcycle", "the mix is drawn for each I/O"),
    refused("rw_sequencer", "sequences are not supported"),
    refused("fill_device", "rw=write without a size writes a device once"),
    refused("zonesize", "zones of devices are not supported; random_distribution=zoned is"),
    refused("zonemode", "zones of devices are not supported"),
    refused("read_iolog", "replay is not supported"),
    refused("write_iolog", "write_lat_log has every I/O's time, size and offset"),
    refused("write_hist_log", "use json+ for buckets"),
    refused("log_hist_msec", "use json+ for buckets"),
    refused("log_compression", "logs are text"),
    refused("numa_cpu_nodes", "use cpus_allowed; memory is taken where the job runs"),
    refused("numa_mem_policy", "memory is taken where the job runs"),
    refused("mem", "memory is the arena's, in chunks of 2 MiB"),
    refused("iomem", "memory is the arena's, in chunks of 2 MiB"),
    refused("gtod_reduce", "a look at the clock is shared by a batch; disable_slat spares one"),
    refused("disable_lat", "latencies cost next to nothing here"),
    refused("disable_clat", "latencies cost next to nothing here"),
    refused("steadystate", "the lab's runner finds the steady state"),
    refused("flow", "give the jobs rates"),
    refused("profile", "write a job file"),
    refused("client", "there is no server mode"),
    refused("server", "there is no server mode"),
    refused("minimal", "use output-format=json"),
    refused("terse_version", "use output-format=json"),
    refused("compress_percentage", "buffers hold noise"),
    refused("dedupe_percentage", "buffers hold noise"),
    refused("buffer_compress_percentage", "buffers hold noise"),
    refused("wait_for", "use stonewall"),
    refused("exec_prerun", "run it from a script"),
    refused("exec_postrun", "run it from a script"),
    refused("trim_percentage", "give trims a job of their own"),
    refused("opendir", "name the files"),
    refused("file_append", "give an offset"),
    refused("cgroup_weight", "set it in the control group"),
    refused("uid", "start it as that user"),
    refused("gid", "start it as that group"),
];

/// There is one kind of flush a job: the last that is asked for. None of one kind leaves the other.
fn flush_every(job: &mut Job, writes: u32, data_sync: bool) {
    if writes > 0 || job.engine_config.data_sync == data_sync {
        (job.spec.flush_every, job.engine_config.data_sync) = (writes, data_sync);
    }
}

fn set_sizes(job: &mut Job, sizes: [Option<Sizes>; 3]) {
    for (mine, new) in job.sizes.iter_mut().zip(sizes) {
        if new.is_some() {
            *mine = new;
        }
    }
}

/// fio's defaults for what is not given with it.
fn target(job: &mut Job) -> &mut LatencyTarget {
    job.spec.latency_target.get_or_insert(LatencyTarget {
        target_ns: 0,
        window_ns: SECOND,
        percentile: 100.0,
    })
}

fn ioengine(job: &mut Job, value: &str) -> Result<(), String> {
    // A mode is named as a whole: one that a global section names does not stay behind.
    job.mode = (value == "iou-c", value == "iou-s");
    let kind = match value {
        "bdev" | "ringbolt" => {
            job.engine = Some(EngineName::Bdev);
            return Ok(());
        }
        "iou" | "iou-c" | "iou-s" => Kind::Uring,
        "sync" | "pread" => Kind::Psync,
        name => Kind::from_name(name).ok_or_else(|| {
            let names = Kind::NAMES.map(|(_, name)| name).join(", ");
            format!("it is one of {names}, iou, iou-c, iou-s, bdev")
        })?,
    };
    job.engine = Some(EngineName::Kernel(kind));
    Ok(())
}

/// The option with a name or an alias; dashes count as underscores.
pub(super) fn find(name: &str) -> Option<&'static OptionInfo> {
    OPTIONS.iter().find(|option| option.name == name || option.aliases.contains(&name))
}

/// The name that is nearest to one that is none, if any is near.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    let names = OPTIONS.iter().flat_map(|option| std::iter::once(&option.name).chain(option.aliases));
    let near = names.map(|known| (distance(name, known), *known)).min()?;
    (near.0 <= 1 + known_length(name) / 4).then_some(near.1)
}

fn known_length(name: &str) -> usize {
    name.chars().count().min(64)
}

/// Letters to change, add or take away to make one of the other (V. Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (number, letter) in one.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = number + 1;
        for (at, against) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *against);
            diagonal = row[at + 1];
            row[at + 1] = changed.min(row[at] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

//! The table of options: supported ones with their parsers, and unsupported ones of fio.

mod unsupported;

use io_engines::{EngineKind, SyncMode};

use super::job::{EngineName, PerfJob};
use super::values::*;
use crate::arrivals::ArrivalProcess;
use crate::log::COARSENESS_MAX;
use crate::spec::{BlockSizes, BufferContent, FioVerify, LatencyTarget, OffsetSequence, Verify, Workload};
use unsupported::{NO_EFFECT, REFUSED};

type Apply = fn(&mut PerfJob, &str) -> Result<(), String>;

/// How an option is supported.
#[derive(Clone, Copy)]
pub enum Support {
    /// An option of a job, with the function that applies it.
    PerfJob(Apply),
    /// An option of the run, accepted on the command line only.
    Run,
    /// An option of fio that asks for what is done anyway, or that changes no result: accepted with a warning.
    NoEffect {
        /// The accepted values; empty for all.
        values: &'static [&'static str],
        /// Why it has no effect.
        why: &'static str,
    },
    /// An unsupported option of fio, with the reason and what to use instead.
    Refused(&'static str),
}

/// One option.
#[derive(Clone, Copy)]
pub struct OptionInfo {
    /// Name, with underscores.
    pub name: &'static str,
    /// Alternative names.
    pub aliases: &'static [&'static str],
    /// Placeholder of the value, or an example.
    pub value: &'static str,
    /// Whether the value may be omitted, which means 1.
    pub switch: bool,
    /// Help text, with differences from fio.
    pub help: &'static str,
    /// How it is supported.
    pub support: Support,
}

const fn job(
    name: &'static str,
    aliases: &'static [&'static str],
    value: &'static str,
    help: &'static str,
    apply: Apply,
) -> OptionInfo {
    OptionInfo { name, aliases, value, switch: false, help, support: Support::PerfJob(apply) }
}

const fn switch(name: &'static str, help: &'static str, apply: Apply) -> OptionInfo {
    OptionInfo { name, aliases: &[], value: "BOOL", switch: true, help, support: Support::PerfJob(apply) }
}

const fn run(name: &'static str, value: &'static str, switch: bool, help: &'static str) -> OptionInfo {
    OptionInfo { name, aliases: &[], value, switch, help, support: Support::Run }
}

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// Every option, grouped by topic.
pub const OPTIONS: &[OptionInfo] =
    &joined::<{ SUPPORTED.len() + NO_EFFECT.len() + REFUSED.len() }>(&[SUPPORTED, NO_EFFECT, REFUSED]);

const fn joined<const COUNT: usize>(tables: &[&[OptionInfo]]) -> [OptionInfo; COUNT] {
    let mut options = [tables[0][0]; COUNT];
    let (mut count, mut table) = (0, 0);
    while table < tables.len() {
        let mut row = 0;
        while row < tables[table].len() {
            options[count] = tables[table][row];
            (count, row) = (count + 1, row + 1);
        }
        table += 1;
    }
    assert!(count == COUNT);
    options
}

/// The options that a job or a run has.
const SUPPORTED: &[OptionInfo] = &[
    // Files and engine.
    job("filename", &[], "FILE[:FILE]", "files, devices or URIs, separated by :", |job, v| {
        job.filename = Some(v.to_string());
        Ok(())
    }),
    job("name", &[], "NAME", "name of the job; the second and later start another job", |job, v| {
        if v.is_empty() {
            return Err("a job needs a name".to_string());
        }
        job.spec.name = v.to_string();
        Ok(())
    }),
    job("description", &[], "TEXT", "text for reports", |job, v| {
        job.description = v.to_string();
        Ok(())
    }),
    job("directory", &[], "DIR", "prefix of relative file names", |job, v| {
        job.directory = Some(v.to_string());
        Ok(())
    }),
    job("nrfiles", &["nr_files"], "N", "number of files if no filename is given", |job, v| {
        job.nrfiles = in_range(v, 1, 65_536)? as u32;
        Ok(())
    }),
    job(
        "file_service_type",
        &[],
        "roundrobin",
        "how the next file is selected: roundrobin, random or sequential, [:N] I/Os per turn",
        |job, v| {
            job.spec.file_service = file_service(v)?;
            Ok(())
        },
    ),
    job(
        "ioengine",
        &[],
        "io_uring",
        "psync, pvsync2, libaio, io_uring, io_uring_cmd, null, filecreate, filestat, filedelete, dircreate, dirstat, dirdelete, or bdev (Ringbolt's own; also spdk and spdk_bdev); iou, iou-c and iou-s are io_uring's modes",
        ioengine,
    ),
    switch("direct", "bypass the page cache (O_DIRECT)", |job, v| {
        job.direct = flag(v)?;
        Ok(())
    }),
    switch("buffered", "use the page cache; the opposite of direct", |job, v| {
        job.direct = !flag(v)?;
        Ok(())
    }),
    job("sync", &[], "none", "synchronous writes: none, sync (O_SYNC) or dsync (O_DSYNC)", |job, v| {
        job.sync = match v {
            "none" | "0" => SyncMode::None,
            "sync" | "1" => SyncMode::Sync,
            "dsync" => SyncMode::DataSync,
            _ => return Err("it is one of none, sync, dsync".to_string()),
        };
        Ok(())
    }),
    job("fsync", &[], "N", "flush (fsync) after every N writes", |job, v| {
        flush_every(job, number(v)?, false);
        Ok(())
    }),
    job("fdatasync", &[], "N", "flush data (fdatasync) after every N writes", |job, v| {
        flush_every(job, number(v)?, true);
        Ok(())
    }),
    switch("end_fsync", "flush at the end", |job, v| {
        job.spec.flush_at_end = flag(v)?;
        Ok(())
    }),
    switch("invalidate", "drop the page cache of the files before a job starts; on by default", |job, v| {
        job.invalidate = flag(v)?;
        Ok(())
    }),
    switch("allow_file_create", "create missing files; on by default", |job, v| {
        job.allow_file_create = flag(v)?;
        Ok(())
    }),
    switch(
        "allow_mounted_write",
        "allow writes to devices that are mounted or otherwise in use",
        |job, v| {
            job.allow_mounted_write = flag(v)?;
            Ok(())
        },
    ),
    switch(
        "create_on_open",
        "create files when they are opened; only with filecreate and dircreate",
        |job, v| {
            job.create_on_open = flag(v)?;
            Ok(())
        },
    ),
    job(
        "openfiles",
        &[],
        "N",
        "files open at a time; at least nrfiles, except with filecreate and its like",
        |job, v| {
            job.open_files = Some(in_range(v, 1, 65_536)? as u32);
            Ok(())
        },
    ),
    switch("create_only", "create the files and do no I/O", |job, v| {
        job.create_only = flag(v)?;
        Ok(())
    }),
    // I/O pattern, sizes and limits.
    job(
        "rw",
        &["readwrite"],
        "randread",
        "read, write, randread, randwrite, rw, randrw, trim, randtrim, trimwrite or randtrimwrite; read:-8k steps by -8 KiB after each I/O, randread:8 has a random offset every 8 I/Os",
        workload,
    ),
    job(
        "rw_sequencer",
        &[],
        "identical",
        "offsets between the random ones of rw=randread:N: sequential or identical",
        |job, v| {
            job.spec.sequence.repeats = match v {
                "sequential" => false,
                "identical" => true,
                _ => return Err("it is sequential or identical".to_string()),
            };
            Ok(())
        },
    ),
    job("bs", &["blocksize"], "4k[,4k[,4k]]", "I/O size in bytes: reads, writes, trims", |job, v| {
        let base = job.kb_base;
        let sizes = per_direction(v, |part| match bytes_u32(part, base)? {
            0 => Err("I/Os have at least one byte".to_string()),
            bytes => Ok(BlockSizes::Fixed(bytes)),
        })?;
        set_sizes(job, sizes);
        Ok(())
    }),
    job(
        "bsrange",
        &["blocksize_range"],
        "4k-64k",
        "range of I/O sizes, uniformly random in steps of the smallest",
        |job, v| {
            let base = job.kb_base;
            let sizes = per_direction(v, |part| range(part, base))?;
            set_sizes(job, sizes);
            Ok(())
        },
    ),
    job("bssplit", &[], "4k/60:64k/40", "I/O sizes, each with its percentage", |job, v| {
        let base = job.kb_base;
        let sizes = per_direction(v, |part| split(part, base))?;
        set_sizes(job, sizes);
        Ok(())
    }),
    job("blockalign", &["ba"], "SIZE", "alignment of random offsets", |job, v| {
        job.spec.align_bytes = Some(bytes(v, job.kb_base)?);
        Ok(())
    }),
    job("iodepth", &[], "N", "I/Os that a job keeps in flight; 1 with psync and pvsync2", |job, v| {
        job.spec.io_depth = in_range(v, 1, 65_536)? as u32;
        Ok(())
    }),
    job(
        "iodepth_batch_submit",
        &["iodepth_batch"],
        "N",
        "most I/Os per submission; 0 for no limit; default 1 with psync, libaio and io_uring, as in fio",
        |job, v| {
            job.batch_submit = Some(in_range(v, 0, 65_536)? as u32);
            Ok(())
        },
    ),
    job(
        "iodepth_batch_complete_max",
        &[],
        "N",
        "most completions reaped at once; 0 for no limit; default 1 with psync, libaio and io_uring, as in fio",
        |job, v| {
            job.batch_complete_max = Some(in_range(v, 0, 65_536)? as u32);
            Ok(())
        },
    ),
    job("rwmixread", &[], "50", "percentage of reads in rw and randrw", |job, v| {
        job.spec.read_percent = in_range(v, 0, 100)? as u8;
        Ok(())
    }),
    job("rwmixwrite", &[], "50", "percentage of writes in rw and randrw", |job, v| {
        job.spec.read_percent = 100 - in_range(v, 0, 100)? as u8;
        Ok(())
    }),
    job(
        "size",
        &["filesize"],
        "SIZE|%",
        "size of the region, divided among the files, or a percentage of each file",
        |job, v| {
            let (size, percent) = bytes_or_percent(v, job.kb_base)?;
            if size == Some(0) || percent == Some(0) {
                return Err("nothing is used of the device then".to_string());
            }
            (job.spec.size_bytes, job.spec.size_percent) = (size, percent.filter(|percent| *percent < 100));
            Ok(())
        },
    ),
    job("offset", &["start_offset", "fileoffset"], "SIZE|%", "start of the region", |job, v| {
        let (offset, percent) = bytes_or_percent(v, job.kb_base)?;
        (job.spec.offset_bytes, job.spec.offset_percent) = (offset.unwrap_or(0), percent.unwrap_or(0));
        Ok(())
    }),
    job("offset_increment", &[], "SIZE", "added to the offset for each further copy of numjobs", |job, v| {
        job.spec.offset_increment = bytes(v, job.kb_base)?;
        Ok(())
    }),
    job("io_size", &["io_limit"], "SIZE", "bytes of I/O after which a job ends", |job, v| {
        job.spec.io_bytes = Some(bytes(v, job.kb_base)?);
        Ok(())
    }),
    job("number_ios", &[], "N", "I/Os after which a job ends", |job, v| {
        job.spec.number_ios = Some(bytes(v, job.kb_base)?);
        Ok(())
    }),
    job("loops", &[], "N", "number of passes over the region", |job, v| {
        job.spec.loops = in_range(v, 1, u64::from(u32::MAX))? as u32;
        Ok(())
    }),
    switch("time_based", "repeat until the runtime has passed", |job, v| {
        job.spec.time_based = flag(v)?;
        Ok(())
    }),
    job("runtime", &["timeout"], "10s", "time limit, without the ramp", |job, v| {
        job.spec.runtime_ns = Some(time(v, SECOND)?).filter(|ns| *ns > 0);
        Ok(())
    }),
    job("ramp_time", &[], "5s", "time before the measurement starts", |job, v| {
        job.spec.ramp_ns = time(v, SECOND)?;
        Ok(())
    }),
    job("startdelay", &[], "5s", "delay before a job starts", |job, v| {
        job.delay_ns = time(v, SECOND)?;
        Ok(())
    }),
    // Random offsets.
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
        "percentage of I/Os at random offsets in a random workload; the others are sequential",
        |job, v| {
            job.spec.random_percent = in_range(v, 0, 100)? as u8;
            Ok(())
        },
    ),
    switch("norandommap", "random I/O may repeat an offset before it has covered all", |job, v| {
        job.random_map = !flag(v)?;
        Ok(())
    }),
    OptionInfo {
        name: "randrepeat",
        aliases: &["allrandrepeat"],
        value: "BOOL",
        switch: true,
        help: "same random numbers in every run; on by default",
        support: Support::PerfJob(|job, v| {
            job.repeatable = flag(v)?;
            Ok(())
        }),
    },
    job("randseed", &["seed"], "N", "seed of offsets, mix and data", |job, v| {
        job.spec.seed = number(v)?;
        Ok(())
    }),
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
    // Data.
    OptionInfo {
        name: "verify",
        aliases: &[],
        value: "crc32c",
        switch: true,
        help: "write blocks with fio's header and verify them when read: crc32c, crc7, crc16, crc32, crc64, md5, sha1, sha256, sha512, sha3-224 to -512, xxhash, meta, pattern; ringbolt: headers of our own in each logical block, which pattern without verify_pattern compares byte by byte",
        support: Support::PerfJob(|job, v| {
            job.spec.verify = match v {
                "1" => Verify::Fio(FioVerify::Crc32c),
                "pattern" => Verify::Pattern,
                "ringbolt" => Verify::Crc32c,
                "0" | "null" | "none" => Verify::Off,
                name => Verify::Fio(FioVerify::from_name(name).ok_or_else(|| {
                    let names = FioVerify::NAMES.map(|(_, name, _)| name).join(", ");
                    format!("it is one of {names}, ringbolt")
                })?),
            };
            Ok(())
        }),
    },
    switch(
        "do_verify",
        "read verified data back at the end of a job that only writes; on by default. Reads are verified either way",
        |job, v| {
            job.spec.reads_back = flag(v)?;
            Ok(())
        },
    ),
    job(
        "verify_pattern",
        &[],
        "0xdeadbeef",
        "bytes of verified blocks behind fio's header, repeated; verify=pattern verifies them without a header",
        |job, v| {
            job.spec.verify_pattern = pattern(v)?;
            Ok(())
        },
    ),
    job(
        "verify_interval",
        &["header_interval"],
        "SIZE",
        "bytes from one of fio's headers to the next; one header an I/O by default",
        |job, v| {
            job.spec.verify_interval = Some(bytes_u32(v, job.kb_base)?).filter(|bytes| *bytes > 0);
            Ok(())
        },
    ),
    switch("refill_buffers", "new random bytes for every write", |job, v| {
        job.spec.content = if flag(v)? { BufferContent::FreshNoise } else { BufferContent::Noise };
        Ok(())
    }),
    switch("zero_buffers", "write zeroes", |job, v| {
        job.spec.content = if flag(v)? { BufferContent::Zeroes } else { BufferContent::Noise };
        Ok(())
    }),
    job("buffer_pattern", &[], "0xdeadbeef", "write these bytes, repeated", |job, v| {
        job.spec.content = BufferContent::Pattern(pattern(v)?);
        Ok(())
    }),
    OptionInfo {
        name: "continue_on_error",
        aliases: &[],
        value: "BOOL",
        switch: true,
        help: "continue after an I/O error",
        support: Support::PerfJob(|job, v| {
            job.spec.continue_on_error = match v {
                "none" => false,
                "all" | "io" => true,
                v => flag(v)
                    .map_err(|_| "it is none, io, all, 0 or 1; one kind of I/O alone is not supported")?,
            };
            Ok(())
        }),
    },
    // io_uring and libaio.
    switch("hipri", "poll for completions", |job, v| {
        job.engine_config.polling.iopoll = flag(v)?;
        Ok(())
    }),
    switch("sqthread_poll", "a kernel thread polls for submissions (SQPOLL)", |job, v| {
        job.engine_config.polling.sqpoll = flag(v)?;
        Ok(())
    }),
    job("sqthread_poll_cpu", &[], "CORE", "core of the SQPOLL thread", |job, v| {
        job.engine_config.polling.sqpoll_cpu = Some(number(v)?);
        Ok(())
    }),
    job(
        "sqthread_poll_idle",
        &[],
        "MS",
        "idle milliseconds after which the SQPOLL thread sleeps",
        |job, v| {
            job.engine_config.polling.sqpoll_idle_ms = number(v)?;
            Ok(())
        },
    ),
    switch("registerfiles", "register files with the ring", |job, v| {
        job.engine_config.register_files = flag(v)?;
        Ok(())
    }),
    switch("fixedbufs", "register buffers with the ring", |job, v| {
        job.engine_config.fixed_buffers = flag(v)?;
        Ok(())
    }),
    switch("nonvectored", "non-vectored read and write operations; on by default", |job, v| {
        job.engine_config.nonvectored = flag(v)?;
        Ok(())
    }),
    switch("userspace_reap", "read libaio's events without a system call", |job, v| {
        job.engine_config.userspace_reap = flag(v)?;
        Ok(())
    }),
    job("cmd_type", &[], "nvme", "command type of io_uring_cmd; nvme only", |_, v| {
        if v == "nvme" { Ok(()) } else { Err("it is nvme".to_string()) }
    }),
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
    switch("exitall", "when the job finishes, stop all others", |job, v| {
        job.exitall = flag(v)?;
        Ok(())
    }),
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
    job("prio", &["ioprio"], "0-7", "I/O priority within its class", |job, v| {
        job.io_priority = Some((job.io_priority.map_or(2, |(class, _)| class), in_range(v, 0, 7)? as u8));
        Ok(())
    }),
    job(
        "prioclass",
        &["ioprio_class"],
        "1-3",
        "I/O priority class: 1 real time, 2 best effort, 3 idle",
        |job, v| {
            job.io_priority = Some((in_range(v, 1, 3)? as u8, job.io_priority.map_or(4, |(_, level)| level)));
            Ok(())
        },
    ),
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
        help: "NAME_bw.N.log: KiB a second, one line per sample",
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
        help: "NAME_iops.N.log: I/Os a second, one line per sample",
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
    run("output_format", "json", false, "normal, json or json+; several separated by commas"),
    run("eta", "auto", false, "print a line each second on standard error: auto, always, never"),
    run("status_interval", "TIME", false, "interval of a line of totals on standard error"),
    run("showcmd", "BOOL", true, "print the jobs as command lines and exit"),
    run("parse_only", "BOOL", true, "check the options and exit"),
    run("readonly", "BOOL", true, "refuse jobs that write"),
    run("cmdhelp", "BOOL", true, "list the options"),
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

/// Sets `fsync` or `fdatasync`. A job has one kind of flush: the last that is given with a count above 0; a
/// count of 0 only disables its own kind.
fn flush_every(job: &mut PerfJob, writes: u32, data_sync: bool) {
    if writes > 0 || job.engine_config.data_sync == data_sync {
        (job.spec.flush_every, job.engine_config.data_sync) = (writes, data_sync);
    }
}

fn set_sizes(job: &mut PerfJob, sizes: [Option<BlockSizes>; 3]) {
    for (mine, new) in job.sizes.iter_mut().zip(sizes) {
        if new.is_some() {
            *mine = new;
        }
    }
}

/// The latency target, with fio's defaults for the values that are not given.
fn latency_target(job: &mut PerfJob) -> &mut LatencyTarget {
    job.spec.latency_target.get_or_insert(LatencyTarget {
        target_ns: 0,
        window_ns: SECOND,
        percentile: 100.0,
    })
}

/// `rw`, with a step of sequential offsets or the length of a sequence of random ones behind a colon.
fn workload(job: &mut PerfJob, value: &str) -> Result<(), String> {
    let (name, sequence) = value.split_once(':').unwrap_or((value, ""));
    let workload = Workload::from_name(name)
        .ok_or_else(|| format!("it is one of {}", Workload::NAMES.map(|(_, names)| names[0]).join(", ")))?;
    let (mut step_bytes, mut length) = (0, 1);
    if !sequence.is_empty() && workload.is_random() {
        length = in_range(sequence, 1, u64::from(u32::MAX))? as u32;
    } else if !sequence.is_empty() {
        let magnitude = sequence.strip_prefix('-').unwrap_or(sequence);
        let step = i64::try_from(bytes(magnitude, job.kb_base)?).map_err(|_| "the step is too long")?;
        step_bytes = if sequence.starts_with('-') { -step } else { step };
    }
    let repeats = job.spec.sequence.repeats;
    (job.spec.workload, job.spec.sequence) = (workload, OffsetSequence { step_bytes, length, repeats });
    Ok(())
}

fn ioengine(job: &mut PerfJob, value: &str) -> Result<(), String> {
    // `ioengine` sets both flags, so that a mode of the global section does not persist.
    job.polling_mode = (value == "iou-c", value == "iou-s");
    let kind = match value {
        "bdev" | "ringbolt" | "spdk" | "spdk_bdev" => {
            job.engine = Some(EngineName::Bdev);
            return Ok(());
        }
        "iou" | "iou-c" | "iou-s" => EngineKind::Uring,
        "sync" | "pread" => EngineKind::Psync,
        "vsync" | "pvsync" => EngineKind::Pvsync2,
        name => EngineKind::from_name(name).ok_or_else(|| {
            let names = EngineKind::NAMES.map(|(_, name)| name).join(", ");
            format!("it is one of {names}, iou, iou-c, iou-s, bdev")
        })?,
    };
    job.engine = Some(EngineName::Kernel(kind));
    Ok(())
}

/// Finds an option by its name or an alias, with underscores.
pub(super) fn find(name: &str) -> Option<&'static OptionInfo> {
    OPTIONS.iter().find(|option| option.name == name || option.aliases.contains(&name))
}

/// The known name that is nearest to an unknown one, if it is near enough.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    let names = OPTIONS.iter().flat_map(|option| std::iter::once(&option.name).chain(option.aliases));
    let near = names.map(|known| (edit_distance(name, known), *known)).min()?;
    (near.0 <= 1 + known_length(name) / 4).then_some(near.1)
}

fn known_length(name: &str) -> usize {
    name.chars().count().min(64)
}

/// The Levenshtein distance.
fn edit_distance(one: &str, other: &str) -> usize {
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

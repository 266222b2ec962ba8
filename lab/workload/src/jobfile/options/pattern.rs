//! I/O patterns, sizes, limits and random offsets.

use super::{OptionInfo, SECOND, Support, job, switch};
use crate::jobfile::job::PerfJob;
use crate::jobfile::values::*;
use crate::spec::{BlockSizes, OffsetSequence, Workload};

/// I/O patterns, sizes, limits and random offsets.
pub(super) const PATTERN: &[OptionInfo] = &[
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
        // fio separates reads and writes by a dash too, where there is no comma.
        let v = match split_outside(v, &['-']) {
            Some((reads, others)) if !v.contains(',') => format!("{reads},{others}"),
            _ => v.to_string(),
        };
        let sizes = per_direction(&v, |part| match bytes_u32(part, base)? {
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
    job(
        "blockalign",
        &["ba"],
        "SIZE[,SIZE[,SIZE]]",
        "alignment of random offsets: reads, writes, trims",
        |job, v| {
            let base = job.kb_base;
            set_given(&mut job.spec.align_bytes, per_direction(v, |part| bytes(part, base).map(Some))?);
            Ok(())
        },
    ),
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
        "filesize",
        &[],
        "SIZE",
        "size of each file; size is then the bytes of I/O, if it is larger",
        |job, v| {
            job.file_bytes = Some(bytes(v, job.kb_base)?).filter(|bytes| *bytes > 0);
            Ok(())
        },
    ),
    job(
        "size",
        &[],
        "SIZE|%",
        "size of the region, divided among the files, or a percentage of each file",
        |job, v| {
            job.spec.in_zones.size = zones(v)?;
            match job.spec.in_zones.size {
                Some(0) => return Err("nothing is used of the device then".to_string()),
                Some(_) => return Ok(()),
                None => {}
            }
            let (size, percent) = bytes_or_percent(v, job.kb_base)?;
            if size == Some(0) || percent == Some(0) {
                return Err("nothing is used of the device then".to_string());
            }
            (job.spec.size_bytes, job.spec.size_percent) = (size, percent.filter(|percent| *percent < 100));
            Ok(())
        },
    ),
    job("offset", &["start_offset", "fileoffset"], "SIZE|%", "start of the region", |job, v| {
        job.spec.in_zones.offset = zones(v)?;
        if job.spec.in_zones.offset.is_some() {
            return Ok(());
        }
        let (offset, percent) = bytes_or_percent(v, job.kb_base)?;
        (job.spec.offset_bytes, job.spec.offset_percent) = (offset.unwrap_or(0), percent.unwrap_or(0));
        Ok(())
    }),
    job(
        "offset_increment",
        &[],
        "SIZE|%",
        "added to the offset for each further copy of numjobs",
        |job, v| {
            job.spec.in_zones.increment = zones(v)?;
            if job.spec.in_zones.increment.is_none() {
                let (size, percent) = bytes_or_percent(v, job.kb_base)?;
                job.spec.offset_increment = size.unwrap_or(0);
                job.spec.offset_increment_percent = percent.unwrap_or(0);
            }
            Ok(())
        },
    ),
    job(
        "io_size",
        &["io_limit"],
        "SIZE|%",
        "bytes of I/O after which a job ends, or percent of size",
        |job, v| {
            job.spec.in_zones.io_size = zones(v)?;
            if job.spec.in_zones.io_size.is_none() {
                let (size, percent) = bytes_or_percent(v, job.kb_base)?;
                (job.spec.io_bytes, job.spec.io_percent) = (size, percent.filter(|percent| *percent < 100));
                if percent == Some(0) {
                    return Err("nothing is done then".to_string());
                }
            }
            Ok(())
        },
    ),
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
    job(
        "reconnect",
        &[],
        "30s",
        "how long a lost nvme+tcp:// target is connected again, while I/O waits; 0 is not at all. Without, for ever if time_based, else not",
        |job, v| {
            job.spec.reconnect_ns = Some(time(v, SECOND)?);
            Ok(())
        },
    ),
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
        "100[,100[,100]]",
        "percentage of reads, writes and trims at random offsets in a random workload; each of the others follows the last I/O of its direction",
        |job, v| {
            let percent = |part: &str| in_range(part, 0, 100).map(|percent| percent as u8);
            set_given(&mut job.spec.random_percent, per_direction(v, percent)?);
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
];

fn set_sizes(job: &mut PerfJob, sizes: [Option<BlockSizes>; 3]) {
    set_given(&mut job.sizes, sizes.map(|size| size.map(Some)));
}

/// Sets the values of the directions that are given.
fn set_given<T>(settings: &mut [T; 3], given: [Option<T>; 3]) {
    for (mine, new) in settings.iter_mut().zip(given) {
        if let Some(new) = new {
            *mine = new;
        }
    }
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

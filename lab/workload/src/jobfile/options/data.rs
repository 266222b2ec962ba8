//! Contents of data, verification, and options of the engines io_uring and libaio.

use super::{OptionInfo, Support, job, switch};
use crate::jobfile::values::*;
use crate::spec::{BufferContent, FioVerify, Verify};

/// Contents of data, verification, and options of the engines io_uring and libaio.
pub(super) const DATA: &[OptionInfo] = &[
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
    job(
        "verify_backlog",
        &[],
        "N",
        "verified writes after which they are read back, before the job goes on",
        |job, v| {
            job.spec.verify_backlog = in_range(v, 0, 1 << 24)? as u32;
            Ok(())
        },
    ),
    job(
        "verify_backlog_batch",
        &["verify_batch"],
        "N",
        "how many writes of the backlog are read back at a time; all by default",
        |job, v| {
            job.spec.verify_batch = in_range(v, 0, 1 << 24)? as u32;
            Ok(())
        },
    ),
    switch(
        "serialize_overlap",
        "no two I/Os in flight on one block, as always with verify; rejected without it",
        |job, v| {
            job.serialize_overlap = flag(v)?;
            Ok(())
        },
    ),
    job("buffer_compress_percentage", &[], "50", "percentage of written data that compresses", |job, v| {
        job.reducible.compress_percent = in_range(v, 0, 100)? as u8;
        Ok(())
    }),
    job(
        "buffer_compress_chunk",
        &[],
        "SIZE",
        "distance of the parts of a block that compress; 512 by default, 0 for one part a block",
        |job, v| {
            job.reducible.chunk_bytes = bytes_u32(v, job.kb_base)?;
            Ok(())
        },
    ),
    job("dedupe_percentage", &[], "50", "percentage of writes with the content of others", |job, v| {
        job.reducible.dedupe_percent = in_range(v, 0, 100)? as u8;
        Ok(())
    }),
    job(
        "dedupe_mode",
        &[],
        "repeat",
        "repeat the last unique write, or write content of a working_set",
        |job, v| {
            job.reducible.working_set_percent = match v {
                "repeat" => None,
                "working_set" => job.reducible.working_set_percent.or(Some(5)),
                _ => return Err("it is repeat or working_set".to_string()),
            };
            Ok(())
        },
    ),
    job(
        "dedupe_working_set_percentage",
        &[],
        "5",
        "size of the working_set, in percent of the blocks of the region",
        |job, v| {
            job.reducible.working_set_percent = Some(in_range(v, 1, 100)? as u8);
            Ok(())
        },
    ),
    switch("dedupe_global", "all jobs with this option have one working_set", |job, v| {
        job.reducible.global = flag(v)?;
        Ok(())
    }),
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
];

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
];

//! Files and engines.

use io_engines::{EngineKind, SyncMode};

use super::{OptionInfo, job, switch};
use crate::jobfile::job::{EngineName, FadviseHint, PerfJob};
use crate::jobfile::values::*;
use crate::work::WorkKind;

/// Files and engines.
pub(super) const FILES: &[OptionInfo] = &[
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
        "psync, pvsync2, mmap, libaio, posixaio, io_uring, io_uring_cmd, null, falloc, ftruncate, filecreate, filestat, filedelete, dircreate, dirstat, dirdelete, cpuio, exec, or bdev (Ringbolt's own; also spdk and spdk_bdev); iou, iou-c and iou-s are io_uring's modes",
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
    switch("fsync_on_close", "the same as end_fsync: files are closed at the end", |job, v| {
        job.spec.flush_at_end |= flag(v)?;
        Ok(())
    }),
    switch(
        "invalidate",
        "with buffered I/O, drop the page cache of the files before each pass over them; on by default",
        |job, v| {
            job.invalidate = flag(v)?;
            Ok(())
        },
    ),
    job(
        "fadvise_hint",
        &[],
        "HINT",
        "what the kernel expects of buffered I/O: 1 what rw says (the default), 0 nothing, random, sequential",
        |job, v| {
            job.fadvise_hint = match v {
                "0" | "none" => FadviseHint::None,
                "1" => FadviseHint::Workload,
                "random" => FadviseHint::Random,
                "sequential" => FadviseHint::Sequential,
                _ => return Err("it is one of 0, 1, random, sequential".to_string()),
            };
            Ok(())
        },
    ),
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
        "create files when they are opened; of other engines than filecreate and dircreate: do not allocate them",
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
    job(
        "fallocate",
        &[],
        "none",
        "whether files that are only written are allocated before: native or posix, as by default; none or truncate",
        |job, v| {
            job.allocates = match v {
                "native" | "posix" | "1" => true,
                "none" | "truncate" | "0" => false,
                "keep" => return Err("files have their size before the jobs start".to_string()),
                _ => return Err("it is native, posix, none or truncate".to_string()),
            };
            Ok(())
        },
    ),
    switch("create_only", "create the files and do no I/O", |job, v| {
        job.create_only = flag(v)?;
        Ok(())
    }),
];

/// Sets `fsync` or `fdatasync`. A job has one kind of flush: the last that is given with a count above 0; a
/// count of 0 only disables its own kind.
fn flush_every(job: &mut PerfJob, writes: u32, data_sync: bool) {
    if writes > 0 || job.engine_config.data_sync == data_sync {
        (job.spec.flush_every, job.engine_config.data_sync) = (writes, data_sync);
    }
}

fn ioengine(job: &mut PerfJob, value: &str) -> Result<(), String> {
    // `ioengine` sets both flags, so that a mode of the global section does not persist.
    job.polling_mode = (value == "iou-c", value == "iou-s");
    let kind = match value {
        "bdev" | "ringbolt" | "spdk" | "spdk_bdev" => {
            job.engine = Some(EngineName::Bdev);
            return Ok(());
        }
        "cpuio" => {
            job.engine = Some(EngineName::Work(WorkKind::Cpu));
            return Ok(());
        }
        "exec" => {
            job.engine = Some(EngineName::Work(WorkKind::Program));
            return Ok(());
        }
        "iou" | "iou-c" | "iou-s" => EngineKind::Uring,
        "sync" | "pread" => EngineKind::Psync,
        "vsync" | "pvsync" => EngineKind::Pvsync2,
        name if let Some(why) = refused_engine(name) => {
            return Err(format!("the engine is not supported: {why}"));
        }
        name => EngineKind::from_name(name)
            .ok_or_else(|| format!("it is one of {}", engine_names().join(", ")))?,
    };
    job.engine = Some(EngineName::Kernel(kind));
    Ok(())
}

/// The values of `ioengine`, without aliases.
pub fn engine_names() -> Vec<&'static str> {
    let kernel = EngineKind::NAMES.iter().map(|(_, name)| *name);
    kernel.chain(["iou", "iou-c", "iou-s", "cpuio", "exec", "bdev"]).collect()
}

/// The options that only this engine, or a few, have.
///
/// # Errors
/// If there is no such engine; the message lists them, or says why it is not supported.
pub fn engine_options(engine: &str) -> Result<Vec<&'static str>, String> {
    const PRIORITIES: &[&str] = &["cmdprio_percentage", "cmdprio_class", "cmdprio", "cmdprio_bssplit"];
    const RING: &[&str] =
        &["hipri", "fixedbufs", "registerfiles", "sqthread_poll", "sqthread_poll_cpu", "sqthread_poll_idle"];
    let mut job = PerfJob::default();
    ioengine(&mut job, engine)?;
    Ok(match job.engine {
        Some(EngineName::Kernel(EngineKind::Libaio)) => [&["userspace_reap"], PRIORITIES].concat(),
        Some(EngineName::Kernel(EngineKind::Uring)) => [RING, &["nonvectored"], PRIORITIES].concat(),
        Some(EngineName::Kernel(EngineKind::Passthrough)) => [RING, &["cmd_type"]].concat(),
        Some(EngineName::Kernel(EngineKind::Pvsync2)) => vec!["hipri"],
        Some(EngineName::Work(WorkKind::Cpu)) => vec!["cpuload", "cpuchunks", "cpumode", "exit_on_io_done"],
        Some(EngineName::Work(WorkKind::Program)) => {
            vec!["program", "arguments", "grace_time", "std_redirect", "exit_on_io_done"]
        }
        Some(EngineName::Bdev) => vec!["config", "memory", "idle", "engine"],
        _ => Vec::new(),
    })
}

/// Why an engine of fio is not supported.
fn refused_engine(name: &str) -> Option<&'static str> {
    const LIBRARY: &str = "it needs a library of another project";
    const BESIDE: &str = "it passes commands to a driver beside the block layer; use libaio or io_uring";
    const SOCKETS: &str = "it measures sockets, not storage";
    Some(match name {
        "page_fault" | "dev-dax" => "it measures memory, and there is no I/O to count",
        "splice" => "use libaio, io_uring or psync",
        "sg" | "mtd" | "e4defrag" => BESIDE,
        "net" | "netsplice" | "rdma" => SOCKETS,
        "libzbc" => "it needs a library of another project; psync, libaio and io_uring have zonemode=zbd",
        "libiscsi" | "nbd" => "it needs a library of another project; connect a block device of the kernel",
        "rbd"
        | "rados"
        | "gfapi"
        | "gfapi_async"
        | "libhdfs"
        | "libpmem"
        | "pmemblk"
        | "http"
        | "nfs"
        | "cpp_null"
        | "external"
        | "ime_psync"
        | "ime_psyncv"
        | "ime_aio"
        | "xnvme"
        | "libblkio"
        | "libcufile"
        | "librpma_apm_client"
        | "librpma_apm_server"
        | "librpma_gpspm_client"
        | "librpma_gpspm_server"
        | "dfs" => LIBRARY,
        _ => return None,
    })
}

//! Options of fio that have no effect here, or are refused, with the reason.

use super::{OptionInfo, Support};

const fn no_effect(
    name: &'static str,
    aliases: &'static [&'static str],
    values: &'static [&'static str],
    why: &'static str,
) -> OptionInfo {
    let support = Support::NoEffect { values, why };
    OptionInfo { name, aliases, value: "", switch: true, help: why, support }
}

/// The same option, which needs a value, after an equals sign or as the next word.
const fn with_value(option: OptionInfo) -> OptionInfo {
    OptionInfo { value: "VALUE", switch: false, ..option }
}

const fn refused(name: &'static str, why: &'static str) -> OptionInfo {
    refused_as(name, &[], why)
}

const fn refused_as(name: &'static str, aliases: &'static [&'static str], why: &'static str) -> OptionInfo {
    OptionInfo { name, aliases, value: "", switch: true, help: why, support: Support::Refused(why) }
}

/// Options that have no effect: they ask for what is done anyway, or change no result.
pub(super) const NO_EFFECT: &[OptionInfo] = &[
    no_effect("verify_fatal", &[], &[], "mismatches are counted, and the run fails"),
    no_effect("verify_dump", &[], &[], "the first mismatch is described, not dumped"),
    with_value(no_effect("verify_async", &[], &[], "each job verifies on its own thread")),
    with_value(no_effect("verify_async_cpus", &[], &[], "each job verifies on its own thread")),
    no_effect("verify_state_save", &[], &[], "there is no file of the state of a verification"),
    no_effect("verify_state_load", &[], &["0", "false"], "there is no file of the state of a verification"),
    no_effect("overwrite", &[], &[], "files that are read are written first, others are allocated"),
    no_effect("unlink", &[], &[], "files stay after a job"),
    no_effect("create_serialize", &[], &[], "files are laid out before the jobs start"),
    no_effect("create_fsync", &[], &[], "files are laid out before the jobs start"),
    no_effect("gtod_reduce", &[], &[], "latencies are measured all the same; a batch shares one clock read"),
    no_effect("disable_lat", &[], &[], "latencies are measured all the same"),
    no_effect("disable_clat", &[], &[], "latencies are measured all the same"),
    no_effect("disable_bw_measurement", &["disable_bw"], &[], "bandwidth is sampled all the same"),
    with_value(no_effect("gtod_cpu", &[], &[], "each job reads the clock itself")),
    with_value(no_effect(
        "clocksource",
        &[],
        &[],
        "the clock is the processor's counter, or the kernel's monotonic clock",
    )),
    with_value(no_effect(
        "mem",
        &["iomem"],
        &["malloc", "shm", "shmhuge", "mmap", "mmaphuge", "mmapshared"],
        "buffers come from an arena of 2 MiB chunks",
    )),
    with_value(no_effect("iomem_align", &["mem_align"], &[], "buffers are aligned to pages")),
    with_value(no_effect("lockmem", &[], &[], "the generator locks no memory but its buffers")),
    no_effect("scramble_buffers", &[], &[], "buffers hold random bytes"),
    with_value(no_effect(
        "random_generator",
        &[],
        &["tausworthe", "tausworthe64", "lfsr"],
        "there is one generator; without norandommap each offset is visited once, as with lfsr",
    )),
    no_effect("softrandommap", &[], &[], "the random map needs no memory"),
    with_value(no_effect(
        "iodepth_batch_complete_min",
        &["iodepth_batch_complete"],
        &["0", "1"],
        "a job waits for one completion at most",
    )),
    with_value(no_effect(
        "io_submit_mode",
        &[],
        &["inline", "offload"],
        "arrivals of a rate never wait for completions, and latency counts from the scheduled start",
    )),
    no_effect("exitall_on_error", &[], &[], "the run fails when a job fails"),
    with_value(no_effect(
        "eta_newline",
        &[],
        &[],
        "progress is one line each second; status_interval sets the time",
    )),
    no_effect("disk_util", &[], &[], "the use of disks is always reported"),
    with_value(no_effect("log_entries", &[], &[], "logs grow as they need to")),
    no_effect("per_job_logs", &[], &["1", "true"], "each copy of a job has its own logs"),
    no_effect("unique_filename", &[], &["1", "true"], "each copy of a job has its own files"),
    with_value(no_effect("significant_figures", &[], &[], "numbers have as many figures as they need")),
    with_value(no_effect("hugepage_size", &[], &[], "buffers come from an arena of 2 MiB chunks")),
    no_effect("verifysort", &[], &[], "data is verified in the order of its offsets"),
    with_value(no_effect("verifysort_nr", &[], &[], "data is verified in the order of its offsets")),
    with_value(no_effect("lockfile", &[], &["none"], "a job locks its files against other processes alone")),
    with_value(no_effect("stat_type", &[], &["stat", "lstat"], "no file is a symbolic link")),
    with_value(no_effect("alloc_size", &[], &[], "memory grows as it is needed")),
    with_value(no_effect("max_jobs", &[], &[], "the number of jobs is limited by memory")),
    with_value(no_effect(
        "eta_interval",
        &[],
        &[],
        "progress is one line each second; status_interval sets the time",
    )),
    with_value(no_effect("aux_path", &[], &[], "no other files are written")),
    no_effect("enable_vmd", &[], &[], "devices are addressed by their PCI functions"),
    with_value(no_effect("shm_id", &[], &[], "memory is never shared with other processes")),
    with_value(no_effect(
        "mem_size_mb",
        &["spdk_mem"],
        &[],
        "the option memory of the command line limits buffers",
    )),
    no_effect("spdk_single_seg", &[], &[], "buffers come from an arena of 2 MiB chunks"),
];

/// Options that are not supported.
pub(super) const REFUSED: &[OptionInfo] = &[
    refused_as("bs_unaligned", &["blocksize_unaligned"], "I/Os are whole blocks"),
    refused("steadystate_check_interval", "steadystate takes a sample each second, as fio 3.33 does"),
    refused("verify_offset", "the header is at the start of each logical block"),
    refused("experimental_verify", "a write-only job reads its data back at the end"),
    refused("trim_verify_zero", "trims are not read back"),
    refused("trim_backlog", "trims are jobs of their own"),
    refused("filename_format", "list the files in filename"),
    refused("flow_watermark", "set a rate for each job"),
    refused("initial_zone_reset", "zones are reset where they are written again: zonemode=zbd"),
    refused("zone_append", "writes are at the write pointer: zonemode=zbd"),
    refused("enable_sgl", "the driver uses SGLs where PRPs do not suffice"),
    refused("skip_bad", "there is no engine for MTD"),
    refused("rate_ignore_thinktime", "use one of rate and thinktime"),
    refused("latency_run", "the depth is tuned until the runtime has passed"),
    refused("iodepth_low", "the queue is refilled as soon as there is room"),
    refused("verify_only", "use verify with rw=read to check data of another run"),
    refused("pre_read", "use a separate job and stonewall"),
    refused("bs_is_seq_rand", "use separate jobs for sequential and random I/O"),
    refused("rwmixcycle", "the mix is drawn for each I/O"),
    refused("read_iolog", "replay is not supported"),
    refused("write_iolog", "write_lat_log with log_offset has the time, size and offset of every I/O"),
    refused("log_compression", "logs are text"),
    refused("bandwidth_log", "there is no log of all jobs together; write_bw_log has each job's"),
    refused("latency_log", "write_lat_log has each job's latencies"),
    refused("profile", "write a job file"),
    refused("client", "there is no server mode"),
    refused("server", "there is no server mode"),
    refused("exec_prerun", "run it from a script"),
    refused("exec_postrun", "run it from a script"),
    refused("trim_percentage", "use a separate job for trims"),
    refused("opendir", "list the files in filename"),
    refused("file_append", "set an offset"),
    refused("cgroup_weight", "set it in the control group"),
    refused("uid", "start it as that user"),
    refused("gid", "start it as that group"),
    refused("cgroup_nodelete", "no control group is made"),
    refused("append_terse", "use --output-format=normal and terse in two runs"),
    refused("atomic", "writes are those of the device"),
    refused("block_error_percentiles", "errors are counted, and the first of them described"),
    refused("daemonize", "start it in the background from a script"),
    refused("debug", "errors name the option, the file and the line"),
    refused("exitall_error", "the run fails when a job fails"),
    refused("force_async", "where an I/O is executed is left to the kernel"),
    refused("gpu_dev_id", "buffers are in main memory"),
    refused("hipri_percentage", "hipri is of all I/Os of a job; use two jobs"),
    refused("idle_prof", "the lab measures the CPU time of the machine: ringbolt lab run"),
    refused_as(
        "log_alternate_epoch",
        &["log_alternate_epoch_clock_id"],
        "log_unix_epoch has times since 1970",
    ),
    refused_as("log_store_compressed", &["log_compression_cpus"], "logs are text"),
    refused_as(
        "merge_blktrace_file",
        &["merge_blktrace_scalars", "merge_blktrace_iters", "merge_blktrace_only"],
        "replay is not supported",
    ),
    refused("nowait", "an I/O that would block is executed"),
    refused("offset_align", "give an offset that is aligned"),
    refused("percentage_sequential", "use percentage_random"),
    refused_as(
        "read_iolog_chunked",
        &[
            "replay_align",
            "replay_no_stall",
            "replay_redirect",
            "replay_scale",
            "replay_skip",
            "replay_time_scale",
        ],
        "replay is not supported",
    ),
    refused("stats", "all jobs are reported"),
    refused("sync_file_range", "use fsync or fdatasync"),
    refused("thp", "the page size of mappings is left to the kernel"),
    refused_as("trigger", &["trigger_file", "trigger_timeout", "trigger_remote"], "use a script"),
    refused("trim_backlog_batch", "trims are jobs of their own"),
    refused("uncached", "use direct=1"),
    refused("unlink_each_loop", "files stay for all passes"),
    refused("warnings_fatal", "warnings are on standard error"),
    refused("write_barrier", "use fsync or fdatasync"),
    refused("write_hint", "lifetimes of data are not passed to the device"),
    // Of versions of fio after 3.33.
    refused_as(
        "fdp",
        &[
            "fdp_pli",
            "fdp_pli_select",
            "dataplacement",
            "data_placement",
            "plids",
            "plid_select",
            "dp_scheme",
        ],
        "writes have no placement identifiers",
    ),
    refused_as(
        "pi_act",
        &["pi_chk", "apptag", "apptag_mask", "md_per_io_size"],
        "commands have no protection information",
    ),
    refused_as(
        "write_mode",
        &["verify_mode", "deac", "readfua", "writefua", "read_mode"],
        "commands are plain reads and writes",
    ),
    refused_as("sprandom", &["spr_op", "spr_num_regions", "spr_cs"], "use ringbolt lab run --precondition"),
    refused("end_syncfs", "use end_fsync"),
    refused("log_issue_time", "times in logs are those of completions"),
    refused("log_window_value", "use log_max_value"),
    refused("ramp_size", "use ramp_time"),
    refused("thinkcycles", "use thinktime_spin"),
    refused("random_sequence_stride", "use rw=read:SIZE or blockalign"),
    refused("num_range", "a trim has one range"),
    refused_as(
        "verify_pattern_interval",
        &["verify_write_sequence", "verify_header_seed", "verify_bytchk"],
        "headers are those of fio 3.33",
    ),
    refused_as("recover_zbd_write_error", &["write_zone_remainder"], "zones are written as by fio 3.33"),
    refused("job_start_clock_id", "log_unix_epoch has times since 1970"),
    refused("libaio_vectored", "an I/O has one buffer"),
    refused("comm", "processes have the name of the program"),
];

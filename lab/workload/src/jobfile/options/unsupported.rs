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
];

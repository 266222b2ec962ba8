//! Renders a cell as a fio job file.

use std::fmt::Write as _;

use crate::fio_histogram_log::HistogramLogs;
use crate::record::{CellParameters, ParameterValue};

/// A cell and everything else that its job file contains.
#[derive(Clone, Debug)]
pub(crate) struct CellJob<'a> {
    /// Parameters of the cell.
    pub(crate) cell: &'a CellParameters,
    /// fio options of the foreground.
    pub(crate) options: &'a CellParameters,
    /// fio options of the background.
    pub(crate) background_options: &'a CellParameters,
    /// Device nodes, files, or URIs.
    pub(crate) filenames: &'a [String],
    /// Size to use of each; 0 for all.
    pub(crate) size_bytes: u64,
    /// CPUs of the foreground.
    pub(crate) cpus: &'a [u32],
    /// CPUs of the background; empty for those of the foreground.
    pub(crate) background_cpus: &'a [u32],
    /// Duration of the measurement, in seconds.
    pub(crate) runtime_s: f64,
    /// Warm-up before it, in seconds.
    pub(crate) ramp_s: f64,
    /// Seed of random offsets.
    pub(crate) seed: u64,
    /// Of fio, which has no timelines.
    pub(crate) logs: Option<&'a HistogramLogs>,
}

/// fio's engine and modes for a kernel API; `None` for an API that bypasses the kernel.
pub(crate) fn engine(api: &str) -> Option<(&'static str, &'static [(&'static str, &'static str)])> {
    Some(match api {
        "psync" => ("psync", &[]),
        "aio" => ("libaio", &[]),
        "iou" => ("io_uring", &[]),
        "iou-c" => ("io_uring", &[("hipri", "1")]),
        "iou-s" => ("io_uring", &[("sqthread_poll", "1")]),
        _ => return None,
    })
}

/// The engine that drives bdevs by URI.
pub(crate) const BDEV_ENGINE: &str = "bdev";

/// Options that only io_uring supports.
const URING_ONLY: [&str; 2] = ["registerfiles", "fixedbufs"];

impl CellJob<'_> {
    /// A parameter as an integer; 0 if it is missing or no number.
    pub(crate) fn number(&self, name: &str) -> u64 {
        self.cell.get(name).and_then(ParameterValue::as_f64).map_or(0, |value| value.max(0.0) as u64)
    }

    fn text(&self, name: &str) -> &str {
        self.cell.get(name).and_then(ParameterValue::as_str).unwrap_or("")
    }

    /// Number of foreground jobs.
    pub(crate) fn jobs(&self) -> u64 {
        self.number("jobs").max(1)
    }

    /// The foreground as options of `ringbolt perf`, which busy-polls as SPDK does.
    pub(crate) fn perf_options(&self) -> Vec<String> {
        let mut arguments = vec![
            format!("--filename={}", self.filenames.first().map_or("", String::as_str)),
            "--name=fg".to_string(),
            format!("--rw={}", self.text("rw")),
            format!("--bs={}", self.number("block_bytes")),
            format!("--iodepth={}", self.number("iodepth").max(1)),
            format!("--numjobs={}", self.jobs()),
            "--time_based".to_string(),
            format!("--runtime={}ms", (self.runtime_s * 1e3).round()),
            format!("--ramp_time={}ms", (self.ramp_s * 1e3).round()),
            "--group_reporting".to_string(),
            format!("--randseed={}", self.seed),
            "--idle=spin".to_string(),
        ];
        if self.size_bytes > 0 {
            arguments.push(format!("--size={}", self.size_bytes));
        }
        let jobs = usize::try_from(self.jobs()).unwrap_or(usize::MAX);
        let cpus: Vec<String> = self.cpus.iter().take(jobs).map(u32::to_string).collect();
        if !cpus.is_empty() {
            arguments.push(format!("--cpus_allowed={}", cpus.join(",")));
        }
        arguments
    }

    /// The job file. Foreground and background are groups, so that they are reported apart; every job is a process.
    pub(crate) fn render(&self) -> String {
        let api = self.text("api");
        let (name, modes) = engine(api).unwrap_or((BDEV_ENGINE, &[]));
        let mut file = String::from("[global]\n");
        let mut put = |name: &str, value: &dyn std::fmt::Display| {
            // Writing to a String cannot fail.
            let _ = writeln!(file, "{name}={value}");
        };
        put("ioengine", &name);
        for (mode, value) in modes {
            put(mode, value);
        }
        // fio separates file names by colons.
        let names: Vec<String> = self.filenames.iter().map(|name| name.replace(':', "\\:")).collect();
        put("filename", &names.join(":"));
        put("direct", &1);
        // As published: all of each device. A size in bytes would be divided among the devices.
        put("size", &"100%");
        put("allow_file_create", &0);
        put("time_based", &1);
        put("runtime", &format!("{}ms", (self.runtime_s * 1e3).round()));
        put("ramp_time", &format!("{}ms", (self.ramp_s * 1e3).round()));
        put("group_reporting", &1);
        put("randseed", &self.seed);
        let background = self.number("background");
        if background > 0 {
            file.push_str("\n[bg]\nnew_group=1\n");
            let role = JobSection {
                rw: self.text("background_rw"),
                block_bytes: self.number("background_block_bytes"),
                iodepth: self.number("background_iodepth"),
                jobs: background,
                cpus: if self.background_cpus.is_empty() { self.cpus } else { self.background_cpus },
                options: self.background_options,
            };
            role.write(&mut file, name, false);
            self.write_logs(&mut file, "bg");
        }
        file.push_str("\n[fg]\nnew_group=1\n");
        let role = JobSection {
            rw: self.text("rw"),
            block_bytes: self.number("block_bytes"),
            iodepth: self.number("iodepth"),
            jobs: self.jobs(),
            cpus: self.cpus,
            options: self.options,
        };
        let split = self.jobs() > 1 && self.jobs() == self.cpus.len() as u64;
        role.write(&mut file, name, split);
        self.write_logs(&mut file, "fg");
        file
    }

    fn write_logs(&self, file: &mut String, role: &str) {
        for (name, value) in self.logs.iter().flat_map(|logs| logs.options(role)) {
            // Writing to a String cannot fail.
            let _ = writeln!(file, "{name}={value}");
        }
    }
}

struct JobSection<'a> {
    rw: &'a str,
    block_bytes: u64,
    iodepth: u64,
    jobs: u64,
    cpus: &'a [u32],
    options: &'a CellParameters,
}

impl JobSection<'_> {
    fn write(&self, file: &mut String, engine: &str, split: bool) {
        let mut put = |name: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(file, "{name}={value}");
        };
        put("rw", &self.rw);
        put("bs", &self.block_bytes);
        put("iodepth", &self.iodepth.max(1));
        put("numjobs", &self.jobs);
        if !self.cpus.is_empty() {
            let cpus: Vec<String> = self.cpus.iter().map(u32::to_string).collect();
            put("cpus_allowed", &cpus.join(","));
            if split {
                put("cpus_allowed_policy", &"split");
            }
        }
        for (name, value) in self.options {
            if engine == "io_uring" || !URING_ONLY.contains(&name.as_str()) {
                put(name, value);
            }
        }
    }
}

#[cfg(test)]
mod tests;

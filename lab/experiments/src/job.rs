//! A cell as fio's job file.

use std::fmt::Write as _;

use crate::record::{Parameters, Value};

/// What a cell needs to become a job file.
#[derive(Clone, Debug)]
pub(crate) struct Job<'a> {
    /// The cell.
    pub(crate) cell: &'a Parameters,
    /// fio options of the foreground.
    pub(crate) options: &'a Parameters,
    /// fio options of the background.
    pub(crate) background_options: &'a Parameters,
    /// What to drive: device nodes, files, or URIs.
    pub(crate) filenames: &'a [String],
    /// Bytes of each that are used.
    pub(crate) size_bytes: u64,
    /// The processors of the foreground.
    pub(crate) cpus: &'a [u32],
    /// The processors of the background, where they are others.
    pub(crate) background_cpus: &'a [u32],
    /// Measuring, in seconds.
    pub(crate) runtime_s: f64,
    /// Before it, in seconds.
    pub(crate) ramp_s: f64,
    /// Seed of positions.
    pub(crate) seed: u64,
}

/// What a kernel API is called in fio: engine and modes. None where the kernel is not asked.
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

/// The name of the engine that drives the generator's own block devices by URI.
pub(crate) const OWN_ENGINE: &str = "bdev";

/// Options that mean something to io_uring only.
const URING_ONLY: [&str; 2] = ["registerfiles", "fixedbufs"];

impl Job<'_> {
    /// A parameter as a whole number.
    pub(crate) fn number(&self, name: &str) -> u64 {
        self.cell.get(name).and_then(Value::as_f64).map_or(0, |value| value.max(0.0) as u64)
    }

    fn text(&self, name: &str) -> &str {
        self.cell.get(name).and_then(Value::as_str).unwrap_or("")
    }

    /// Jobs of the foreground.
    pub(crate) fn jobs(&self) -> u64 {
        self.number("jobs").max(1)
    }

    /// The foreground as options of `ringbolt perf`, which polls as SPDK does.
    pub(crate) fn options_of_perf(&self) -> Vec<String> {
        let mut words = vec![
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
            words.push(format!("--size={}", self.size_bytes));
        }
        let jobs = usize::try_from(self.jobs()).unwrap_or(usize::MAX);
        let cpus: Vec<String> = self.cpus.iter().take(jobs).map(u32::to_string).collect();
        if !cpus.is_empty() {
            words.push(format!("--cpus_allowed={}", cpus.join(",")));
        }
        words
    }

    /// The job file: foreground and background are groups of their own, and every job is a process.
    pub(crate) fn render(&self) -> String {
        let api = self.text("api");
        let (name, modes) = engine(api).unwrap_or((OWN_ENGINE, &[]));
        let mut file = String::from("[global]\n");
        let mut put = |name: &str, value: &dyn std::fmt::Display| {
            // Writing to a string cannot fail.
            let _ = writeln!(file, "{name}={value}");
        };
        put("ioengine", &name);
        for (mode, value) in modes {
            put(mode, value);
        }
        // A URI has colons of its own.
        let names: Vec<String> = self.filenames.iter().map(|name| name.replace(':', "\\:")).collect();
        put("filename", &names.join(":"));
        put("direct", &1);
        // Of each device, as published; a number of bytes would be shared out among them.
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
            let role = Role {
                rw: self.text("background_rw"),
                block_bytes: self.number("background_block_bytes"),
                iodepth: self.number("background_iodepth"),
                jobs: background,
                cpus: if self.background_cpus.is_empty() { self.cpus } else { self.background_cpus },
                options: self.background_options,
            };
            role.write(&mut file, name, false);
        }
        file.push_str("\n[fg]\nnew_group=1\n");
        let role = Role {
            rw: self.text("rw"),
            block_bytes: self.number("block_bytes"),
            iodepth: self.number("iodepth"),
            jobs: self.jobs(),
            cpus: self.cpus,
            options: self.options,
        };
        let split = self.jobs() > 1 && self.jobs() == self.cpus.len() as u64;
        role.write(&mut file, name, split);
        file
    }
}

struct Role<'a> {
    rw: &'a str,
    block_bytes: u64,
    iodepth: u64,
    jobs: u64,
    cpus: &'a [u32],
    options: &'a Parameters,
}

impl Role<'_> {
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

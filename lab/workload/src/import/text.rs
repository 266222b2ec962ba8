//! Parser of fio's text output, the format `normal`.

use super::{FioRow, ImportError, PERCENTILES};

/// The rows; `None` if no line starts a job's results.
pub(super) fn rows(text: &str) -> Result<Option<Vec<FioRow>>, ImportError> {
    let mut reader = Reader::default();
    for (index, line) in text.lines().enumerate() {
        reader
            .line(line)
            .ok_or_else(|| ImportError::Text { line: index + 1, text: line.chars().take(80).collect() })?;
    }
    Ok(reader.finish())
}

/// The state of the parser.
#[derive(Default)]
struct Reader {
    rows: Vec<FioRow>,
    /// Index of the current job's first row; `None` before the first job.
    job: Option<usize>,
    /// Jobs so far.
    jobs: usize,
    header: FioRow,
    /// The headers before the results, for each job: name, `rw`, I/O size, engine, depth.
    job_headers: Vec<FioRow>,
    /// Unit of the current table of percentiles, in microseconds; `None` outside of a table.
    table_unit: Option<f64>,
    /// Whether the current table is of `clat` or `lat`; tables of `slat` are skipped.
    table_is_reported: bool,
}

impl Reader {
    fn finish(mut self) -> Option<Vec<FioRow>> {
        self.end_job();
        self.job.map(|_| self.rows)
    }

    /// A job that failed before its first I/O has no line of a direction.
    fn end_job(&mut self) {
        if self.job == Some(self.rows.len()) && self.header.error != 0 {
            self.rows.push(std::mem::take(&mut self.header));
        }
    }

    /// Parses a line; `None` if it is malformed.
    fn line(&mut self, line: &str) -> Option<()> {
        let trimmed = line.trim();
        if let Some((name, rest)) = line.split_once(": (groupid=") {
            return self.start_job(name, rest);
        }
        if let Some((name, rest)) = line.split_once(": (g=") {
            self.parse_job_header(name, rest);
            return Some(());
        }
        if self.job.is_none() {
            return Some(());
        }
        if trimmed.starts_with("Run status group") || trimmed.starts_with('{') {
            // A summary or JSON follows.
            self.end_job();
            self.header = FioRow::default();
            self.table_unit = None;
            return Some(());
        }
        let direction = ["read", "write", "trim", "mixed"].into_iter().find(|name| {
            trimmed.strip_prefix(name).is_some_and(|rest| rest.trim_start().starts_with(": IOPS="))
        });
        if let Some(direction) = direction {
            return self.direction(direction, trimmed);
        }
        if trimmed.starts_with('|') {
            return self.percentiles(trimmed);
        }
        let Some((name, rest)) = trimmed.split_once(':') else { return Some(()) };
        let (name, unit) = match name.split_once('(') {
            Some((name, unit)) => (name.trim(), unit.trim_end_matches([')', ' ']).trim()),
            None => (name.trim(), ""),
        };
        if rest.contains("avg=") && matches!(name, "slat" | "clat" | "lat") {
            return self.latency(name, unit, rest);
        }
        if name.ends_with("percentiles") {
            self.table_unit = Some(microseconds(unit)?);
            self.table_is_reported = !name.starts_with("slat");
            return Some(());
        }
        match name {
            "iops" if rest.contains("stdev=") => self.last()?.iops_sd = number(field(rest, "stdev")?)?,
            "cpu" => self.processor(rest)?,
            "latency" => {
                let depth = field(rest, "depth").and_then(|depth| depth.parse().ok());
                let job = self.job?;
                self.rows[job..].iter_mut().for_each(|row| row.qd = depth.unwrap_or(row.qd));
            }
            _ => {}
        }
        Some(())
    }

    /// `name: (g=0): rw=randread, bs=(R) 4096B-4096B, …, ioengine=psync, iodepth=1`
    fn parse_job_header(&mut self, name: &str, rest: &str) {
        let mut row = FioRow { jobname: name.to_string(), ..FioRow::default() };
        row.rw = field(rest, "rw").unwrap_or_default().to_string();
        row.engine = field(rest, "ioengine").unwrap_or_default().to_string();
        row.qd = field(rest, "iodepth").and_then(|depth| depth.parse().ok()).unwrap_or(0);
        let bytes = rest.split("(R) ").nth(1).and_then(|rest| rest.split('-').next());
        row.bs_bytes = bytes.and_then(bytes_of).unwrap_or(0.0) as u64;
        self.job_headers.push(row);
    }

    /// `name: (groupid=0, jobs=1): err= 0: pid=…`
    fn start_job(&mut self, name: &str, rest: &str) -> Option<()> {
        self.end_job();
        let (group, rest) = rest.split_once(", jobs=")?;
        let (jobs, rest) = rest.split_once(')')?;
        let error = rest.split("err=").nth(1)?.trim_start();
        let error = error.split([':', ' ', '(']).next()?;
        self.header = self.job_headers.iter().find(|row| row.jobname == name).cloned().unwrap_or_default();
        (self.header.jobname, self.header.job) = (name.to_string(), self.jobs);
        self.jobs += 1;
        self.header.group = group.trim().parse().ok()?;
        self.header.procs = jobs.trim().parse().ok()?;
        self.header.error = error.parse().ok()?;
        self.job = Some(self.rows.len());
        self.table_unit = None;
        Some(())
    }

    /// `read: IOPS=1997, BW=7990KiB/s (8182kB/s)(15.6MiB/2001msec)`
    fn direction(&mut self, name: &str, line: &str) -> Option<()> {
        let (_, line) = line.split_once(':')?;
        let bandwidth = field(line, "BW")?.split(' ').next()?.strip_suffix("/s")?;
        let mut row = FioRow { direction: name.to_string(), ..self.header.clone() };
        row.iops = number(field(line, "IOPS")?)?;
        row.bw_mib_s = bytes_of(bandwidth)? / 1048576.0;
        self.rows.push(row);
        self.table_unit = None;
        Some(())
    }

    /// `clat (usec): min=34, max=7976, avg=220.96, stdev=659.70`
    fn latency(&mut self, name: &str, unit: &str, rest: &str) -> Option<()> {
        let scale = microseconds(unit)?;
        let value = |key: &str| number(field(rest, key)?).map(|value| value * scale);
        let (mean, deviation, max) = (value("avg")?, value("stdev")?, value("max")?);
        let row = self.last()?;
        match name {
            "slat" => row.slat_mean_us = mean,
            "clat" => (row.clat_mean_us, row.max_us) = (mean, max),
            _ => {
                (row.mean_us, row.sd_us) = (mean, deviation);
                if row.clat_mean_us == 0.0 {
                    row.max_us = max;
                }
            }
        }
        Some(())
    }

    /// `|  1.00th=[   51],  5.00th=[   55],`
    fn percentiles(&mut self, line: &str) -> Option<()> {
        let Some(unit) = self.table_unit else { return Some(()) };
        let is_reported = self.table_is_reported;
        let row = self.last()?;
        for cell in line.trim_start_matches('|').split(']').filter(|cell| cell.contains("th=[")) {
            let (percent, value) = cell.trim_start_matches(',').trim().split_once("th=[")?;
            let (percent, value): (f64, f64) = (percent.parse().ok()?, number(value)?);
            if let Some(index) = PERCENTILES.iter().position(|known| (known - percent).abs() < 1e-6)
                && is_reported
            {
                row.percentiles_us[index] = Some(value * unit);
            }
        }
        Some(())
    }

    /// `usr=27.80%, sys=1.35%, ctx=6245, majf=0, minf=37`
    fn processor(&mut self, rest: &str) -> Option<()> {
        let percent = |key: &str| field(rest, key)?.trim_end_matches('%').parse::<f64>().ok();
        let (user, system) = (percent("usr")?, percent("sys")?);
        let switches = field(rest, "ctx")?.parse().ok()?;
        let job = self.job?;
        for row in &mut self.rows[job..] {
            (row.cpu_usr_pct, row.cpu_sys_pct, row.ctx) = (user, system, switches);
        }
        Some(())
    }

    /// The row of the current direction; `None` before the first direction of a job.
    fn last(&mut self) -> Option<&mut FioRow> {
        let job = self.job?;
        self.rows[job..].last_mut()
    }
}

/// The value of `key=`, up to a comma or parenthesis.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut parts = text.split([',', '(', ')']).map(|part| part.trim_start_matches([':', ' ']));
    parts.find_map(|part| part.strip_prefix(key)?.strip_prefix('=')).map(str::trim)
}

/// Parses `1997`, `220.96`, `3885.5k`; units are powers of 1000.
fn number(text: &str) -> Option<f64> {
    let text = text.trim();
    let (digits, scale) = match text.chars().last()? {
        'k' => (&text[..text.len() - 1], 1e3),
        'M' => (&text[..text.len() - 1], 1e6),
        'G' => (&text[..text.len() - 1], 1e9),
        _ => (text, 1.0),
    };
    digits.parse::<f64>().ok().filter(|value| value.is_finite()).map(|value| value * scale)
}

/// Parses `7990KiB`, `31.2MiB`, `8182kB`, `64B` to bytes.
fn bytes_of(text: &str) -> Option<f64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let value: f64 = text[..split].parse().ok()?;
    let scale = match &text[split..] {
        "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1048576.0,
        "GiB" => 1073741824.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        _ => return None,
    };
    Some(value * scale)
}

fn microseconds(unit: &str) -> Option<f64> {
    match unit {
        "nsec" => Some(1e-3),
        "usec" => Some(1.0),
        "msec" => Some(1e3),
        "sec" => Some(1e6),
        _ => None,
    }
}

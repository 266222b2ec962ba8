//! Validation of profile values. Most bounds are chosen so that a wrong unit is detected.

use super::{DeviceProfile, ProfileError, SCHEMA};
use crate::quantile::{MixtureComponent, US_MAX};

/// Dies of the largest drives on the market, with a margin.
const DIES_MAX: u32 = 4096;
/// Components per distribution.
const COMPONENTS_MAX: usize = 16;
/// Fault rules; each one is evaluated for every command.
const FAULTS_MAX: usize = 64;
const TARGETS_MAX: usize = 1024;
/// A petabyte.
const GB_MAX: f64 = 1e6;

impl DeviceProfile {
    /// Validates all values; the error names the first invalid key.
    pub fn check(&self) -> Result<(), ProfileError> {
        if self.schema != SCHEMA {
            return Err(invalid_value(
                "schema",
                format!("{} is not {SCHEMA}, the only supported version", self.schema),
            ));
        }
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.name.is_empty() || self.name.len() > 64 || !self.name.chars().all(is_allowed) {
            return Err(invalid_value(
                "name",
                "must be 1 to 64 letters, digits, '-', '_' and '.'".to_string(),
            ));
        }
        self.check_device()?;
        self.check_read()?;
        self.check_write()?;
        if self.faults.len() > FAULTS_MAX {
            return Err(invalid_value("faults", format!("there are more than {FAULTS_MAX}")));
        }
        for (index, fault) in self.faults.iter().enumerate() {
            fault.check(&format!("faults[{index}]"))?;
        }
        self.check_targets()
    }

    fn check_device(&self) -> Result<(), ProfileError> {
        check_range("device.capacity_gb", self.device.capacity_gb, 0.002, GB_MAX)?;
        for (key, bytes) in
            [("device.block_bytes", self.device.block_bytes), ("device.page_bytes", self.device.page_bytes)]
        {
            if !(512..=1 << 20).contains(&bytes) || !bytes.is_power_of_two() {
                return Err(invalid_value(key, format!("{bytes} is not a power of two of 512 to 1048576")));
            }
        }
        let front = &self.front;
        check_range("front.read_iops", front.read_iops, 1.0, 1e9)?;
        check_range("front.write_iops", front.write_iops, 1.0, 1e9)?;
        check_range("front.read_mb_s", front.read_mb_s, 0.1, 1e6)?;
        check_range("front.write_mb_s", front.write_mb_s, 0.1, 1e6)?;
        if self.media.dies > DIES_MAX {
            return Err(invalid_value("media.dies", format!("{} is more than {DIES_MAX}", self.media.dies)));
        }
        check_distribution("flush_us", &self.flush_us)?;
        check_distribution("deallocate_us", &self.deallocate_us)
    }

    fn check_read(&self) -> Result<(), ProfileError> {
        let read = &self.read;
        check_distribution("read.die_us", &read.die_us)?;
        check_distribution("read.path_us", &read.path_us)?;
        if !read.die_us.is_empty() && self.media.dies == 0 {
            return Err(invalid_value("read.die_us", "there are no dies; set media.dies".to_string()));
        }
        check_range("read.split_us", read.split_us, 0.0, US_MAX)?;
        check_range("read.split_mb_s", read.split_mb_s, 0.0, 1e6)?;
        check_distribution("read.large_die_us", &read.large_die_us)?;
        let large = read.large_page_bytes;
        if large != 0 && (!large.is_power_of_two() || !(self.device.page_bytes..=1 << 20).contains(&large)) {
            let reason = format!("{large} is not a power of two of device.page_bytes to 1048576");
            return Err(invalid_value("read.large_page_bytes", reason));
        }
        check_range("read.suspend_probability", read.suspend_probability, 0.0, 1.0)?;
        check_range("read.suspend_us", read.suspend_us, 0.0, US_MAX)
    }

    fn check_write(&self) -> Result<(), ProfileError> {
        let write = &self.write;
        check_distribution("write.path_us", &write.path_us)?;
        check_distribution("write.die_us", &write.die_us)?;
        check_range("write.split_us", write.split_us, 0.0, US_MAX)?;
        check_range("write.buffer_kib", write.buffer_kib, 0.0, 64e6)?;
        if !write.die_us.is_empty() && (self.is_buffered() || self.media.dies == 0) {
            let reason = "only for devices with dies and without a write buffer (write.buffer_kib)";
            return Err(invalid_value("write.die_us", reason.to_string()));
        }
        if self.is_buffered() {
            if self.media.dies == 0 {
                return Err(invalid_value(
                    "write.buffer_kib",
                    "a write buffer drains to dies; set media.dies".to_string(),
                ));
            }
            check_range("write.unit_kib", write.unit_kib, 0.5, 65536.0)?;
            check_range("write.program_us", write.program_us, 0.1, US_MAX)?;
            if write.buffer_kib < write.unit_kib {
                return Err(invalid_value("write.buffer_kib", "is smaller than write.unit_kib".to_string()));
            }
        } else if self.slc.is_some() || self.gc.is_some() {
            let key = if self.slc.is_some() { "slc" } else { "gc" };
            return Err(invalid_value(
                key,
                "only for devices with a write buffer (write.buffer_kib)".to_string(),
            ));
        }
        if let Some(slc) = &self.slc {
            check_range("slc.gb", slc.gb, 0.0, GB_MAX)?;
            check_range("slc.program_us", slc.program_us, 0.1, US_MAX)?;
            check_range("slc.refill_mb_s", slc.refill_mb_s, 0.0, 1e6)?;
        }
        if let Some(gc) = &self.gc {
            check_range("gc.spare_percent", gc.spare_percent, 0.5, 1000.0)?;
            check_range("gc.amplification", gc.amplification, 1.0, 1000.0)?;
            check_range("gc.burst_ms", gc.burst_ms, 0.0, 60_000.0)?;
            check_range("gc.erase_us", gc.erase_us, 0.0, 1e6)?;
            check_range("gc.erase_percent", gc.erase_percent, 0.0, 100.0)?;
        }
        Ok(())
    }

    fn check_targets(&self) -> Result<(), ProfileError> {
        if self.target.len() > TARGETS_MAX {
            return Err(invalid_value("target", format!("there are more than {TARGETS_MAX}")));
        }
        for (index, target) in self.target.iter().enumerate() {
            let key = |name: &str| format!("target[{index}].{name}");
            let loads = std::iter::once((target.bs, target.qd));
            for (bs, qd) in loads.chain(target.beside.map(|beside| (beside.bs, beside.qd))) {
                if !(512..=16 << 20).contains(&bs) || bs % 512 != 0 {
                    return Err(invalid_value(
                        &key("bs"),
                        format!("{bs} is not a multiple of 512 up to 16 MiB"),
                    ));
                }
                if !(1..=65_536).contains(&qd) {
                    return Err(invalid_value(&key("qd"), format!("{qd} is not 1 to 65536")));
                }
            }
            if !(1..=256).contains(&target.devices) {
                return Err(invalid_value(&key("devices"), format!("{} is not 1 to 256", target.devices)));
            }
            if target.excluded.as_ref().is_some_and(|reason| reason.trim().is_empty()) {
                return Err(invalid_value(&key("excluded"), "the reason is empty".to_string()));
            }
            check_range(&key("value"), target.value, 1e-3, 1e12)?;
            check_range(&key("host_us"), target.host_us, 0.0, US_MAX)?;
            check_range(&key("wait_us"), target.wait_us, 0.0, US_MAX)?;
        }
        Ok(())
    }
}

/// Line number, from 1, of a key in the text of a profile; `None` if a plain line scan does not find it,
/// for instance in an inline table.
pub(super) fn line_of(text: &str, key: &str) -> Option<usize> {
    let mut parts = key.split('.').map(|part| {
        let (name, rest) = part.split_once('[').unwrap_or((part, "0]"));
        (name, rest.trim_end_matches(']').parse::<usize>().unwrap_or(0))
    });
    let (first, index) = parts.next()?;
    let header = |line: &str| {
        let name = line.trim().strip_prefix('[')?.split(']').next()?;
        Some(name.trim_start_matches('[').trim() == first)
    };
    let is_key = |line: &str, name: &str| {
        line.trim_start().strip_prefix(name).is_some_and(|rest| rest.trim_start().starts_with('='))
    };
    let Some((name, _)) = parts.next() else {
        let found = |line: &str| is_key(line, first) || header(line) == Some(true);
        return text.lines().position(found).map(|line| line + 1);
    };
    let mut tables = text.lines().enumerate().filter(|(_, line)| header(line) == Some(true));
    let (begin, _) = tables.nth(index)?;
    let inside = text.lines().enumerate().skip(begin + 1).take_while(|(_, line)| header(line).is_none());
    inside.into_iter().find(|(_, line)| is_key(line, name)).map(|(line, _)| line + 1)
}

pub(crate) fn invalid_value(key: &str, reason: String) -> ProfileError {
    ProfileError::Value { key: key.to_string(), reason }
}

pub(crate) fn check_range(key: &str, value: f64, min: f64, max: f64) -> Result<(), ProfileError> {
    // This form of the comparison also rejects NaN.
    if value >= min && value <= max {
        return Ok(());
    }
    Err(invalid_value(key, format!("{value} is not between {min} and {max}")))
}

fn check_distribution(key: &str, components: &[MixtureComponent]) -> Result<(), ProfileError> {
    if components.len() > COMPONENTS_MAX {
        return Err(invalid_value(key, format!("a distribution has at most {COMPONENTS_MAX} components")));
    }
    for (index, component) in components.iter().enumerate() {
        let key = |name: &str| format!("{key}[{index}].{name}");
        check_range(&key("weight"), component.weight, 1e-9, 1e9)?;
        check_range(&key("us"), component.us, 0.0, US_MAX / 100.0)?;
        check_range(&key("sigma"), component.sigma, 0.0, 4.0)?;
        check_range(&key("exp_us"), component.exp_us, 0.0, US_MAX / 100.0)?;
        if component.sigma > 0.0 && component.exp_us > 0.0 {
            return Err(invalid_value(
                &key("exp_us"),
                "not together with sigma; make two components".to_string(),
            ));
        }
        if component.sigma > 0.0 && component.us == 0.0 {
            return Err(invalid_value(&key("us"), "a log-normal has a median above 0".to_string()));
        }
    }
    Ok(())
}

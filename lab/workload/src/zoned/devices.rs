//! The zoned devices of a run.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use io_engines::DeviceZones;
use os::{DeviceZone, ZoneCondition};

use super::table::{Zone, ZoneTable};
use super::{ZoneCommands, ZonedDevice, ZonedOptions};
use crate::run::RunError;

/// Most zones of a device, and of a file that pretends to have some.
const ZONES_MAX: u64 = 1 << 22;

impl ZoneCommands for DeviceZones {
    fn reset(&self, start: u64, length: u64) -> io::Result<()> {
        DeviceZones::reset(self, start, length)
    }

    fn pointer(&self, start: u64) -> io::Result<u64> {
        Ok(self.report_one(start)?.pointer)
    }
}

/// The devices of all jobs with `zonemode=zbd`, for the whole run: write pointers that exist here alone persist from one
/// phase to the next, as in fio.
#[derive(Debug)]
pub(crate) struct ZonedDevices {
    /// Whether any job writes or resets zones.
    writes: bool,
    open: Mutex<BTreeMap<PathBuf, Arc<ZonedDevice>>>,
}

impl ZonedDevices {
    pub(crate) fn new(writes: bool) -> ZonedDevices {
        ZonedDevices { writes, open: Mutex::default() }
    }

    /// The zones of a file or device of `bytes` bytes, which the jobs on it share.
    ///
    /// # Errors
    /// A device that cannot be queried, zones of other sizes than the job says or of several sizes.
    pub(crate) fn open(
        &self,
        path: &str,
        bytes: u64,
        is_null: bool,
        options: &ZonedOptions,
    ) -> Result<Arc<ZonedDevice>, RunError> {
        let key = std::fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path));
        let mut open = sync::lock(&self.open);
        if let Some(device) = open.get(&key) {
            check_zone_bytes(path, device.zone_bytes, options)?;
            return Ok(device.clone());
        }
        let device = match if is_null { None } else { DeviceZones::open(path, self.writes)? } {
            Some(zones) => of_device(path, zones, options)?,
            None => emulated(path, bytes, options).map_err(RunError::Options)?,
        };
        let device = Arc::new(device);
        open.insert(key, device.clone());
        Ok(device)
    }
}

fn check_zone_bytes(path: &str, zone_bytes: u64, options: &ZonedOptions) -> Result<(), RunError> {
    match options.zone_bytes {
        Some(given) if given != zone_bytes => {
            Err(RunError::Options(format!("--zonesize={given}: the zones of {path} have {zone_bytes} bytes")))
        }
        _ => Ok(()),
    }
}

fn of_device(path: &str, device: DeviceZones, options: &ZonedOptions) -> Result<ZonedDevice, RunError> {
    let failed = |error| RunError::Machine { what: format!("{path}: report of its zones"), error };
    let zones = device.report().map_err(failed)?;
    let zone_bytes = zones.first().map_or(0, |zone| zone.length);
    let is_last = |index: usize| index + 1 == zones.len();
    let alike = |(index, zone): (usize, &DeviceZone)| {
        zone.start == index as u64 * zone_bytes && (zone.length == zone_bytes || is_last(index))
    };
    if zone_bytes == 0 || !zones.iter().enumerate().all(alike) {
        return Err(RunError::Options(format!(
            "{path}: its zones have several sizes, which is not supported"
        )));
    }
    check_zone_bytes(path, zone_bytes, options)?;
    let limit = if options.ignores_limit { 0 } else { device.open_max };
    if limit > 0 && options.open_max > limit {
        return Err(RunError::Options(format!(
            "--max_open_zones={}: {path} has at most {limit} open zones; --ignore_zone_limits=1 tries nevertheless",
            options.open_max
        )));
    }
    let open_max = if options.open_max > 0 { options.open_max } else { limit };
    let table = ZoneTable { zones: zones.iter().map(Zone::new).collect(), ..ZoneTable::default() };
    Ok(ZonedDevice { zone_bytes, commands: Some(Box::new(device)), open_max, table: table.into() })
}

/// Empty zones of the size that the job gives.
pub(super) fn emulated(path: &str, bytes: u64, options: &ZonedOptions) -> Result<ZonedDevice, String> {
    let Some(zone_bytes) = options.zone_bytes else {
        return Err(format!(
            "{path} has no zones: --zonesize gives it some, whose write pointers the jobs keep"
        ));
    };
    let capacity = options.capacity_bytes.unwrap_or(zone_bytes);
    let count = bytes.div_ceil(zone_bytes.max(1));
    if capacity > zone_bytes || bytes < zone_bytes {
        return Err(format!(
            "--zonesize={zone_bytes} is below --zonecapacity={capacity}, or above the {bytes} bytes of {path}"
        ));
    }
    if count > ZONES_MAX {
        return Err(format!(
            "{path} would have {count} zones of --zonesize={zone_bytes}, more than {ZONES_MAX}"
        ));
    }
    let zone = |number: u64| {
        let start = number * zone_bytes;
        let length = zone_bytes.min(bytes - start);
        let capacity = capacity.min(length);
        DeviceZone { start, length, capacity, pointer: start, condition: ZoneCondition::Writable }
    };
    let zones = (0..count).map(|number| Zone::new(&zone(number))).collect();
    let table = ZoneTable { zones, ..ZoneTable::default() };
    Ok(ZonedDevice { zone_bytes, commands: None, open_max: options.open_max, table: table.into() })
}

/// The whole zones of a region, of a job that changes zones with write pointers: offset and size in bytes.
///
/// # Errors
/// There is no whole zone.
pub(crate) fn align_region(device: &ZonedDevice, offset: u64, size: u64) -> Result<(u64, u64), String> {
    let table = device.lock();
    let (first, last) = (table.index_of(offset), table.index_of((offset + size).saturating_sub(1)));
    if !table.zones[first..=last].iter().any(|zone| zone.is_sequential) {
        return Ok((offset, size));
    }
    let start = if table.zones[first].start == offset { offset } else { table.zones[first].end };
    let end = if table.zones[last].end == offset + size { offset + size } else { table.zones[last].start };
    match end > start {
        true => Ok((start, end - start)),
        false => Err(format!("--offset={offset} and --size={size} have no whole zone")),
    }
}

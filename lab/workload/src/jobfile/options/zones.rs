//! Zones: parts of the region (`zonemode=strided`), and those of zoned devices (`zonemode=zbd`).

use super::{OptionInfo, job, switch};
use crate::jobfile::job::ZoneMode;
use crate::jobfile::values::*;

/// Zones.
pub(super) const ZONES: &[OptionInfo] = &[
    job(
        "zonemode",
        &[],
        "zbd",
        "none; strided: zonesize bytes of each zone; zbd: zones with write pointers, of a zoned device or kept here",
        |job, v| {
            job.zones.mode = match v {
                "none" => Some(ZoneMode::None),
                "strided" => Some(ZoneMode::Strided),
                "zbd" => Some(ZoneMode::Zoned),
                _ => return Err("it is none, strided or zbd".to_string()),
            };
            Ok(())
        },
    ),
    job("zonerange", &[], "SIZE", "length of a zone of strided; zonesize by default", |job, v| {
        job.zones.strided.range_bytes = bytes(v, job.kb_base)?;
        Ok(())
    }),
    job(
        "zonesize",
        &[],
        "SIZE",
        "strided: bytes of I/O in a zone, then the next zone follows; zbd: bytes of a zone, that of a zoned device by default",
        |job, v| {
            job.zones.strided.size_bytes = bytes(v, job.kb_base)?;
            Ok(())
        },
    ),
    job("zoneskip", &[], "SIZE", "bytes between two zones of strided", |job, v| {
        job.zones.strided.skip_bytes = bytes(v, job.kb_base)?;
        Ok(())
    }),
    job(
        "zonecapacity",
        &[],
        "SIZE",
        "zbd: bytes of a zone that can be written, of files and devices without zones; zonesize by default",
        |job, v| {
            job.zones.zoned.capacity_bytes = Some(bytes(v, job.kb_base)?).filter(|bytes| *bytes > 0);
            Ok(())
        },
    ),
    switch("read_beyond_wp", "zbd: read at any offset, not only written data", |job, v| {
        job.zones.zoned.reads_beyond_pointer = flag(v)?;
        Ok(())
    }),
    job(
        "max_open_zones",
        &[],
        "N",
        "zbd: zones that all jobs write at a time; that of the device by default, 0 for no other limit",
        |job, v| {
            job.zones.zoned.open_max = in_range(v, 0, 4096)? as u32;
            Ok(())
        },
    ),
    job("job_max_open_zones", &[], "N", "zbd: zones that each job writes at a time", |job, v| {
        job.zones.zoned.job_open_max = in_range(v, 0, 4096)? as u32;
        Ok(())
    }),
    switch("ignore_zone_limits", "zbd: the device's own limit of open zones does not count", |job, v| {
        job.zones.zoned.ignores_limit = flag(v)?;
        Ok(())
    }),
    job(
        "zone_reset_threshold",
        &[],
        "0-1",
        "zbd: share of the region with data above which zone_reset_frequency resets zones; 1 by default",
        |job, v| {
            job.zones.zoned.reset_threshold = share(v)?;
            Ok(())
        },
    ),
    job(
        "zone_reset_frequency",
        &[],
        "0-1",
        "zbd: resets of the written zone per write, above zone_reset_threshold; 0 by default",
        |job, v| {
            job.zones.zoned.reset_frequency = share(v)?;
            Ok(())
        },
    ),
];

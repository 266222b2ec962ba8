//! Zones, and blocks that are larger than a buffer.

use io_engines::EngineKind;

use super::{EngineName, PerfJob};
use crate::spec::{BlockSizes, BufferContent, StridedZones, Verify};
use crate::zoned::{RegionInZones, ZonedOptions};

/// `zonemode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::jobfile) enum ZoneMode {
    None,
    Strided,
    Zoned,
}

/// The options of zones as given.
#[derive(Clone, Debug)]
pub(in crate::jobfile) struct ZoneArguments {
    pub(in crate::jobfile) mode: Option<ZoneMode>,
    pub(in crate::jobfile) strided: StridedZones,
    pub(in crate::jobfile) zoned: ZonedOptions,
}

impl Default for ZoneArguments {
    fn default() -> Self {
        let strided = StridedZones { range_bytes: 0, size_bytes: 0, skip_bytes: 0 };
        ZoneArguments { mode: None, strided, zoned: ZonedOptions::default() }
    }
}

impl PerfJob {
    pub(super) fn finalize_zones(&mut self) -> Result<(), String> {
        let zones = &self.zones.strided;
        if self.zones.mode != Some(ZoneMode::Zoned) && self.zones.zoned != ZonedOptions::default() {
            let options = "zonecapacity, read_beyond_wp, max_open_zones, job_max_open_zones, ignore_zone_limits and \
                           zone_reset_*";
            return Err(format!("{options} do nothing without --zonemode=zbd"));
        }
        // As in fio, zonesize alone means strided.
        let strided = if zones.size_bytes > 0 { ZoneMode::Strided } else { ZoneMode::None };
        let outcome = match self.zones.mode.unwrap_or(strided) {
            ZoneMode::None => Ok(()),
            ZoneMode::Strided => self.finalize_strided(),
            ZoneMode::Zoned => self.finalize_zoned(),
        };
        outcome?;
        if self.spec.in_zones == RegionInZones::default() {
            return Ok(());
        }
        match self.zones.strided.size_bytes {
            0 if self.spec.zoned.is_some() => Ok(()),
            0 => Err("a size in zones, as 8z, needs --zonesize or --zonemode=zbd".to_string()),
            bytes => self.spec.resolve_zones(bytes).ok_or_else(|| "a size in zones is too large".to_string()),
        }
    }

    fn finalize_strided(&mut self) -> Result<(), String> {
        let zones = self.zones.strided;
        if zones.size_bytes == 0 {
            return Err("--zonemode=strided needs --zonesize".to_string());
        }
        if self.spec.verify != Verify::Off || self.spec.sequence.step_bytes < 0 {
            return Err("--zonemode=strided excludes verify and steps backwards in --rw".to_string());
        }
        let range_bytes = if zones.range_bytes == 0 { zones.size_bytes } else { zones.range_bytes };
        if range_bytes < u64::from(self.spec.block_bytes) {
            return Err("--zonerange is below the block size".to_string());
        }
        self.spec.zones = Some(StridedZones { range_bytes, ..zones });
        Ok(())
    }

    fn finalize_zoned(&mut self) -> Result<(), String> {
        let zones = self.zones.strided;
        let spec = &mut self.spec;
        let cases = [
            (zones.range_bytes > 0, "--zonerange"),
            (zones.skip_bytes > 0, "--zoneskip"),
            (spec.verify != Verify::Off, "--verify"),
            (spec.sequence != Default::default(), "a step or sequence in --rw"),
            (spec.workload.writes_what_it_trims(), "--rw=trimwrite"),
            (spec.fills_device, "--fill_device"),
        ];
        if let Some((_, option)) = cases.into_iter().find(|(given, _)| *given) {
            return Err(format!("--zonemode=zbd excludes {option}"));
        }
        let trims = spec.workload.directions(spec.read_percent)[2];
        let largest = if trims { 0 } else { u64::from(spec.block_bytes) };
        if zones.size_bytes > 0 && largest > zones.size_bytes {
            return Err("the block size is above --zonesize".to_string());
        }
        let zone_bytes = Some(zones.size_bytes).filter(|bytes| *bytes > 0);
        spec.zoned = Some(Box::new(ZonedOptions { zone_bytes, ..self.zones.zoned.clone() }));
        // Writes are where the zones permit them, so offsets repeat.
        spec.random_map = false;
        Ok(())
    }

    /// Blocks above a MiB are gathered from several buffers, which not everything supports.
    pub(super) fn finalize_large_blocks(&self) -> Result<(), String> {
        let used = self.spec.workload.directions(self.spec.read_percent);
        let of = |direction: usize| match &self.spec.sizes {
            Some(sizes) => sizes[direction].max(),
            None => self.spec.block_bytes,
        };
        // Trims have no buffer.
        let largest = [0, 1].into_iter().filter(|direction| used[*direction]).map(of).max().unwrap_or(0);
        if largest as usize <= dma::BUFFER_BYTES_MAX {
            return Ok(());
        }
        if largest > IO_BYTES_MAX {
            return Err(format!("--bs={largest} is above {} MiB", IO_BYTES_MAX >> 20));
        }
        let supported =
            [EngineKind::Psync, EngineKind::Pvsync2, EngineKind::Libaio, EngineKind::Uring, EngineKind::Null];
        let kind = match self.engine {
            Some(EngineName::Kernel(kind)) => Some(kind),
            _ => None,
        };
        let cases = [
            (kind.is_none_or(|kind| !supported.contains(&kind)), "this engine"),
            (self.spec.verify != Verify::Off, "verify"),
            (self.engine_config.fixed_buffers, "fixedbufs"),
            (
                matches!(self.spec.content, BufferContent::Reducible(_)),
                "dedupe_percentage and buffer_compress_percentage",
            ),
        ];
        match cases.into_iter().find(|(given, _)| *given) {
            Some((_, what)) => Err(format!("--bs={largest}: {what} has blocks of at most 1 MiB")),
            None => Ok(()),
        }
    }

    /// Whether the copies of the job are threads: they share state.
    pub(crate) fn shares_state(&self) -> bool {
        self.spec.flow.is_some() || self.spec.zoned.is_some()
    }

    /// The smallest reads, writes and trims, bytes.
    pub(crate) fn min_bytes(&self) -> [u64; 3] {
        let whole = self.spec.block_bytes;
        let sizes = self.spec.sizes.as_deref().map(|sizes| sizes.each_ref().map(BlockSizes::min));
        sizes.unwrap_or([whole; 3]).map(|bytes| u64::from(bytes).max(1))
    }
}

/// Largest read or write: 256 buffers of a MiB, a quarter of the vectors that an operation may have.
const IO_BYTES_MAX: u32 = 256 << 20;

//! Where the checksums are on a device.

use wire_blob::{CHECKSUM_REGION_BYTES, ChecksumHeader, DirtyRegions, PAGE_BYTES};

const PAGE: u64 = PAGE_BYTES as u64;

/// Data from the start of a device, and its checksums after it. Offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumLayout {
    /// Where the data begins that has checksums.
    pub data_start: u64,
    /// Where it ends.
    pub data_bytes: u64,
}

impl ChecksumLayout {
    /// The layout of a device of this size, for data in whole `unit_bytes`, a multiple of 4096; `None` if
    /// there is no space for any.
    pub fn within(device_bytes: u64, unit_bytes: u64, data_start: u64) -> Option<ChecksumLayout> {
        let layout = |units: u64| ChecksumLayout { data_start, data_bytes: units * unit_bytes };
        // The most for which there is space: more data needs more checksums.
        let (mut fits, mut too_many) = (0, device_bytes / unit_bytes + 1);
        while fits + 1 < too_many {
            let middle = fits.midpoint(too_many);
            match layout(middle).end() <= device_bytes {
                true => fits = middle,
                false => too_many = middle,
            }
        }
        // Regions are counted in 32 bits.
        (fits > 0 && layout(fits).data_bytes.div_ceil(CHECKSUM_REGION_BYTES) < u32::MAX.into())
            .then(|| layout(fits))
    }

    /// The layout that a header describes, if its device has this size; `None` if it cannot be.
    pub fn of(header: &ChecksumHeader, device_bytes: u64) -> Option<ChecksumLayout> {
        let ChecksumHeader { data_start, data_bytes, .. } = *header;
        let layout = ChecksumLayout { data_start, data_bytes };
        let is_possible = data_bytes > 0
            && data_bytes.is_multiple_of(PAGE)
            && data_start.is_multiple_of(PAGE)
            && data_start <= data_bytes
            && data_bytes < device_bytes
            && layout.end() <= device_bytes;
        is_possible.then_some(layout)
    }

    /// Regions of the data.
    pub fn regions(&self) -> u32 {
        self.data_bytes.div_ceil(CHECKSUM_REGION_BYTES).try_into().unwrap_or(u32::MAX)
    }

    /// Pages with the bits of regions.
    pub fn dirty_pages(&self) -> u32 {
        self.regions().div_ceil(DirtyRegions::REGIONS)
    }

    /// Where the header is.
    pub fn header_offset(&self) -> u64 {
        self.data_bytes
    }

    /// Where a page of bits is.
    pub fn dirty_offset(&self, page: u32) -> u64 {
        self.data_bytes + PAGE * (1 + u64::from(page))
    }

    /// Where the checksums of a region are.
    pub fn checksums_offset(&self, region: u32) -> u64 {
        self.dirty_offset(self.dirty_pages()) + PAGE * u64::from(region)
    }

    /// The offset and length of the data of a region.
    pub fn region_range(&self, region: u32) -> (u64, usize) {
        let offset = u64::from(region) * CHECKSUM_REGION_BYTES;
        // At most 1 MiB.
        (offset, (self.data_bytes - offset).min(CHECKSUM_REGION_BYTES) as usize)
    }

    /// Where it all ends.
    pub fn end(&self) -> u64 {
        self.checksums_offset(self.regions())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_data_as_fits_with_its_checksums() {
        for device_bytes in [3 << 20, 64 << 20, (10 << 30) + 512, 1 << 44, (1 << 44) + 123_456_512] {
            for unit_bytes in [1 << 16, 1 << 20, 4 << 20] {
                let Some(layout) = ChecksumLayout::within(device_bytes, unit_bytes, 1 << 20) else {
                    assert!(device_bytes < unit_bytes + (1 << 20), "{device_bytes} {unit_bytes}");
                    continue;
                };
                assert!(layout.end() <= device_bytes && layout.data_bytes.is_multiple_of(unit_bytes));
                let larger = ChecksumLayout { data_bytes: layout.data_bytes + unit_bytes, ..layout };
                assert!(larger.end() > device_bytes);
                let header =
                    ChecksumHeader { id: [1; 16], data_start: 1 << 20, data_bytes: layout.data_bytes };
                assert_eq!(ChecksumLayout::of(&header, device_bytes), Some(layout));
                assert_eq!(ChecksumLayout::of(&header, layout.end() - 1), None);
            }
        }
        assert_eq!(ChecksumLayout::within(4096, 4096, 0), None);
    }

    #[test]
    fn a_header_of_any_numbers_makes_no_panic() {
        for data_bytes in [0, 4095, 4096, 1 << 40, u64::MAX - 4095, u64::MAX] {
            for data_start in [0, 1, 4096, u64::MAX] {
                let header = ChecksumHeader { id: [0; 16], data_start, data_bytes };
                if let Some(layout) = ChecksumLayout::of(&header, 1 << 30) {
                    assert!(layout.end() <= 1 << 30);
                }
            }
        }
    }
}

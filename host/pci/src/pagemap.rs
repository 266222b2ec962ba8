//! Physical addresses of this process's memory, for devices behind no IOMMU.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that one entry of `/proc/self/pagemap` tells of on every machine with PCI that we know.
fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// The physical address of a page in memory; `None` where this process may not know it.
///
/// The page must not move while a device uses the address, which only hugepages promise: they are
/// neither swapped nor merged, and the kernel migrates them only when told to by an administrator.
pub(crate) fn physical(start: u64) -> io::Result<Option<u64>> {
    let page = page_bytes();
    let mut entry = [0; 8];
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, start / page * 8)?;
    Ok(decode(u64::from_ne_bytes(entry), page).map(|physical| physical + start % page))
}

/// One entry: bit 63 is set when the page is in memory, bits 0 to 54 are its frame, and zero without
/// CAP_SYS_ADMIN (the kernel's Documentation/admin-guide/mm/pagemap.rst).
fn decode(entry: u64, page: u64) -> Option<u64> {
    const PRESENT: u64 = 1 << 63;
    let frame = entry & ((1 << 55) - 1);
    (entry & PRESENT != 0 && frame != 0).then(|| frame.checked_mul(page)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_as_the_kernel_documents_them() {
        assert_eq!(decode(1 << 63 | 1 << 61 | 0x1234, 4096), Some(0x123_4000));
        assert_eq!(decode(0x1234, 4096), None, "not in memory");
        assert_eq!(decode(1 << 63, 4096), None, "kept from us");
        assert_eq!(decode(1 << 63 | ((1 << 55) - 1), 4096), None, "beyond 64 bits");
    }

    #[test]
    fn memory_of_ours_has_an_address_or_is_kept_from_us() {
        let byte = Box::new(7u8);
        let address = std::ptr::from_ref(&*byte) as u64;
        if let Some(physical) = physical(address).unwrap() {
            assert_eq!(physical % 4096, address % 4096);
        }
    }
}

//! Physical addresses of this process's memory, for devices without an IOMMU.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of memory per entry of `/proc/self/pagemap`: the page size.
fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// The physical address of a page in memory; `None` if this process may not read it.
///
/// The page must not move while a device uses the address. Only hugepages guarantee that: they are neither
/// swapped nor merged, and the kernel migrates them only at an administrator's request.
pub(crate) fn physical(start: u64) -> io::Result<Option<u64>> {
    let page = page_bytes();
    let mut entry = [0; 8];
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, start / page * 8)?;
    Ok(decode(u64::from_ne_bytes(entry), page).map(|physical| physical + start % page))
}

/// Decodes an entry: bit 63 is set if the page is in memory, bits 0 to 54 are its frame number, which is 0 without
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
    fn entries_are_decoded_as_documented() {
        assert_eq!(decode(1 << 63 | 1 << 61 | 0x1234, 4096), Some(0x123_4000));
        assert_eq!(decode(0x1234, 4096), None, "not in memory");
        assert_eq!(decode(1 << 63, 4096), None, "no permission");
        assert_eq!(decode(1 << 63 | ((1 << 55) - 1), 4096), None, "beyond 64 bits");
    }

    #[test]
    fn own_memory_has_a_physical_address_or_none_is_visible() {
        let byte = Box::new(7u8);
        let address = std::ptr::from_ref(&*byte) as u64;
        if let Some(physical) = physical(address).unwrap() {
            assert_eq!(physical % 4096, address % 4096);
        }
    }
}

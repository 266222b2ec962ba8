//! The kernel's VFIO and iommufd interface: structures and ioctl requests of `linux/vfio.h` and
//! `linux/iommufd.h`, with one safe function per request.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `_IO(';', 100 + number)`: VFIO's requests encode neither direction nor size.
const fn vfio(number: u32) -> u32 {
    (b';' as u32) << 8 | (100 + number)
}

/// `_IO(';', 0x80 + number)`.
const fn iommufd(number: u32) -> u32 {
    (b';' as u32) << 8 | (0x80 + number)
}

const API_VERSION: i32 = 0;
/// An IOMMU with map and unmap, version 2 (`VFIO_TYPE1v2_IOMMU`).
pub(crate) const TYPE1V2: u32 = 3;
/// No IOMMU (`VFIO_NOIOMMU_IOMMU`).
pub(crate) const NO_IOMMU: u32 = 8;

/// Index of the configuration space region.
pub(crate) const CONFIG_REGION: u32 = 7;

/// VFIO interrupt indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum VfioIrq {
    Msi = 1,
    Msix = 2,
    /// The kernel requests the function back.
    Request = 4,
}

/// An ioctl argument structure.
///
/// # Safety
/// For `REQUEST` the kernel must read and write at most the bytes of the structure, for which every bit
/// pattern must be valid.
unsafe trait IoctlArgument {
    const REQUEST: u32;
}

fn call<T: IoctlArgument>(fd: BorrowedFd<'_>, argument: &mut T) -> io::Result<i32> {
    // SAFETY: the pointer is to a live value, and the trait guarantees that the kernel stays inside it.
    unsafe { raw_ioctl(fd, T::REQUEST, std::ptr::from_mut(argument).cast()) }
}

/// # Safety
/// `argument` must be what `request` expects: a number, or a pointer to memory that the kernel may read and
/// write as the request specifies.
unsafe fn raw_ioctl(fd: BorrowedFd<'_>, request: u32, argument: *mut libc::c_void) -> io::Result<i32> {
    loop {
        // SAFETY: the caller guarantees a valid argument.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, argument) };
        if result >= 0 {
            return Ok(result);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A request whose argument is a number, or unused (0).
fn call_number(fd: BorrowedFd<'_>, request: u32, number: u32) -> io::Result<i32> {
    // SAFETY: this module calls it only for requests whose argument is a number.
    unsafe { raw_ioctl(fd, request, number as usize as *mut libc::c_void) }
}

macro_rules! arguments {
    ($($name:ident = $request:expr, $bytes:literal { $($field:ident: $type:ty,)* })*) => {$(
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        struct $name { $($field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $bytes);
        // SAFETY: the layout is that of the kernel's header and has only integers; requests with a size
        // field (`argsz`, `size`) get the size of this structure.
        unsafe impl IoctlArgument for $name { const REQUEST: u32 = $request; }
        #[allow(dead_code)]
        impl $name { const BYTES: u32 = size_of::<$name>() as u32; }
    )*};
}

arguments! {
    GroupStatus = vfio(3), 8 { argsz: u32, flags: u32, }
    DeviceInfo = vfio(7), 24 {
        argsz: u32, flags: u32, num_regions: u32, num_irqs: u32, cap_offset: u32, pad: u32,
    }
    RegionInfo = vfio(8), 32 {
        argsz: u32, flags: u32, index: u32, cap_offset: u32, size: u64, offset: u64,
    }
    IrqInfo = vfio(9), 16 { argsz: u32, flags: u32, index: u32, count: u32, }
    DmaMap = vfio(13), 32 { argsz: u32, flags: u32, vaddr: u64, iova: u64, size: u64, }
    DmaUnmap = vfio(14), 24 { argsz: u32, flags: u32, iova: u64, size: u64, }
    BindIommufd = vfio(18), 16 { argsz: u32, flags: u32, iommufd: i32, out_devid: u32, }
    AttachIoas = vfio(19), 12 { argsz: u32, flags: u32, pt_id: u32, }
    IoasAlloc = iommufd(1), 12 { size: u32, flags: u32, out_ioas_id: u32, }
    IoasMap = iommufd(5), 40 {
        size: u32, flags: u32, ioas_id: u32, reserved: u32, user_va: u64, length: u64, iova: u64,
    }
    IoasUnmap = iommufd(6), 24 { size: u32, ioas_id: u32, iova: u64, length: u64, }
}

/// `struct vfio_irq_set` without its data.
#[repr(C)]
struct IrqSet {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
}
const _: () = assert!(size_of::<IrqSet>() == 20);

/// `struct iommu_ioas_iova_ranges`.
#[repr(C)]
struct IoasRanges {
    size: u32,
    ioas_id: u32,
    num_iovas: u32,
    reserved: u32,
    allowed_iovas: u64,
    out_iova_alignment: u64,
}
const _: () = assert!(size_of::<IoasRanges>() == 32);

/// A range of usable IOVAs, both ends inclusive: `struct iommu_iova_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IovaRange {
    pub(crate) first: u64,
    pub(crate) last: u64,
}
const _: () = assert!(size_of::<IovaRange>() == 16);

const MAP_READ: u32 = 1;
const MAP_WRITE: u32 = 2;
const IOAS_FIXED: u32 = 1;
const IOAS_WRITEABLE: u32 = 2;
const IOAS_READABLE: u32 = 4;

/// Whether the container's API version is 0.
pub(crate) fn container_version_matches(container: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(call_number(container, vfio(0), 0)? == API_VERSION)
}

/// Whether a container supports an IOMMU type.
pub(crate) fn container_supports(container: BorrowedFd<'_>, kind: u32) -> io::Result<bool> {
    Ok(call_number(container, vfio(1), kind)? > 0)
}

/// Sets the IOMMU type of a container that has a group.
pub(crate) fn set_iommu(container: BorrowedFd<'_>, kind: u32) -> io::Result<()> {
    call_number(container, vfio(2), kind).map(drop)
}

/// Whether the group is viable: no function of it is bound to a kernel driver.
pub(crate) fn group_is_viable(group: BorrowedFd<'_>) -> io::Result<bool> {
    let mut status = GroupStatus { argsz: GroupStatus::BYTES, flags: 0 };
    call(group, &mut status)?;
    Ok(status.flags & 1 != 0)
}

/// Adds a group to a container.
pub(crate) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let mut fd: RawFd = container.as_raw_fd();
    // SAFETY: the request reads one int.
    unsafe { raw_ioctl(group, vfio(4), std::ptr::from_mut(&mut fd).cast()) }.map(drop)
}

/// Opens a function of a group, by its PCI address.
pub(crate) fn device(group: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    // SAFETY: the request reads a zero-terminated string.
    let fd = unsafe { raw_ioctl(group, vfio(6), name.as_ptr().cast_mut().cast()) }?;
    // SAFETY: the kernel has just returned this new descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The attributes of a function (`struct vfio_device_info`).
pub(crate) struct DeviceAttributes {
    pub(crate) is_pci: bool,
    pub(crate) can_reset: bool,
    pub(crate) regions: u32,
    pub(crate) interrupts: u32,
}

/// Queries the attributes of a function.
pub(crate) fn device_attributes(device: BorrowedFd<'_>) -> io::Result<DeviceAttributes> {
    let mut info = DeviceInfo { argsz: DeviceInfo::BYTES, ..Default::default() };
    call(device, &mut info)?;
    Ok(DeviceAttributes {
        can_reset: info.flags & 1 != 0,
        is_pci: info.flags & 2 != 0,
        regions: info.num_regions,
        interrupts: info.num_irqs,
    })
}

/// The location of a region in the descriptor of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VfioRegion {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) mappable: bool,
}

/// Queries a region of a function.
pub(crate) fn region(device: BorrowedFd<'_>, index: u32) -> io::Result<VfioRegion> {
    let mut info = RegionInfo { argsz: RegionInfo::BYTES, index, ..Default::default() };
    call(device, &mut info)?;
    Ok(VfioRegion { offset: info.offset, bytes: info.size, mappable: info.flags & 4 != 0 })
}

/// The number of interrupts of a kind that can signal an eventfd.
pub(crate) fn interrupt_count(device: BorrowedFd<'_>, kind: VfioIrq) -> io::Result<u32> {
    let mut info = IrqInfo { argsz: IrqInfo::BYTES, index: kind as u32, ..Default::default() };
    call(device, &mut info)?;
    Ok(if info.flags & 1 != 0 { info.count } else { 0 })
}

/// Makes the interrupts of a kind, from the first, signal `events`; an empty slice disables them. If not all can be
/// enabled, returns the number that can; otherwise 0.
pub(crate) fn set_interrupts(
    device: BorrowedFd<'_>,
    kind: VfioIrq,
    events: &[BorrowedFd<'_>],
) -> io::Result<u32> {
    const DATA_NONE: u32 = 1;
    const DATA_EVENTFD: u32 = 4;
    const ACTION_TRIGGER: u32 = 32;
    let bytes = size_of::<IrqSet>() + size_of_val(events) / size_of::<BorrowedFd<'_>>() * size_of::<RawFd>();
    let data = if events.is_empty() { DATA_NONE } else { DATA_EVENTFD };
    let mut words = vec![bytes as u32, data | ACTION_TRIGGER, kind as u32, 0, events.len() as u32];
    words.extend(events.iter().map(|event| event.as_raw_fd() as u32));
    // SAFETY: an `IrqSet` in words, followed by as many descriptors as its count; the kernel only
    // reads it.
    let available = unsafe { raw_ioctl(device, vfio(10), words.as_mut_ptr().cast()) }?;
    Ok(available as u32)
}

/// Resets a function.
pub(crate) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    call_number(device, vfio(11), 0).map(drop)
}

/// The usable IOVA ranges of a container; `None` if the kernel (before 5.4) does not report them.
pub(crate) fn container_ranges(container: BorrowedFd<'_>) -> io::Result<Option<Vec<IovaRange>>> {
    // `struct vfio_iommu_type1_info`: argsz, flags, page sizes (u64), offset of the first capability.
    const FIXED: usize = 24;
    // 64 KiB is enough for 4,000 ranges; systems have a handful.
    const BYTES_MAX: usize = 65536;
    let mut words = vec![0u64; FIXED / 8];
    for _ in 0..2 {
        let bytes = words.len() * 8;
        words[0] = bytes as u64;
        // SAFETY: the kernel writes at most `argsz` bytes, which is in the first word and is the size of `words`.
        unsafe { raw_ioctl(container, vfio(12), words.as_mut_ptr().cast()) }?;
        let needed = (words[0] as u32 as usize).next_multiple_of(8);
        if needed <= bytes {
            break;
        }
        words = vec![0u64; needed.min(BYTES_MAX) / 8];
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(parse_iova_ranges(&bytes))
}

/// Parses the IOVA ranges in the result of `VFIO_IOMMU_GET_INFO`.
fn parse_iova_ranges(bytes: &[u8]) -> Option<Vec<IovaRange>> {
    const HAS_CAPABILITIES: u32 = 2;
    const IOVA_RANGES: u16 = 1;
    // Limits the capability chain, so that a cyclic chain terminates.
    const LINKS_MAX: usize = 64;
    let half = |at: usize| Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    if word(4)? & HAS_CAPABILITIES == 0 {
        return None;
    }
    let mut at = word(16)? as usize;
    for _ in 0..LINKS_MAX {
        if at == 0 {
            return None;
        }
        // struct vfio_info_cap_header: id, version, offset of the next.
        if half(at)? == IOVA_RANGES {
            let count = word(at + 8)? as usize;
            let one = |index| {
                let from = at + 16 + index * 16;
                Some(IovaRange { first: long(from)?, last: long(from + 8)? })
            };
            return (0..count.min(bytes.len() / 16)).map(one).collect();
        }
        at = word(at + 4)? as usize;
    }
    None
}

/// Maps memory of this process for the devices of a container.
pub(crate) fn container_map(container: BorrowedFd<'_>, start: u64, bytes: u64, iova: u64) -> io::Result<()> {
    let flags = MAP_READ | MAP_WRITE;
    let mut map = DmaMap { argsz: DmaMap::BYTES, flags, vaddr: start, iova, size: bytes };
    call(container, &mut map).map(drop)
}

/// Reverts [`container_map`].
pub(crate) fn container_unmap(container: BorrowedFd<'_>, bytes: u64, iova: u64) -> io::Result<()> {
    let mut unmap = DmaUnmap { argsz: DmaUnmap::BYTES, flags: 0, iova, size: bytes };
    call(container, &mut unmap).map(drop)
}

/// Binds a function, opened through its character device, to an iommufd.
pub(crate) fn bind_iommufd(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> io::Result<()> {
    let mut bind =
        BindIommufd { argsz: BindIommufd::BYTES, iommufd: iommufd.as_raw_fd(), ..Default::default() };
    call(device, &mut bind).map(drop)
}

/// Attaches a bound function to an address space.
pub(crate) fn attach(device: BorrowedFd<'_>, ioas: u32) -> io::Result<()> {
    let mut attach = AttachIoas { argsz: AttachIoas::BYTES, flags: 0, pt_id: ioas };
    call(device, &mut attach).map(drop)
}

/// Allocates an empty I/O address space (IOAS).
pub(crate) fn ioas_alloc(iommufd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut alloc = IoasAlloc { size: IoasAlloc::BYTES, ..Default::default() };
    call(iommufd, &mut alloc)?;
    Ok(alloc.out_ioas_id)
}

/// The usable IOVA ranges of the devices attached to an address space.
pub(crate) fn ioas_ranges(fd: BorrowedFd<'_>, ioas: u32) -> io::Result<Vec<IovaRange>> {
    // Systems have a handful.
    const RANGES_MAX: usize = 4096;
    let mut ranges: Vec<IovaRange> = Vec::new();
    loop {
        let mut argument = IoasRanges {
            size: size_of::<IoasRanges>() as u32,
            ioas_id: ioas,
            num_iovas: ranges.len() as u32,
            reserved: 0,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            out_iova_alignment: 0,
        };
        // SAFETY: the kernel writes the structure, and at most `num_iovas` ranges at `allowed_iovas`.
        let result = unsafe { raw_ioctl(fd, iommufd(4), std::ptr::from_mut(&mut argument).cast()) };
        let count = argument.num_iovas as usize;
        match result {
            Ok(_) => {
                ranges.truncate(count);
                return Ok(ranges);
            }
            // There are more ranges than space for them; the kernel returns their number.
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && count > ranges.len() => {
                if count > RANGES_MAX {
                    return Err(error);
                }
                ranges.resize(count, IovaRange::default());
            }
            Err(error) => return Err(error),
        }
    }
}

/// Maps memory of this process for the devices of an address space.
pub(crate) fn ioas_map(
    iommufd: BorrowedFd<'_>,
    ioas: u32,
    start: u64,
    bytes: u64,
    iova: u64,
) -> io::Result<()> {
    let flags = IOAS_FIXED | IOAS_WRITEABLE | IOAS_READABLE;
    let mut map = IoasMap {
        size: IoasMap::BYTES,
        flags,
        ioas_id: ioas,
        user_va: start,
        length: bytes,
        iova,
        reserved: 0,
    };
    call(iommufd, &mut map).map(drop)
}

/// Reverts [`ioas_map`].
pub(crate) fn ioas_unmap(iommufd: BorrowedFd<'_>, ioas: u32, bytes: u64, iova: u64) -> io::Result<()> {
    let mut unmap = IoasUnmap { size: IoasUnmap::BYTES, ioas_id: ioas, iova, length: bytes };
    call(iommufd, &mut unmap).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The kernel's layout: the fixed part, another capability, then the ranges.
    fn iommu_info(ranges: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let total = 24 + 16 + 16 + 16 * ranges.len();
        for word in [total as u32, 3, 0xffff_f000, 0, 24, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        for half in [3u16, 1] {
            bytes.extend(half.to_ne_bytes());
        }
        for word in [40u32, 65535, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        for half in [1u16, 1] {
            bytes.extend(half.to_ne_bytes());
        }
        for word in [0u32, ranges.len() as u32, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        for (first, last) in ranges {
            bytes.extend(first.to_ne_bytes());
            bytes.extend(last.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn iova_ranges_are_found_behind_other_capabilities() {
        let ranges = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];
        let expected = ranges.map(|(first, last)| IovaRange { first, last }).to_vec();
        assert_eq!(parse_iova_ranges(&iommu_info(&ranges)), Some(expected));
        let mut none = iommu_info(&ranges);
        none[4] = 1;
        assert_eq!(parse_iova_ranges(&none), None);
        let mut cyclic = iommu_info(&ranges);
        cyclic[40] = 9;
        cyclic[44] = 24;
        assert_eq!(parse_iova_ranges(&cyclic), None);
    }

    #[test]
    fn request_numbers_match_the_kernel_headers() {
        assert_eq!((GroupStatus::REQUEST, DmaMap::REQUEST), (0x3b67, 0x3b71));
        assert_eq!((BindIommufd::REQUEST, IoasMap::REQUEST), (0x3b76, 0x3b85));
    }

    proptest! {
        #[test]
        fn parsing_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(0u8..48, 0..256)) {
            parse_iova_ranges(&bytes);
        }
    }
}

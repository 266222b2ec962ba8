//! The kernel's interface to VFIO and iommufd: structures and requests of `linux/vfio.h` and
//! `linux/iommufd.h`, and one safe function for each request.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `_IO(';', 100 + number)`: neither direction nor size is part of VFIO's requests.
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

/// Index of the region that is the configuration space.
pub(crate) const CONFIG_REGION: u32 = 7;

/// Kinds of interrupts, by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Interrupt {
    Msi = 1,
    Msix = 2,
    /// The kernel asks for the function back.
    Request = 4,
}

/// A structure that the kernel takes and gives back.
///
/// # Safety
/// For `REQUEST` the kernel reads and writes at most the bytes of the structure, of which every bit
/// pattern is a value.
unsafe trait Argument {
    const REQUEST: u32;
}

fn call<T: Argument>(fd: BorrowedFd<'_>, argument: &mut T) -> io::Result<i32> {
    // SAFETY: the pointer is to a live value, and the trait says that the kernel stays inside it.
    unsafe { raw(fd, T::REQUEST, std::ptr::from_mut(argument).cast()) }
}

/// # Safety
/// `argument` is what `request` takes: a number, or a pointer to memory that the kernel may read and
/// write as the request says.
unsafe fn raw(fd: BorrowedFd<'_>, request: u32, argument: *mut libc::c_void) -> io::Result<i32> {
    loop {
        // SAFETY: the caller's promise.
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

/// A request that takes a number, or nothing (0).
fn call_number(fd: BorrowedFd<'_>, request: u32, number: u32) -> io::Result<i32> {
    // SAFETY: this module passes only requests here that take their argument as a number.
    unsafe { raw(fd, request, number as usize as *mut libc::c_void) }
}

macro_rules! arguments {
    ($($name:ident = $request:expr, $bytes:literal { $($field:ident: $type:ty,)* })*) => {$(
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        struct $name { $($field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $bytes);
        // SAFETY: the layout is that of the kernel's header, plain integers all; requests that are
        // told their size (`argsz`, `size`) are told this one.
        unsafe impl Argument for $name { const REQUEST: u32 = $request; }
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

/// Addresses that a device may use, both ends inside. The kernel's `struct iommu_iova_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: u64,
    pub(crate) last: u64,
}
const _: () = assert!(size_of::<Range>() == 16);

const MAP_READ: u32 = 1;
const MAP_WRITE: u32 = 2;
const IOAS_FIXED: u32 = 1;
const IOAS_WRITEABLE: u32 = 2;
const IOAS_READABLE: u32 = 4;

/// Whether a container speaks the version that we do.
pub(crate) fn container_is_known(container: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(call_number(container, vfio(0), 0)? == API_VERSION)
}

/// Whether a container knows a kind of IOMMU.
pub(crate) fn container_has(container: BorrowedFd<'_>, kind: u32) -> io::Result<bool> {
    Ok(call_number(container, vfio(1), kind)? > 0)
}

/// Chooses the kind of IOMMU of a container that has a group.
pub(crate) fn set_iommu(container: BorrowedFd<'_>, kind: u32) -> io::Result<()> {
    call_number(container, vfio(2), kind).map(drop)
}

/// Whether every function of the group is out of the kernel's hands.
pub(crate) fn group_is_viable(group: BorrowedFd<'_>) -> io::Result<bool> {
    let mut status = GroupStatus { argsz: GroupStatus::BYTES, flags: 0 };
    call(group, &mut status)?;
    Ok(status.flags & 1 != 0)
}

/// Puts a group into a container.
pub(crate) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let mut fd: RawFd = container.as_raw_fd();
    // SAFETY: the request reads one int.
    unsafe { raw(group, vfio(4), std::ptr::from_mut(&mut fd).cast()) }.map(drop)
}

/// The descriptor of a group's function, by its address.
pub(crate) fn device(group: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    // SAFETY: the request reads a text that ends with a zero byte.
    let fd = unsafe { raw(group, vfio(6), name.as_ptr().cast_mut().cast()) }?;
    // SAFETY: the kernel just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What a function can do.
pub(crate) struct Abilities {
    pub(crate) is_pci: bool,
    pub(crate) can_reset: bool,
    pub(crate) regions: u32,
    pub(crate) interrupts: u32,
}

/// What a function can do.
pub(crate) fn abilities(device: BorrowedFd<'_>) -> io::Result<Abilities> {
    let mut info = DeviceInfo { argsz: DeviceInfo::BYTES, ..Default::default() };
    call(device, &mut info)?;
    Ok(Abilities {
        can_reset: info.flags & 1 != 0,
        is_pci: info.flags & 2 != 0,
        regions: info.num_regions,
        interrupts: info.num_irqs,
    })
}

/// Where a region of a function lies in its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) mappable: bool,
}

/// A region of a function.
pub(crate) fn region(device: BorrowedFd<'_>, index: u32) -> io::Result<Region> {
    let mut info = RegionInfo { argsz: RegionInfo::BYTES, index, ..Default::default() };
    call(device, &mut info)?;
    Ok(Region { offset: info.offset, bytes: info.size, mappable: info.flags & 4 != 0 })
}

/// How many interrupts of a kind a function has that can signal an eventfd.
pub(crate) fn interrupt_count(device: BorrowedFd<'_>, kind: Interrupt) -> io::Result<u32> {
    let mut info = IrqInfo { argsz: IrqInfo::BYTES, index: kind as u32, ..Default::default() };
    call(device, &mut info)?;
    Ok(if info.flags & 1 != 0 { info.count } else { 0 })
}

/// Lets the interrupts of a kind, from the first, signal `events`; none turns them off. Returns how
/// many the function could have had where it could not have them all.
pub(crate) fn set_interrupts(
    device: BorrowedFd<'_>,
    kind: Interrupt,
    events: &[BorrowedFd<'_>],
) -> io::Result<u32> {
    const DATA_NONE: u32 = 1;
    const DATA_EVENTFD: u32 = 4;
    const ACTION_TRIGGER: u32 = 32;
    let bytes = size_of::<IrqSet>() + size_of_val(events) / size_of::<BorrowedFd<'_>>() * size_of::<RawFd>();
    let data = if events.is_empty() { DATA_NONE } else { DATA_EVENTFD };
    let mut words = vec![bytes as u32, data | ACTION_TRIGGER, kind as u32, 0, events.len() as u32];
    words.extend(events.iter().map(|event| event.as_raw_fd() as u32));
    // SAFETY: an `IrqSet` in words, with as many descriptors behind it as its count says; the kernel
    // only reads it.
    let more = unsafe { raw(device, vfio(10), words.as_mut_ptr().cast()) }?;
    Ok(more as u32)
}

/// Resets a function.
pub(crate) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    call_number(device, vfio(11), 0).map(drop)
}

/// The addresses that devices of a container may use; `None` where the kernel (before 5.4) does not say.
pub(crate) fn container_ranges(container: BorrowedFd<'_>) -> io::Result<Option<Vec<Range>>> {
    // `struct vfio_iommu_type1_info`: argsz, flags, page sizes (u64), offset of the first capability.
    const FIXED: usize = 24;
    // 64 KiB hold 4,000 ranges, where machines have a handful.
    const MOST: usize = 65536;
    let mut words = vec![0u64; FIXED / 8];
    for _ in 0..2 {
        let bytes = words.len() * 8;
        words[0] = bytes as u64;
        // SAFETY: the kernel writes at most as many bytes as the first word says, which are there.
        unsafe { raw(container, vfio(12), words.as_mut_ptr().cast()) }?;
        let needed = (words[0] as u32 as usize).next_multiple_of(8);
        if needed <= bytes {
            break;
        }
        words = vec![0u64; needed.min(MOST) / 8];
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(ranges_in(&bytes))
}

/// The ranges in what `VFIO_IOMMU_GET_INFO` filled in.
fn ranges_in(bytes: &[u8]) -> Option<Vec<Range>> {
    const HAS_CAPABILITIES: u32 = 2;
    const IOVA_RANGES: u16 = 1;
    // More links than there can be headers: a chain that runs in a circle ends.
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
                Some(Range { first: long(from)?, last: long(from + 8)? })
            };
            return (0..count.min(bytes.len() / 16)).map(one).collect();
        }
        at = word(at + 4)? as usize;
    }
    None
}

/// Lets devices of a container reach memory of this process.
pub(crate) fn container_map(container: BorrowedFd<'_>, start: u64, bytes: u64, iova: u64) -> io::Result<()> {
    let flags = MAP_READ | MAP_WRITE;
    let mut map = DmaMap { argsz: DmaMap::BYTES, flags, vaddr: start, iova, size: bytes };
    call(container, &mut map).map(drop)
}

/// Ends what [`container_map`] began.
pub(crate) fn container_unmap(container: BorrowedFd<'_>, bytes: u64, iova: u64) -> io::Result<()> {
    let mut unmap = DmaUnmap { argsz: DmaUnmap::BYTES, flags: 0, iova, size: bytes };
    call(container, &mut unmap).map(drop)
}

/// Gives a function's descriptor, opened from its node, to an iommufd.
pub(crate) fn bind_iommufd(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> io::Result<()> {
    let mut bind =
        BindIommufd { argsz: BindIommufd::BYTES, iommufd: iommufd.as_raw_fd(), ..Default::default() };
    call(device, &mut bind).map(drop)
}

/// Lets a bound function use an address space.
pub(crate) fn attach(device: BorrowedFd<'_>, ioas: u32) -> io::Result<()> {
    let mut attach = AttachIoas { argsz: AttachIoas::BYTES, flags: 0, pt_id: ioas };
    call(device, &mut attach).map(drop)
}

/// A new, empty address space.
pub(crate) fn ioas_new(iommufd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut alloc = IoasAlloc { size: IoasAlloc::BYTES, ..Default::default() };
    call(iommufd, &mut alloc)?;
    Ok(alloc.out_ioas_id)
}

/// The addresses that devices attached to the space may use.
pub(crate) fn ioas_ranges(fd: BorrowedFd<'_>, ioas: u32) -> io::Result<Vec<Range>> {
    // Machines have a handful.
    const MOST: usize = 4096;
    let mut ranges: Vec<Range> = Vec::new();
    loop {
        let mut argument = IoasRanges {
            size: size_of::<IoasRanges>() as u32,
            ioas_id: ioas,
            num_iovas: ranges.len() as u32,
            reserved: 0,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            out_iova_alignment: 0,
        };
        // SAFETY: the kernel writes the structure, and at most as many ranges as it was told there are.
        let result = unsafe { raw(fd, iommufd(4), std::ptr::from_mut(&mut argument).cast()) };
        let count = argument.num_iovas as usize;
        match result {
            Ok(_) => {
                ranges.truncate(count);
                return Ok(ranges);
            }
            // It has more than there was room for, and says how many.
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && count > ranges.len() => {
                if count > MOST {
                    return Err(error);
                }
                ranges.resize(count, Range::default());
            }
            Err(error) => return Err(error),
        }
    }
}

/// Lets devices of an address space reach memory of this process.
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

/// Ends what [`ioas_map`] began.
pub(crate) fn ioas_unmap(iommufd: BorrowedFd<'_>, ioas: u32, bytes: u64, iova: u64) -> io::Result<()> {
    let mut unmap = IoasUnmap { size: IoasUnmap::BYTES, ioas_id: ioas, iova, length: bytes };
    call(iommufd, &mut unmap).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As the kernel lays it out: the fixed part, a capability of another kind, then the ranges.
    fn filled(ranges: &[(u64, u64)]) -> Vec<u8> {
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
    fn ranges_are_found_behind_other_capabilities() {
        let ranges = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];
        let expected = ranges.map(|(first, last)| Range { first, last }).to_vec();
        assert_eq!(ranges_in(&filled(&ranges)), Some(expected));
        let mut none = filled(&ranges);
        none[4] = 1;
        assert_eq!(ranges_in(&none), None);
        let mut circle = filled(&ranges);
        circle[40] = 9;
        circle[44] = 24;
        assert_eq!(ranges_in(&circle), None);
    }

    #[test]
    fn requests_have_the_numbers_of_the_headers() {
        assert_eq!((GroupStatus::REQUEST, DmaMap::REQUEST), (0x3b67, 0x3b71));
        assert_eq!((BindIommufd::REQUEST, IoasMap::REQUEST), (0x3b76, 0x3b85));
    }

    proptest! {
        #[test]
        fn any_answer_is_read_or_refused(bytes in proptest::collection::vec(0u8..48, 0..256)) {
            ranges_in(&bytes);
        }
    }
}

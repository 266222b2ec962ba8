//! Safe wrappers for `ioctl(2)` requests of block devices and NVMe devices.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `BLKDISCARD` of `linux/fs.h`.
const BLKDISCARD: libc::Ioctl = 0x1277;
/// `NVME_IOCTL_ID` and `NVME_IOCTL_ADMIN_CMD` of `linux/nvme_ioctl.h`.
const NVME_ID: libc::Ioctl = 0x4e40;
const NVME_ADMIN: libc::Ioctl = 0xc048_4e41u32 as libc::Ioctl;
/// `LOOP_GET_STATUS64` of `linux/loop.h`.
const LOOP_GET_STATUS64: libc::Ioctl = 0x4c05;
/// Opcode of the Identify command.
const IDENTIFY: u8 = 0x06;
/// Size of an Identify data structure in bytes.
pub const IDENTIFY_BYTES: usize = 4096;

/// Discards a range of a block device, in bytes, and waits for completion.
///
/// # Errors
/// The kernel's error: `EOPNOTSUPP` if the device does not support discard, `EINVAL` if the range is not a
/// multiple of its blocks.
pub fn discard(device: impl AsFd, offset: u64, bytes: u64) -> io::Result<()> {
    let range = [offset, bytes];
    // SAFETY: BLKDISCARD reads two words, which live until the call returns.
    match unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The identifier of the namespace behind an NVMe block or generic device.
///
/// # Errors
/// The kernel's error: `ENOTTY` if it is not an NVMe device.
pub fn nvme_namespace_id(device: impl AsFd) -> io::Result<u32> {
    // SAFETY: the request takes no argument.
    let namespace_id = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), NVME_ID) };
    u32::try_from(namespace_id).map_err(|_| io::Error::last_os_error())
}

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number_and_encryption: [u32; 3],
    flags: u32,
    names: [u8; 128],
    encryption_key: [u8; 32],
    init: [u64; 2],
}
const _: () = assert!(size_of::<LoopInfo>() == 232);

/// The file behind a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopBackingFile {
    /// Number of the device that its file system is on, as in `st_dev`.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Where in the file the loop device begins, in bytes.
    pub offset: u64,
    /// Most bytes of the file that it has; 0 for all.
    pub size_limit: u64,
}

/// The file behind a loop device.
///
/// # Errors
/// The kernel's error: `ENOTTY` if it is not a loop device, `ENXIO` if it has no file.
pub fn loop_file(device: impl AsFd) -> io::Result<LoopBackingFile> {
    let mut info = LoopInfo {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number_and_encryption: [0; 3],
        flags: 0,
        names: [0; 128],
        encryption_key: [0; 32],
        init: [0; 2],
    };
    // SAFETY: LOOP_GET_STATUS64 writes a `struct loop_info64`, which is local and of that size; the kernel
    // does not access it after the call.
    match unsafe { libc::ioctl(device.as_fd().as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) } {
        0 => {
            let LoopInfo { device, inode, offset, size_limit, .. } = info;
            Ok(LoopBackingFile { device, inode, offset, size_limit })
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// `struct nvme_passthru_cmd`.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    address: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10_to_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}
const _: () = assert!(size_of::<AdminCommand>() == 72);

/// The Identify Namespace data structure (NVMe Base Specification 2.0, 5.17.2.1) of a namespace.
///
/// # Errors
/// The kernel's error, or the NVMe status of a failed command.
pub fn nvme_identify_namespace(device: impl AsFd, namespace: u32) -> io::Result<Box<[u8; IDENTIFY_BYTES]>> {
    let mut data = Box::new([0u8; IDENTIFY_BYTES]);
    let mut command = AdminCommand {
        opcode: IDENTIFY,
        namespace,
        address: data.as_mut_ptr() as u64,
        data_len: IDENTIFY_BYTES as u32,
        ..AdminCommand::default()
    };
    // SAFETY: the kernel writes IDENTIFY_BYTES into `data` and a result into `command`; both are local and
    // live until the call returns, after which the kernel does not access them.
    match unsafe { libc::ioctl(device.as_fd().as_raw_fd(), NVME_ADMIN, &raw mut command) } {
        0 => Ok(data),
        status @ 1.. => Err(io::Error::other(format!("NVMe status {status:#x}"))),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement ioctl")]
    fn other_files_fail_with_enotty() {
        let null = std::fs::File::open("/dev/null").unwrap();
        for error in [
            discard(&null, 0, 4096).unwrap_err(),
            nvme_namespace_id(&null).unwrap_err(),
            nvme_identify_namespace(&null, 1).unwrap_err(),
        ] {
            assert_eq!(error.raw_os_error(), Some(libc::ENOTTY), "{error}");
        }
    }
}

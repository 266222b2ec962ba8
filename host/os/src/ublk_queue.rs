//! A queue of a ublk device.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dma::SharedRegion;
use wire_ublk::{AutoBufferRegistration, DeviceInfo, Features, IoDescriptor};

use crate::event_loop::PageRange;

/// How the data of a ublk device's requests gets from and to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UblkDataPath {
    /// The server reads and writes it at an offset of the character device
    /// ([`USER_COPY`](wire_ublk::Features::USER_COPY)).
    UserCopy,
    /// The driver copies it from and to memory of the server, that of a write when the server has asked for the data
    /// ([`NEED_GET_DATA`](wire_ublk::Features::NEED_GET_DATA)).
    GetData,
}

impl UblkDataPath {
    /// That of a device with these features; `None` if it has none of them: its server gives memory in advance.
    pub fn of(features: Features) -> Option<UblkDataPath> {
        if features.contains(Features::USER_COPY) {
            Some(UblkDataPath::UserCopy)
        } else {
            features.contains(Features::NEED_GET_DATA).then_some(UblkDataPath::GetData)
        }
    }
}

/// A queue of a ublk device for an event loop: the character device, and the descriptors of the queue's requests, which
/// the driver writes.
pub struct UblkQueueFile {
    file: OwnedFd,
    map: UblkQueueMap,
}

/// The descriptors of a queue, mapped.
pub(crate) struct UblkQueueMap {
    pub(crate) queue: u16,
    depth: u16,
    pub(crate) path: UblkDataPath,
    /// The driver registers the pages of requests.
    pub(crate) registers: bool,
    /// The registered buffers of the tags, if there was room for them.
    pub(crate) pages: Option<PageRange>,
    descriptors: SharedRegion,
}

impl UblkQueueFile {
    /// Maps the queue `index` of the device `info`, whose character device is `device`.
    ///
    /// # Errors
    /// The kernel's; `Unsupported` if the server of the device gives memory in advance.
    pub fn map(device: BorrowedFd<'_>, info: &DeviceInfo, index: u16) -> io::Result<UblkQueueFile> {
        let path = UblkDataPath::of(Features::from_bits_retain(info.features));
        let path = path.ok_or(ErrorKind::Unsupported)?;
        let bytes = wire_ublk::descriptors_bytes(info.queue_depth, rustix::param::page_size() as u64);
        let offset = wire_ublk::descriptors_offset(index);
        let descriptors =
            SharedRegion::map(device.as_fd(), offset, bytes, false).map_err(io::Error::other)?;
        let file = device.try_clone_to_owned()?;
        let registers = Features::from_bits_retain(info.features).contains(Features::AUTO_BUF_REG);
        let depth = info.queue_depth;
        let map = UblkQueueMap { queue: index, depth, path, registers, pages: None, descriptors };
        Ok(UblkQueueFile { file, map })
    }

    pub(crate) fn into_parts(self) -> (OwnedFd, UblkQueueMap) {
        (self.file, self.map)
    }
}

impl UblkQueueMap {
    pub(crate) fn depth(&self) -> u16 {
        self.depth
    }

    /// Where the pages of the next request of a tag are registered. Without room for them the driver does not find the
    /// buffer, and delivers the request without.
    pub(crate) fn registration(&self, tag: u16) -> Option<AutoBufferRegistration> {
        let index = self.pages.map_or(u16::MAX, |pages| pages.start + tag);
        self.registers.then_some(AutoBufferRegistration { index, fallback: true })
    }

    /// The descriptor of a tag.
    ///
    /// # Panics
    /// If the queue has no such tag.
    #[inline]
    pub(crate) fn descriptor(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth, "tag {tag} of a queue of {} requests", self.depth);
        let bytes: [u8; IoDescriptor::SIZE] =
            self.descriptors.snapshot(u64::from(tag) * IoDescriptor::SIZE as u64);
        IoDescriptor::decode(&bytes).expect("the array has the bytes of a descriptor")
    }
}

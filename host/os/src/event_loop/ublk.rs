//! Commands to the character devices of ublk disks.

use std::io;
use std::os::fd::AsRawFd;

use block_io::RegisteredPages;
use dma::Data;
use wire_ublk::{IoCommand, IoDescriptor, IoFlags, IoRequest, SECTOR_BYTES};

use super::{BackendState, EventClient, FileId, PendingOperation, RejectedOperation};
use crate::ublk_queue::{UblkDataPath, UblkQueueMap};

/// A command to the character device of a ublk disk ([`IoCommand`] without queue and address).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkCommand {
    /// What it asks for.
    pub request: IoRequest,
    /// Tag of the request.
    pub tag: u16,
    /// Result of the request that it completes.
    pub result: i32,
}

/// The address of a command without memory to a device whose driver copies. It wants an address of each read that is
/// completed, also of one that has failed, for which it does not use it. No memory is mapped at this one.
const NO_MEMORY: u64 = 1;

impl EventClient {
    /// The descriptor of the request of `tag` of a queue that was [added](Self::add_ublk_queue). It is that of the latest
    /// request of the tag, or zeroes before the first.
    ///
    /// # Panics
    /// If `file` is no such queue, or has no such tag.
    #[inline]
    pub fn ublk_request(&self, file: FileId, tag: u16) -> IoDescriptor {
        let inner = self.inner.borrow();
        let map = inner.files.get(file.0).and_then(|file| file.ublk.as_deref());
        map.expect("the file is a queue of a ublk disk").descriptor(tag)
    }

    /// The pages of the request of `tag`, if the driver has registered them.
    ///
    /// # Panics
    /// As [`ublk_request`](Self::ublk_request).
    #[inline]
    pub fn ublk_pages(&self, file: FileId, tag: u16) -> Option<RegisteredPages> {
        let inner = self.inner.borrow();
        let map = inner.files.get(file.0).and_then(|file| file.ublk.as_deref());
        let map = map.expect("the file is a queue of a ublk disk");
        let first = map.pages?;
        let descriptor = map.descriptor(tag);
        let is_registered = !descriptor.flags().contains(IoFlags::NEED_REGISTRATION);
        let bytes = descriptor.sectors.checked_mul(SECTOR_BYTES as u32)?;
        is_registered.then_some(RegisteredPages { index: first.start + tag, bytes })
    }

    /// Queues a command to a queue of a ublk disk. The [`EventCompletion`](super::EventCompletion) with `tag` has the
    /// driver's result, that of a fetch when there is a request.
    ///
    /// `data` is memory that the driver copies to or from, on devices of [`UblkDataPath::GetData`] alone. That of
    /// [`IoRequest::NeedGetData`] comes back with the result. That of [`IoRequest::CommitAndFetch`], the data of a read, is
    /// free before the next request arrives: it comes back in a completion of its own, with `data_tag` and the result 0.
    ///
    /// # Panics
    /// If `file` is no queue of a ublk disk, or has no such tag; if `data` has fewer bytes than the driver copies, several
    /// slices, or is shared but to be written; if a command lacks data or has it in vain.
    pub fn submit_ublk(
        &self,
        file: FileId,
        command: UblkCommand,
        data: Option<Data>,
        tag: u64,
        data_tag: u64,
    ) -> Result<(), RejectedOperation> {
        let mut guard = self.inner.borrow_mut();
        let inner = &mut *guard;
        let file = inner.files.get(file.0).expect("the file was not removed");
        let map = file.ublk.as_deref().expect("the file is a queue of a ublk disk");
        let address = address(map, command, data.as_ref());
        let fd = file.fd.as_raw_fd();
        let BackendState::Uring(uring) = &mut inner.backend else {
            return Err(RejectedOperation { reason: io::ErrorKind::Unsupported, data });
        };
        let is_commit = command.request == IoRequest::CommitAndFetch;
        let slots = if is_commit && data.is_some() { 2 } else { 1 };
        if inner.pending.len() + slots > inner.pending.capacity() {
            return Err(RejectedOperation { reason: io::ErrorKind::WouldBlock, data });
        }
        let (with_command, after) = if is_commit { (None, data) } else { (data, None) };
        let mut insert = |tag, data| {
            let pending = PendingOperation::Operation { client: self.id, tag, data, vectors: None };
            let Ok(slot) = inner.pending.insert(pending) else {
                unreachable!("there is room for the operation")
            };
            inner.operations_in_flight += 1;
            slot.to_bits()
        };
        let UblkCommand { request, tag: index, result } = command;
        let encoded = IoCommand { queue: map.queue, tag: index, result, address };
        let pages = map.registration(index);
        uring.ublk(fd, request, encoded, pages, insert(tag, with_command));
        if after.is_some() {
            // The kernel starts operations in their order, and the driver copies the data of a read when it starts the
            // command, which waits for the next request only then. So the data is free when this is started.
            uring.nothing(insert(data_tag, after));
        }
        Ok(())
    }
}

/// The address that a command gives the driver.
///
/// # Panics
/// As for [`EventClient::submit_ublk`].
fn address(map: &UblkQueueMap, command: UblkCommand, data: Option<&Data>) -> u64 {
    let UblkCommand { request, tag, result } = command;
    let descriptor = map.descriptor(tag);
    let Some(data) = data else {
        assert!(request != IoRequest::NeedGetData, "{command:?} needs memory");
        return match map.path {
            UblkDataPath::UserCopy => 0,
            UblkDataPath::GetData => NO_MEMORY,
        };
    };
    assert!(map.path == UblkDataPath::GetData, "{command:?} with memory to a device with user copy");
    // The driver copies all of a write, which its descriptor describes until the command completes, and of a read the
    // bytes of the result.
    let bytes = match request {
        IoRequest::Fetch => panic!("a fetch has no data"),
        IoRequest::CommitAndFetch => u64::try_from(result).expect("a read with data has succeeded"),
        IoRequest::NeedGetData => {
            assert!(data.is_writable(), "shared memory can't be written");
            u64::from(descriptor.sectors) * SECTOR_BYTES
        }
    };
    assert!(bytes <= data.len() as u64, "{command:?} copies {bytes} bytes, with memory of {}", data.len());
    let buffer = data.single().expect("the driver copies from and to a single slice");
    buffer.as_ptr().expose_provenance() as u64
}

// Miri does not implement io_uring.
#[cfg(all(test, not(miri)))]
mod tests;

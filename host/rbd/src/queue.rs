//! One core's operations on an image.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use dma::Data;
use reactor::{Core, MailboxReceiver, MailboxSender};

use crate::Image;
use crate::functions::{Functions, Handle};

/// Most operations of a queue.
pub const QUEUE_DEPTH_MAX: u32 = 1 << 12;

/// Most slices of an operation's data, as of a system call.
pub const SLICES_MAX: usize = 1024;

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const ZEROES_THICK: c_int = 1;

/// What an operation does with its range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageOperation {
    /// Reads it into the data.
    Read,
    /// Writes the data to it.
    Write,
    /// As [`Write`](Self::Write), and then a [`Flush`](Self::Flush).
    WriteDurable,
    /// Waits until all writes that have completed are on the OSDs' disks. It has no range.
    Flush,
    /// Reads return zeroes afterwards. Whole objects are removed, unless it `allocates`.
    WriteZeroes {
        /// It has space of its own.
        allocates: bool,
        /// A flush follows.
        is_durable: bool,
    },
}

/// An operation that has ended.
#[derive(Debug)]
pub struct ImageCompletion {
    /// Of [`ImageQueue::start`].
    pub tag: u64,
    /// 0, for a read the number of bytes, or a negative error number.
    pub result: i64,
    /// The data of the operation.
    pub data: Option<Data>,
}

/// One core's operations on an image.
///
/// [`start`](Self::start) takes an operation, which owns its data from then on, and [`reap`](Self::reap)
/// returns it. A completion is a message of a thread of librados to the core's mailbox, which wakes the core.
/// Dropping a queue with operations in flight leaks their memory and the image, since the library may still
/// use them.
pub struct ImageQueue {
    image: Arc<Image>,
    functions: &'static Functions,
    handle: Handle,
    slots: Box<[ImageSlot]>,
    free: Vec<u32>,
    /// Operations that the library refused, with the error.
    refused: Vec<(u32, i64)>,
    receiver: MailboxReceiver<(u32, i64)>,
}

struct ImageSlot {
    tag: u64,
    data: Option<Data>,
    /// The library may read them until the operation completes.
    vectors: Vec<libc::iovec>,
    flushes: bool,
    context: Box<CallbackContext>,
}

/// What the callback of a slot's operation gets.
struct CallbackContext {
    functions: &'static Functions,
    index: u32,
    sender: MailboxSender<(u32, i64)>,
}

impl ImageQueue {
    /// A queue of `depth` operations for a core.
    ///
    /// # Panics
    /// If `depth` is 0 or exceeds [`QUEUE_DEPTH_MAX`].
    pub fn new(image: &Arc<Image>, core: &Core, depth: u32) -> ImageQueue {
        assert!((1..=QUEUE_DEPTH_MAX).contains(&depth), "a queue of {depth} operations");
        let (functions, handle) = image.parts();
        // An operation sends one message at a time.
        let (sender, receiver) = core.mailbox(depth as usize);
        let slot = |index| ImageSlot {
            tag: 0,
            data: None,
            vectors: Vec::new(),
            flushes: false,
            context: Box::new(CallbackContext { functions, index, sender: sender.clone() }),
        };
        ImageQueue {
            image: image.clone(),
            functions,
            handle,
            slots: (0..depth).map(slot).collect(),
            free: (0..depth).rev().collect(),
            refused: Vec::new(),
            receiver,
        }
    }

    /// Number of operations that were started and not reaped.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether [`reap`](Self::reap) returns something.
    pub fn has_ended(&self) -> bool {
        !self.receiver.is_empty() || !self.refused.is_empty()
    }

    /// Starts an operation on `bytes` bytes at `offset` of the image, with data of as many for reads and
    /// writes.
    ///
    /// # Errors
    /// Gives the data back if as many operations as the depth are in flight.
    ///
    /// # Panics
    /// If the data of a read or write has another length or more than [`SLICES_MAX`] slices, or that of a
    /// read is shared.
    pub fn start(
        &mut self,
        operation: ImageOperation,
        offset: u64,
        bytes: u64,
        data: Option<Data>,
        tag: u64,
    ) -> Result<(), Option<Data>> {
        let has_data =
            matches!(operation, ImageOperation::Read | ImageOperation::Write | ImageOperation::WriteDurable);
        if has_data {
            let length = data.as_ref().map_or(0, Data::len);
            assert!(length as u64 == bytes, "{bytes} bytes with data of {length}");
            let is_writable = data.as_ref().is_none_or(Data::is_writable);
            assert!(operation != ImageOperation::Read || is_writable, "a read into memory that is shared");
        }
        let Some(index) = self.free.pop() else { return Err(data) };
        let slot = &mut self.slots[index as usize];
        (slot.tag, slot.data) = (tag, data);
        slot.flushes = matches!(
            operation,
            ImageOperation::WriteDurable | ImageOperation::WriteZeroes { is_durable: true, .. }
        );
        slot.vectors.clear();
        if let Some(data) = slot.data.as_ref().filter(|_| has_data) {
            let vector =
                |slice: &dma::Buffer| libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() };
            slot.vectors.extend(data.slices().iter().map(vector));
            assert!(slot.vectors.len() <= SLICES_MAX, "{} slices in one operation", slot.vectors.len());
        }
        self.submit(index, operation, offset, bytes);
        Ok(())
    }

    /// Passes the operation of a slot to the library.
    fn submit(&mut self, index: u32, operation: ImageOperation, offset: u64, bytes: u64) {
        let (rbd, image) = (&self.functions.rbd, self.handle);
        let slot = &self.slots[index as usize];
        let argument = ptr::from_ref::<CallbackContext>(&slot.context).cast_mut().cast::<c_void>();
        let mut completion = ptr::null_mut();
        // SAFETY: the completion is written. The context is in a box that stays until the operation has
        // completed.
        let result = unsafe { (rbd.rbd_aio_create_completion)(argument, completed, &raw mut completion) };
        if result < 0 {
            return self.refused.push((index, result.into()));
        }
        let (vectors, count) = (slot.vectors.as_ptr(), slot.vectors.len() as c_int);
        let result = match operation {
            ImageOperation::Read => {
                // SAFETY: the image is open. The slot keeps the vectors and the writable memory that they
                // describe until the operation has completed.
                unsafe { (rbd.rbd_aio_readv)(image, vectors, count, offset, completion) }
            }
            ImageOperation::Write | ImageOperation::WriteDurable => {
                // SAFETY: as of a read.
                unsafe { (rbd.rbd_aio_writev)(image, vectors, count, offset, completion) }
            }
            ImageOperation::Flush => {
                // SAFETY: the image is open.
                unsafe { (rbd.rbd_aio_flush)(image, completion) }
            }
            ImageOperation::WriteZeroes { allocates, .. } => {
                let flags = if allocates { ZEROES_THICK } else { 0 };
                // SAFETY: the image is open.
                unsafe { (rbd.rbd_aio_write_zeroes)(image, offset, bytes as usize, completion, flags, 0) }
            }
        };
        if result < 0 {
            // SAFETY: an operation that was refused has no callback, so that this is the completion's last
            // use.
            unsafe { (rbd.rbd_aio_release)(completion) };
            self.refused.push((index, result.into()));
        }
    }

    /// Appends the operations that have ended.
    pub fn reap(&mut self, out: &mut Vec<ImageCompletion>) {
        while let Some((index, result)) = self.refused.pop() {
            self.complete(index, result, out);
        }
        while let Some((index, result)) = self.receiver.receive() {
            if result >= 0 && std::mem::take(&mut self.slots[index as usize].flushes) {
                self.submit(index, ImageOperation::Flush, 0, 0);
            } else {
                self.complete(index, result, out);
            }
        }
    }

    fn complete(&mut self, index: u32, result: i64, out: &mut Vec<ImageCompletion>) {
        let slot = &mut self.slots[index as usize];
        self.free.push(index);
        out.push(ImageCompletion { tag: slot.tag, result, data: slot.data.take() });
    }
}

extern "C" fn completed(completion: Handle, argument: *mut c_void) {
    // SAFETY: the context stays at least until the message below is received.
    let context = unsafe { &*argument.cast::<CallbackContext>() };
    let (rbd, index) = (&context.functions.rbd, context.index);
    // SAFETY: the operation of this completion has ended.
    let result = unsafe { (rbd.rbd_aio_get_return_value)(completion) };
    // SAFETY: nothing else uses the completion; the library keeps it until the callback has returned.
    unsafe { (rbd.rbd_aio_release)(completion) };
    // A sender of its own: the queue may be dropped once the message is there. The mailbox has space for a
    // message of each slot.
    let sender = context.sender.clone();
    _ = sender.send((index, result as i64));
}

impl Drop for ImageQueue {
    fn drop(&mut self) {
        if self.in_flight() > 0 {
            log::warn!(target: "rbd", "{} operations on an image of Ceph are abandoned", self.in_flight());
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(self.image.clone());
        }
    }
}

impl fmt::Debug for ImageQueue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ImageQueue({} in flight)", self.in_flight())
    }
}

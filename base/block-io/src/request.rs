//! Requests and completions.

use crate::{ProtectedData, Status};

/// A caller's identifier for a request; the completion returns it unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// The operation that a request asks for.
///
/// `lba` and `blocks` of the request are its range where [`has_range`](Self::has_range) says so. What an
/// operation needs besides is in the request's [`Payload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Reads the range into the data.
    Read,
    /// Writes the data to the range.
    Write,
    /// Makes every write that completed before this was submitted durable. The range is unused.
    Flush,
    /// Deallocates the range; reads return zeroes afterwards.
    Unmap,
    /// Writes zeroes to the range.
    WriteZeroes,
    /// Resets the device to a known state. The range is unused.
    Reset,
    /// Makes reads of the range fail with Unrecovered Read Error until it is written again.
    WriteUncorrectable,
    /// Succeeds if the range holds the data, fails with Compare Failure otherwise; see [`Payload::Mismatch`].
    Compare,
    /// Copies to the range from [`Payload::CopySource`] of the same device, which it may overlap.
    Copy,
    /// Asks that the request with the tag in [`Payload::Abort`] complete soon, with Command Abort Requested
    /// if it had not been executed. It is sent on the channel and by the flow of that request, and completes
    /// with success whether or not that was in flight. The range is unused.
    Abort,
    /// Finds the first allocated block from `lba` on, within `blocks`; see [`Payload::Found`].
    SeekData,
    /// Finds the first unallocated block from `lba` on, within `blocks`; see [`Payload::Found`].
    SeekHole,
}

impl Op {
    /// Every operation, in the order of [`Op::index`].
    pub const ALL: [Op; 12] = [
        Op::Read,
        Op::Write,
        Op::Flush,
        Op::Unmap,
        Op::WriteZeroes,
        Op::Reset,
        Op::WriteUncorrectable,
        Op::Compare,
        Op::Copy,
        Op::Abort,
        Op::SeekData,
        Op::SeekHole,
    ];

    /// A dense index from 0, for tables by operation.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether `lba` and `blocks` are used.
    pub const fn has_range(self) -> bool {
        !matches!(self, Op::Flush | Op::Reset | Op::Abort)
    }

    /// Whether the payload is `blocks` blocks of data.
    pub const fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write | Op::Compare)
    }

    /// Whether it changes blocks.
    pub const fn is_write(self) -> bool {
        matches!(self, Op::Write | Op::Unmap | Op::WriteZeroes | Op::WriteUncorrectable | Op::Copy)
    }

    /// The name in statistics and error messages.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
            Op::Unmap => "unmap",
            Op::WriteZeroes => "write_zeroes",
            Op::Reset => "reset",
            Op::WriteUncorrectable => "write_uncorrectable",
            Op::Compare => "compare",
            Op::Copy => "copy",
            Op::Abort => "abort",
            Op::SeekData => "seek_data",
            Op::SeekHole => "seek_hole",
        }
    }
}

bitflags::bitflags! {
    /// Flags that modify a request.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RequestFlags: u8 {
        /// Force Unit Access: the write completes only once the data is on the medium.
        const FUA = 1 << 0;
        /// Write Zeroes may deallocate the range.
        const DEALLOCATE = 1 << 1;
        /// A fused compare: the next request of the batch is a write of the same range, which is executed
        /// only if the compare succeeds. No other write of the range comes between the two.
        const FUSED = 1 << 2;
        /// A request that the block layer itself issues on behalf of a caller's request; it takes the flag
        /// off what callers submit.
        const INTERNAL = 1 << 3;
        /// A write that the block layer does not divide, of which a failure leaves all or nothing, as far as
        /// the device promises it. Callers keep to the limits of its geometry; what is beyond a single
        /// request fails.
        const ATOMIC = 1 << 4;
        /// The range of a Write Zeroes has space of its own afterwards, as far as the device is thin and
        /// supports it. Not with [`DEALLOCATE`](Self::DEALLOCATE).
        const ALLOCATE = 1 << 5;
    }
}

impl RequestFlags {
    /// No flag.
    pub const NONE: RequestFlags = RequestFlags::empty();
}

/// What an operation carries besides its range.
///
/// A variant belongs to the operations that it names; the block layer rejects a request with another. It is
/// as large as the data alone.
#[derive(Debug, Default)]
pub enum Payload<D> {
    /// Nothing.
    #[default]
    None,
    /// The data, exactly `blocks` blocks, of operations with [`Op::has_data`].
    Data(D),
    /// Of [`Op::Read`] and [`Op::Write`]: data of a device with metadata, and what it does with protection
    /// information. [`Data`](Self::Data) has whole blocks of such a device, interleaved metadata included,
    /// which are not checked.
    Protected(Box<ProtectedData<D>>),
    /// Of [`Op::Read`] and [`Op::Write`]: pages of another request of the kernel, exactly `blocks` blocks.
    /// Only a device that takes them gets such a request.
    Registered(RegisteredPages),
    /// Of [`Op::Copy`]: the first block to copy from.
    CopySource(u64),
    /// Of [`Op::Abort`]: the tag of the request to abort.
    Abort(Tag),
    /// The result of [`Op::SeekData`] and [`Op::SeekHole`]: the block that was found; `None` if there is none
    /// in the range.
    Found(Option<u64>),
    /// The data of an [`Op::Compare`] that has failed with Compare Failure, and where it differs.
    Mismatch(Box<Mismatch<D>>),
}

/// Pages of the kernel that the core's io_uring has as a registered buffer: [`Payload::Registered`]. They
/// have no address in this process; only operations of that ring read and write them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredPages {
    /// Index of the registered buffer.
    pub index: u16,
    /// Number of bytes, from the buffer's first.
    pub bytes: u32,
}

/// The data of a compare that does not match: [`Payload::Mismatch`].
#[derive(Debug)]
pub struct Mismatch<D> {
    /// The data that was expected.
    pub data: D,
    /// The first byte that differs, counted from the start of the data.
    pub offset: u64,
}

impl<D> Payload<D> {
    /// The data, or none.
    #[inline]
    pub fn from_data(data: Option<impl Into<D>>) -> Payload<D> {
        // Unlike `map_or`, which makes and drops a payload in vain.
        match data {
            Some(data) => Payload::Data(data.into()),
            None => Payload::None,
        }
    }
}

/// One I/O to submit. It owns its data until it is returned as a [`Completion`].
#[derive(Debug)]
pub struct Request<D> {
    /// Chosen by the caller, returned with the completion.
    pub tag: Tag,
    /// First logical block, counted from 0.
    pub lba: u64,
    /// When the request was issued, in clock ticks (`os::clock::ticks`). If 0, the block layer reads the
    /// clock; a caller that has just read it sets the value to avoid a second read.
    pub issued_ticks: u64,
    /// Number of logical blocks.
    pub blocks: u32,
    /// The connection or other consumer that it is from, by a number of its own in the process; 0 is the
    /// process itself. The block layer knows the tenant of each flow, and schedules by it.
    pub flow: u16,
    /// The operation.
    pub op: Op,
    /// See [`RequestFlags`].
    pub flags: RequestFlags,
    /// The data, or what else the operation needs.
    pub payload: Payload<D>,
}

impl<D> Request<D> {
    /// A request without payload or flags; set the fields to add them.
    #[inline]
    pub const fn new(tag: Tag, op: Op, lba: u64, blocks: u32) -> Self {
        Request::with_payload(tag, op, lba, blocks, Payload::None)
    }

    /// A request with a payload and without flags. Unlike setting the payload of another request, it drops
    /// none.
    #[inline]
    pub const fn with_payload(tag: Tag, op: Op, lba: u64, blocks: u32, payload: Payload<D>) -> Self {
        Request { tag, lba, issued_ticks: 0, blocks, flow: 0, op, flags: RequestFlags::NONE, payload }
    }

    /// A read into `data`.
    pub fn read(tag: Tag, lba: u64, blocks: u32, data: impl Into<D>) -> Self {
        Request::with_payload(tag, Op::Read, lba, blocks, Payload::Data(data.into()))
    }

    /// A write of `data`.
    pub fn write(tag: Tag, lba: u64, blocks: u32, data: impl Into<D>) -> Self {
        Request::with_payload(tag, Op::Write, lba, blocks, Payload::Data(data.into()))
    }

    /// A copy of `blocks` blocks from `source_lba` to `lba`.
    pub fn copy(tag: Tag, source_lba: u64, lba: u64, blocks: u32) -> Self {
        Request::with_payload(tag, Op::Copy, lba, blocks, Payload::CopySource(source_lba))
    }

    /// An abort of the request with the tag `target`.
    pub fn abort(tag: Tag, target: Tag) -> Self {
        Request::with_payload(tag, Op::Abort, 0, 0, Payload::Abort(target))
    }

    /// The data, if it carries any, and no protection.
    #[inline]
    pub const fn data(&self) -> Option<&D> {
        // The common case by itself: drivers ask for each command's.
        if let Payload::Data(data) = &self.payload { Some(data) } else { self.compared_data() }
    }

    /// The data of a compare that does not match.
    #[cold]
    const fn compared_data(&self) -> Option<&D> {
        if let Payload::Mismatch(mismatch) = &self.payload { Some(&mismatch.data) } else { None }
    }

    /// As [`data`](Self::data), to change it.
    #[inline]
    pub const fn data_mut(&mut self) -> Option<&mut D> {
        match &mut self.payload {
            Payload::Data(data) => Some(data),
            Payload::Mismatch(mismatch) => Some(&mut mismatch.data),
            _ => None,
        }
    }

    /// Takes the data out, protected or compared or neither, and leaves none; another payload stays.
    #[inline]
    pub fn take_data(&mut self) -> Option<D> {
        match std::mem::take(&mut self.payload) {
            Payload::Data(data) => Some(data),
            Payload::Protected(protected) => Some(protected.data),
            Payload::Mismatch(mismatch) => Some(mismatch.data),
            other => {
                self.payload = other;
                None
            }
        }
    }

    /// Sets the data, or none.
    #[inline]
    pub fn set_data(&mut self, data: Option<impl Into<D>>) {
        let payload = Payload::from_data(data);
        let previous = std::mem::replace(&mut self.payload, payload);
        // The drop of a payload is a call, and usually there was none.
        if matches!(previous, Payload::None) {
            std::mem::forget(previous);
        }
    }

    /// Completes the request. The only constructor of [`Completion`], so that a request completes once.
    pub const fn complete(self, status: Status) -> Completion<D> {
        Completion { request: self, status }
    }
}

/// A completed I/O: the original request and its status.
#[derive(Debug)]
pub struct Completion<D> {
    request: Request<D>,
    status: Status,
}

impl<D> Completion<D> {
    /// The tag of the request.
    pub const fn tag(&self) -> Tag {
        self.request.tag
    }

    /// The outcome of the request.
    pub const fn status(&self) -> Status {
        self.status
    }

    /// The completed request.
    pub const fn request(&self) -> &Request<D> {
        &self.request
    }

    /// The completed request, for a layer that gives it the caller's tag and range again.
    #[inline]
    pub const fn request_mut(&mut self) -> &mut Request<D> {
        &mut self.request
    }

    /// Returns the data that the request carried, protected or not.
    #[inline]
    pub fn into_data(self) -> Option<D> {
        match self.request.payload {
            Payload::Data(data) => Some(data),
            Payload::Protected(protected) => Some(protected.data),
            Payload::Mismatch(mismatch) => Some(mismatch.data),
            _ => None,
        }
    }

    /// Returns the request with its payload, to read the data or to submit it again.
    pub fn into_request(self) -> Request<D> {
        self.request
    }

    /// The same completion with another status, for layers that translate errors.
    pub fn with_status(self, status: Status) -> Self {
        Completion { status, ..self }
    }
}

//! Requests and completions.

use crate::Status;

/// The caller's name for a request; comes back with the completion, otherwise untouched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Fill the buffer from `blocks` blocks at `lba`.
    Read,
    /// Put the buffer into `blocks` blocks at `lba`.
    Write,
    /// Everything acknowledged before this was submitted reaches the medium. The range is unused.
    Flush,
    /// The range is no longer needed; reads of it return zeroes afterwards.
    Unmap,
    /// The range reads as zeroes afterwards.
    WriteZeroes,
    /// Bring the device back to a known state. The range is unused.
    Reset,
    /// Reads of the range fail with Unrecovered Read Error until it is written again.
    WriteUncorrectable,
    /// Success if the range holds what is in the buffer, Compare Failure otherwise.
    Compare,
}

impl Op {
    /// Every operation, in the order of [`Op::index`].
    pub const ALL: [Op; 8] = [
        Op::Read,
        Op::Write,
        Op::Flush,
        Op::Unmap,
        Op::WriteZeroes,
        Op::Reset,
        Op::WriteUncorrectable,
        Op::Compare,
    ];

    /// A dense index from 0, for tables by operation.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether `lba` and `blocks` mean something.
    pub const fn has_range(self) -> bool {
        !matches!(self, Op::Flush | Op::Reset)
    }

    /// Whether the buffer carries `blocks` blocks.
    pub const fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write | Op::Compare)
    }

    /// Whether blocks read otherwise afterwards.
    pub const fn is_write(self) -> bool {
        matches!(self, Op::Write | Op::Unmap | Op::WriteZeroes | Op::WriteUncorrectable)
    }

    /// The operation's name as statistics and errors spell it.
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
        }
    }
}

/// Modifiers of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u8);

impl Flags {
    /// None of them.
    pub const NONE: Flags = Flags(0);
    /// Force unit access: acknowledged only once the data is on the medium.
    pub const FUA: Flags = Flags(1);
    /// Write zeroes may give the space back.
    pub const DEALLOCATE: Flags = Flags(2);
    /// Of a compare: the next request of the batch is a write of the same range, which is done only if they
    /// are equal, with no other write of the range in between.
    pub const FUSED: Flags = Flags(4);
    /// Made by the block layer for a request of its caller's. Nobody else sets it.
    pub const OWN: Flags = Flags(8);

    /// Whether every flag of `other` is set.
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets together.
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// One I/O on its way down. Owns its buffer until it comes back as a [`Completion`].
#[derive(Debug)]
pub struct Request<B> {
    /// The caller's name for it.
    pub tag: Tag,
    /// First logical block, counted from 0.
    pub lba: u64,
    /// When it was issued, in ticks of the machine's clock. With 0 the block layer stamps it; a caller
    /// that has just looked at the clock spares it that look.
    pub issued: u64,
    /// Number of logical blocks.
    pub blocks: u32,
    /// Which of the consumers that share a channel this belongs to; they are served in turn.
    pub flow: u16,
    /// What is asked for.
    pub op: Op,
    /// Modifiers.
    pub flags: Flags,
    /// The data, exactly `blocks` blocks of it, for operations that carry data.
    pub buffer: Option<B>,
}

impl<B> Request<B> {
    /// A request without data; give it a buffer or flags by setting the fields.
    pub const fn new(tag: Tag, op: Op, lba: u64, blocks: u32) -> Self {
        Request { tag, lba, issued: 0, blocks, flow: 0, op, flags: Flags::NONE, buffer: None }
    }

    /// Fill `buffer` from the device.
    pub const fn read(tag: Tag, lba: u64, blocks: u32, buffer: B) -> Self {
        Request {
            tag,
            lba,
            issued: 0,
            blocks,
            flow: 0,
            op: Op::Read,
            flags: Flags::NONE,
            buffer: Some(buffer),
        }
    }

    /// Put `buffer` on the device.
    pub const fn write(tag: Tag, lba: u64, blocks: u32, buffer: B) -> Self {
        Request {
            tag,
            lba,
            issued: 0,
            blocks,
            flow: 0,
            op: Op::Write,
            flags: Flags::NONE,
            buffer: Some(buffer),
        }
    }

    /// Ends it. The only way to a completion, so that each request completes once.
    pub const fn complete(self, status: Status) -> Completion<B> {
        Completion { request: self, status }
    }
}

/// One I/O on its way back: the request that it was, and how it ended.
#[derive(Debug)]
pub struct Completion<B> {
    request: Request<B>,
    status: Status,
}

impl<B> Completion<B> {
    /// The caller's name for it.
    pub const fn tag(&self) -> Tag {
        self.request.tag
    }

    /// How it ended.
    pub const fn status(&self) -> Status {
        self.status
    }

    /// The request that it was.
    pub const fn request(&self) -> &Request<B> {
        &self.request
    }

    /// Gives the request back, buffer included, to be read from or used again.
    pub fn into_request(self) -> Request<B> {
        self.request
    }

    /// The same request with another outcome, for layers that translate errors.
    pub fn with_status(self, status: Status) -> Self {
        Completion { status, ..self }
    }
}

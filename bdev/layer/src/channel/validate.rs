//! Validation: which requests may go to the module as they are, which need the layer, and the errors of the others.

use block_io::{Op, Payload, ProtectedData, RequestFlags, Status};
use dma::Data;

use super::BdevChannel;
use crate::Request;
use crate::device::IoLimits;

/// The limits that requests are validated against, read once a batch.
pub(super) struct RequestLimits {
    pub(super) blocks: u64,
    pub(super) block_size: u64,
    pub(super) allowed_ops: u16,
    /// The device has a rate limit, or its queue depth is sampled.
    pub(super) is_watched: bool,
    /// The module takes [`Payload::Registered`].
    pub(super) takes_registered: bool,
    pub(super) io: IoLimits,
}

impl BdevChannel {
    /// The error of an invalid request, or `None` if it is valid.
    pub(super) fn validate(&self, request: &Request, limits: &RequestLimits) -> Option<Status> {
        let op = request.op;
        if limits.is_fast_path(request) || (op == Op::Reset && !self.is_removed()) {
            return None;
        }
        let length = u64::from(request.blocks);
        // A compare reaches the module as a read, and a copy as reads and writes.
        let required = match op {
            Op::Compare => Op::Read,
            Op::Copy => Op::Write,
            Op::SeekData | Op::SeekHole if !limits.allows(op) => Op::Read,
            op => op,
        };
        let status = if self.is_removed() {
            Status::INVALID_NAMESPACE_OR_FORMAT
        } else if !self.writes && op.is_write() {
            Status::NAMESPACE_WRITE_PROTECTED
        } else if self.is_reserved(required, limits) || (op == Op::Copy && self.is_reserved(Op::Read, limits))
        {
            Status::RESERVATION_CONFLICT
        } else if !limits.allows(required) || (op == Op::Copy && !limits.allows(Op::Read)) {
            Status::INVALID_OPCODE
        } else if op.has_range() && length == 0 {
            Status::INVALID_FIELD
        } else if op.has_range() && (length > limits.blocks || request.lba > limits.blocks - length) {
            Status::LBA_OUT_OF_RANGE
        } else if let Payload::Protected(protected) = &request.payload {
            return self.validate_protected(request, protected);
        } else if limits.is_complete(request) {
            let is_divided =
                request.flags.contains(RequestFlags::ATOMIC) && !limits.io.allow_undivided(request);
            return is_divided.then_some(Status::INVALID_FIELD.do_not_retry());
        } else if let Payload::CopySource(_) = request.payload {
            Status::LBA_OUT_OF_RANGE
        } else if op.has_data()
            && request.data().is_some_and(|data| data.len() as u64 == length * limits.block_size)
        {
            // Memory that the layer or the device would have to write, and cannot.
            Status::INVALID_FIELD
        } else {
            Status::DATA_SGL_LENGTH_INVALID
        };
        Some(status.do_not_retry())
    }

    /// Whether a reservation of others denies an operation that is allowed otherwise. The device is not
    /// removed.
    fn is_reserved(&self, op: Op, limits: &RequestLimits) -> bool {
        self.allowed_ops >> op.index() & 1 != 0 && !limits.allows(op)
    }

    /// The error of a request with protected data, whose range is valid.
    #[cold]
    fn validate_protected(&self, request: &Request, protected: &ProtectedData<Data>) -> Option<Status> {
        let geometry = self.open.device.geometry();
        let (format, flags) = (geometry.metadata, protected.flags);
        let is_transfer = matches!(request.op, Op::Read | Op::Write);
        if !is_transfer || format.bytes == 0 || (format.protection.is_none() && !flags.is_empty()) {
            return Some(Status::INVALID_PROTECTION_INFORMATION.do_not_retry());
        }
        let blocks = u64::from(request.blocks);
        let is_separate = !format.extended && !format.strips(flags);
        let metadata_bytes = if is_separate { blocks * u64::from(format.bytes) } else { 0 };
        let metadata = protected.metadata.as_ref();
        if protected.data.len() as u64 != blocks * u64::from(geometry.transfer_bytes(flags))
            || metadata.map_or(0, Data::len) as u64 != metadata_bytes
        {
            return Some(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        let writable = protected.data.is_writable() && metadata.is_none_or(Data::is_writable);
        if request.op == Op::Read && !writable {
            return Some(Status::INVALID_FIELD.do_not_retry());
        }
        None
    }
}

/// Operation and length of a valid request with data. Of other requests of the same shape only the LBA is checked, and
/// the alignment and access of their data for all together.
pub(super) struct RequestShape {
    op: Op,
    blocks: u32,
    bytes: u32,
    /// Highest LBA at which such a request fits the device.
    lba_max: u64,
    /// Bits that are set in the address of any buffer of the requests that matched.
    pub(super) addresses: usize,
    /// Whether any of these buffers is read-only.
    pub(super) read_only: bool,
}

impl RequestShape {
    /// Requests at the front of `requests` that have this shape and a time of issue.
    ///
    /// Not inlined, so that the loop has all registers: it is most of what the layer costs in a large batch.
    #[inline(never)]
    pub(super) fn count_matching(&mut self, requests: &[Request]) -> usize {
        let (mut addresses, mut read_only) = (self.addresses, u8::from(self.read_only));
        let mut rest = requests;
        while let [request, others @ ..] = rest
            && let Payload::Data(Data::One(buffer)) = &request.payload
            && request.op == self.op
            && request.blocks == self.blocks
            && buffer.len() as u32 == self.bytes
            && request.lba <= self.lba_max
            && request.issued_ticks != 0
        {
            addresses |= buffer.as_ptr().addr();
            read_only |= u8::from(!buffer.is_writable());
            rest = others;
        }
        (self.addresses, self.read_only) = (addresses, read_only != 0);
        requests.len() - rest.len()
    }
}

impl RequestLimits {
    #[inline]
    pub(super) fn shape(&self, first: &Request, first_is_valid: bool) -> RequestShape {
        let (op, blocks) = (first.op, first.blocks);
        let bytes = first.data().and_then(|data| u32::try_from(data.len()).ok());
        match bytes {
            Some(bytes) if first_is_valid && op.has_data() && self.io.boundary_blocks == 0 => {
                let lba_max = self.blocks - u64::from(blocks);
                RequestShape { op, blocks, bytes, lba_max, addresses: 0, read_only: false }
            }
            // Matches no request: no buffer has this length.
            _ => RequestShape { op, blocks, bytes: 0, lba_max: 0, addresses: 0, read_only: false },
        }
    }

    /// Whether a request is valid and needs nothing of the layer: it may go to the module directly.
    ///
    /// Not inlined: in the loop over a batch it would cost the registers of the comparison that nearly every request
    /// takes instead.
    #[inline(never)]
    pub(super) fn is_fast_path(&self, request: &Request) -> bool {
        let op = request.op;
        let length = u64::from(request.blocks);
        // An end that overflows lies beyond every device.
        let end = request.lba.saturating_add(length);
        if !self.allows(op) {
            return false;
        }
        match &request.payload {
            Payload::Data(data) if op.has_data() => {
                end <= self.blocks
                    && data.len() as u64 == length * self.block_size
                    && length > 0
                    && (op != Op::Read || data.is_writable())
                    && self.io.allow(request, data)
            }
            Payload::Registered(pages) => {
                self.takes_registered
                    && matches!(op, Op::Read | Op::Write)
                    && end <= self.blocks
                    && u64::from(pages.bytes) == length * self.block_size
                    && length > 0
            }
            Payload::Data(_) | Payload::None => {
                !op.has_range() || (!op.has_data() && end <= self.blocks && length > 0)
            }
            _ => false,
        }
    }

    #[inline]
    pub(super) fn allows(&self, op: Op) -> bool {
        self.allowed_ops >> op.index() & 1 != 0
    }

    /// Whether a request inside the device has the payload that it needs, though not on the fast path.
    fn is_complete(&self, request: &Request) -> bool {
        let bytes = u64::from(request.blocks) * self.block_size;
        match &request.payload {
            Payload::Data(data) if data.len() as u64 == bytes => match request.op {
                Op::Read => data.is_writable(),
                Op::Write | Op::Compare => true,
                _ => false,
            },
            Payload::CopySource(lba) => {
                request.op == Op::Copy && lba.saturating_add(request.blocks.into()) <= self.blocks
            }
            Payload::None => matches!(request.op, Op::SeekData | Op::SeekHole),
            _ => false,
        }
    }
}

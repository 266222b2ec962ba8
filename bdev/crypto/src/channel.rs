//! The I/O of an encrypted device on one core.

use std::collections::VecDeque;
use std::sync::Arc;

use accel::{AccelChannel, AccelFailure, AccelOp, CryptoKey, Effect};
use bdev::stacking::BaseChannel;
use bdev::{Completion, Request};
use block_io::{Op, Payload, RequestFlags, Status, Tag, is_zero};
use dma::{Buffer, Data, Pool};
use os::clock::Clock;
use slots::{Slab, Slot};

use crate::runs::{copy, for_each_run};

/// Bytes that a request without a private copy is written in, piece by piece, if there is memory.
const PIECE_BYTES: usize = 128 << 10;
/// Bytes of the memory that each channel keeps, so that it is never without.
const RESERVE_BYTES: usize = 16 << 10;
/// When a channel that found no memory for its reserve looks again.
const RETRY_NS: u64 = 1_000_000;

/// Requests reach the base as they are, but writes, whose data is replaced by an encrypted copy. Zeroes to be
/// written, and writes for which there is no memory, wait for their turn and go piece by piece through one
/// buffer.
///
/// Writes have tags of their own at the base; others keep the caller's.
pub(crate) struct CryptoChannel {
    base: BaseChannel,
    accel: AccelChannel,
    key: Arc<CryptoKey>,
    block_bytes: usize,
    pool: Pool,
    clock: Clock,
    /// Writes at the base.
    writes: Slab<WriteAtBase>,
    sequential: VecDeque<Sequential>,
    /// Memory of the pieces, if none of them is at the base.
    reserve: Option<Buffer>,
    /// A piece is at the base.
    piece_in_flight: bool,
    completed: Vec<Completion>,
    /// Completions of the base; empty between polls.
    at_base: Vec<Completion>,
    scratch: Vec<u8>,
}

/// What comes back with the completion of a write of the base.
enum WriteAtBase {
    /// The caller's request.
    Whole { tag: Tag, flags: RequestFlags, payload: Payload<Data> },
    /// A piece of the first of those that go piece by piece; whether its memory is the reserve.
    Piece { is_reserve: bool, blocks: u32 },
}

/// A request that is written piece by piece.
struct Sequential {
    request: Request,
    done_blocks: u32,
}

impl CryptoChannel {
    pub(crate) fn new(
        base: BaseChannel,
        core: &reactor::Core,
        accel: AccelChannel,
        key: Arc<CryptoKey>,
        block_bytes: usize,
        depth: u32,
    ) -> CryptoChannel {
        let mut channel = CryptoChannel {
            base,
            accel,
            key,
            block_bytes,
            pool: core.pool().clone(),
            clock: core.clock().clone(),
            // A piece beside the requests that the layer admits.
            writes: Slab::with_capacity(depth.saturating_add(1)),
            sequential: VecDeque::new(),
            reserve: None,
            piece_in_flight: false,
            completed: Vec::new(),
            at_base: Vec::new(),
            scratch: Vec::new(),
        };
        channel.refill_reserve();
        channel
    }

    fn refill_reserve(&mut self) {
        if self.reserve.is_none() {
            self.reserve = self.pool.take(RESERVE_BYTES.max(self.block_bytes));
        }
    }

    fn accept(&mut self, request: Request) {
        match request.op {
            Op::Write => self.write(request),
            Op::WriteZeroes => self.sequential.push_back(Sequential { request, done_blocks: 0 }),
            // Flushes and resets have no data; the base has unallocated blocks where the device has.
            _ => self.base.push(request),
        }
    }

    /// Encrypts a write, and passes it on.
    fn write(&mut self, mut request: Request) {
        let Payload::Data(data) = &request.payload else {
            // The device has no metadata, and takes no pages of others.
            return self.completed.push(request.complete(Status::INVALID_FIELD.do_not_retry()));
        };
        let Some(mut private) = self.pool.take_data(data.len()) else {
            let reserve_bytes = RESERVE_BYTES.max(self.block_bytes);
            if request.flags.contains(RequestFlags::ATOMIC) && data.len() > reserve_bytes {
                // It cannot be divided; a shorter one is one piece in any case.
                return self.completed.push(request.complete(Status::COMMAND_INTERRUPTED));
            }
            return self.sequential.push_back(Sequential { request, done_blocks: 0 });
        };
        if self.encrypt(Some(data), &mut private, request.lba).is_err() {
            return self.completed.push(request.complete(Status::INTERNAL_ERROR));
        }
        let payload = std::mem::replace(&mut request.payload, Payload::Data(private));
        let at_base = WriteAtBase::Whole { tag: request.tag, flags: request.flags, payload };
        self.submit_write(request, at_base);
    }

    fn submit_write(&mut self, mut request: Request, at_base: WriteAtBase) {
        // With its new tag the base would take it for a request of its own layer.
        request.flags -= RequestFlags::INTERNAL;
        match self.writes.insert(at_base) {
            Ok(slot) => {
                request.tag = Tag(slot.to_bits());
                self.base.push(request);
            }
            Err(_) => unreachable!("the layer admits no more than the depth of {}", self.writes.capacity()),
        }
    }

    /// Encrypts `from`, or what `to` has, to `to`, which is memory of the channel's own.
    fn encrypt(&mut self, from: Option<&Data>, to: &mut Data, lba: u64) -> Result<(), AccelFailure> {
        let effect = self.accel.begin(AccelOp::Encrypt, to.len() as u64)?;
        let (key, block_bytes) = (&self.key, self.block_bytes);
        match (from.and_then(Data::single), to.single_mut()) {
            (Some(from), Some(to)) if !from.is_external() => {
                key.encrypt_to(to.as_mut_slice(), from.as_slice(), block_bytes, lba);
            }
            _ => {
                if let Some(from) = from {
                    copy(to, from);
                }
                for_each_run(to, block_bytes, &mut self.scratch, |block, run| {
                    key.encrypt(run, block_bytes, lba + block);
                });
            }
        }
        corrupt(effect, to);
        Ok(())
    }

    /// Decrypts the data of a read in place. Blocks of zeroes stay: they were never written, or unmapped.
    fn decrypt(&mut self, request: &mut Request) -> Status {
        let Payload::Data(data) = &mut request.payload else { return Status::INTERNAL_ERROR };
        let Ok(effect) = self.accel.begin(AccelOp::Decrypt, data.len() as u64) else {
            // What the base has is not for the caller.
            data.clear();
            return Status::INTERNAL_ERROR;
        };
        let (key, block_bytes, lba) = (&self.key, self.block_bytes, request.lba);
        for_each_run(data, block_bytes, &mut self.scratch, |first, run| {
            decrypt_run(key, run, block_bytes, lba + first);
        });
        corrupt(effect, data);
        Status::SUCCESS
    }

    /// Memory for `bytes` bytes: all, or the reserve, which may have less. Whether it is that.
    fn take_memory(&mut self, bytes: usize) -> Option<(Buffer, bool)> {
        if let Some(buffer) = self.pool.take(bytes) {
            return Some((buffer, false));
        }
        self.refill_reserve();
        self.reserve.take().map(|buffer| (buffer, true))
    }

    /// Starts the next piece, if none is at the base and there is memory.
    fn advance(&mut self) {
        let piece_bytes = PIECE_BYTES.max(self.block_bytes) / self.block_bytes * self.block_bytes;
        while !self.piece_in_flight
            && let Some(first) = self.sequential.front()
        {
            let left_bytes = (first.request.blocks - first.done_blocks) as usize * self.block_bytes;
            let wanted = left_bytes.min(piece_bytes);
            let Some((mut buffer, is_reserve)) = self.take_memory(wanted) else { return };
            let Some(Sequential { request, done_blocks }) = self.sequential.front() else { return };
            buffer.resize(buffer.capacity().min(wanted) / self.block_bytes * self.block_bytes);
            let blocks = (buffer.len() / self.block_bytes) as u32;
            let lba = request.lba + u64::from(*done_blocks);
            let mut piece = Request::new(Tag(0), Op::Write, lba, blocks);
            piece.flags = request.flags & (RequestFlags::FUA | RequestFlags::ATOMIC);
            (piece.flow, piece.issued_ticks) = (request.flow, request.issued_ticks);
            match &request.payload {
                Payload::Data(data) => {
                    data.copy_to(*done_blocks as usize * self.block_bytes, buffer.as_mut_slice());
                }
                _ => buffer.clear(),
            }
            let mut private = Data::from(buffer);
            if self.encrypt(None, &mut private, lba).is_err() {
                self.return_memory(private, is_reserve);
                self.end_sequential(Status::INTERNAL_ERROR);
                continue;
            }
            piece.payload = Payload::Data(private);
            self.piece_in_flight = true;
            self.submit_write(piece, WriteAtBase::Piece { is_reserve, blocks });
        }
    }

    fn return_memory(&mut self, memory: Data, is_reserve: bool) {
        if is_reserve && let Ok(mut buffer) = memory.into_single() {
            buffer.resize(buffer.capacity());
            self.reserve = Some(buffer);
        }
    }

    fn end_sequential(&mut self, status: Status) {
        if let Some(ended) = self.sequential.pop_front() {
            self.completed.push(ended.request.complete(status));
        }
    }

    fn complete(&mut self, completion: Completion) {
        let status = completion.status();
        let mut request = completion.into_request();
        match request.op {
            Op::Read if status.is_success() => {
                let status = self.decrypt(&mut request);
                self.completed.push(request.complete(status));
            }
            Op::Write => self.complete_write(request, status),
            _ => self.completed.push(request.complete(status)),
        }
    }

    fn complete_write(&mut self, mut request: Request, status: Status) {
        let slot = Slot::from_bits(request.tag.0);
        match self.writes.remove(slot) {
            Some(WriteAtBase::Whole { tag, flags, payload }) => {
                (request.tag, request.flags, request.payload) = (tag, flags, payload);
                self.completed.push(request.complete(status));
            }
            Some(WriteAtBase::Piece { is_reserve, blocks }) => {
                self.piece_in_flight = false;
                if let Some(memory) = request.take_data() {
                    self.return_memory(memory, is_reserve);
                }
                let Some(first) = self.sequential.front_mut() else { return };
                first.done_blocks += blocks;
                if !status.is_success() || first.done_blocks == first.request.blocks {
                    self.end_sequential(status);
                }
            }
            None => unreachable!("slot {slot:?} completed by the base and is not in the table"),
        }
    }
}

/// Decrypts whole blocks, but those of zeroes.
fn decrypt_run(key: &CryptoKey, run: &mut [u8], block_bytes: usize, lba: u64) {
    let blocks = run.len() / block_bytes;
    let mut begin = 0;
    for block in 0..=blocks {
        let at = block * block_bytes;
        let ends = block == blocks || is_zero(&run[at..at + block_bytes]);
        if ends && begin < at {
            key.decrypt(&mut run[begin..at], block_bytes, lba + (begin / block_bytes) as u64);
        }
        if ends {
            begin = at + block_bytes;
        }
    }
}

/// A fault of the engine: one bit of the result is wrong.
fn corrupt(effect: Effect, data: &mut Data) {
    if effect == Effect::Corrupt {
        let mut byte = [0];
        data.copy_to(0, &mut byte);
        data.copy_from(0, &[byte[0] ^ 1]);
    }
}

impl block_io::Channel for CryptoChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            self.accept(request);
        }
        if !self.sequential.is_empty() {
            self.advance();
        }
        self.base.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let mut completions = std::mem::take(&mut self.at_base);
        completions.extend(self.base.poll());
        completions.drain(..).for_each(|completion| self.complete(completion));
        self.at_base = completions;
        if !self.sequential.is_empty() {
            self.advance();
            self.base.submit();
        }
        sink.append(&mut self.completed);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.completed.is_empty() {
            return Some(0);
        }
        let waits = !self.sequential.is_empty() && !self.piece_in_flight;
        let retry = waits.then(|| self.clock.now_ns() + RETRY_NS);
        [self.base.deadline(), retry].into_iter().flatten().min()
    }
}

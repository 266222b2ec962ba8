//! What a ring's entries say: reads and writes of files, or NVMe commands.

use io_uring::{cqueue, opcode, squeue};
use memory::Buffer;
use ring::{Op, Request};

use super::{Place, UringConfig};
use crate::requests::RingFile;
use crate::sqe::{self, Memory, with_file};

/// What a ring's entries say. There are two: [`Transfers`] and [`Commands`].
pub trait Dialect: sealed::Entries {}

mod sealed {
    use super::{Buffer, Place, Request, RingFile, UringConfig, cqueue, squeue};

    /// Sealed, as what an entry says must be true: the memory that it names is the request's.
    pub trait Entries {
        type Sqe: squeue::EntryMarker;
        type Cqe: cqueue::EntryMarker;
        /// Whether buffers are registered one by one, and named as registered only as a whole.
        const WHOLE_BUFFERS: bool;

        fn new(config: &UringConfig) -> Self;

        /// Describes a request, whose buffer stays where it is until it completes. Where it begins and how
        /// many bytes of the buffer may be named is its span.
        fn describe<F: RingFile>(
            &mut self,
            request: &Request<Buffer>,
            span: (u64, u32),
            place: &Place<F>,
        ) -> Self::Sqe;

        /// Its tag and how it ended.
        fn outcome(entry: &Self::Cqe) -> (u64, i64);

        /// Gives up for good what entries may still point to.
        fn forget(&mut self) {}
    }
}

/// Reads, writes and flushes of files. What is neither is a no-operation, whose result is 0.
pub struct Transfers {
    data_sync: bool,
    /// One for each tag, where I/O is vectored; the kernel may read it until the request completes.
    vectors: Box<[libc::iovec]>,
}

impl Dialect for Transfers {}

impl sealed::Entries for Transfers {
    type Sqe = squeue::Entry;
    type Cqe = cqueue::Entry;
    const WHOLE_BUFFERS: bool = false;

    fn new(config: &UringConfig) -> Transfers {
        let vector = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let count = if config.nonvectored { 0 } else { config.depth as usize };
        Transfers { data_sync: config.data_sync, vectors: vec![vector; count].into() }
    }

    #[inline]
    fn describe<F: RingFile>(
        &mut self,
        request: &Request<Buffer>,
        (offset, bytes): (u64, u32),
        place: &Place<F>,
    ) -> squeue::Entry {
        let entry = match (request.op, &request.buffer) {
            (Op::Read | Op::Write, Some(buffer)) => {
                let (start, registered) = (buffer.as_ptr(), place.registered(buffer));
                let file = place.handle(request);
                let memory = Memory { start, bytes, registered };
                match (self.vectors.is_empty() || registered.is_some(), request.op) {
                    (true, Op::Read) => sqe::read(file, memory, offset),
                    (true, _) => sqe::write(file, memory, offset, 0),
                    (false, op) => {
                        let vector = &mut self.vectors[request.tag.0 as usize];
                        *vector = libc::iovec { iov_base: start.cast(), iov_len: bytes as usize };
                        let vector = &raw const *vector;
                        match op {
                            Op::Read => with_file!(file, file => {
                                opcode::Readv::new(file, vector, 1).offset(offset).build()
                            }),
                            _ => with_file!(file, file => {
                                opcode::Writev::new(file, vector, 1).offset(offset).build()
                            }),
                        }
                    }
                }
            }
            (Op::Flush, _) => sqe::sync(place.handle(request), self.data_sync),
            _ => opcode::Nop::new().build(),
        };
        entry.user_data(request.tag.0)
    }

    #[inline]
    fn outcome(entry: &cqueue::Entry) -> (u64, i64) {
        (entry.user_data(), i64::from(entry.result()))
    }

    fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.vectors));
    }
}

/// NVMe reads, writes and flushes to a namespace's generic device (`/dev/ng0n1`), past the block layer.
///
/// What is none of these is a flush. A result is 0, a negative error number, or the status field of the
/// completion queue entry. The device believes [`RingFile::block_bytes`]: it is to be what the namespace
/// says, as the device and not the kernel counts the blocks of a command.
pub struct Commands(());

/// `NVME_URING_CMD_IO` of `linux/nvme_ioctl.h`: `_IOWR('N', 0x80, struct nvme_uring_cmd)`, 72 bytes.
const URING_CMD_IO: u32 = 3 << 30 | 72 << 16 | 0x4e << 8 | 0x80;
/// The number of the kernel's header, written down once more.
const _: () = assert!(URING_CMD_IO == 0xc048_4e80);
const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;

impl Dialect for Commands {}

impl sealed::Entries for Commands {
    type Sqe = squeue::Entry128;
    type Cqe = cqueue::Entry32;
    // Linux 6.1 takes every page from the command's first to the end of what is registered as the command's, and
    // answers EINVAL where they hold more bytes than the command has, or are more than the device has segments.
    const WHOLE_BUFFERS: bool = true;

    fn new(_: &UringConfig) -> Commands {
        Commands(())
    }

    #[inline]
    fn describe<F: RingFile>(
        &mut self,
        request: &Request<Buffer>,
        (_, bytes): (u64, u32),
        place: &Place<F>,
    ) -> squeue::Entry128 {
        // `struct nvme_uring_cmd`: opcode at 0, nsid 4, addr 24, data_len 36, cdw10 40, cdw11 44, cdw12 48.
        let mut command = [0u8; 80];
        let mut put = |at: usize, bytes: &[u8]| command[at..at + bytes.len()].copy_from_slice(bytes);
        put(4, &place.file(request).namespace().to_le_bytes());
        let mut registered = None;
        match (request.op, &request.buffer) {
            (Op::Read | Op::Write, Some(buffer)) => {
                put(0, &[if request.op == Op::Read { READ } else { WRITE }]);
                put(24, &(buffer.as_ptr() as u64).to_le_bytes());
                put(36, &bytes.to_le_bytes());
                put(40, &request.lba.to_le_bytes());
                // Number of logical blocks, 0's based (NVM Command Set Specification 1.0, 3.2.4).
                put(48, &(request.blocks.saturating_sub(1) & 0xffff).to_le_bytes());
                registered = place.registered_whole(request, bytes);
            }
            _ => put(0, &[FLUSH]),
        }
        let entry = with_file!(place.handle(request), file => {
            opcode::UringCmd80::new(file, URING_CMD_IO).cmd(command).buf_index(registered).build()
        });
        entry.user_data(request.tag.0)
    }

    #[inline]
    fn outcome(entry: &cqueue::Entry32) -> (u64, i64) {
        (entry.user_data(), i64::from(entry.result()))
    }
}

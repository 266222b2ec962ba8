//! Formats of submission queue entries: file I/O, or NVMe passthrough commands.

use block_io::{Op, Request, RequestFlags};
use dma::Data;
use io_uring::{cqueue, opcode, squeue};

use super::{QueueResources, UringQueueConfig};
use crate::requests::BlockFile;
use crate::sqe::{self, SqeMemory, with_file};
use crate::vectors::IoVectors;

/// The format of a queue's entries: [`FileIo`] or [`NvmePassthrough`].
pub trait SqeFormat: sealed::EntryFormat {}

mod sealed {
    use super::{BlockFile, Data, QueueResources, Request, UringQueueConfig, cqueue, squeue};

    /// Sealed, because safety depends on it: an entry may point only to memory that its request owns.
    pub trait EntryFormat {
        type Sqe: squeue::EntryMarker + From<squeue::Entry>;
        type Cqe: cqueue::EntryMarker;
        /// Whether buffers are registered individually, and used as registered only as a whole.
        const REGISTERS_EACH_BUFFER: bool;

        fn new(config: &UringQueueConfig) -> Self;

        /// Encodes a request, whose buffer stays at its address until it completes. `range` is its offset in the file
        /// and the number of bytes of the buffer that the entry may use.
        fn encode<F: BlockFile>(
            &mut self,
            request: &Request<Data>,
            range: (u64, u32),
            resources: &QueueResources<F>,
        ) -> Self::Sqe;

        /// The tag and the result of a completion.
        fn decode(entry: &Self::Cqe) -> (u64, i64);

        /// Leaks the memory that entries may still point to.
        fn leak(&mut self) {}
    }
}

/// Reads, writes and flushes of files. Any other operation is a no-op with result 0.
pub struct FileIo {
    data_sync: bool,
    nonvectored: bool,
    /// One list per tag for vectored I/O; the kernel may read it until the request completes.
    vectors: Box<[IoVectors]>,
}

impl SqeFormat for FileIo {}

impl sealed::EntryFormat for FileIo {
    type Sqe = squeue::Entry;
    type Cqe = cqueue::Entry;
    const REGISTERS_EACH_BUFFER: bool = false;

    fn new(config: &UringQueueConfig) -> FileIo {
        let (data_sync, nonvectored) = (config.data_sync, config.nonvectored);
        FileIo { data_sync, nonvectored, vectors: vectors_per_tag(config) }
    }

    #[inline]
    fn encode<F: BlockFile>(
        &mut self,
        request: &Request<Data>,
        (offset, bytes): (u64, u32),
        resources: &QueueResources<F>,
    ) -> squeue::Entry {
        let entry = match (request.op, request.data()) {
            (Op::Read | Op::Write, Some(data)) => {
                let registered = data.single().and_then(|buffer| resources.registered_chunk(buffer));
                let memory = match data {
                    Data::One(buffer) if self.nonvectored || registered.is_some() => {
                        SqeMemory::Contiguous { start: buffer.as_ptr(), bytes, registered }
                    }
                    _ => {
                        let vectors = &mut self.vectors[request.tag.0 as usize];
                        let (list, count) = match data {
                            Data::One(buffer) => vectors.describe_one(buffer, bytes),
                            Data::Many(_) => vectors.describe(data.slices(), 0, bytes as usize),
                        };
                        SqeMemory::Vectors(list, count)
                    }
                };
                let (file, priority) = (resources.handle(request), resources.priority(request));
                match request.op {
                    Op::Read => sqe::read(file, memory, offset, priority),
                    _ => {
                        let durable = request.flags.contains(RequestFlags::FUA);
                        let flags = if durable { libc::RWF_DSYNC } else { 0 };
                        sqe::write(file, memory, offset, flags, priority)
                    }
                }
            }
            (Op::Flush, _) => sqe::sync(resources.handle(request), self.data_sync),
            _ => opcode::Nop::new().build(),
        };
        entry.user_data(request.tag.0)
    }

    #[inline]
    fn decode(entry: &cqueue::Entry) -> (u64, i64) {
        (entry.user_data(), i64::from(entry.result()))
    }

    fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.vectors));
    }
}

fn vectors_per_tag(config: &UringQueueConfig) -> Box<[IoVectors]> {
    (0..config.depth).map(|_| IoVectors::default()).collect()
}

/// NVMe reads, writes and flushes to a namespace's generic device (`/dev/ng0n1`), which bypass the block layer.
///
/// Any other operation is a flush. A result is 0, a negative error number, or the status field of the completion
/// queue entry. [`BlockFile::block_bytes`] must be the LBA size of the namespace, because the device and not the
/// kernel interprets the number of blocks of a command.
pub struct NvmePassthrough {
    /// One list per tag; the kernel may read it until the command completes.
    vectors: Box<[IoVectors]>,
}

/// `NVME_URING_CMD_IO` of `linux/nvme_ioctl.h`: `_IOWR('N', 0x80, struct nvme_uring_cmd)`, 72 bytes.
const URING_CMD_IO: u32 = 3 << 30 | 72 << 16 | 0x4e << 8 | 0x80;
/// `NVME_URING_CMD_IO_VEC`: the same with I/O vectors, `addr` and `data_len` being their address and number.
const URING_CMD_IO_VEC: u32 = URING_CMD_IO + 1;
/// The value in the kernel's header.
const _: () = assert!(URING_CMD_IO == 0xc048_4e80);
const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;

impl SqeFormat for NvmePassthrough {}

impl sealed::EntryFormat for NvmePassthrough {
    type Sqe = squeue::Entry128;
    type Cqe = cqueue::Entry32;
    // Linux 6.1 maps every page from the command's first to the end of the registered buffer for the command, and
    // fails with EINVAL if they have more bytes than the command, or exceed the device's segment limit.
    const REGISTERS_EACH_BUFFER: bool = true;

    fn new(config: &UringQueueConfig) -> NvmePassthrough {
        NvmePassthrough { vectors: vectors_per_tag(config) }
    }

    #[inline]
    fn encode<F: BlockFile>(
        &mut self,
        request: &Request<Data>,
        (_, bytes): (u64, u32),
        resources: &QueueResources<F>,
    ) -> squeue::Entry128 {
        // `struct nvme_uring_cmd`: opcode at 0, nsid 4, addr 24, data_len 36, cdw10 40, cdw11 44, cdw12 48.
        let mut command = [0u8; 80];
        let mut put = |at: usize, bytes: &[u8]| command[at..at + bytes.len()].copy_from_slice(bytes);
        put(4, &resources.file(request).namespace_id().to_le_bytes());
        let (mut registered, mut operation) = (None, URING_CMD_IO);
        match (request.op, request.data()) {
            (Op::Read | Op::Write, Some(data)) => {
                put(0, &[if request.op == Op::Read { READ } else { WRITE }]);
                let (address, length) = match data {
                    Data::One(buffer) => {
                        registered = resources.registered_buffer(request, bytes);
                        (buffer.as_ptr().expose_provenance(), bytes)
                    }
                    Data::Many(_) => {
                        let vectors = &mut self.vectors[request.tag.0 as usize];
                        let (list, count) = vectors.describe(data.slices(), 0, bytes as usize);
                        operation = URING_CMD_IO_VEC;
                        (list.expose_provenance(), count)
                    }
                };
                put(24, &(address as u64).to_le_bytes());
                put(36, &length.to_le_bytes());
                put(40, &request.lba.to_le_bytes());
                // Number of logical blocks, 0's based (NVM Command Set Specification 1.0, 3.2.4).
                let fua = u32::from(request.flags.contains(RequestFlags::FUA)) << 30;
                put(48, &(request.blocks.saturating_sub(1) & 0xffff | fua).to_le_bytes());
            }
            _ => put(0, &[FLUSH]),
        }
        let entry = with_file!(resources.handle(request), file => {
            opcode::UringCmd80::new(file, operation).cmd(command).buf_index(registered).build()
        });
        entry.user_data(request.tag.0)
    }

    #[inline]
    fn decode(entry: &cqueue::Entry32) -> (u64, i64) {
        (entry.user_data(), i64::from(entry.result()))
    }

    fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.vectors));
    }
}

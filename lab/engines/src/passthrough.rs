//! `io_uring_cmd`: NVMe commands to a namespace's generic device, past the block layer.

use io_uring::{cqueue, opcode, squeue, types};
use memory::Buffer;
use ring::{Channel, Completion, Op, Request, Status};

use crate::engine::{Slots, drain, status_of};
use crate::uring::{Place, Ring, Shape, with_fd};
use crate::{Config, Engine, File, OpenError};

/// `NVME_URING_CMD_IO` of `linux/nvme_ioctl.h`: `_IOWR('N', 0x80, struct nvme_uring_cmd)`, 72 bytes.
const URING_CMD_IO: u32 = 3 << 30 | 72 << 16 | 0x4e << 8 | 0x80;
const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;

struct Commands;

impl Shape for Commands {
    type Sqe = squeue::Entry128;
    type Cqe = cqueue::Entry32;

    fn describe(&mut self, request: &Request<Buffer>, place: &Place) -> squeue::Entry128 {
        let file = &place.files[request.flow as usize];
        // `struct nvme_uring_cmd`: opcode at 0, nsid 4, addr 24, data_len 36, cdw10 40, cdw11 44, cdw12 48.
        let mut command = [0u8; 80];
        let mut put = |at: usize, bytes: &[u8]| command[at..at + bytes.len()].copy_from_slice(bytes);
        put(4, &file.namespace().to_le_bytes());
        let mut registered = None;
        match (request.op, &request.buffer) {
            (Op::Read | Op::Write, Some(buffer)) => {
                let bytes = request.blocks * file.block_bytes();
                assert!(bytes as usize <= buffer.len(), "{bytes} bytes in a buffer of {}", buffer.len());
                put(0, &[if request.op == Op::Read { READ } else { WRITE }]);
                put(24, &(buffer.as_ptr() as u64).to_le_bytes());
                put(36, &bytes.to_le_bytes());
                put(40, &request.lba.to_le_bytes());
                // Number of logical blocks, 0's based (NVM Command Set Specification 1.0, 3.2.4).
                put(48, &(request.blocks.saturating_sub(1) & 0xffff).to_le_bytes());
                registered = place.registered(buffer);
            }
            _ => put(0, &[FLUSH]),
        }
        let entry = with_fd!(place, request, fd => {
            opcode::UringCmd80::new(fd, URING_CMD_IO).cmd(command).buf_index(registered).build()
        });
        entry.user_data(request.tag.0)
    }

    fn outcome(&self, entry: &cqueue::Entry32, _: &Slots) -> (u64, i64) {
        (entry.user_data(), i64::from(entry.result()))
    }

    /// The result is 0, a negative error number, or the status field of the completion queue entry.
    fn status(&self, op: Op, result: i64, _: u64) -> Status {
        match (op, result) {
            (Op::Read | Op::Write | Op::Flush, 0) => Status::SUCCESS,
            (Op::Read | Op::Write | Op::Flush, 1..) => Status::from_field(result as u16),
            (Op::Read | Op::Write | Op::Flush, _) => status_of(op, result, 0),
            _ => Status::INVALID_OPCODE,
        }
    }
}

/// Commands to `/dev/ngXnY`, in any of io_uring's modes.
pub struct Passthrough(Ring<Commands>);

impl Passthrough {
    pub(crate) fn open(
        config: &Config,
        files: Vec<File>,
        requests: &[Request<Buffer>],
    ) -> Result<Passthrough, OpenError> {
        Ring::open(config, files, requests, Commands).map(Passthrough)
    }
}

impl Channel for Passthrough {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        self.0.submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        self.0.poll(sink)
    }
}

impl Engine for Passthrough {
    fn wait(&mut self, timeout_ns: u64) {
        self.0.wait(timeout_ns);
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn submission_thread(&self) -> Option<u32> {
        self.0.submission_thread()
    }
}

impl Drop for Passthrough {
    fn drop(&mut self) {
        if !drain(self) {
            self.0.forget();
        }
    }
}

/// The numbers of the kernel's header, written down once more.
const _: () = assert!(URING_CMD_IO == 0xc048_4e80);

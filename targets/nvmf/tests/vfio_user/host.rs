//! The host's side of a vfio-user controller: memory, queues and doorbells, without a driver.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use block_io::Status;
use dma::SharedRegion;
use rustix::fs::MemfdFlags;
use vfio_user::{BAR0, ClientConfig, VfioUserClient};
use wire_nvme::doorbell::AdminQueueAttributes;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::queue::{CreateIoCq, CreateIoSq, DeleteQueue};
use wire_nvme::registers::offset;
use wire_nvme::{Cqe, DataPointer, Sqe, admin, io};

/// I/O virtual address of the host's memory.
pub(crate) const IOVA: u64 = 0x4000_0000;
/// Bytes of the host's memory.
pub(crate) const MEMORY: u64 = 8 << 20;
/// Offset of data buffers; the queues are below.
pub(crate) const DATA: u64 = 1 << 20;

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) struct VfioUserTestHost {
    pub(crate) client: VfioUserClient,
    pub(crate) memory: SharedRegion,
    pub(crate) file: OwnedFd,
    /// `None` if doorbells are written by message.
    doorbells: Option<SharedRegion>,
    pub(crate) admin: HostQueuePair,
    next_cid: u16,
}

/// A queue pair in the host's memory.
pub(crate) struct HostQueuePair {
    pub(crate) qid: u16,
    pub(crate) entries: u32,
    pub(crate) submission: u64,
    pub(crate) completion: u64,
    pub(crate) tail: u32,
    pub(crate) head: u32,
    phase: bool,
}

impl HostQueuePair {
    /// A placeholder for a queue that is moved out temporarily.
    pub(crate) fn placeholder() -> HostQueuePair {
        HostQueuePair::new(0, 2, 0, 0)
    }

    fn new(qid: u16, entries: u32, submission: u64, completion: u64) -> HostQueuePair {
        HostQueuePair { qid, entries, submission, completion, tail: 0, head: 0, phase: true }
    }
}

pub(crate) fn memory_file(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("host", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}

impl VfioUserTestHost {
    /// Connects and maps memory, without enabling the controller.
    pub(crate) fn attach(path: &Path) -> VfioUserTestHost {
        // The target serves one client at a time; the next waits in the backlog.
        let client =
            VfioUserClient::connect(path, &ClientConfig { timeout: TIMEOUT, ..ClientConfig::default() })
                .unwrap();
        let file = memory_file(MEMORY);
        let memory = SharedRegion::map(file.as_fd(), 0, MEMORY, true).unwrap();
        client.dma_map_file(IOVA, file.as_fd(), 0, MEMORY, true).unwrap();
        let trapped = client.regions()[0].areas.is_empty();
        let doorbells = (!trapped).then(|| client.map_region(BAR0, 0x1000, 0x1000).unwrap());
        let admin = HostQueuePair::new(0, 32, 0, 0x1000);
        VfioUserTestHost { client, memory, file, doorbells, admin, next_cid: 1 }
    }

    /// Connects and enables the controller.
    pub(crate) fn connect(path: &Path) -> VfioUserTestHost {
        let mut host = VfioUserTestHost::attach(path);
        host.enable();
        host
    }

    pub(crate) fn read(&self, at: u32) -> u32 {
        self.client.read_u32(BAR0, at.into()).unwrap()
    }

    pub(crate) fn write(&self, at: u32, value: u32) {
        self.client.write_u32(BAR0, at.into(), value).unwrap();
    }

    pub(crate) fn enable(&mut self) {
        self.memory.zero(0, DATA);
        self.admin = HostQueuePair::new(0, 32, 0, 0x1000);
        let attributes = AdminQueueAttributes { submission_entries: 32, completion_entries: 32 };
        self.write(offset::AQA, attributes.encode());
        self.client.write_u64(BAR0, offset::ASQ.into(), IOVA + self.admin.submission).unwrap();
        self.client.write_u64(BAR0, offset::ACQ.into(), IOVA + self.admin.completion).unwrap();
        self.write(offset::CC, 0x0046_0001);
        self.wait_status(1, 1);
    }

    /// Waits until CSTS under `mask` is `value`.
    pub(crate) fn wait_status(&self, mask: u32, value: u32) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let status = self.read(offset::CSTS);
            if status & mask == value {
                return;
            }
            assert!(Instant::now() < deadline, "CSTS is {status:#x}");
        }
    }

    pub(crate) fn cid(&mut self) -> u16 {
        self.next_cid = self.next_cid.wrapping_add(1);
        self.next_cid
    }

    /// Writes a submission queue entry without ringing the doorbell.
    pub(crate) fn push_sqe(&self, queue: &mut HostQueuePair, sqe: &Sqe) {
        self.memory.write(queue.submission + u64::from(queue.tail) * 64, &sqe.to_bytes());
        queue.tail = (queue.tail + 1) % queue.entries;
    }

    pub(crate) fn ring_doorbell(&self, queue: &HostQueuePair) {
        self.doorbell(u32::from(queue.qid) * 8, queue.tail);
    }

    /// Writes a doorbell.
    fn doorbell(&self, at: u32, value: u32) {
        match &self.doorbells {
            Some(doorbells) => doorbells.store_u32(at.into(), value),
            None => self.write(0x1000 + at, value),
        }
    }

    /// The mapped doorbells.
    pub(crate) fn mapped_doorbells(&self) -> &SharedRegion {
        self.doorbells.as_ref().unwrap()
    }

    /// The next completion, if there is one; rings the head doorbell.
    pub(crate) fn poll(&self, queue: &mut HostQueuePair) -> Option<Cqe> {
        let cqe = self.take_completion(queue)?;
        self.doorbell(u32::from(queue.qid) * 8 + 4, queue.head);
        Some(cqe)
    }

    /// The next completion, if there is one; does not ring the head doorbell.
    fn take_completion(&self, queue: &mut HostQueuePair) -> Option<Cqe> {
        let at = queue.completion + u64::from(queue.head) * 16;
        let high = self.memory.load_u64(at + 8);
        if (high >> 48 & 1 == 1) != queue.phase {
            return None;
        }
        let mut bytes = [0; 16];
        self.memory.read(at, &mut bytes);
        queue.head += 1;
        if queue.head == queue.entries {
            (queue.head, queue.phase) = (0, !queue.phase);
        }
        Some(Cqe::decode(&bytes))
    }

    pub(crate) fn wait(&self, queue: &mut HostQueuePair) -> Cqe {
        let cqe = self.wait_without_doorbell(queue);
        self.doorbell(u32::from(queue.qid) * 8 + 4, queue.head);
        cqe
    }

    /// Waits for a completion; does not ring the head doorbell.
    pub(crate) fn wait_without_doorbell(&self, queue: &mut HostQueuePair) -> Cqe {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(cqe) = self.take_completion(queue) {
                return cqe;
            }
            assert!(Instant::now() < deadline, "no completion on queue {}", queue.qid);
            std::thread::yield_now();
        }
    }

    /// Executes a command and returns its completion.
    pub(crate) fn execute(&mut self, queue: &mut HostQueuePair, sqe: Sqe) -> Cqe {
        let sqe = Sqe { cid: self.cid(), ..sqe };
        self.push_sqe(queue, &sqe);
        self.ring_doorbell(queue);
        let cqe = self.wait(queue);
        assert_eq!((cqe.cid, cqe.sqid), (sqe.cid, queue.qid));
        assert_eq!(u32::from(cqe.sqhd), queue.tail);
        cqe
    }

    pub(crate) fn admin(&mut self, sqe: Sqe) -> Cqe {
        let mut queue = std::mem::replace(&mut self.admin, HostQueuePair::placeholder());
        let cqe = self.execute(&mut queue, sqe);
        self.admin = queue;
        cqe
    }

    pub(crate) fn identify(&mut self, cns: u8, nsid: u32) -> Vec<u8> {
        let identify = admin::Identify { cns, ..Default::default() };
        let cqe = self.admin(prp(identify.to_sqe(nsid), IOVA + DATA, 0));
        assert_eq!(cqe.status, Status::SUCCESS);
        let mut page = vec![0; 4096];
        self.memory.read(DATA, &mut page);
        page
    }

    /// Creates a queue pair; each uses 64 KiB of the memory below [`DATA`].
    pub(crate) fn create_queue_pair(&mut self, qid: u16, entries: u32) -> HostQueuePair {
        self.create_queue_pair_on(qid, entries, qid)
    }

    /// Like [`create_queue_pair`](Self::create_queue_pair), with this interrupt vector.
    pub(crate) fn create_queue_pair_on(&mut self, qid: u16, entries: u32, vector: u16) -> HostQueuePair {
        let submission = u64::from(qid) * 0x1_0000;
        let completion = submission + 0x8000;
        self.memory.zero(submission, 0x1_0000);
        let create = CreateIoCq {
            address: IOVA + completion,
            qid,
            entries,
            contiguous: true,
            interrupts: true,
            vector,
        };
        assert_eq!(self.admin(create.to_sqe()).status, Status::SUCCESS);
        self.create_submission(qid, entries, qid);
        HostQueuePair::new(qid, entries, submission, completion)
    }

    /// Creates a submission queue on an existing completion queue.
    pub(crate) fn create_submission_queue(&mut self, qid: u16, entries: u32, cqid: u16) -> HostQueuePair {
        self.create_submission(qid, entries, cqid);
        HostQueuePair::new(qid, entries, u64::from(qid) * 0x1_0000, 0)
    }

    fn create_submission(&mut self, qid: u16, entries: u32, cqid: u16) {
        let address = IOVA + u64::from(qid) * 0x1_0000;
        let create = CreateIoSq { address, qid, entries, contiguous: true, priority: 0, cqid };
        assert_eq!(self.admin(create.to_sqe()).status, Status::SUCCESS);
    }

    pub(crate) fn delete(&mut self, opcode: AdminOpcode, qid: u16) -> Status {
        self.admin(DeleteQueue { qid }.to_sqe(opcode)).status
    }
}

pub(crate) fn prp(sqe: Sqe, first: u64, second: u64) -> Sqe {
    Sqe { flags: 0, data: DataPointer::prp(first, second), ..sqe }
}

/// A read or write of `blocks` blocks with PRPs.
pub(crate) fn transfer(opcode: NvmOpcode, lba: u64, blocks: u32, first: u64, second: u64) -> Sqe {
    let command = io::ReadWrite { lba, blocks, ..Default::default() };
    Sqe { nsid: 1, ..prp(command.to_sqe(opcode), first, second) }
}

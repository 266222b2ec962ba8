//! Associations and I/O queues over a transport that is none of the driver's: a controller in this process's
//! memory.
#![allow(clippy::unwrap_used)]

mod rig;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;

use block_io::{Channel, Completion, Request, Status, Tag};
use dma::Data;
use nvme::fabrics::{
    Association, CommandData, FabricsCompletion, FabricsIoQueue, FabricsQueue, FabricsUri, QueuePurpose,
};
use nvme::{AttachedController, ControllerFailure, IoQueue, NvmeOpenError, Options};
use reactor::{Core, IdlePolicy, Reactor};
use rig::{next_turn, options, reactor_config};
use wire_nvme::fabrics::{Connect, ConnectData, ConnectResponse, Nqn, PropertyGet, fabrics_type};
use wire_nvme::identify::{self, ControllerType, IdentifyController, IdentifyNamespace, LbaFormat};
use wire_nvme::opcode::{AdminOpcode, FABRICS, FabricsType, NvmOpcode};
use wire_nvme::protection::MetadataFormat;
use wire_nvme::registers::{NvmeVersion, offset};
use wire_nvme::{Cqe, Sqe};

/// CAP: 128 entries a queue, 15 s until ready, the NVM command set.
const CAP: u64 = 127 | 1 << 16 | 30 << 24 | 1 << 37;
/// CSTS: ready.
const READY: u64 = 1;
const CNTLID: u16 = 7;
const SUBNQN: &str = "nqn.2026-11.io.ringbolt:memory";
const BLOCK_BYTES: usize = 512;
const BLOCKS: usize = 8;

thread_local! {
    static MEDIUM: RefCell<Vec<u8>> = RefCell::new(vec![0; BLOCKS * BLOCK_BYTES]);
}

#[derive(Clone)]
struct MemoryUri {
    subnqn: Nqn,
}

impl FabricsUri for MemoryUri {
    fn subnqn(&self) -> &Nqn {
        &self.subnqn
    }

    fn nsid(&self) -> u32 {
        1
    }
}

#[derive(Clone)]
struct MemoryRemote;

impl fmt::Display for MemoryRemote {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("memory")
    }
}

/// A queue pair whose controller executes commands when they are received.
struct MemoryQueue {
    purpose: QueuePurpose,
    entries: u32,
    submitted: VecDeque<(Sqe, Request<Data>, CommandData, Vec<u8>)>,
    completions: Vec<FabricsCompletion>,
    failure: Option<ControllerFailure>,
    /// Turns until its handshake is done.
    handshake_turns: u32,
}

impl FabricsQueue for MemoryQueue {
    type Uri = MemoryUri;
    type Remote = MemoryRemote;

    const HANDSHAKE: &'static str = "the handshake";
    const DEPTH_MAX: u32 = 16;
    const NO_METADATA: &'static str = "metadata is not supported in memory";

    fn resolve(_uri: &MemoryUri) -> Result<MemoryRemote, NvmeOpenError> {
        Ok(MemoryRemote)
    }

    fn connect(
        _core: &Core,
        _remote: &MemoryRemote,
        entries: u32,
        purpose: QueuePurpose,
        _options: &Options,
    ) -> Result<MemoryQueue, NvmeOpenError> {
        let (submitted, completions) = (VecDeque::new(), Vec::new());
        Ok(MemoryQueue { purpose, entries, submitted, completions, failure: None, handshake_turns: 3 })
    }

    fn connect_error(_remote: &MemoryRemote, failure: ControllerFailure) -> NvmeOpenError {
        NvmeOpenError::Failure(failure)
    }

    fn is_ready(&self) -> bool {
        self.handshake_turns == 0 && self.failure.is_none()
    }

    fn failure(&self) -> Option<ControllerFailure> {
        self.failure
    }

    fn fail(&mut self, failure: ControllerFailure) {
        self.failure.get_or_insert(failure);
        for (sqe, request, _, _) in self.submitted.drain(..) {
            let cqe = Cqe::new(sqe.cid, Status::HOST_PATHING_ERROR);
            self.completions.push(FabricsCompletion { request, cqe });
        }
    }

    fn is_full(&self) -> bool {
        self.free_slots() == 0
    }

    fn free_slots(&self) -> usize {
        self.entries as usize - 1 - self.submitted.len()
    }

    fn set_in_capsule_max(&mut self, _bytes: u32) {}

    fn submit(&mut self, sqe: Sqe, request: Request<Data>, data: CommandData, inline_data: &[u8]) {
        assert!(self.is_ready() && !self.is_full());
        self.submitted.push_back((sqe, request, data, inline_data.to_vec()));
    }

    fn flush(&mut self) {}

    fn receive(&mut self) -> u64 {
        self.handshake_turns = self.handshake_turns.saturating_sub(1);
        let mut count = 0;
        while let Some((sqe, mut request, data, inline_data)) = self.submitted.pop_front() {
            let (status, result) = match self.purpose {
                _ if sqe.opcode == FABRICS => fabrics(&sqe, &inline_data),
                QueuePurpose::Admin => admin(&sqe, &mut request),
                QueuePurpose::Io(_) => (io(&sqe, &mut request, data), 0),
            };
            let cqe = Cqe::new(sqe.cid, status).with_result(result);
            self.completions.push(FabricsCompletion { request, cqe });
            count += 1;
        }
        count
    }

    fn completions(&mut self) -> &mut Vec<FabricsCompletion> {
        &mut self.completions
    }

    fn is_pending(&self) -> bool {
        self.handshake_turns > 0 || !self.submitted.is_empty()
    }
}

fn fabrics(sqe: &Sqe, inline_data: &[u8]) -> (Status, u64) {
    match fabrics_type(sqe).unwrap() {
        FabricsType::Connect => {
            let (connect, data) = (Connect::from_sqe(sqe), ConnectData::decode(inline_data).unwrap());
            if data.subnqn.as_str() != SUBNQN {
                return (Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), 0);
            }
            // I/O queues join the association that the admin queue has made.
            assert_eq!(data.cntlid, if connect.qid == 0 { 0xffff } else { CNTLID });
            let response = ConnectResponse { cntlid: CNTLID, ..ConnectResponse::default() };
            (Status::SUCCESS, response.to_result())
        }
        FabricsType::PropertyGet => {
            let get = PropertyGet::from_sqe(sqe).unwrap();
            (Status::SUCCESS, if get.offset == offset::CAP { CAP } else { READY })
        }
        _ => (Status::SUCCESS, 0),
    }
}

fn admin(sqe: &Sqe, request: &mut Request<Data>) -> (Status, u64) {
    match AdminOpcode::from_wire(sqe.opcode) {
        Some(AdminOpcode::Identify) => {
            let identity = IdentifyController {
                cntrltype: ControllerType::Io,
                ver: NvmeVersion::new(2, 0, 0),
                io_command_capsule_bytes: 64,
                io_response_capsule_bytes: 16,
                ..IdentifyController::default()
            };
            let mut page = [0; identify::SIZE];
            identity.encode(&mut page);
            let Some(Data::One(buffer)) = request.data_mut() else { panic!("Identify has one buffer") };
            buffer.as_mut_slice().copy_from_slice(&page);
            (Status::SUCCESS, 0)
        }
        // Number of Queues: two of each kind, counted from 0.
        Some(AdminOpcode::SetFeatures) => (Status::SUCCESS, 1 << 16 | 1),
        _ => (Status::SUCCESS, 0),
    }
}

fn io(sqe: &Sqe, request: &mut Request<Data>, data: CommandData) -> Status {
    let at = request.lba as usize * BLOCK_BYTES;
    let Some(Data::One(buffer)) = request.data_mut() else { return Status::INVALID_FIELD };
    MEDIUM.with_borrow_mut(|medium| match (NvmOpcode::from_wire(sqe.opcode), data) {
        (Some(NvmOpcode::Read), CommandData::In(length)) => {
            buffer.as_mut_slice().copy_from_slice(&medium[at..at + length as usize]);
            Status::SUCCESS
        }
        (Some(NvmOpcode::Write), CommandData::Out(length)) => {
            medium[at..at + length as usize].copy_from_slice(buffer.as_slice());
            Status::SUCCESS
        }
        _ => Status::INVALID_OPCODE,
    })
}

fn uri(subnqn: &str) -> MemoryUri {
    MemoryUri { subnqn: Nqn::new(subnqn).unwrap() }
}

fn on_core<F: Future<Output = ()> + 'static>(body: impl FnOnce(Core) -> F) {
    let reactor = Reactor::new(&reactor_config(IdlePolicy::Spin)).unwrap();
    let core = reactor.core();
    reactor.block_on(body(core));
}

async fn run(queue: &mut FabricsIoQueue<MemoryQueue>, request: Request<Data>) -> Completion<Data> {
    let (mut batch, mut done) = (vec![request], Vec::new());
    loop {
        queue.submit(&mut batch);
        queue.poll(&mut done);
        match done.pop() {
            Some(completion) => return completion,
            None => next_turn().await,
        }
    }
}

#[test]
fn a_transport_brings_a_queue_and_gets_associations_and_io_queues() {
    on_core(async |core| {
        let uri = uri(SUBNQN);
        let association = Association::<MemoryQueue>::open_over(&core, &uri, &options(), 4).await.unwrap();
        let handle = association.handle().clone();
        assert_eq!((handle.cntlid(), handle.queues_left()), (CNTLID, 2));
        let identify = IdentifyNamespace {
            nsze: BLOCKS as u64,
            formats: vec![LbaFormat { metadata_bytes: 0, data_log2: 9, performance: 0 }],
            ..IdentifyNamespace::default()
        };
        let opened = FabricsIoQueue::<MemoryQueue>::open_over(
            &core,
            &handle,
            1,
            &identify,
            &MetadataFormat::default(),
        )
        .await;
        let mut queue = opened.unwrap();
        assert_eq!((queue.blocks(), queue.block_size(), handle.queues_left()), (BLOCKS as u64, 512, 1));
        let mut buffer = core.pool().take(1024).unwrap();
        buffer.as_mut_slice().fill(0x5a);
        assert_eq!(run(&mut queue, Request::write(Tag(1), 3, 2, buffer)).await.status(), Status::SUCCESS);
        let buffer = core.pool().take(512).unwrap();
        let read = run(&mut queue, Request::read(Tag(2), 4, 1, buffer)).await;
        assert_eq!(read.status(), Status::SUCCESS);
        let request = read.into_request();
        let Some(Data::One(buffer)) = request.data() else { panic!("no data") };
        assert!(buffer.as_slice().iter().all(|byte| *byte == 0x5a));
        drop(queue);
        assert_eq!(handle.queues_left(), 2);
        // The control path of every transport.
        let controller: Box<dyn AttachedController> = Box::new(association);
        assert!(controller.is_fabrics() && controller.reset().await.is_none());
        assert_eq!((controller.cntlid(), controller.resets(), controller.failure()), (CNTLID, 0, None));
    });
}

#[test]
fn a_transports_controller_that_rejects_connect_is_not_attached() {
    on_core(async |core| {
        let uri = uri("nqn.2026-11.io.ringbolt:other");
        let opened = Association::<MemoryQueue>::open_over(&core, &uri, &options(), 1).await;
        let error = opened.err().unwrap();
        assert!(matches!(error, NvmeOpenError::ConnectRejected(_)), "{error}");
    });
}

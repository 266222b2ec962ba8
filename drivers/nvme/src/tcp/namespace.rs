//! A namespace over TCP as a channel.

use std::net::TcpStream;

use memory::Buffer;
use net::{Event, Network};
use reactor::Core;
use ring::{Channel, Completion, Flags, Op, Request, Status};
use wire_nvme::Sqe;
use wire_nvme::io::{DSM_RANGE_SIZE, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteZeroes};
use wire_nvme::opcode::NvmOpcode;

use super::controller::{Controller, Facts};
use super::queue::Data;
use crate::error::{Failure, OpenError};
use crate::options::Options;
use crate::uri::TcpUri;

/// A namespace, open on one core with a queue pair of its own.
pub(crate) struct TcpNamespace {
    controller: Controller,
    facts: Facts,
    nsid: u32,
    events: Vec<Event<TcpStream>>,
    /// Completed without a command.
    refused: Vec<Completion<Buffer>>,
    keep_alive_due_ns: Option<u64>,
}

impl TcpNamespace {
    /// Connects to the controller and opens the namespace, on the core that will use it.
    pub(crate) async fn open(
        core: &Core,
        uri: &TcpUri,
        options: &Options,
    ) -> Result<TcpNamespace, OpenError> {
        let address = uri.resolve()?;
        let (controller, facts) = Controller::open(core, uri, address, options).await?;
        let mut namespace = TcpNamespace {
            controller,
            facts,
            nsid: uri.nsid,
            events: Vec::new(),
            refused: Vec::new(),
            keep_alive_due_ns: None,
        };
        namespace.schedule_keep_alive();
        Ok(namespace)
    }

    /// Bytes of a logical block.
    pub(crate) fn block_size(&self) -> u32 {
        self.facts.block_size
    }

    /// Number of logical blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.facts.blocks
    }

    /// Most bytes of one request.
    pub(crate) fn transfer_max_bytes(&self) -> u32 {
        self.facts.transfer_max_bytes
    }

    /// Why the namespace can no longer be reached, if so.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.controller.io.as_ref().and_then(|io| io.failure).or(self.controller.admin.failure)
    }

    /// Half the timeout: one may be lost (Base 2.0, section 3.9.4 leaves the interval to the host).
    fn schedule_keep_alive(&mut self) {
        let interval_ns = u64::from(self.controller.keep_alive_ms) * 500_000;
        self.keep_alive_due_ns = (interval_ns > 0).then(|| sys::clock::now_ns() + interval_ns);
    }
}

impl Facts {
    /// The command for a request, or how the request fails without one.
    #[inline]
    pub(super) fn command(
        &self,
        nsid: u32,
        request: &Request<Buffer>,
    ) -> Result<(Sqe, Data, Option<[u8; DSM_RANGE_SIZE]>), Status> {
        let bytes = u64::from(request.blocks) * u64::from(self.block_size);
        let fua = request.flags.contains(Flags::FUA);
        let (lba, blocks) = (request.lba, request.blocks);
        if request.op.has_data() {
            let there = request.buffer.as_ref().map_or(0, Buffer::len) as u64;
            if blocks == 0 || there != bytes || bytes > u64::from(self.transfer_max_bytes) {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
        }
        let read_write = ReadWrite { lba, blocks, fua, ..ReadWrite::default() };
        let (mut sqe, data, small) = match request.op {
            Op::Read => (read_write.to_sqe(NvmOpcode::Read), Data::In(bytes as u32), None),
            Op::Write => (read_write.to_sqe(NvmOpcode::Write), Data::Out(bytes as u32), None),
            Op::Flush => (Sqe::new(NvmOpcode::Flush.to_wire()), Data::None, None),
            Op::WriteZeroes if self.write_zeroes && (1..=65536).contains(&blocks) => {
                let deallocate = request.flags.contains(Flags::DEALLOCATE);
                let zeroes = WriteZeroes { lba, blocks, fua, deallocate, prinfo: Prinfo(0) };
                (zeroes.to_sqe(), Data::None, None)
            }
            Op::Unmap if self.unmap && blocks > 0 => {
                let mut range = [0; DSM_RANGE_SIZE];
                DsmRange { attributes: 0, blocks, lba }.encode(&mut range);
                let dsm = DatasetManagement {
                    ranges: 1,
                    integral_read: false,
                    integral_write: false,
                    deallocate: true,
                };
                (dsm.to_sqe(), Data::None, Some(range))
            }
            Op::WriteZeroes | Op::Unmap if blocks == 0 || blocks > 65536 => {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            Op::WriteZeroes | Op::Unmap | Op::Reset => return Err(Status::INVALID_OPCODE.do_not_retry()),
        };
        sqe.nsid = nsid;
        Ok((sqe, data, small))
    }
}

impl Channel for TcpNamespace {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        let room = match &self.controller.io {
            Some(io) if io.failure.is_none() => io.room(),
            _ => {
                self.refused
                    .extend(batch.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR)));
                return;
            }
        };
        let count = batch.len().min(room);
        for request in batch.drain(..count) {
            match self.facts.command(self.nsid, &request) {
                Ok((sqe, data, small)) => {
                    let small = small.as_ref().map_or(&[][..], |range| &range[..]);
                    if let Some(io) = &mut self.controller.io {
                        io.submit(sqe, request, data, small);
                    }
                }
                Err(status) => self.refused.push(request.complete(status)),
            }
        }
        if let Some(io) = &mut self.controller.io {
            io.flush(&mut self.controller.network);
        }
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let before = sink.len();
        self.controller.poll(&mut self.events);
        if let Some(io) = &mut self.controller.io {
            sink.extend(
                io.finished().drain(..).map(|finished| finished.request.complete(finished.cqe.status)),
            );
        }
        self.controller.admin.finished().clear();
        sink.append(&mut self.refused);
        if self.keep_alive_due_ns.is_some_and(|due_ns| sys::clock::now_ns() >= due_ns) {
            self.controller.keep_alive();
            self.schedule_keep_alive();
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        let finished = !self.refused.is_empty() || self.controller.network.is_pending();
        if finished { Some(0) } else { self.keep_alive_due_ns }
    }
}

//! What the simulated controller makes of commands.

use ring::Status;
use wire_nvme::admin::{GetLogPage, Identify, SetFeatures};
use wire_nvme::doorbell::DoorbellBuffer;
use wire_nvme::feature::NumberOfQueues;
use wire_nvme::identify::{self, IdentifyController, IdentifyNamespace, NamespaceList, oacs};
use wire_nvme::io::{
    Copy, CopyRange, DSM_RANGE_SIZE, DatasetManagement, DsmRange, ReadWrite, WriteUncorrectable, WriteZeroes,
};
use wire_nvme::manage::FormatNvm;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::queue::{CreateIoCq, CreateIoSq, DeleteQueue};
use wire_nvme::sqe::{Fuse, Psdt, Sgl};
use wire_nvme::{NSID_ALL, Sqe};

use super::{Disk, State};

/// How a command ended, and what it returned; `None` for one that ends later.
pub(super) type Outcome = Option<(Status, u64)>;

const PAGE: u64 = 4096;

pub(super) fn done(status: Status) -> Outcome {
    Some((status, 0))
}

impl State {
    pub(super) fn admin(&mut self, sqe: &Sqe) -> Outcome {
        match AdminOpcode::from_wire(sqe.opcode) {
            Some(AdminOpcode::Identify) => done(self.identify(sqe)),
            Some(AdminOpcode::SetFeatures) => {
                let result = match SetFeatures::of(sqe).fid {
                    7 => {
                        let count = self.config.queues;
                        NumberOfQueues { submission: count, completion: count }.to_wire().into()
                    }
                    _ => 0,
                };
                Some((Status::SUCCESS, result))
            }
            Some(AdminOpcode::GetFeatures) => Some((Status::SUCCESS, 0x1234)),
            Some(AdminOpcode::CreateIoCq) => done(self.create_completion(CreateIoCq::of(sqe))),
            Some(AdminOpcode::CreateIoSq) => done(self.create_submission(CreateIoSq::of(sqe))),
            Some(AdminOpcode::DeleteIoSq) => {
                let found = self.submission.remove(&DeleteQueue::of(sqe).qid).is_some();
                done(if found { Status::SUCCESS } else { Status::INVALID_QUEUE_IDENTIFIER })
            }
            Some(AdminOpcode::DeleteIoCq) => {
                let found = self.completion.remove(&DeleteQueue::of(sqe).qid).is_some();
                done(if found { Status::SUCCESS } else { Status::INVALID_QUEUE_IDENTIFIER })
            }
            Some(AdminOpcode::AsyncEventRequest) => {
                self.event_requests.push_back(sqe.cid);
                None
            }
            Some(AdminOpcode::GetLogPage) => done(self.log_page(sqe)),
            // Whatever it was has completed or never will: not aborted.
            Some(AdminOpcode::Abort) => Some((Status::SUCCESS, 1)),
            Some(AdminOpcode::DoorbellBufferConfig) => {
                let view = DoorbellBuffer::of(sqe);
                if self.config.identity.oacs & oacs::DOORBELL_BUFFER == 0 || self.config.refuses_shadow {
                    return done(Status::INVALID_OPCODE.do_not_retry());
                }
                self.shadow = Some((view.shadow, view.events));
                done(Status::SUCCESS)
            }
            Some(AdminOpcode::FormatNvm) => done(self.format(sqe)),
            Some(AdminOpcode::NamespaceManagement) if self.manages_namespaces() => self.manage(sqe),
            Some(AdminOpcode::NamespaceAttachment) if self.manages_namespaces() => done(self.attachment(sqe)),
            _ => done(Status::INVALID_OPCODE.do_not_retry()),
        }
    }

    fn identify(&mut self, sqe: &Sqe) -> Status {
        let mut page = [0; identify::SIZE];
        match Identify::of(sqe).cns {
            0 => match self.namespace(sqe.nsid) {
                Some(namespace) => namespace.encode(&mut page),
                None if sqe.nsid == 0 || sqe.nsid == NSID_ALL => {
                    return Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
                }
                None => {}
            },
            1 => {
                let unvmcap = self.unallocated();
                IdentifyController { unvmcap, ..self.config.identity.clone() }.encode(&mut page);
            }
            2 => {
                let nsids = 1..=self.config.namespaces.len() as u32;
                let active = |nsid: &u32| *nsid > sqe.nsid && self.namespace(*nsid).is_some();
                NamespaceList(nsids.filter(active).collect()).encode(&mut page);
            }
            3 | 6 => {}
            cns @ 0x10..=0x13 if self.manages_namespaces() => {
                match self.identify_allocated(cns, sqe, &mut page) {
                    Some(Status::SUCCESS) => {}
                    Some(status) => return status,
                    None => return Status::INVALID_FIELD.do_not_retry(),
                }
            }
            _ => return Status::INVALID_FIELD.do_not_retry(),
        }
        self.give(sqe, &page)
    }

    fn log_page(&mut self, sqe: &Sqe) -> Status {
        let view = GetLogPage::of(sqe);
        let mut page = vec![0; view.length_bytes.min(1 << 16) as usize];
        if view.lid == 4 {
            let mut list = [0; identify::SIZE];
            NamespaceList(std::mem::take(&mut self.changed_namespaces).into_iter().collect())
                .encode(&mut list);
            let length = page.len().min(list.len());
            page[..length].copy_from_slice(&list[..length]);
            self.event_masked = false;
        }
        self.give(sqe, &page)
    }

    fn format(&mut self, sqe: &Sqe) -> Status {
        let index = (sqe.nsid as usize).wrapping_sub(1);
        let Some(view) = FormatNvm::of(sqe) else { return Status::INVALID_FIELD.do_not_retry() };
        let Some(namespace) = self.config.namespaces.get_mut(index) else {
            return Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        };
        let Some(format) = namespace.formats.get(usize::from(view.format)) else {
            return Status::INVALID_FIELD.do_not_retry();
        };
        let old = namespace.formats[usize::from(namespace.format)];
        namespace.nsze = namespace.nsze << old.data_log2 >> format.data_log2;
        namespace.format = view.format;
        namespace.extended_lba = view.extended_lba;
        namespace.dps = view.protection | u8::from(view.protection_first) << 3;
        self.disks[index] = Disk::new(namespace);
        Status::SUCCESS
    }

    fn manages_namespaces(&self) -> bool {
        self.config.identity.oacs & oacs::NAMESPACE_MANAGEMENT != 0
    }

    /// A namespace that is attached.
    fn namespace(&self, nsid: u32) -> Option<&IdentifyNamespace> {
        if !self.attached.contains(&nsid) {
            return None;
        }
        self.config.namespaces.get((nsid as usize).wrapping_sub(1)).filter(|namespace| namespace.nsze > 0)
    }

    pub(super) fn io(&mut self, qid: u16, sqe: &Sqe) -> Outcome {
        let first = self.fused.remove(&qid);
        let status = match (sqe.fuse(), first) {
            (Fuse::Second, Some(status)) if !status.is_success() => Status::FUSED_FAILED,
            (Fuse::Second, None) | (Fuse::Normal | Fuse::First, Some(_)) => Status::FUSED_MISSING,
            _ => self.execute(sqe),
        };
        if sqe.fuse() == Fuse::First {
            self.fused.insert(qid, status);
        }
        done(status)
    }

    fn execute(&mut self, sqe: &Sqe) -> Status {
        let index = (sqe.nsid as usize).wrapping_sub(1);
        let Some(namespace) = self.namespace(sqe.nsid) else {
            return Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        };
        let format = namespace.formats[usize::from(namespace.format)];
        let (blocks, size) = (namespace.nsze, 1usize << format.data_log2);
        let extended = namespace.extended_lba;
        let metadata = usize::from(format.metadata_bytes);
        let range = |lba: u64, count: u64| {
            let end = lba.checked_add(count).filter(|end| *end <= blocks);
            end.map(|_| lba as usize * size..(lba + count) as usize * size)
        };
        let out_of_range = Status::LBA_OUT_OF_RANGE.do_not_retry();
        match NvmOpcode::from_wire(sqe.opcode) {
            Some(NvmOpcode::Flush) => Status::SUCCESS,
            Some(opcode @ (NvmOpcode::Read | NvmOpcode::Write | NvmOpcode::Compare)) => {
                let view = ReadWrite::of(sqe);
                let (lba, count) = (view.lba, u64::from(view.blocks));
                let Some(bytes) = range(lba, count) else { return out_of_range };
                let apart = lba as usize * metadata..(lba + count) as usize * metadata;
                // With PRACT, eight bytes of metadata are the controller's own.
                let stripped = view.prinfo.0 & 8 != 0 && metadata == 8;
                if metadata > 0 && !stripped && extended {
                    return self.interleaved(
                        sqe,
                        opcode,
                        index,
                        lba as usize,
                        count as usize,
                        (size, metadata),
                    );
                }
                let with = (metadata > 0 && !stripped).then_some(apart);
                self.transfer(sqe, opcode, index, bytes, with, lba..lba + count)
            }
            Some(NvmOpcode::WriteZeroes) => {
                let view = WriteZeroes::of(sqe);
                let Some(bytes) = range(view.lba, view.blocks.into()) else { return out_of_range };
                self.disks[index].data[bytes].fill(0);
                Status::SUCCESS
            }
            Some(NvmOpcode::DatasetManagement) => {
                let view = DatasetManagement::of(sqe);
                let mut data = vec![0; usize::from(view.ranges) * DSM_RANGE_SIZE];
                if let Err(status) = self.take(sqe, &mut data) {
                    return status;
                }
                for part in data.as_chunks::<DSM_RANGE_SIZE>().0 {
                    let part = DsmRange::decode(part);
                    let Some(bytes) = range(part.lba, part.blocks.into()) else { return out_of_range };
                    if view.deallocate {
                        self.disks[index].data[bytes].fill(0);
                    }
                }
                Status::SUCCESS
            }
            Some(NvmOpcode::Verify) => {
                let view = ReadWrite::of(sqe);
                let (lba, count) = (view.lba, u64::from(view.blocks));
                if range(lba, count).is_none() {
                    return out_of_range;
                }
                if self.disks[index].bad.range(lba..lba + count).next().is_some() {
                    return Status::UNRECOVERED_READ_ERROR;
                }
                Status::SUCCESS
            }
            Some(NvmOpcode::WriteUncorrectable) => {
                let view = WriteUncorrectable::of(sqe);
                if range(view.lba, view.blocks.into()).is_none() {
                    return out_of_range;
                }
                self.disks[index].bad.extend(view.lba..view.lba + u64::from(view.blocks));
                Status::SUCCESS
            }
            Some(NvmOpcode::Copy) => {
                let Some(view) = Copy::of(sqe) else { return Status::INVALID_FIELD.do_not_retry() };
                let mut data = vec![0; usize::from(view.ranges) * 32];
                if let Err(status) = self.take(sqe, &mut data) {
                    return status;
                }
                let mut to = view.lba;
                for part in data.as_chunks::<32>().0 {
                    let part = CopyRange::decode(part);
                    let count = u64::from(part.blocks);
                    let (Some(from), Some(into)) = (range(part.lba, count), range(to, count)) else {
                        return out_of_range;
                    };
                    let copy = self.disks[index].data[from].to_vec();
                    self.disks[index].data[into].copy_from_slice(&copy);
                    to += count;
                }
                Status::SUCCESS
            }
            _ => Status::INVALID_OPCODE.do_not_retry(),
        }
    }

    /// Read, Write or Compare whose metadata is in a buffer of its own, or which has none.
    fn transfer(
        &mut self,
        sqe: &Sqe,
        opcode: NvmOpcode,
        index: usize,
        bytes: std::ops::Range<usize>,
        apart: Option<std::ops::Range<usize>>,
        lbas: std::ops::Range<u64>,
    ) -> Status {
        if opcode == NvmOpcode::Read {
            if self.disks[index].bad.range(lbas).next().is_some() {
                return Status::UNRECOVERED_READ_ERROR;
            }
            let status = self.give(sqe, &self.disks[index].data[bytes]);
            if let Some(apart) = apart {
                let written = self.memory.write(sqe.mptr, &self.disks[index].metadata[apart]);
                return if written.is_some() { status } else { Status::DATA_TRANSFER_ERROR };
            }
            return status;
        }
        let mut data = vec![0; bytes.len()];
        if let Err(status) = self.take(sqe, &mut data) {
            return status;
        }
        if opcode == NvmOpcode::Compare {
            let same = self.disks[index].data[bytes] == data;
            return if same { Status::SUCCESS } else { Status::COMPARE_FAILURE };
        }
        let disk = &mut self.disks[index];
        disk.data[bytes].copy_from_slice(&data);
        for lba in lbas {
            disk.bad.remove(&lba);
        }
        if let Some(apart) = apart {
            let mut metadata = vec![0; apart.len()];
            if self.memory.read(sqe.mptr, &mut metadata).is_none() {
                return Status::DATA_TRANSFER_ERROR;
            }
            disk.metadata[apart].copy_from_slice(&metadata);
        }
        Status::SUCCESS
    }

    /// Read or Write of extended blocks: each block's metadata behind its data.
    fn interleaved(
        &mut self,
        sqe: &Sqe,
        opcode: NvmOpcode,
        index: usize,
        lba: usize,
        count: usize,
        (size, metadata): (usize, usize),
    ) -> Status {
        let mut data = vec![0; count * (size + metadata)];
        if opcode != NvmOpcode::Read
            && let Err(status) = self.take(sqe, &mut data)
        {
            return status;
        }
        let disk = &mut self.disks[index];
        for (block, both) in data.chunks_exact_mut(size + metadata).enumerate() {
            let at = lba + block;
            let (bytes, behind) = both.split_at_mut(size);
            let here = &mut disk.data[at * size..(at + 1) * size];
            let meta = &mut disk.metadata[at * metadata..(at + 1) * metadata];
            match opcode {
                NvmOpcode::Read => {
                    bytes.copy_from_slice(here);
                    behind.copy_from_slice(meta);
                }
                NvmOpcode::Write => {
                    here.copy_from_slice(bytes);
                    meta.copy_from_slice(behind);
                }
                _ => return Status::INVALID_OPCODE.do_not_retry(),
            }
        }
        if opcode == NvmOpcode::Read { self.give(sqe, &data) } else { Status::SUCCESS }
    }

    /// Sends data to where a command wants it.
    fn give(&self, sqe: &Sqe, data: &[u8]) -> Status {
        let pieces = match self.pieces(sqe, data.len() as u64) {
            Ok(pieces) => pieces,
            Err(status) => return status,
        };
        let mut at = 0;
        for (address, length) in pieces {
            if self.memory.write(address, &data[at..at + length]).is_none() {
                return Status::DATA_TRANSFER_ERROR;
            }
            at += length;
        }
        Status::SUCCESS
    }

    /// Fetches a command's data.
    pub(super) fn take(&self, sqe: &Sqe, into: &mut [u8]) -> Result<(), Status> {
        let mut at = 0;
        for (address, length) in self.pieces(sqe, into.len() as u64)? {
            let read = self.memory.read(address, &mut into[at..at + length]);
            read.ok_or(Status::DATA_TRANSFER_ERROR)?;
            at += length;
        }
        Ok(())
    }

    /// The pages of a command's data (Base 2.0, section 4.1.1), or its one SGL descriptor.
    fn pieces(&self, sqe: &Sqe, length: u64) -> Result<Vec<(u64, usize)>, Status> {
        if sqe.psdt() == Psdt::Sgl {
            return match sqe.data.sgl() {
                Ok(Sgl::DataBlock { address, length: given }) if u64::from(given) >= length => {
                    Ok(vec![(address, length as usize)])
                }
                _ => Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
            };
        }
        let offset_invalid = Err(Status::PRP_OFFSET_INVALID.do_not_retry());
        let (prp1, prp2) = (sqe.data.low, sqe.data.high);
        if prp1 % 4 != 0 {
            return offset_invalid;
        }
        let first = (PAGE - prp1 % PAGE).min(length);
        let mut pieces = vec![(prp1, first as usize)];
        let mut left = length - first;
        if left == 0 {
            return Ok(pieces);
        }
        if left <= PAGE {
            if prp2 % PAGE != 0 {
                return offset_invalid;
            }
            pieces.push((prp2, left as usize));
            return Ok(pieces);
        }
        let mut list = prp2;
        while left > 0 {
            let mut entry = [0; 8];
            self.memory.read(list, &mut entry).ok_or(Status::DATA_TRANSFER_ERROR)?;
            let entry = u64::from_le_bytes(entry);
            // The last entry of a page leads to the next list, if there is more than a page to come.
            if list % PAGE == PAGE - 8 && left > PAGE {
                list = entry;
                continue;
            }
            if entry % PAGE != 0 {
                return offset_invalid;
            }
            pieces.push((entry, left.min(PAGE) as usize));
            left -= left.min(PAGE);
            list += 8;
        }
        Ok(pieces)
    }
}

//! Command execution of the simulated controller.

use block_io::Status;
use wire_nvme::admin::{GetLogPage, Identify, SetFeatures};
use wire_nvme::doorbell::DoorbellBuffer;
use wire_nvme::feature::NumberOfQueues;
use wire_nvme::identify::{self, IdentifyController, IdentifyNamespace, NamespaceList, oacs};
use wire_nvme::io::{
    CopyCommand, CopyRange, DSM_RANGE_SIZE, DatasetManagement, DsmRange, Prinfo, ReadWrite,
    WriteUncorrectable, WriteZeroes,
};
use wire_nvme::manage::FormatNvm;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::queue::{CreateIoCq, CreateIoSq, DeleteQueue};
use wire_nvme::sqe::{Fuse, Psdt, Sgl};
use wire_nvme::{NSID_ALL, Sqe};

use super::{NamespaceStore, SimulatedState};

/// Status and result of a command; `None` if it completes later.
pub(super) type CommandOutcome = Option<(Status, u64)>;

const PAGE: u64 = 4096;

pub(super) fn complete_with(status: Status) -> CommandOutcome {
    Some((status, 0))
}

impl SimulatedState {
    pub(super) fn admin(&mut self, sqe: &Sqe) -> CommandOutcome {
        match AdminOpcode::from_wire(sqe.opcode) {
            Some(AdminOpcode::Identify) => complete_with(self.identify(sqe)),
            Some(AdminOpcode::SetFeatures) => {
                let result = match SetFeatures::from_sqe(sqe).fid {
                    7 => {
                        let count = self.config.queues;
                        NumberOfQueues { submission: count, completion: count }.to_wire().into()
                    }
                    _ => 0,
                };
                Some((Status::SUCCESS, result))
            }
            Some(AdminOpcode::GetFeatures) => Some((Status::SUCCESS, 0x1234)),
            Some(AdminOpcode::CreateIoCq) => complete_with(self.create_io_cq(CreateIoCq::from_sqe(sqe))),
            Some(AdminOpcode::CreateIoSq) => complete_with(self.create_io_sq(CreateIoSq::from_sqe(sqe))),
            Some(AdminOpcode::DeleteIoSq) => {
                let found = self.submission.remove(&DeleteQueue::from_sqe(sqe).qid).is_some();
                complete_with(if found { Status::SUCCESS } else { Status::INVALID_QUEUE_IDENTIFIER })
            }
            Some(AdminOpcode::DeleteIoCq) => {
                let found = self.completion.remove(&DeleteQueue::from_sqe(sqe).qid).is_some();
                complete_with(if found { Status::SUCCESS } else { Status::INVALID_QUEUE_IDENTIFIER })
            }
            Some(AdminOpcode::AsyncEventRequest) => {
                self.event_requests.push_back(sqe.cid);
                None
            }
            Some(AdminOpcode::GetLogPage) => complete_with(self.log_page(sqe)),
            // The command has completed or never will: report "not aborted".
            Some(AdminOpcode::Abort) => Some((Status::SUCCESS, 1)),
            Some(AdminOpcode::DoorbellBufferConfig) => {
                let view = DoorbellBuffer::from_sqe(sqe);
                if self.config.identity.oacs & oacs::DOORBELL_BUFFER == 0
                    || self.config.reject_doorbell_buffer
                {
                    return complete_with(Status::INVALID_OPCODE.do_not_retry());
                }
                self.shadow = Some((view.shadow, view.events));
                complete_with(Status::SUCCESS)
            }
            Some(AdminOpcode::FormatNvm) => complete_with(self.format(sqe)),
            Some(AdminOpcode::NamespaceManagement) if self.manages_namespaces() => self.manage(sqe),
            Some(AdminOpcode::NamespaceAttachment) if self.manages_namespaces() => {
                complete_with(self.attachment(sqe))
            }
            _ => complete_with(Status::INVALID_OPCODE.do_not_retry()),
        }
    }

    fn identify(&mut self, sqe: &Sqe) -> Status {
        let mut page = [0; identify::SIZE];
        match Identify::from_sqe(sqe).cns {
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
        self.write_data(sqe, &page)
    }

    fn log_page(&mut self, sqe: &Sqe) -> Status {
        let view = GetLogPage::from_sqe(sqe);
        let mut page = vec![0; view.length_bytes.min(1 << 16) as usize];
        if view.lid == 4 {
            let mut list = [0; identify::SIZE];
            NamespaceList(std::mem::take(&mut self.changed_namespaces).into_iter().collect())
                .encode(&mut list);
            let length = page.len().min(list.len());
            page[..length].copy_from_slice(&list[..length]);
            self.event_masked = false;
        }
        self.write_data(sqe, &page)
    }

    fn format(&mut self, sqe: &Sqe) -> Status {
        let index = (sqe.nsid as usize).wrapping_sub(1);
        let Some(view) = FormatNvm::from_sqe(sqe) else { return Status::INVALID_FIELD.do_not_retry() };
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
        self.stores[index] = NamespaceStore::new(namespace);
        Status::SUCCESS
    }

    fn manages_namespaces(&self) -> bool {
        self.config.identity.oacs & oacs::NAMESPACE_MANAGEMENT != 0
    }

    /// The namespace with this identifier, if it is attached.
    fn namespace(&self, nsid: u32) -> Option<&IdentifyNamespace> {
        if !self.attached.contains(&nsid) {
            return None;
        }
        self.config.namespaces.get((nsid as usize).wrapping_sub(1)).filter(|namespace| namespace.nsze > 0)
    }

    pub(super) fn io(&mut self, qid: u16, sqe: &Sqe) -> CommandOutcome {
        let first = self.fused.remove(&qid);
        let status = match (sqe.fuse(), first) {
            (Fuse::Second, Some(status)) if !status.is_success() => Status::FUSED_FAILED,
            (Fuse::Second, None) | (Fuse::Normal | Fuse::First, Some(_)) => Status::FUSED_MISSING,
            _ => self.execute(sqe),
        };
        if sqe.fuse() == Fuse::First {
            self.fused.insert(qid, status);
        }
        complete_with(status)
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
                let view = ReadWrite::from_sqe(sqe);
                let (lba, count) = (view.lba, u64::from(view.blocks));
                let Some(bytes) = range(lba, count) else { return out_of_range };
                let separate = lba as usize * metadata..(lba + count) as usize * metadata;
                // With PRACT, the controller inserts and strips protection information: this one has 16-bit
                // guards.
                let stripped = view.prinfo.contains(Prinfo::ACTION) && metadata == 8;
                if metadata > 0 && !stripped && extended {
                    return self.transfer_extended(
                        sqe,
                        opcode,
                        index,
                        lba as usize,
                        count as usize,
                        (size, metadata),
                    );
                }
                let with = (metadata > 0 && !stripped).then_some(separate);
                self.transfer(sqe, opcode, index, bytes, with, lba..lba + count)
            }
            Some(NvmOpcode::WriteZeroes) => {
                let view = WriteZeroes::from_sqe(sqe);
                let Some(bytes) = range(view.lba, view.blocks.into()) else { return out_of_range };
                self.stores[index].data[bytes].fill(0);
                Status::SUCCESS
            }
            Some(NvmOpcode::DatasetManagement) => {
                let view = DatasetManagement::from_sqe(sqe);
                let mut data = vec![0; usize::from(view.ranges) * DSM_RANGE_SIZE];
                if let Err(status) = self.read_data(sqe, &mut data) {
                    return status;
                }
                for part in data.as_chunks::<DSM_RANGE_SIZE>().0 {
                    let part = DsmRange::decode(part);
                    let Some(bytes) = range(part.lba, part.blocks.into()) else { return out_of_range };
                    if view.deallocate {
                        self.stores[index].data[bytes].fill(0);
                    }
                }
                Status::SUCCESS
            }
            Some(NvmOpcode::Verify) => {
                let view = ReadWrite::from_sqe(sqe);
                let (lba, count) = (view.lba, u64::from(view.blocks));
                if range(lba, count).is_none() {
                    return out_of_range;
                }
                if self.stores[index].uncorrectable.range(lba..lba + count).next().is_some() {
                    return Status::UNRECOVERED_READ_ERROR;
                }
                Status::SUCCESS
            }
            Some(NvmOpcode::WriteUncorrectable) => {
                let view = WriteUncorrectable::from_sqe(sqe);
                if range(view.lba, view.blocks.into()).is_none() {
                    return out_of_range;
                }
                self.stores[index].uncorrectable.extend(view.lba..view.lba + u64::from(view.blocks));
                Status::SUCCESS
            }
            Some(NvmOpcode::Copy) => {
                let Some(view) = CopyCommand::from_sqe(sqe) else {
                    return Status::INVALID_FIELD.do_not_retry();
                };
                let mut data = vec![0; usize::from(view.ranges) * 32];
                if let Err(status) = self.read_data(sqe, &mut data) {
                    return status;
                }
                let mut to = view.lba;
                for part in data.as_chunks::<32>().0 {
                    let part = CopyRange::decode(part);
                    let count = u64::from(part.blocks);
                    let (Some(from), Some(into)) = (range(part.lba, count), range(to, count)) else {
                        return out_of_range;
                    };
                    let copy = self.stores[index].data[from].to_vec();
                    self.stores[index].data[into].copy_from_slice(&copy);
                    to += count;
                }
                Status::SUCCESS
            }
            _ => Status::INVALID_OPCODE.do_not_retry(),
        }
    }

    /// Executes a Read, Write or Compare with separate metadata or none.
    fn transfer(
        &mut self,
        sqe: &Sqe,
        opcode: NvmOpcode,
        index: usize,
        bytes: std::ops::Range<usize>,
        separate: Option<std::ops::Range<usize>>,
        lbas: std::ops::Range<u64>,
    ) -> Status {
        if opcode == NvmOpcode::Read {
            if self.stores[index].uncorrectable.range(lbas).next().is_some() {
                return Status::UNRECOVERED_READ_ERROR;
            }
            let status = self.write_data(sqe, &self.stores[index].data[bytes]);
            if let Some(separate) = separate {
                let written = self.memory.write(sqe.mptr, &self.stores[index].metadata[separate]);
                return if written.is_some() { status } else { Status::DATA_TRANSFER_ERROR };
            }
            return status;
        }
        let mut data = vec![0; bytes.len()];
        if let Err(status) = self.read_data(sqe, &mut data) {
            return status;
        }
        if opcode == NvmOpcode::Compare {
            let same = self.stores[index].data[bytes] == data;
            return if same { Status::SUCCESS } else { Status::COMPARE_FAILURE };
        }
        let disk = &mut self.stores[index];
        disk.data[bytes].copy_from_slice(&data);
        for lba in lbas {
            disk.uncorrectable.remove(&lba);
        }
        if let Some(separate) = separate {
            let mut metadata = vec![0; separate.len()];
            if self.memory.read(sqe.mptr, &mut metadata).is_none() {
                return Status::DATA_TRANSFER_ERROR;
            }
            disk.metadata[separate].copy_from_slice(&metadata);
        }
        Status::SUCCESS
    }

    /// Executes a Read or Write of extended LBAs: the metadata follows the data of each block.
    fn transfer_extended(
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
            && let Err(status) = self.read_data(sqe, &mut data)
        {
            return status;
        }
        let disk = &mut self.stores[index];
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
        if opcode == NvmOpcode::Read { self.write_data(sqe, &data) } else { Status::SUCCESS }
    }

    /// Writes data to the command's host buffers.
    fn write_data(&self, sqe: &Sqe, data: &[u8]) -> Status {
        let segments = match self.segments(sqe, data.len() as u64) {
            Ok(segments) => segments,
            Err(status) => return status,
        };
        let mut at = 0;
        for (address, length) in segments {
            if self.memory.write(address, &data[at..at + length]).is_none() {
                return Status::DATA_TRANSFER_ERROR;
            }
            at += length;
        }
        Status::SUCCESS
    }

    /// Reads data from the command's host buffers.
    pub(super) fn read_data(&self, sqe: &Sqe, into: &mut [u8]) -> Result<(), Status> {
        let mut at = 0;
        for (address, length) in self.segments(sqe, into.len() as u64)? {
            let read = self.memory.read(address, &mut into[at..at + length]);
            read.ok_or(Status::DATA_TRANSFER_ERROR)?;
            at += length;
        }
        Ok(())
    }

    /// Device address ranges of a command's data: PRPs (Base 2.0, section 4.1.1), one SGL data block
    /// descriptor, or a segment of them.
    fn segments(&self, sqe: &Sqe, length: u64) -> Result<Vec<(u64, usize)>, Status> {
        if sqe.psdt() == Psdt::Sgl {
            return match sqe.data.sgl() {
                Ok(Sgl::DataBlock { address, length: given }) if u64::from(given) >= length => {
                    Ok(vec![(address, length as usize)])
                }
                Ok(Sgl::Segment { offset: false, last: true, address, length: bytes }) => {
                    self.sgl_blocks(address, bytes, length)
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
        let mut segments = vec![(prp1, first as usize)];
        let mut left = length - first;
        if left == 0 {
            return Ok(segments);
        }
        if left <= PAGE {
            if prp2 % PAGE != 0 {
                return offset_invalid;
            }
            segments.push((prp2, left as usize));
            return Ok(segments);
        }
        let mut list = prp2;
        while left > 0 {
            let mut entry = [0; 8];
            self.memory.read(list, &mut entry).ok_or(Status::DATA_TRANSFER_ERROR)?;
            let entry = u64::from_le_bytes(entry);
            // The last entry of a list page points to the next list if more than one page of data remains.
            if list % PAGE == PAGE - 8 && left > PAGE {
                list = entry;
                continue;
            }
            if entry % PAGE != 0 {
                return offset_invalid;
            }
            segments.push((entry, left.min(PAGE) as usize));
            left -= left.min(PAGE);
            list += 8;
        }
        Ok(segments)
    }

    /// The data blocks of an SGL segment at a device address, which must be `length` bytes together.
    fn sgl_blocks(&self, address: u64, bytes: u32, length: u64) -> Result<Vec<(u64, usize)>, Status> {
        let mut segment = vec![0; bytes as usize];
        self.memory.read(address, &mut segment).ok_or(Status::DATA_TRANSFER_ERROR)?;
        let (descriptors, rest) = segment.as_chunks::<16>();
        let mut blocks = Vec::new();
        for descriptor in descriptors {
            let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| descriptor[at + byte]));
            let data = wire_nvme::DataPointer { low: half(0), high: half(8) };
            let Ok(Sgl::DataBlock { address, length }) = data.sgl() else {
                return Err(Status::SGL_TYPE_INVALID.do_not_retry());
            };
            blocks.push((address, length as usize));
        }
        let described: u64 = blocks.iter().map(|(_, length)| *length as u64).sum();
        if !rest.is_empty() || described != length {
            return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        Ok(blocks)
    }
}

//! What is known of a namespace over TCP, and how requests become its commands.

use memory::Buffer;
use ring::{Flags, Op, Request, Status};
use wire_nvme::Sqe;
use wire_nvme::identify::{self, IdentifyNamespace};
use wire_nvme::io::{
    DSM_RANGE_SIZE, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteUncorrectable, WriteZeroes,
};
use wire_nvme::opcode::NvmOpcode;

use super::queue::Data;
use crate::error::OpenError;

/// What identification told.
pub(super) struct Facts {
    pub(super) blocks: u64,
    pub(super) block_size: u32,
    pub(super) transfer_max_bytes: u32,
    pub(super) write_zeroes: bool,
    pub(super) write_uncorrectable: bool,
    pub(super) unmap: bool,
}

impl Facts {
    pub(super) fn new(
        nsid: u32,
        namespace: &IdentifyNamespace,
        mdts: u8,
        oncs: u16,
    ) -> Result<Facts, OpenError> {
        if namespace.nsze == 0 {
            return Err(OpenError::NoNamespace(nsid));
        }
        let Some(format) = namespace.formats.get(usize::from(namespace.format)) else {
            return Err(OpenError::Format(nsid, "it is in a format that it does not list"));
        };
        if format.metadata_bytes > 0 {
            return Err(OpenError::Format(nsid, "metadata"));
        }
        if !(9..=16).contains(&format.data_log2) {
            return Err(OpenError::Format(nsid, "blocks under 512 bytes or over 64 KiB"));
        }
        // MDTS counts in pages of CAP.MPSMIN, which is 4 KiB over fabrics; 0 is no limit.
        let transfer_max_bytes = match mdts {
            0 => memory::BUFFER_BYTES_MAX as u32,
            mdts => 4096u32.checked_shl(mdts.into()).unwrap_or(u32::MAX).min(memory::BUFFER_BYTES_MAX as u32),
        };
        Ok(Facts {
            blocks: namespace.nsze,
            block_size: 1 << format.data_log2,
            transfer_max_bytes,
            write_zeroes: oncs & identify::oncs::WRITE_ZEROES != 0,
            write_uncorrectable: oncs & identify::oncs::WRITE_UNCORRECTABLE != 0,
            unmap: oncs & identify::oncs::DATASET_MANAGEMENT != 0,
        })
    }

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
            Op::WriteUncorrectable if self.write_uncorrectable && (1..=65536).contains(&blocks) => {
                (WriteUncorrectable { lba, blocks }.to_sqe(), Data::None, None)
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
            Op::WriteZeroes | Op::Unmap | Op::WriteUncorrectable if blocks == 0 || blocks > 65536 => {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            Op::WriteZeroes | Op::Unmap | Op::WriteUncorrectable | Op::Compare | Op::Reset => {
                return Err(Status::INVALID_OPCODE.do_not_retry());
            }
        };
        sqe.nsid = nsid;
        Ok((sqe, data, small))
    }
}

//! Properties of a namespace over fabrics, and how its requests become commands.

use block_io::{Op, Request, RequestFlags, Status};
use dma::Data;
use wire_nvme::Sqe;
use wire_nvme::identify::{self, IdentifyNamespace};
use wire_nvme::io::{
    DSM_RANGE_SIZE, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteUncorrectable, WriteZeroes,
    set_block_tags,
};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::protection::{MetadataFormat, Protection};

use super::queue::CommandData;
use crate::error::NvmeOpenError;
use crate::namespace_info::inserted_protection;

/// Most blocks of one Write Zeroes or Write Uncorrectable: NLB has 16 bits and is 0's based.
const NLB_MAX: u32 = 65536;

/// Properties of a namespace over fabrics, from Identify.
pub(super) struct FabricsNamespaceInfo {
    pub(super) blocks: u64,
    pub(super) block_size: u32,
    pub(super) transfer_max_bytes: u32,
    /// Of reads and writes of a namespace whose protection information the controller inserts, checks and
    /// strips.
    protection: Option<Protection>,
    prinfo: Prinfo,
    pub(super) write_zeroes: bool,
    pub(super) write_uncorrectable: bool,
    pub(super) unmap: bool,
}

impl FabricsNamespaceInfo {
    pub(super) fn new(
        nsid: u32,
        namespace: &IdentifyNamespace,
        metadata: &MetadataFormat,
        mdts: u8,
        oncs: u16,
    ) -> Result<FabricsNamespaceInfo, NvmeOpenError> {
        if namespace.nsze == 0 {
            return Err(NvmeOpenError::NoNamespace(nsid));
        }
        let Some(format) = namespace.formats.get(usize::from(namespace.format)) else {
            return Err(NvmeOpenError::UnsupportedFormat(
                nsid,
                "its format index is not in its list of formats",
            ));
        };
        let prinfo =
            inserted_protection(metadata).ok_or(NvmeOpenError::UnsupportedFormat(nsid, "metadata"))?;
        if !(9..=16).contains(&format.data_log2) {
            return Err(NvmeOpenError::UnsupportedFormat(nsid, "blocks under 512 bytes or over 64 KiB"));
        }
        // MDTS counts in pages of CAP.MPSMIN, which is 4 KiB over fabrics; 0 is no limit.
        let transfer_max_bytes = match mdts {
            0 => dma::BUFFER_BYTES_MAX as u32,
            mdts => 4096u32.checked_shl(mdts.into()).unwrap_or(u32::MAX).min(dma::BUFFER_BYTES_MAX as u32),
        };
        Ok(FabricsNamespaceInfo {
            blocks: namespace.nsze,
            block_size: 1 << format.data_log2,
            transfer_max_bytes,
            protection: metadata.protection.filter(|_| !prinfo.is_empty()),
            prinfo,
            write_zeroes: oncs & identify::oncs::WRITE_ZEROES != 0,
            write_uncorrectable: oncs & identify::oncs::WRITE_UNCORRECTABLE != 0,
            unmap: oncs & identify::oncs::DATASET_MANAGEMENT != 0,
        })
    }

    /// Encodes a request as a command with its data transfer and in-capsule DSM range.
    ///
    /// # Errors
    /// The status with which an invalid request completes.
    #[inline]
    pub(super) fn to_command(
        &self,
        nsid: u32,
        request: &Request<Data>,
    ) -> Result<(Sqe, CommandData, Option<[u8; DSM_RANGE_SIZE]>), Status> {
        let bytes = u64::from(request.blocks) * u64::from(self.block_size);
        let fua = request.flags.contains(RequestFlags::FUA);
        let (lba, blocks) = (request.lba, request.blocks);
        if request.op.has_data() {
            let data = request.data().filter(|data| request.op != Op::Read || data.is_writable());
            let data_bytes = data.map_or(0, Data::len) as u64;
            // It cannot be borrowed for the socket. Users copy it; one whose path was of another transport
            // tries again.
            if data.is_some_and(Data::is_external) {
                return Err(Status::COMMAND_INTERRUPTED);
            }
            if blocks == 0 || data_bytes != bytes || bytes > u64::from(self.transfer_max_bytes) {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
        }
        let read_write = ReadWrite { lba, blocks, fua, prinfo: self.prinfo, ..ReadWrite::default() };
        let (mut sqe, data, inline_data) = match request.op {
            Op::Read => (read_write.to_sqe(NvmOpcode::Read), CommandData::In(bytes as u32), None),
            Op::Write => (read_write.to_sqe(NvmOpcode::Write), CommandData::Out(bytes as u32), None),
            Op::Flush => (Sqe::new(NvmOpcode::Flush.to_wire()), CommandData::None, None),
            Op::Unmap | Op::WriteZeroes if blocks == 0 => return Err(Status::INVALID_FIELD.do_not_retry()),
            Op::WriteZeroes if self.write_zeroes && blocks <= NLB_MAX => {
                let deallocate = request.flags.contains(RequestFlags::DEALLOCATE);
                let zeroes =
                    WriteZeroes { lba, blocks, fua, deallocate, prinfo: self.prinfo & Prinfo::ACTION };
                (zeroes.to_sqe(), CommandData::None, None)
            }
            Op::WriteUncorrectable if self.write_uncorrectable && (1..=NLB_MAX).contains(&blocks) => {
                (WriteUncorrectable { lba, blocks }.to_sqe(), CommandData::None, None)
            }
            Op::Unmap if self.unmap => {
                let mut range = [0; DSM_RANGE_SIZE];
                DsmRange { attributes: 0, blocks, lba }.encode(&mut range);
                let dsm = DatasetManagement {
                    ranges: 1,
                    integral_read: false,
                    integral_write: false,
                    deallocate: true,
                };
                (dsm.to_sqe(), CommandData::None, Some(range))
            }
            Op::WriteZeroes if self.write_zeroes => return Err(Status::INVALID_FIELD.do_not_retry()),
            Op::WriteUncorrectable if self.write_uncorrectable => {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
        };
        sqe.nsid = nsid;
        if let Some(protection) = &self.protection
            && matches!(request.op, Op::Read | Op::Write)
            && self.prinfo.contains(Prinfo::CHECK_REFERENCE_TAG)
        {
            set_block_tags(&mut sqe, protection, 0, lba);
        }
        Ok((sqe, data, inline_data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block_io::Tag;
    use wire_nvme::identify::{ExtendedLbaFormat, LbaFormat, NvmNamespace};
    use wire_nvme::protection::GuardFormat;

    fn status(supported: bool, op: Op, blocks: u32) -> Option<Status> {
        let info = FabricsNamespaceInfo {
            blocks: 1 << 20,
            block_size: 512,
            transfer_max_bytes: 1 << 20,
            protection: None,
            prinfo: Prinfo::empty(),
            write_zeroes: supported,
            write_uncorrectable: supported,
            unmap: supported,
        };
        info.to_command(1, &Request::new(Tag(0), op, 0, blocks)).err()
    }

    /// The statuses of the same requests over PCI Express.
    #[test]
    fn an_unsupported_operation_fails_with_invalid_opcode_whatever_its_length() {
        let (opcode, field) =
            (Some(Status::INVALID_OPCODE.do_not_retry()), Some(Status::INVALID_FIELD.do_not_retry()));
        // Operation, blocks, status if the controller supports it, status if not.
        let table = [
            (Op::WriteZeroes, 0, field, field),
            (Op::WriteZeroes, 65_536, None, opcode),
            (Op::WriteZeroes, 65_537, field, opcode),
            (Op::Unmap, 0, field, field),
            (Op::Unmap, 65_536, None, opcode),
            (Op::Unmap, 65_537, None, opcode),
            (Op::WriteUncorrectable, 0, field, opcode),
            (Op::WriteUncorrectable, 65_536, None, opcode),
            (Op::WriteUncorrectable, 65_537, field, opcode),
        ];
        for (op, blocks, supported, unsupported) in table {
            assert_eq!(status(true, op, blocks), supported, "{op:?} of {blocks} blocks, supported");
            assert_eq!(status(false, op, blocks), unsupported, "{op:?} of {blocks} blocks, unsupported");
        }
    }

    #[test]
    fn reference_tags_are_as_wide_as_the_format_of_the_namespace() {
        const LBA: u64 = 0x0012_3456_789a_bcde;
        for (guard, dwords) in [
            (GuardFormat::Crc16, [0, 0, 0x789a_bcde]),
            (GuardFormat::Crc32, [0, 0x0012_3456, 0x789a_bcde]),
            (GuardFormat::Crc64, [0, 0x3456, 0x789a_bcde]),
        ] {
            let format = LbaFormat { metadata_bytes: guard.bytes() as u16, data_log2: 9, performance: 0 };
            let identify = IdentifyNamespace {
                nsze: u64::MAX >> 9,
                formats: vec![format],
                extended_lba: true,
                dps: 1,
                ..IdentifyNamespace::default()
            };
            let mut nvm = NvmNamespace::default();
            let storage_tag_bits = guard.storage_tag_bits().0;
            nvm.extended_formats[0] = ExtendedLbaFormat { pif: guard.to_wire(), storage_tag_bits };
            let metadata = identify.metadata_format(Some(&nvm)).unwrap();
            let info = FabricsNamespaceInfo::new(1, &identify, &metadata, 0, 0).unwrap();
            let arena = dma::Arena::new(dma::ArenaConfig { limit_bytes: 4 << 20, ..Default::default() });
            let mut buffer = dma::Pool::new(&arena).take(512).unwrap();
            buffer.clear();
            let (sqe, _, _) = info.to_command(1, &Request::write(Tag(0), LBA, 1, buffer)).unwrap();
            assert_eq!([sqe.cdw2, sqe.cdw3, sqe.cdw14], dwords, "{guard:?}");
        }
    }
}

//! Properties of a namespace, and how its requests become commands.

use block_io::{Op, Request};
use dma::{Buffer, Data};
use wire_nvme::Sqe;
use wire_nvme::identify::{Csi, IdentifyController, IdentifyNamespace, NvmController, NvmNamespace, oncs};
use wire_nvme::io::{Prinfo, set_block_tags};
use wire_nvme::protection::{MetadataFormat, Protection};

use crate::error::NvmeOpenError;

/// Properties of a namespace, from Identify Namespace and the controller's limits.
#[derive(Clone, Debug, PartialEq)]
pub struct NamespaceInfo {
    /// Namespace identifier, from 1.
    pub nsid: u32,
    /// I/O command set.
    pub command_set: Csi,
    /// Number of logical blocks.
    pub blocks: u64,
    /// Data bytes of a logical block, 512 to 65536.
    pub block_size: u32,
    /// Metadata format of a logical block.
    pub metadata: MetadataFormat,
    /// Most bytes of one read or write.
    pub transfer_max_bytes: u32,
    /// Most blocks of one Write Zeroes; 0 if the controller does not support the command.
    pub write_zeroes_blocks_max: u32,
    /// Most blocks of one Write Uncorrectable; 0 if the controller does not support the command.
    pub write_uncorrectable_blocks_max: u32,
    /// The controller supports Dataset Management.
    pub unmap: bool,
    /// Optional NVM commands that the controller supports; see [`oncs`].
    pub oncs: u16,
    /// The Identify Namespace data structure.
    pub identify: IdentifyNamespace,
    /// UUID; `None` if the controller does not report one.
    pub uuid: Option<[u8; 16]>,
}

impl NamespaceInfo {
    /// Combines Identify Namespace with the controller's limits; fails with the reason if it is not
    /// supported.
    pub(crate) fn new(
        nsid: u32,
        command_set: Csi,
        (identify, nvm): (IdentifyNamespace, Option<&NvmNamespace>),
        controller: &IdentifyController,
        limits: &NvmController,
        page_min_log2: u8,
    ) -> Result<NamespaceInfo, &'static str> {
        let Some(format) = identify.formats.get(usize::from(identify.format)) else {
            return Err("its format index is not in its list of formats");
        };
        if !(9..=16).contains(&format.data_log2) {
            return Err("blocks under 512 bytes or over 64 KiB");
        }
        if identify.nsze > u64::MAX >> format.data_log2 {
            return Err("its size in bytes exceeds 64 bits");
        }
        let metadata = identify.metadata_format(nvm)?;
        let buffer_max = dma::BUFFER_BYTES_MAX as u32;
        let pages = |log2: u8| match log2 {
            0 => u32::MAX,
            log2 => 1u32.checked_shl(u32::from(log2) + u32::from(page_min_log2)).unwrap_or(u32::MAX),
        };
        // NLB has 16 bits.
        let nlb_max_bytes = 65536u64 << format.data_log2;
        let zeroes_max = (pages(limits.wzsl) >> format.data_log2).clamp(1, 65536);
        let uncorrectable_max = (pages(limits.wusl) >> format.data_log2).clamp(1, 65536);
        let uncorrectable = controller.oncs & oncs::WRITE_UNCORRECTABLE != 0;
        let write_zeroes = controller.oncs & oncs::WRITE_ZEROES != 0;
        Ok(NamespaceInfo {
            nsid,
            command_set,
            blocks: identify.nsze,
            block_size: 1 << format.data_log2,
            metadata,
            transfer_max_bytes: pages(controller.mdts)
                .min(buffer_max)
                .min(nlb_max_bytes.min(u64::from(buffer_max)) as u32),
            write_zeroes_blocks_max: if write_zeroes { zeroes_max } else { 0 },
            write_uncorrectable_blocks_max: if uncorrectable { uncorrectable_max } else { 0 },
            unmap: controller.oncs & oncs::DATASET_MANAGEMENT != 0,
            oncs: controller.oncs,
            identify,
            uuid: None,
        })
    }

    /// Whether the identifiers that both have are the same: those of one namespace, before and after a
    /// change. A namespace without any could have been replaced without a sign.
    pub(crate) fn has_identity_of(&self, other: &NamespaceInfo) -> bool {
        let ids = |of: &NamespaceInfo| {
            let nguid = Some(u128::from_le_bytes(of.identify.nguid)).filter(|nguid| *nguid != 0);
            let eui64 = Some(u64::from_le_bytes(of.identify.eui64)).filter(|eui64| *eui64 != 0);
            [nguid, eui64.map(u128::from), of.uuid.map(u128::from_le_bytes)]
        };
        let both = ids(self).into_iter().zip(ids(other)).filter_map(|(one, other)| one.zip(other));
        both.into_iter().all(|(one, other)| one == other)
    }

    /// The layout that encodes requests as commands. Requests carry data without metadata: the controller
    /// must insert and strip the metadata, which it does (PRACT) for protection information that is all of
    /// it.
    pub(crate) fn layout(&self) -> Result<NamespaceLayout, NvmeOpenError> {
        let check = inserted_protection(&self.metadata).ok_or(NvmeOpenError::UnsupportedFormat(
            self.nsid,
            "metadata; read and write it with typed commands",
        ))?;
        // At most 65536 blocks, the limit of NLB.
        let Some(last) = (self.transfer_max_bytes / self.block_size).checked_sub(1) else {
            return Err(NvmeOpenError::UnsupportedFormat(
                self.nsid,
                "blocks are larger than the maximum data transfer size",
            ));
        };
        let checks_reference = check.contains(Prinfo::CHECK_REFERENCE_TAG);
        let protection = self.metadata.protection.filter(|_| checks_reference);
        let reference_mask = protection.map_or(0, |protection| protection.reference_mask());
        let block_log2 = self.block_size.ilog2();
        // Where all reference tags have 32 bits, nothing else of a command depends on them.
        let wide = protection.filter(|_| reference_mask.min(self.blocks.max(1) - 1) > u32::MAX.into());
        Ok(NamespaceLayout {
            nsid: self.nsid,
            block_log2,
            common_block_log2: if wide.is_some() { NO_BLOCK_LOG2 } else { block_log2 },
            wide,
            blocks_max_minus_1: u16::try_from(last).unwrap_or(u16::MAX),
            write_zeroes: self.write_zeroes_blocks_max > 0,
            write_zeroes_blocks_max: self.write_zeroes_blocks_max,
            write_uncorrectable_blocks_max: self.write_uncorrectable_blocks_max,
            unmap: self.unmap,
            prinfo: check,
            reference_mask: reference_mask as u32,
        })
    }
}

/// PRINFO of reads and writes without metadata: nothing for a namespace without metadata; for one whose
/// metadata is protection information and nothing else, the controller inserts, checks and strips it. `None`
/// for other formats.
pub(crate) fn inserted_protection(metadata: &MetadataFormat) -> Option<Prinfo> {
    match metadata.bytes {
        0 => Some(Prinfo::empty()),
        _ if metadata.strips(Prinfo::ACTION) => Some(Prinfo::ACTION | metadata.checks()),
        _ => None,
    }
}

/// With blocks of this size no request is valid: 65536 of them have 2^63 bytes.
const NO_BLOCK_LOG2: u32 = 47;

/// The properties of a namespace that the I/O path needs to encode requests as commands.
#[derive(Clone, Debug)]
pub(crate) struct NamespaceLayout {
    pub(crate) nsid: u32,
    block_log2: u32,
    /// That of requests whose commands are encoded on the common path: none, if reference tags can be wider
    /// than 32 bits, which that path would have to find out for each request.
    common_block_log2: u32,
    /// The protection of a namespace whose reference tags can be wider than 32 bits.
    wide: Option<Protection>,
    /// Most blocks of a read or write, minus one.
    pub(crate) blocks_max_minus_1: u16,
    pub(crate) write_zeroes_blocks_max: u32,
    /// 0 if the command is not supported.
    pub(crate) write_uncorrectable_blocks_max: u32,
    pub(crate) write_zeroes: bool,
    pub(crate) unmap: bool,
    pub(crate) prinfo: Prinfo,
    reference_mask: u32,
}

impl NamespaceLayout {
    /// Whether the length of a read or write is valid, its buffer has exactly that length, and a read may
    /// write it. Not if its command is for the uncommon path.
    #[inline(always)]
    pub(crate) fn is_common_transfer(&self, request: &Request<Data>, buffer: &Buffer) -> bool {
        self.is_valid_length(request, buffer.len(), self.common_block_log2)
            && (request.op != Op::Read || buffer.is_writable())
    }

    /// As [`is_common_transfer`](Self::is_common_transfer), for any command, and data of any number of
    /// slices.
    pub(crate) fn is_valid_data(&self, request: &Request<Data>, data: &Data) -> bool {
        self.is_valid_length(request, data.len(), self.block_log2)
            && (request.op != Op::Read || data.is_writable())
    }

    #[inline(always)]
    fn is_valid_length(&self, request: &Request<Data>, bytes: usize, block_log2: u32) -> bool {
        request.blocks.wrapping_sub(1) <= u32::from(self.blocks_max_minus_1)
            && u64::from(request.blocks) << block_log2 == bytes as u64
    }

    #[inline(always)]
    pub(crate) fn reference_tag(&self, lba: u64) -> u32 {
        lba as u32 & self.reference_mask
    }

    /// Sets what [`reference_tag`](Self::reference_tag) lacks.
    pub(crate) fn widen_reference_tag(&self, sqe: &mut Sqe, lba: u64) {
        if let Some(protection) = &self.wide {
            set_block_tags(sqe, protection, 0, lba);
        }
    }
}

#[cfg(test)]
mod tests {
    use wire_nvme::identify::{ExtendedLbaFormat, LbaFormat};
    use wire_nvme::protection::GuardFormat;

    use super::*;

    fn layout(data_log2: u8, mdts: u8) -> Result<NamespaceLayout, NvmeOpenError> {
        let format = LbaFormat { metadata_bytes: 0, data_log2, performance: 0 };
        let identify = IdentifyNamespace { nsze: 8, formats: vec![format], ..IdentifyNamespace::default() };
        let controller = IdentifyController { mdts, ..IdentifyController::default() };
        let limits = NvmController::default();
        NamespaceInfo::new(1, Csi::Nvm, (identify, None), &controller, &limits, 12).unwrap().layout()
    }

    #[test]
    fn blocks_larger_than_mdts_are_rejected() {
        assert_eq!(layout(13, 1).unwrap().blocks_max_minus_1, 0);
        assert_eq!(layout(9, 1).unwrap().blocks_max_minus_1, 15);
        assert!(matches!(layout(16, 1), Err(NvmeOpenError::UnsupportedFormat(1, _))));
    }

    #[test]
    fn only_namespaces_beyond_32_bits_have_wide_reference_tags() {
        for (blocks, guard, dwords) in [
            (1 << 32, GuardFormat::Crc64, None),
            ((1 << 32) + 1, GuardFormat::Crc16, None),
            ((1 << 32) + 1, GuardFormat::Crc64, Some([0, 0x9876, 0x5432_1007])),
            (1 << 50, GuardFormat::Crc32, Some([0, 0x9876, 0x5432_1007])),
        ] {
            let format = LbaFormat { metadata_bytes: guard.bytes() as u16, data_log2: 9, performance: 0 };
            let identify = IdentifyNamespace {
                nsze: blocks,
                formats: vec![format],
                extended_lba: true,
                dps: 1,
                ..IdentifyNamespace::default()
            };
            let mut nvm = NvmNamespace::default();
            let storage_tag_bits = guard.storage_tag_bits().0;
            nvm.extended_formats[0] = ExtendedLbaFormat { pif: guard.to_wire(), storage_tag_bits };
            let controller = IdentifyController::default();
            let limits = NvmController::default();
            let both = (identify, Some(&nvm));
            let info = NamespaceInfo::new(1, Csi::Nvm, both, &controller, &limits, 12).unwrap();
            let layout = info.layout().unwrap();
            let arena = dma::Arena::new(dma::ArenaConfig { limit_bytes: 4 << 20, ..Default::default() });
            let mut buffer = dma::Pool::new(&arena).take(512).unwrap();
            buffer.clear();
            let mut sqe = Sqe::default();
            layout.widen_reference_tag(&mut sqe, 0x9876_5432_1007);
            let set = [sqe.cdw2, sqe.cdw3, sqe.cdw14];
            assert_eq!(set, dwords.unwrap_or_default(), "{blocks} {guard:?}");
            let request: Request<Data> = Request::write(block_io::Tag(0), 7, 1, buffer);
            let data = request.data().unwrap();
            assert!(layout.is_valid_data(&request, data));
            assert_eq!(layout.is_common_transfer(&request, data.single().unwrap()), dwords.is_none());
            assert_eq!(layout.reference_tag(0x9876_5432_1007), 0x5432_1007);
        }
    }
}

//! What is known of a namespace.

use memory::Buffer;
use ring::Request;
use wire_nvme::identify::{Csi, IdentifyController, IdentifyNamespace, NvmController, oncs};
use wire_nvme::io::Prinfo;

use crate::error::OpenError;

/// What identification told of a namespace.
#[derive(Clone, Debug, PartialEq)]
pub struct NamespaceInfo {
    /// Its identifier.
    pub nsid: u32,
    /// Its command set.
    pub command_set: Csi,
    /// Number of logical blocks.
    pub blocks: u64,
    /// Data bytes of a logical block.
    pub block_size: u32,
    /// Metadata of a logical block.
    pub metadata: Metadata,
    /// Most bytes of one read or write.
    pub transfer_max_bytes: u32,
    /// Write Zeroes is offered, for so many blocks at a time; 0 if not.
    pub write_zeroes_blocks_max: u32,
    /// Most blocks of one Write Uncorrectable; 0 where the controller does not offer it.
    pub write_uncorrectable_blocks_max: u32,
    /// Dataset Management is offered.
    pub unmap: bool,
    /// The optional commands of the controller; see [`oncs`].
    pub oncs: u16,
    /// The whole structure.
    pub identify: IdentifyNamespace,
}

/// What each block carries besides data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Bytes of it; 0 for none.
    pub bytes: u16,
    /// It follows the data of each block rather than being in a buffer of its own.
    pub extended: bool,
    /// It holds protection information.
    pub protection: Option<Protection>,
}

/// End-to-end protection of a namespace (NVM 1.0, section 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Type 1, 2 or 3.
    pub kind: ProtectionType,
    /// It is in the first bytes of the metadata rather than the last.
    pub first: bool,
}

/// What the reference tag means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtectionType {
    /// The low 32 bits of the block's address.
    Type1,
    /// What the command says, counting up.
    Type2,
    /// Nothing that the controller checks.
    Type3,
}

impl NamespaceInfo {
    /// From what the controller said.
    pub(crate) fn new(
        nsid: u32,
        command_set: Csi,
        identify: IdentifyNamespace,
        controller: &IdentifyController,
        limits: &NvmController,
        page_min_log2: u8,
    ) -> Result<NamespaceInfo, &'static str> {
        let Some(format) = identify.formats.get(usize::from(identify.format)) else {
            return Err("it is in a format that it does not list");
        };
        if !(9..=16).contains(&format.data_log2) {
            return Err("blocks under 512 bytes or over 64 KiB");
        }
        if identify.nsze > u64::MAX >> format.data_log2 {
            return Err("more bytes than 64 bits count");
        }
        let kind = match identify.dps & 7 {
            0 => None,
            1 => Some(ProtectionType::Type1),
            2 => Some(ProtectionType::Type2),
            3 => Some(ProtectionType::Type3),
            _ => return Err("a reserved type of protection information"),
        };
        if kind.is_some() && format.metadata_bytes < 8 {
            return Err("protection information without room for it");
        }
        let protection = kind.map(|kind| Protection { kind, first: identify.dps & 8 != 0 });
        let most = memory::BUFFER_BYTES_MAX as u32;
        let pages = |log2: u8| match log2 {
            0 => u32::MAX,
            log2 => 1u32.checked_shl(u32::from(log2) + u32::from(page_min_log2)).unwrap_or(u32::MAX),
        };
        // NLB has 16 bits.
        let countable = 65536u64 << format.data_log2;
        let zeroes_max = (pages(limits.wzsl) >> format.data_log2).clamp(1, 65536);
        let uncorrectable_max = (pages(limits.wusl) >> format.data_log2).clamp(1, 65536);
        let uncorrectable = controller.oncs & oncs::WRITE_UNCORRECTABLE != 0;
        let write_zeroes = controller.oncs & oncs::WRITE_ZEROES != 0;
        Ok(NamespaceInfo {
            nsid,
            command_set,
            blocks: identify.nsze,
            block_size: 1 << format.data_log2,
            metadata: Metadata {
                bytes: format.metadata_bytes,
                extended: identify.extended_lba && format.metadata_bytes > 0,
                protection,
            },
            transfer_max_bytes: pages(controller.mdts).min(most).min(countable.min(u64::from(most)) as u32),
            write_zeroes_blocks_max: if write_zeroes { zeroes_max } else { 0 },
            write_uncorrectable_blocks_max: if uncorrectable { uncorrectable_max } else { 0 },
            unmap: controller.oncs & oncs::DATASET_MANAGEMENT != 0,
            oncs: controller.oncs,
            identify,
        })
    }

    /// How requests become commands. Requests carry data alone: the controller must then make and strip
    /// the metadata by itself, which it does for eight bytes of protection information.
    pub(crate) fn layout(&self) -> Result<Layout, OpenError> {
        let stripped = self.metadata.bytes == 8 && self.metadata.protection.is_some();
        if self.metadata.bytes > 0 && !stripped {
            return Err(OpenError::Format(self.nsid, "metadata; read and write it with typed commands"));
        }
        let protection = self.metadata.protection.map(|protection| protection.kind);
        let check = match protection {
            None => 0,
            // Guard and reference tag; the application tag is nobody's here.
            Some(ProtectionType::Type1 | ProtectionType::Type2) => Prinfo::ACTION | 0b101,
            Some(ProtectionType::Type3) => Prinfo::ACTION | 0b100,
        };
        // Not over 65536, which is as far as a command counts.
        let Some(last) = (self.transfer_max_bytes / self.block_size).checked_sub(1) else {
            return Err(OpenError::Format(
                self.nsid,
                "blocks that are longer than what it transfers at a time",
            ));
        };
        Ok(Layout {
            nsid: self.nsid,
            block_log2: self.block_size.ilog2(),
            blocks_last_max: u16::try_from(last).unwrap_or(u16::MAX),
            write_zeroes: self.write_zeroes_blocks_max > 0,
            write_zeroes_blocks_max: self.write_zeroes_blocks_max,
            write_uncorrectable_blocks_max: self.write_uncorrectable_blocks_max,
            unmap: self.unmap,
            prinfo: Prinfo(check),
            reference_mask: match protection {
                Some(ProtectionType::Type1 | ProtectionType::Type2) => u32::MAX,
                Some(ProtectionType::Type3) | None => 0,
            },
        })
    }
}

/// What turns a request into a command, and nothing else.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) nsid: u32,
    pub(crate) block_log2: u32,
    /// Most blocks of a read or write, less one.
    pub(crate) blocks_last_max: u16,
    pub(crate) write_zeroes_blocks_max: u32,
    /// 0 where there is no such command.
    pub(crate) write_uncorrectable_blocks_max: u32,
    pub(crate) write_zeroes: bool,
    pub(crate) unmap: bool,
    pub(crate) prinfo: Prinfo,
    reference_mask: u32,
}

impl Layout {
    /// Whether a read or write has as many blocks as it may, and a buffer of just so many.
    #[inline(always)]
    pub(crate) fn covers(&self, request: &Request<Buffer>, buffer: &Buffer) -> bool {
        request.blocks.wrapping_sub(1) <= u32::from(self.blocks_last_max)
            && u64::from(request.blocks) << self.block_log2 == buffer.len() as u64
    }

    #[inline(always)]
    pub(crate) fn reference_tag(&self, lba: u64) -> u32 {
        lba as u32 & self.reference_mask
    }
}

#[cfg(test)]
mod tests {
    use wire_nvme::identify::LbaFormat;

    use super::*;

    fn layout(data_log2: u8, mdts: u8) -> Result<Layout, OpenError> {
        let format = LbaFormat { metadata_bytes: 0, data_log2, performance: 0 };
        let identify = IdentifyNamespace { nsze: 8, formats: vec![format], ..IdentifyNamespace::default() };
        let controller = IdentifyController { mdts, ..IdentifyController::default() };
        let limits = NvmController::default();
        NamespaceInfo::new(1, Csi::Nvm, identify, &controller, &limits, 12).unwrap().layout()
    }

    #[test]
    fn a_transfer_holds_at_least_a_block() {
        assert_eq!(layout(13, 1).unwrap().blocks_last_max, 0);
        assert_eq!(layout(9, 1).unwrap().blocks_last_max, 15);
        assert!(matches!(layout(16, 1), Err(OpenError::Format(1, _))));
    }
}

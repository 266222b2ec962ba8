//! Reads and writes of namespaces with metadata (NVM 1.0, section 5.2).
//!
//! Metadata is interleaved with the data, as fabrics require. The block device checks, generates and strips
//! protection information; here is decided what it is asked for. A command without PRINFO transfers whole
//! blocks and is planned as any other. Of a namespace that hides its protection information, the device
//! generates, checks and strips it for every command, and hosts transfer data only.

use block_io::{ProtectedData, ProtectionFlags, ProtectionTags, Status};
use dma::Data;
use wire_nvme::Sqe;
use wire_nvme::io::{ReadWrite, block_tags};
use wire_nvme::protection::ProtectionType;

use super::{
    DIRECTIVE, IoOp, IoPlan, NamespaceEntry, NamespaceTable, PROTECTION, STORAGE_TAG, block_range, plan_range,
};

/// Plans a Read, Write, Compare or Verify of a namespace with metadata.
#[cold]
pub(super) fn read_write(sqe: &Sqe, table: &NamespaceTable, op: IoOp) -> Result<IoPlan, Status> {
    let (namespace, entry) = table.find(sqe.nsid)?;
    if !entry.hidden_protection.is_empty() {
        return of_hidden(sqe, table, op, (namespace, entry));
    }
    let clear = if entry.has_storage_tag() { DIRECTIVE } else { STORAGE_TAG | DIRECTIVE };
    let (lba, blocks) = block_range(sqe, entry, clear)?;
    let command = ReadWrite::from_sqe(sqe);
    let flags = match command.storage_tag_check {
        true => command.prinfo | ProtectionFlags::CHECK_STORAGE_TAG,
        false => command.prinfo,
    };
    let storage_tag = checked_storage_tag(entry, op, (sqe, lba), flags)?;
    let bytes = u64::from(blocks) * u64::from(entry.block_bytes(flags));
    let plan = plan_range(sqe, table, op, (namespace, entry), (lba, blocks), bytes)?;
    let op = match op {
        IoOp::Read if !flags.is_empty() => IoOp::ProtectedRead,
        IoOp::Write if !flags.is_empty() => IoOp::ProtectedWrite,
        op => op,
    };
    let (application_tag, application_mask) = (command.application_tag, command.application_tag_mask);
    Ok(IoPlan { op, protection: flags, storage_tag, application_tag, application_mask, ..plan })
}

/// Plans a command of a namespace that hides its protection information.
fn of_hidden(
    sqe: &Sqe,
    table: &NamespaceTable,
    op: IoOp,
    (namespace, entry): (u16, &NamespaceEntry),
) -> Result<IoPlan, Status> {
    let protected = match op {
        IoOp::Read => IoOp::ProtectedRead,
        IoOp::Write => IoOp::ProtectedWrite,
        IoOp::Verify => IoOp::Verify,
        // The block layer compares whole blocks, which hosts do not have.
        _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
    };
    let (lba, blocks) = block_range(sqe, entry, PROTECTION | DIRECTIVE)?;
    let bytes = u64::from(blocks) << entry.block_log2;
    let plan = plan_range(sqe, table, op, (namespace, entry), (lba, blocks), bytes)?;
    let protection = entry.hidden_protection | ProtectionFlags::ACTION;
    Ok(IoPlan { op: protected, protection, ..plan })
}

/// Checks what a command wants of protection information; returns its storage tag.
fn checked_storage_tag(
    entry: &NamespaceEntry,
    op: IoOp,
    (sqe, lba): (&Sqe, u64),
    flags: ProtectionFlags,
) -> Result<u16, Status> {
    if flags.is_empty() {
        return Ok(0);
    }
    let invalid = Err(Status::INVALID_PROTECTION_INFORMATION.do_not_retry());
    // The block layer compares whole blocks.
    let is_supported = matches!(op, IoOp::Read | IoOp::Write | IoOp::Verify);
    let Some(protection) = entry.metadata.protection.filter(|_| is_supported) else { return invalid };
    let (storage, reference) = block_tags(sqe, &protection);
    // The block device counts reference tags from the LBA. Type 1 requires that; other initial tags of type 2
    // are not supported, and type 3 does not check them.
    let uses_reference = flags.intersects(ProtectionFlags::ACTION | ProtectionFlags::CHECK_REFERENCE_TAG);
    let counts_from_lba =
        reference == lba & protection.reference_mask() || protection.kind == ProtectionType::Type3;
    if uses_reference && !counts_from_lba {
        return invalid;
    }
    Ok(storage as u16)
}

impl NamespaceEntry {
    fn has_storage_tag(&self) -> bool {
        self.metadata.protection.is_some_and(|protection| protection.storage_tag_bits > 0)
    }
}

impl IoPlan {
    /// The payload of a request that is executed with the command's protection.
    pub(crate) fn protected(&self, data: Data) -> Box<ProtectedData<Data>> {
        let tags = ProtectionTags {
            reference: self.lba,
            storage: self.storage_tag.into(),
            application: self.application_tag,
            application_mask: self.application_mask,
        };
        Box::new(ProtectedData { data, metadata: None, flags: self.protection, tags })
    }
}

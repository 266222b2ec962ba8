//! The namespaces of a controller, as its I/O queues see them.

use std::collections::BTreeMap;
use std::sync::Arc;

use block_io::{ProtectionFlags, Status};
use wire_nvme::Sqe;
use wire_nvme::log::AnaState;
use wire_nvme::protection::MetadataFormat;

use super::{CONFLICT, IoOp, IoPlan};
use crate::limits::PAGE_LOG2;
use crate::reservation::{self, DenyMask, NamespaceReservations, Requester, access};
use crate::subsystem::NamespaceIdentity;
use crate::{ControllerAssociation, ControllerDirectory, ControllerLimits, Subsystem};

/// The status of commands to a namespace that has replaced another one and was not identified since.
const REPLACED: Status = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();

/// The namespaces of a subsystem, indexed for lookup by I/O queues: rebuilt for every new [`Subsystem`]
/// snapshot, read by every command.
#[derive(Clone, Debug, Default)]
pub struct NamespaceTable {
    // Indexed by namespace identifier - 1; `exists` is false for inactive identifiers.
    pub(super) entries: Vec<NamespaceEntry>,
    // Same index.
    pub(super) reservations: Vec<Option<Arc<NamespaceReservations>>>,
    pub(super) requester: Option<Requester>,
    // Namespaces that the host takes for those which had their identifiers before, by index, with what their
    // entries become when it has identified them. Their entries reject every command until then, so that none
    // reaches the device of another namespace than it was meant for.
    pub(super) replaced: BTreeMap<u32, ReplacedNamespace>,
    pub(super) transfer_max_bytes: u32,
    pub(super) memory_based: bool,
    pub(super) compare_and_write: bool,
    // Bits of ONCS whose commands are rejected.
    pub(super) masked_oncs: u16,
    // Most bytes of a Write Zeroes, and most blocks of a range that is deallocated.
    pub(super) write_zeroes_max_bytes: u64,
    pub(super) unmap_range_max_blocks: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ReplacedNamespace {
    identity: NamespaceIdentity,
    is_plain: bool,
    ana: Status,
}

/// One namespace of a [`NamespaceTable`].
#[derive(Clone, Debug)]
pub struct NamespaceEntry {
    /// Size in blocks.
    pub blocks: u64,
    /// The transport's key for the block device.
    pub backend: u32,
    /// Data bytes of a block, as a power of two.
    pub block_log2: u8,
    /// Metadata of a block, interleaved with its data.
    pub metadata: MetadataFormat,
    /// What the device checks of protection information that hosts do not see.
    pub(super) hidden_protection: ProtectionFlags,
    /// Required alignment of buffer addresses in bytes.
    pub buffer_alignment: u32,
    pub(super) exists: bool,
    // Exists, accepts commands, and has no metadata, not even hidden.
    pub(super) is_plain: bool,
    pub(super) read_only: bool,
    pub(super) can_unmap: bool,
    pub(super) can_write_zeroes: bool,
    pub(super) can_write_uncorrectable: bool,
    // Access that reservations of other hosts deny.
    pub(super) deny_mask: Arc<DenyMask>,
    // Success, or the status that the state of its ANA group requires for every command, or that it was
    // replaced.
    pub(super) ana: Status,
}

impl NamespaceEntry {
    fn none() -> NamespaceEntry {
        NamespaceEntry {
            blocks: 0,
            backend: 0,
            block_log2: 9,
            metadata: MetadataFormat::NONE,
            hidden_protection: ProtectionFlags::empty(),
            buffer_alignment: 4096,
            exists: false,
            is_plain: false,
            read_only: true,
            can_unmap: false,
            can_write_zeroes: false,
            can_write_uncorrectable: false,
            deny_mask: Arc::default(),
            ana: Status::SUCCESS,
        }
    }

    /// Bytes of a block that a command with these flags transfers.
    pub(crate) fn block_bytes(&self, flags: ProtectionFlags) -> u32 {
        self.metadata.transfer_bytes(1 << self.block_log2, flags)
    }
}

impl NamespaceTable {
    /// The namespaces of a subsystem on a port, without a host: reservations are not enforced.
    pub fn new(subsystem: &Subsystem, portid: u16, limits: &ControllerLimits) -> NamespaceTable {
        NamespaceTable::build(subsystem, portid, limits, None)
    }

    /// The namespaces of a subsystem on a port, with the reservations that apply to the controller's host.
    pub fn for_controller(
        subsystem: &Subsystem,
        portid: u16,
        limits: &ControllerLimits,
        directory: &Arc<ControllerDirectory>,
        association: &Arc<ControllerAssociation>,
    ) -> NamespaceTable {
        let requester = Requester { directory: directory.clone(), association: association.clone() };
        NamespaceTable::build(subsystem, portid, limits, Some(requester))
    }

    fn build(
        subsystem: &Subsystem,
        portid: u16,
        limits: &ControllerLimits,
        requester: Option<Requester>,
    ) -> NamespaceTable {
        let last = subsystem.namespaces.last().map_or(0, |namespace| namespace.nsid);
        assert!(last <= u16::MAX.into(), "namespace {last} has no index in plans");
        let mut entries = vec![NamespaceEntry::none(); last as usize];
        let mut reservations = vec![None; last as usize];
        let mut replaced = BTreeMap::new();
        for namespace in &subsystem.namespaces {
            let is_visible = |requester: &Requester| namespace.is_visible_to(requester.association.hostnqn());
            if !requester.as_ref().is_none_or(is_visible) {
                continue;
            }
            reservations[namespace.nsid as usize - 1] = Some(namespace.reservations.clone());
            let ana = match subsystem.ana_state(portid, namespace.anagrpid) {
                AnaState::Optimized | AnaState::NonOptimized => Status::SUCCESS,
                AnaState::Inaccessible => Status::ANA_INACCESSIBLE,
                AnaState::PersistentLoss => Status::ANA_PERSISTENT_LOSS,
                AnaState::Change => Status::ANA_TRANSITION,
            };
            let storage_tag_bits = namespace.metadata.protection.map_or(0, |it| it.storage_tag_bits);
            assert!(storage_tag_bits <= 16, "a storage tag of {storage_tag_bits} bits has no space in plans");
            let is_plain =
                ana.is_success() && namespace.metadata.bytes == 0 && namespace.hidden_protection.is_empty();
            let identity = namespace.identity();
            let is_another =
                |requester: &Requester| requester.association.takes_for_another(namespace.nsid, &identity);
            let is_replaced = requester.as_ref().is_some_and(is_another);
            if is_replaced {
                replaced.insert(namespace.nsid - 1, ReplacedNamespace { identity, is_plain, ana });
            }
            let ana = if is_replaced { REPLACED } else { ana };
            entries[namespace.nsid as usize - 1] = NamespaceEntry {
                blocks: namespace.blocks,
                backend: namespace.backend,
                block_log2: namespace.block_size.trailing_zeros() as u8,
                metadata: namespace.metadata,
                hidden_protection: namespace.hidden_protection,
                is_plain: is_plain && !is_replaced,
                buffer_alignment: namespace.buffer_alignment,
                exists: true,
                read_only: namespace.read_only,
                can_unmap: namespace.can_unmap,
                can_write_zeroes: namespace.can_write_zeroes,
                can_write_uncorrectable: namespace.can_write_uncorrectable,
                deny_mask: requester
                    .as_ref()
                    .map(|requester| namespace.reservations.attach(requester, namespace.nsid))
                    .unwrap_or_default(),
                ana,
            };
        }
        NamespaceTable {
            entries,
            reservations,
            requester,
            replaced,
            transfer_max_bytes: limits.transfer_max_bytes,
            memory_based: limits.memory_based,
            compare_and_write: limits.compare_and_write,
            masked_oncs: limits.masked_oncs,
            write_zeroes_max_bytes: match subsystem.write_zeroes_max_log2 {
                0 => u64::MAX,
                log2 => 1u64.checked_shl(u32::from(PAGE_LOG2) + u32::from(log2)).unwrap_or(u64::MAX),
            },
            unmap_range_max_blocks: match subsystem.unmap_range_max_blocks {
                0 => u32::MAX,
                blocks => blocks,
            },
        }
    }

    /// Whether the host has identified a replaced namespace since the table was built.
    pub(crate) fn is_identified(&self, nsid: u32) -> bool {
        let replaced = self.replaced.get(&nsid.wrapping_sub(1));
        let association = self.requester.as_ref().map(|requester| &requester.association);
        replaced
            .zip(association)
            .is_some_and(|(replaced, association)| !association.takes_for_another(nsid, &replaced.identity))
    }

    /// Accepts commands to a replaced namespace that the host has identified.
    pub(crate) fn open_replaced(&mut self, nsid: u32) {
        let index = nsid.wrapping_sub(1);
        if let Some(ReplacedNamespace { is_plain, ana, .. }) = self.replaced.remove(&index)
            && let Some(entry) = self.entries.get_mut(index as usize)
        {
            (entry.is_plain, entry.ana) = (is_plain, ana);
        }
    }

    /// The namespace of a plan.
    #[inline]
    pub fn entry(&self, plan: &IoPlan) -> &NamespaceEntry {
        &self.entries[plan.namespace as usize]
    }

    /// The key of the block device of a plan; `None` if the plan has no namespace, or if it was removed
    /// since.
    pub(crate) fn backend(&self, plan: &IoPlan) -> Option<u32> {
        if matches!(plan.op, IoOp::FlushAll | IoOp::Disconnect) {
            return None;
        }
        let entry = self.entries.get(plan.namespace as usize)?;
        entry.exists.then_some(entry.backend)
    }

    /// The keys of the block devices of all namespaces, for [`IoOp::FlushAll`].
    pub fn backends(&self) -> impl Iterator<Item = u32> {
        self.entries.iter().filter(|entry| entry.exists).map(|entry| entry.backend)
    }

    /// Checks whether reservations still permit a plan. A plan that was deferred must be checked again:
    /// another host may have acquired a reservation since.
    ///
    /// # Errors
    /// The status to complete the command with.
    #[inline]
    pub fn check_reservation(&self, plan: &IoPlan) -> Result<(), Status> {
        let class = match plan.op {
            IoOp::Read | IoOp::ProtectedRead => access::READ,
            IoOp::Compare | IoOp::FusedCompare | IoOp::Verify => access::READ,
            IoOp::ProtectedWrite | IoOp::Write | IoOp::FusedWrite | IoOp::Flush | IoOp::WriteZeroes => {
                access::WRITE
            }
            IoOp::Unmap | IoOp::WriteUncorrectable => access::WRITE,
            IoOp::Copy => access::READ | access::WRITE,
            IoOp::FlushAll => {
                let denied = self.entries.iter().any(|entry| entry.deny_mask.denies(access::WRITE));
                return if denied { Err(CONFLICT) } else { Ok(()) };
            }
            // Dataset Management is a write even if it only sets attributes.
            IoOp::NoOp => access::WRITE,
            IoOp::Reservation | IoOp::Disconnect => return Ok(()),
        };
        if self.entry(plan).deny_mask.denies(class) { Err(CONFLICT) } else { Ok(()) }
    }

    /// Executes an [`IoOp::Reservation`] plan with the host's data.
    pub fn execute_reservation(&self, plan: &IoPlan, data: &[u8]) -> reservation::ReservationOutcome {
        let reservations = self.reservations.get(plan.namespace as usize).and_then(Option::as_ref);
        let (Some(requester), Some(reservations)) = (&self.requester, reservations) else {
            return reservation::ReservationOutcome::Done(Status::INTERNAL_ERROR);
        };
        let mut sqe = Sqe::new(plan.blocks as u8);
        (sqe.cdw10, sqe.cdw11) = (plan.lba as u32, (plan.lba >> 32) as u32);
        reservations.execute(requester, &sqe, data)
    }

    /// Bits of FUSE and PSDT that no I/O command may have, but fused ones. FUSE is 00b except for fused
    /// operations. PSDT is 01b over fabrics (SGLs), and 00b (PRPs) or 01b on memory-based transports (Base
    /// 2.0, section 3.3.3.1).
    #[inline(always)]
    pub(super) fn invalid_flags(&self, flags: u8) -> u8 {
        let (mask, valid) = if self.memory_based { (0x83, 0) } else { (0xc3, Sqe::FLAGS_SGL) };
        flags & mask ^ valid
    }

    /// The namespace with this identifier, if it accepts commands and has no metadata.
    #[inline]
    pub(super) fn find_plain(&self, nsid: u32) -> Option<(u16, &NamespaceEntry)> {
        // Identifier 0 wraps to an index beyond the end.
        let index = nsid.wrapping_sub(1);
        self.entries.get(index as usize).filter(|entry| entry.is_plain).map(|entry| (index as u16, entry))
    }

    pub(super) fn find(&self, nsid: u32) -> Result<(u16, &NamespaceEntry), Status> {
        let index = nsid.wrapping_sub(1);
        let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        match self.entries.get(index as usize) {
            Some(entry) if entry.exists && !entry.ana.is_success() => Err(entry.ana),
            Some(entry) if entry.exists && entry.metadata.protection.is_some_and(|it| it.is_extended()) => {
                if self.host_knows_extended_formats() {
                    Ok((index as u16, entry))
                } else {
                    invalid
                }
            }
            Some(entry) if entry.exists => Ok((index as u16, entry)),
            _ => invalid,
        }
    }

    /// Whether the host has said that it knows extended formats of protection information: others would take
    /// it for that with a 16-bit guard.
    fn host_knows_extended_formats(&self) -> bool {
        self.requester.as_ref().is_none_or(|requester| requester.association.knows_extended_formats())
    }
}

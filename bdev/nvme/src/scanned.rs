//! What a scan finds out about a namespace on one path.

use std::sync::Arc;

use uuid::Uuid;
use wire_nvme::identify::{IdentifyController, IdentifyNamespace, nsfeat};
use wire_nvme::protection::MetadataFormat;

/// The globally unique identifiers of a namespace (Base 2.0, section 4.7.1).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NamespaceIds {
    pub(crate) nguid: [u8; 16],
    pub(crate) eui64: [u8; 8],
    pub(crate) uuid: Option<Uuid>,
}

impl NamespaceIds {
    /// Whether it reports any identifier.
    pub(crate) fn is_known(&self) -> bool {
        self.nguid != [0; 16] || self.eui64 != [0; 8] || self.uuid.is_some_and(|uuid| !uuid.is_nil())
    }

    /// Whether both are of one namespace: they have an identifier in common, and none that differs. One that
    /// only one of them has proves nothing, as a controller may not report it for a time. Without any on both
    /// sides, they may be.
    pub(crate) fn may_be(&self, other: &NamespaceIds) -> bool {
        let ids = |of: &NamespaceIds| {
            let uuid = of.uuid.filter(|uuid| !uuid.is_nil()).map(Uuid::into_bytes);
            let nguid = Some(of.nguid).filter(|nguid| *nguid != [0; 16]);
            let eui64 = Some(of.eui64).filter(|eui64| *eui64 != [0; 8]);
            [uuid, nguid, eui64.map(|eui64| (u128::from(u64::from_le_bytes(eui64))).to_le_bytes())]
        };
        let both = ids(self).into_iter().zip(ids(other)).filter_map(|(one, other)| one.zip(other));
        let mut same = both.map(|(one, other)| one == other).peekable();
        match same.peek() {
            Some(_) => same.all(|same| same),
            None => !self.is_known() && !other.is_known(),
        }
    }
}

/// The properties of a namespace, as identified on one path.
#[derive(Clone)]
pub(crate) struct ScannedNamespace {
    pub(crate) nsid: u32,
    pub(crate) identity: NamespaceIds,
    pub(crate) identify: Arc<IdentifyNamespace>,
    pub(crate) block_size: u32,
    /// None, or protection information that the controller inserts, checks and strips.
    pub(crate) metadata: MetadataFormat,
    pub(crate) transfer_max_bytes: u32,
    /// See [`bdev::IoLimits`].
    pub(crate) alignment: u32,
    pub(crate) virtual_boundary: u32,
    pub(crate) atomic: AtomicUnit,
    pub(crate) unmap: bool,
    pub(crate) write_zeroes: bool,
    pub(crate) write_uncorrectable: bool,
}

/// Writes that are atomic at a power failure, and against reads: the unit for the former is never larger than
/// that for the latter (NVM 1.0, section 2.1.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AtomicUnit {
    /// Most blocks; 0 for none.
    pub(crate) blocks: u32,
    /// They cross no multiple of this many blocks; 0 for no boundary.
    pub(crate) boundary_blocks: u32,
}

impl AtomicUnit {
    /// The unit of a namespace, within what a command transfers.
    pub(crate) fn of(
        controller: &IdentifyController,
        namespace: &IdentifyNamespace,
        command_blocks_max: u32,
    ) -> AtomicUnit {
        let of_controller = controller.atomic_write_power_fail_blocks;
        let has_own = namespace.nsfeat & nsfeat::ATOMICS != 0;
        let blocks = match namespace.atomic_write_power_fail_blocks {
            own if has_own && own > 0 => own,
            _ => of_controller,
        };
        let blocks = blocks.min(command_blocks_max);
        match namespace.atomic_boundary_blocks {
            boundary_blocks if has_own && boundary_blocks > 0 => {
                // Boundaries that do not begin at the first block have no place in a geometry.
                let is_possible = namespace.atomic_boundary_offset == 0;
                AtomicUnit {
                    blocks: if is_possible { blocks.min(boundary_blocks) } else { 0 },
                    boundary_blocks,
                }
            }
            _ => AtomicUnit { blocks, boundary_blocks: 0 },
        }
    }

    /// What holds on two paths.
    pub(crate) fn and(self, other: AtomicUnit) -> AtomicUnit {
        let (mut one, mut rest) = (self.boundary_blocks, other.boundary_blocks);
        while rest > 0 {
            (one, rest) = (rest, one % rest);
        }
        let blocks = self.blocks.min(other.blocks);
        AtomicUnit { blocks: if one > 0 { blocks.min(one) } else { blocks }, boundary_blocks: one }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_the_same_if_no_identifier_differs_and_one_is_common() {
        let ids = |nguid: u8, eui64: u8, uuid: u128| NamespaceIds {
            nguid: [nguid; 16],
            eui64: [eui64; 8],
            uuid: (uuid != 0).then(|| Uuid::from_u128(uuid)),
        };
        for (one, other, same) in [
            (ids(1, 0, 0), ids(1, 0, 0), true),
            (ids(1, 2, 3), ids(1, 2, 3), true),
            (ids(1, 2, 3), ids(1, 2, 4), false),
            (ids(1, 2, 3), ids(1, 4, 3), false),
            (ids(1, 2, 3), ids(4, 2, 3), false),
            // One that was not reported says nothing.
            (ids(1, 0, 3), ids(1, 2, 0), true),
            (ids(0, 0, 3), ids(1, 2, 0), false),
            (ids(0, 0, 0), ids(0, 2, 0), false),
            (ids(0, 0, 0), ids(0, 0, 0), true),
            (NamespaceIds { uuid: Some(Uuid::nil()), ..ids(0, 0, 0) }, ids(0, 0, 0), true),
        ] {
            assert_eq!((one.may_be(&other), other.may_be(&one)), (same, same), "{one:?} {other:?}");
        }
    }

    #[test]
    fn atomic_writes_keep_to_the_units_and_boundaries_of_the_namespace() {
        let controller =
            IdentifyController { atomic_write_power_fail_blocks: 16, ..IdentifyController::default() };
        let unit = |features, own, offset, boundary| {
            let namespace = IdentifyNamespace {
                nsfeat: features,
                atomic_write_power_fail_blocks: own,
                atomic_boundary_offset: offset,
                atomic_boundary_blocks: boundary,
                ..IdentifyNamespace::default()
            };
            let unit = AtomicUnit::of(&controller, &namespace, 256);
            (unit.blocks, unit.boundary_blocks)
        };
        assert_eq!(unit(0, 32, 0, 64), (16, 0), "fields that are not valid");
        assert_eq!(unit(nsfeat::ATOMICS, 0, 0, 0), (16, 0));
        assert_eq!(unit(nsfeat::ATOMICS, 300, 0, 0), (256, 0), "one command");
        assert_eq!(unit(nsfeat::ATOMICS, 33, 0, 64), (33, 64));
        assert_eq!(unit(nsfeat::ATOMICS, 64, 0, 40), (40, 40));
        assert_eq!(unit(nsfeat::ATOMICS, 32, 4, 64).0, 0);
        let of = |blocks, boundary_blocks| AtomicUnit { blocks, boundary_blocks };
        assert_eq!(of(32, 64).and(of(16, 0)), of(16, 64));
        assert_eq!(of(32, 64).and(of(40, 40)), of(8, 8));
        assert_eq!(of(32, 0).and(of(0, 0)), of(0, 0));
    }
}

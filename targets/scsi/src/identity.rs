//! INQUIRY data: what the unit is, and what it supports.

use bdev::Uuid;
use wire_scsi::inquiry::{
    self, Association, BlockLimits, DISK, Designator, NO_UNIT, ProtocolId, Provisioning, StandardInquiry,
    page, version,
};

use crate::blocks::compare_and_write_blocks_max;
use crate::limits::{TRANSFER_BYTES_MAX, UNMAP_DESCRIPTORS_MAX, WRITE_SAME_BLOCKS_MAX};
use crate::nexus::UnitNexus;
use crate::sanitize::can_erase;
use crate::transfer::{atomic_blocks_max, atomic_unit_blocks};
use crate::unit::LogicalUnit;

const VENDOR: &str = "RINGBOLT";
const REVISION: &str = "0001";
const VERSIONS: [u16; 4] = [version::SAM_5, version::SPC_4, version::SBC_3, version::ISCSI];

/// Pages that [`page`] has, in ascending order.
const PAGES: [u8; 9] = [
    page::SUPPORTED,
    page::SERIAL,
    page::IDENTIFICATION,
    page::NETWORK_ADDRESSES,
    page::EXTENDED,
    page::MODE_POLICY,
    page::BLOCK_LIMITS,
    page::CHARACTERISTICS,
    page::PROVISIONING,
];

/// Standard INQUIRY data of a unit.
pub(crate) fn standard(unit: &LogicalUnit) -> Vec<u8> {
    let inquiry = StandardInquiry {
        peripheral: DISK,
        // Implicit and explicit changes of access states.
        port_groups: if unit.ports().has_groups() { 3 } else { 0 },
        third_party_copy: true,
        multiple_ports: true,
        vendor: VENDOR,
        product: &unit.config().product,
        revision: REVISION,
        versions: &VERSIONS,
    };
    inquiry.encode().to_vec()
}

/// Standard INQUIRY data of a LUN without a unit.
pub(crate) fn standard_absent() -> Vec<u8> {
    let inquiry = StandardInquiry {
        peripheral: NO_UNIT,
        port_groups: 0,
        third_party_copy: false,
        multiple_ports: false,
        vendor: VENDOR,
        product: "",
        revision: REVISION,
        versions: &VERSIONS,
    };
    inquiry.encode().to_vec()
}

/// A vital product data page; `None` if there is no such page.
pub(crate) fn page(nexus: &UnitNexus, code: u8) -> Option<Vec<u8>> {
    let unit = nexus.unit();
    let config = unit.config();
    let content = match code {
        page::SUPPORTED => PAGES.to_vec(),
        page::SERIAL => serial(unit).into_bytes(),
        page::IDENTIFICATION => identification(nexus),
        // Its management has no address of its own.
        page::NETWORK_ADDRESSES => Vec::new(),
        page::EXTENDED => inquiry::extended(config.geometry.write_cache).to_vec(),
        page::MODE_POLICY => inquiry::MODE_POLICY_SHARED.to_vec(),
        page::BLOCK_LIMITS => limits(unit).encode().to_vec(),
        page::CHARACTERISTICS => inquiry::characteristics(can_erase(unit)).to_vec(),
        page::PROVISIONING => provisioning(unit).encode().to_vec(),
        _ => return None,
    };
    Some(inquiry::vpd_page(DISK, code, &content))
}

/// The serial number: the UUID's digits.
pub(crate) fn serial(unit: &LogicalUnit) -> String {
    unit.config().uuid.simple().to_string()
}

/// A number of 60 bits for initiators that make names of NAA identifiers, such as multipath drivers, which
/// take units of one name for one. It depends on every bit of the UUID (FNV-1a): UUIDs that are counted up,
/// or begin with the time, are equal in one half.
fn naa(uuid: Uuid) -> u64 {
    uuid.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// What identifies a unit with this serial number, on every path.
pub(crate) fn unit_designators<'a>(unit: &LogicalUnit, serial: &'a str) -> [Designator<'a>; 3] {
    let uuid = unit.config().uuid;
    [Designator::LocalNaa(naa(uuid)), Designator::T10(VENDOR, serial), Designator::Uuid(*uuid.as_bytes())]
}

/// The device identification page. Identifiers of the unit follow from its UUID, those of ports from the
/// nexus.
fn identification(nexus: &UnitNexus) -> Vec<u8> {
    let (unit, ports) = (nexus.unit(), nexus.ports());
    let serial = serial(unit);
    let mut out = Vec::new();
    for designator in unit_designators(unit, &serial) {
        designator.encode(Association::Unit, ProtocolId::None, &mut out);
    }
    let of_port = [Designator::RelativePort(ports.relative_port), Designator::PortGroup(ports.port_group)];
    for designator in of_port {
        designator.encode(Association::Port, ports.protocol, &mut out);
    }
    if ports.protocol == ProtocolId::Iscsi {
        Designator::Name(&ports.target).encode(Association::Port, ports.protocol, &mut out);
    }
    if !ports.target_device.is_empty() {
        Designator::Name(&ports.target_device).encode(Association::Device, ports.protocol, &mut out);
    }
    out
}

fn limits(unit: &LogicalUnit) -> BlockLimits {
    let block_bytes = unit.block_bytes().max(1);
    let transfer_blocks = (TRANSFER_BYTES_MAX / block_bytes).max(1);
    let geometry = unit.config().geometry;
    let unit_blocks = geometry.write_unit_blocks.max(1);
    let granularity = (geometry.physical_block_size / block_bytes).max(unit_blocks);
    // Initiators divide what is longer, which is to be between units.
    let optimal_blocks = (transfer_blocks / unit_blocks).max(1) * unit_blocks;
    let can_unmap = unit.config().can_unmap;
    BlockLimits {
        write_same_nonzero: true,
        compare_and_write_blocks: compare_and_write_blocks_max(unit) as u8,
        unmap_blocks: if can_unmap { u32::MAX } else { 0 },
        unmap_descriptors: if can_unmap { UNMAP_DESCRIPTORS_MAX as u32 } else { 0 },
        write_same_blocks: WRITE_SAME_BLOCKS_MAX.into(),
        optimal_granularity_blocks: granularity.clamp(1, u16::MAX.into()) as u16,
        transfer_blocks,
        optimal_transfer_blocks: optimal_blocks.min(transfer_blocks),
        atomic_blocks: atomic_blocks_max(unit),
        atomic_unit_blocks: atomic_unit_blocks(unit),
        unmap_granularity_blocks: 0,
    }
}

fn provisioning(unit: &LogicalUnit) -> Provisioning {
    let can_unmap = unit.config().can_unmap;
    Provisioning { unmap: can_unmap, write_same: can_unmap, reads_zeroes: can_unmap, thin: can_unmap }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn uuids_that_differ_anywhere_have_different_naa_identifiers() {
        let some = Uuid::from_bytes(*b"unit of the test").as_u128();
        // Each bit of one, and UUIDs that are counted up, in either half.
        let changed = (0..128).map(|bit| some ^ 1 << bit);
        let counted = (0..1000_u128).flat_map(|number| [number, number << 64, number << 64 | number]);
        let uuids: BTreeSet<u128> = changed.chain(counted).collect();
        let identifiers: BTreeSet<u64> =
            uuids.iter().map(|uuid| naa(Uuid::from_u128(*uuid)) & (u64::MAX >> 4)).collect();
        assert_eq!(identifiers.len(), uuids.len());
        // It is the same in every version, as initiators keep names.
        assert_eq!(naa(Uuid::from_u128(some)), 0xf7dc_7318_b5e3_8fa1);
    }
}

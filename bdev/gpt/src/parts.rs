//! The partitions of bases as bdevs.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use bdev::stacking::{BaseBdev, PartBdev, PartKind};
use bdev::{BdevError, BlockDevice, InfoValue, Registry};
use uuid::Uuid;
use wire_gpt::{GptEntry, GptTable, PartitionType};

/// What a partition is beside its blocks.
pub struct GptPart {
    table_guid: Uuid,
    entry: GptEntry,
}

impl GptPart {
    /// Its entry in the table.
    pub fn entry(&self) -> &GptEntry {
        &self.entry
    }
}

impl PartKind for GptPart {
    const PRODUCT_NAME: &'static str = "GPT Disk";

    fn describe(&self, base_name: &str, first_lba: u64) -> Vec<(&'static str, InfoValue)> {
        let guid = |guid: &Uuid| InfoValue::Text(guid.to_string());
        let object = vec![
            ("base_bdev", base_name.into()),
            ("offset_blocks", InfoValue::Number(first_lba)),
            ("partition_table_guid", guid(&self.table_guid)),
            ("partition_type_guid", guid(&self.entry.type_guid)),
            ("unique_partition_guid", guid(&self.entry.unique_guid)),
            ("partition_name", InfoValue::Text(self.entry.name_text())),
        ];
        vec![("gpt", InfoValue::Object(object))]
    }
}

/// Which partitions are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PartTypes {
    All,
    One(PartitionType),
}

impl PartTypes {
    pub(crate) fn parse(text: &str) -> Option<PartTypes> {
        match text.eq_ignore_ascii_case("all") {
            true => Some(PartTypes::All),
            false => PartitionType::parse(text).map(PartTypes::One),
        }
    }

    pub(crate) fn contain(self, entry: &GptEntry) -> bool {
        match self {
            PartTypes::All => true,
            PartTypes::One(PartitionType(guid)) => guid == entry.type_guid,
        }
    }
}

impl std::fmt::Display for PartTypes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PartTypes::All => f.write_str("all"),
            PartTypes::One(PartitionType(guid)) => write!(f, "{guid}"),
        }
    }
}

/// Whether SPDK exposes the partition, so that it becomes a bdev without a request.
pub(crate) fn is_of_spdk(entry: &GptEntry) -> bool {
    [PartitionType::SPDK.0, PartitionType::SPDK_OLD.0].contains(&entry.type_guid)
}

/// Blocks of the bdev of a partition: one less than it has for the old type, whose bdevs have always been so.
fn exposed_blocks(entry: &GptEntry) -> Option<u64> {
    let is_old = entry.type_guid == PartitionType::SPDK_OLD.0;
    entry.blocks()?.checked_sub(is_old.into()).filter(|blocks| *blocks > 0)
}

/// The claimed bases with their tables, by UUID. An entry without partitions is without effect, and goes with
/// the next claim.
#[derive(Default)]
pub(crate) struct ClaimedBases(HashMap<Uuid, ClaimedBase>);

struct ClaimedBase {
    /// Of its partitions.
    base: Weak<BaseBdev>,
    table: Arc<GptTable>,
}

/// What has become of the partitions that were asked for.
#[derive(Default)]
pub(crate) struct Exposed {
    /// Names of those that are there.
    pub(crate) names: Vec<String>,
    /// Those that were created now.
    pub(crate) created: Vec<Arc<BlockDevice>>,
    /// Names of those that could not be created, and why.
    pub(crate) failed: Vec<(String, BdevError)>,
}

impl ClaimedBases {
    /// The table of a base whose partitions are there.
    pub(crate) fn table(&self, device: &Arc<BlockDevice>) -> Option<Arc<GptTable>> {
        self.claimed(device).map(|(_, table)| table)
    }

    fn claimed(&self, device: &Arc<BlockDevice>) -> Option<(Arc<BaseBdev>, Arc<GptTable>)> {
        let claimed = self.0.get(&device.uuid())?;
        let base = claimed.base.upgrade().filter(|base| Arc::ptr_eq(base.device(), device))?;
        Some((base, claimed.table.clone()))
    }

    /// Creates the partitions of a device that `is_wanted` selects and that are not there. A table that
    /// counts already goes before `table`.
    ///
    /// # Errors
    /// [`BdevError::Claimed`]; [`BdevError::Removed`]; [`BdevError::Invalid`] for a device with protection
    /// information.
    pub(crate) fn expose(
        &mut self,
        registry: &Registry,
        device: &Arc<BlockDevice>,
        table: &Arc<GptTable>,
        is_wanted: impl Fn(&GptEntry) -> bool,
    ) -> Result<Exposed, BdevError> {
        let claimed = self.claimed(device);
        let table = claimed.as_ref().map_or(table, |(_, table)| table).clone();
        let (valid, rest) = table.valid_entries();
        if claimed.is_none() && !rest.is_empty() {
            let numbers: Vec<String> = rest.iter().map(|index| (index + 1).to_string()).collect();
            let (name, numbers) = (device.name(), numbers.join(", "));
            log::warn!(target: "bdev", "partitions {numbers} of {name} overlap or are outside of its usable blocks: they are no bdevs");
        }
        let mut exposed = Exposed::default();
        let wanted = valid.iter().filter(|(_, entry)| is_wanted(entry));
        let wanted: Vec<_> =
            wanted.filter_map(|(index, entry)| Some((index, entry, exposed_blocks(entry)?))).collect();
        if wanted.is_empty() {
            return Ok(exposed);
        }
        let base = match claimed {
            Some((base, _)) => base,
            None => {
                let by = format!("gpt bdevs of {}", device.name());
                let base = BaseBdev::claim(registry, device.name(), &by)?;
                if !Arc::ptr_eq(base.device(), device) {
                    return Err(BdevError::Removed { name: device.name().to_string() });
                }
                let base = Arc::new(base);
                self.0.retain(|_, claimed| claimed.base.strong_count() > 0);
                self.0
                    .insert(device.uuid(), ClaimedBase { base: Arc::downgrade(&base), table: table.clone() });
                base
            }
        };
        for (index, entry, blocks) in wanted {
            // From 1, as the kernel counts them.
            let name = format!("{}p{}", device.name(), index + 1);
            if part_of(registry, &name, device) {
                exposed.names.push(name);
                continue;
            }
            let kind = GptPart { table_guid: table.header.disk_guid, entry: *entry };
            let created = PartBdev::new(base.clone(), entry.first_lba, blocks, kind)
                .and_then(|part| registry.register(&name, Some(entry.unique_guid), &[], Arc::new(part)));
            match created {
                Ok(part) => {
                    exposed.names.push(name);
                    exposed.created.push(part);
                }
                Err(error) => exposed.failed.push((name, error)),
            }
        }
        exposed.created.iter().for_each(|part| registry.stack(device, part));
        Ok(exposed)
    }
}

/// Whether `name` is a partition of that device.
fn part_of(registry: &Registry, name: &str, device: &Arc<BlockDevice>) -> bool {
    registry.find(name).is_some_and(|found| {
        found.name() == name
            && found.module::<PartBdev<GptPart>>().is_some_and(|part| Arc::ptr_eq(part.base(), device))
    })
}

/// The partitions of a device that are there.
pub(crate) fn parts_of(registry: &Registry, device: &BlockDevice) -> Vec<(Arc<BlockDevice>, GptEntry)> {
    let uppers = registry.uppers(device).into_iter().filter(|upper| !upper.is_removed());
    let parts = uppers.filter_map(|upper| {
        let entry = *upper.module::<PartBdev<GptPart>>()?.kind().entry();
        Some((upper, entry))
    });
    parts.collect()
}

//! Virtual bdevs that methods create: at once, when their bases appear, and again when these return.
//!
//! Each is kept here until a method deletes it. It is pending while the registry does not have it: before its
//! bases have appeared, and after a base went and took it along. One that did without a base gets it back
//! here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::MutexGuard;

use control::json::{Map, Value};
use control::{DecodeLog, Parameters, RpcError};
use uuid::Uuid;

use super::BdevModule;
use crate::{BdevError, BlockDevice, Registry};

/// Most virtual bdevs, so that calls for bases that never come take a bounded amount of memory.
const VIRTUAL_BDEVS_MAX: usize = 65_536;

/// The virtual bdevs of the module.
#[derive(Default)]
pub(super) struct VirtualBdevs {
    records: BTreeMap<String, VirtualBdevRecord>,
    /// Their names by what their calls name as their bases.
    on_base: HashMap<String, BTreeSet<String>>,
}

/// A virtual bdev that a method has created, or is to create once its bases appear.
struct VirtualBdevRecord {
    /// Name, alias or UUID of each base.
    bases: Vec<String>,
    /// UUIDs of the bases that it was created on last, as far as they were there; `None` before the first.
    created_on: Option<Vec<Option<Uuid>>>,
    create: CreateBdev,
}

/// Creates the bdev again, and records the call. The flag says whether it is on the bases that it was on
/// before.
type CreateBdev = Box<dyn Fn(&BdevModule, bool) -> Result<(), CreateFailure> + Send>;

enum CreateFailure {
    /// A base is not there yet.
    BaseMissing,
    Failed(RpcError),
}

impl CreateFailure {
    fn of(error: BdevError, bases: &[String]) -> CreateFailure {
        match error {
            BdevError::NotFound { name } if bases.contains(&name) => CreateFailure::BaseMissing,
            error => CreateFailure::Failed(error.into()),
        }
    }
}

impl BdevModule {
    /// Creates a virtual bdev on `bases`, each a name, alias or UUID, with `create`, which sets in the
    /// parameters what the saved call needs besides. For modules of other crates too; a bdev that was created
    /// so is deleted by [`delete`](Self::delete), upper before base, and saved with the subsystem `bdev`.
    ///
    /// If `create` fails with [`BdevError::NotFound`] of one of the bases, by the name given here, the bdev
    /// is created when that base appears; another failure is then logged. It is created again, with the UUID
    /// that it had in the parameter `uuid`, when it went with a base and that returns; on another base of the
    /// same name with the UUID that the call gave, if any. While it is there, it gets each of its bases that
    /// appears by [`Bdev::on_base_returned`](crate::Bdev::on_base_returned).
    ///
    /// # Errors
    /// Of `create`; `EINVAL` if it is its own base; `EEXIST` if the name is in use or pending, `ENOMEM` if
    /// too many are pending.
    pub fn create_on_bases<P: Parameters + Send + 'static>(
        &self,
        bases: &[&str],
        name: &str,
        method: &'static str,
        mut params: P,
        create: impl Fn(&Registry, &mut P) -> Result<(), BdevError> + Send + 'static,
    ) -> Result<(), RpcError> {
        // Held over both attempts: a base that appears in between is examined after this.
        let mut virtual_bdevs = self.virtual_bdevs();
        if virtual_bdevs.contains(name) {
            return Err(BdevError::Exists { name: name.to_string() }.into());
        }
        if bases.contains(&name) {
            let reason = format!("{name} cannot be its own base");
            return Err(BdevError::Invalid { field: "name", reason }.into());
        }
        let full = virtual_bdevs.records.len() >= VIRTUAL_BDEVS_MAX;
        let given_uuid = params.to_object().remove("uuid");
        let bases: Vec<String> = bases.iter().map(|base| base.to_string()).collect();
        let found = self.uuids_of(&bases);
        let result = create(&self.registry, &mut params).map_err(|error| CreateFailure::of(error, &bases));
        let created_on = match result {
            Ok(()) => Some(found),
            Err(CreateFailure::BaseMissing) => {
                if self.registry.find(name).is_some() {
                    return Err(BdevError::Exists { name: name.to_string() }.into());
                }
                if full {
                    let message =
                        format!("{VIRTUAL_BDEVS_MAX} virtual bdevs exist, or wait for their bases, already");
                    return Err(RpcError::new(RpcError::ENOMEM, message));
                }
                log::info!(target: "bdev", "{name} is created when it has its base {}", bases.join(", "));
                None
            }
            Err(CreateFailure::Failed(error)) => return Err(error),
        };
        self.created.record(name, method, &params);
        let (own_name, own_bases) = (name.to_string(), bases.clone());
        let create_again = move |bdevs: &BdevModule, is_same_base: bool| {
            // As it is saved: what was changed after its creation, such as a latency, still holds.
            let mut object = bdevs.created.parameters(&own_name).unwrap_or_default();
            if !is_same_base {
                set_uuid(&mut object, given_uuid.clone());
            }
            let params = P::from_object(object, &mut DecodeLog::default());
            let mut params = params.map_err(|error| CreateFailure::Failed(error.into()))?;
            create(&bdevs.registry, &mut params).map_err(|error| CreateFailure::of(error, &own_bases))?;
            bdevs.created.record(&own_name, method, &params);
            Ok(())
        };
        let record = VirtualBdevRecord { bases, created_on, create: Box::new(create_again) };
        virtual_bdevs.insert(name, record);
        Ok(())
    }

    /// Creates the virtual bdevs that wait for a device, or the one of that name if its bases are there;
    /// those that are there already get the device back.
    pub(super) fn create_pending(&self, appeared: &str) {
        let mut virtual_bdevs = self.virtual_bdevs();
        for name in virtual_bdevs.on_device(&self.registry, appeared) {
            let Some(record) = virtual_bdevs.records.get_mut(&name) else { continue };
            if let Some(upper) = self.registry.find(&name) {
                self.return_base(record, &upper, appeared);
                continue;
            }
            let bases = self.uuids_of(&record.bases);
            if bases.iter().all(Option::is_none) {
                continue;
            }
            let same = |(before, now): (&Option<Uuid>, &Option<Uuid>)| before.is_none() || before == now;
            let before = record.created_on.as_ref();
            let is_same_base = before.is_none_or(|before| before.iter().zip(&bases).all(same));
            match (record.create)(self, is_same_base) {
                Ok(()) => record.created_on = Some(bases),
                Err(CreateFailure::BaseMissing) => {}
                Err(CreateFailure::Failed(error)) => {
                    let bases = record.bases.join(", ");
                    log::warn!(target: "bdev", "{name} cannot be created on {bases}: {error}");
                    if record.created_on.is_none() {
                        virtual_bdevs.remove(&name);
                        self.created.remove(&name);
                    }
                }
            }
        }
    }

    fn return_base(&self, record: &VirtualBdevRecord, upper: &BlockDevice, appeared: &str) {
        // Not a device that only has the name of one that is pending.
        let is_its_own = record.created_on.is_some() && self.registry.is_stacked(upper);
        let Some(base) =
            self.registry.find(appeared).filter(|base| is_its_own && base.name() != upper.name())
        else {
            return;
        };
        if let Err(error) = upper.bdev().on_base_returned(&self.registry, &base) {
            log::warn!(target: "bdev", "{} does without its base {}: {error}", upper.name(), base.name());
        }
    }

    fn uuids_of(&self, bases: &[String]) -> Vec<Option<Uuid>> {
        bases.iter().map(|base| Some(self.registry.find(base)?.uuid())).collect()
    }

    /// Forgets a virtual bdev, so that it is not created any more; returns whether it was pending or created.
    pub(super) fn forget_virtual(&self, name: &str) -> bool {
        let found = self.virtual_bdevs().remove(name);
        if found {
            self.created.remove(name);
        }
        found
    }

    pub(super) fn virtual_bdevs(&self) -> MutexGuard<'_, VirtualBdevs> {
        sync::lock(&self.virtual_bdevs)
    }
}

impl VirtualBdevs {
    pub(super) fn contains(&self, name: &str) -> bool {
        self.records.contains_key(name)
    }

    fn insert(&mut self, name: &str, record: VirtualBdevRecord) {
        for base in &record.bases {
            self.on_base.entry(base.clone()).or_default().insert(name.to_string());
        }
        self.records.insert(name.to_string(), record);
    }

    fn remove(&mut self, name: &str) -> bool {
        let Some(record) = self.records.remove(name) else { return false };
        for base in &record.bases {
            if let Some(names) = self.on_base.get_mut(base) {
                names.remove(name);
                if names.is_empty() {
                    self.on_base.remove(base);
                }
            }
        }
        true
    }

    /// Names of those that are based on a device, by one of its names; if there is none, of that which has
    /// this name.
    fn on_device(&self, registry: &Registry, name: &str) -> BTreeSet<String> {
        let Some(device) = registry.find(name) else { return BTreeSet::from([name.to_string()]) };
        let uuid = device.uuid().to_string();
        let aliases = device.aliases();
        let bases = [device.name(), &uuid].into_iter().chain(aliases.iter().map(String::as_str));
        bases.filter_map(|base| self.on_base.get(base)).flatten().cloned().collect()
    }
}

fn set_uuid(object: &mut Map<String, Value>, uuid: Option<Value>) {
    match uuid {
        Some(uuid) => _ = object.insert("uuid".to_string(), uuid),
        None => _ = object.remove("uuid"),
    }
}

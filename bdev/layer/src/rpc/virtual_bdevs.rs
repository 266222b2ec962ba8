//! Virtual bdevs that methods create: at once, when their base appears, and again when it returns.
//!
//! Each is kept here until a method deletes it. It is pending while the registry does not have it: before its
//! base has appeared, and after the base went and took it along.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::MutexGuard;

use control::json::{Map, Value};
use control::{DecodeLog, Parameters, RpcError};
use uuid::Uuid;

use super::BdevModule;
use crate::{BdevError, Registry};

/// Most virtual bdevs, so that calls for bases that never come take a bounded amount of memory.
const VIRTUAL_BDEVS_MAX: usize = 65_536;

/// The virtual bdevs of the module.
#[derive(Default)]
pub(super) struct VirtualBdevs {
    records: BTreeMap<String, VirtualBdevRecord>,
    /// Their names by what their calls name as their bases.
    on_base: HashMap<String, BTreeSet<String>>,
}

/// A virtual bdev that a method has created, or is to create once its base appears.
struct VirtualBdevRecord {
    /// Name, alias or UUID of the base.
    base: String,
    /// UUID of the base that it was created on last; `None` before the first.
    created_on: Option<Uuid>,
    create: CreateBdev,
}

/// Creates the bdev again, and records the call. The flag says whether it is on the base that it was on
/// before.
type CreateBdev = Box<dyn FnMut(&BdevModule, bool) -> Result<(), RpcError> + Send>;

impl BdevModule {
    /// Creates a virtual bdev on `base` with `create`, which sets what the saved call needs besides. If there
    /// is no such base yet, it is created when the base appears; a failure is then logged. It is created
    /// again, with the UUID that it had, when the base has gone and returns; on another base of the same name
    /// with the UUID that the call gave, if any.
    pub(super) fn create_on_base<P: Parameters + Send + 'static>(
        &self,
        base: &str,
        name: &str,
        method: &'static str,
        mut params: P,
        create: fn(&Registry, &mut P) -> Result<(), BdevError>,
    ) -> Result<(), RpcError> {
        // Held over both attempts: a base that appears in between is examined after this.
        let mut virtual_bdevs = self.virtual_bdevs();
        if virtual_bdevs.contains(name) {
            return Err(BdevError::Exists { name: name.to_string() }.into());
        }
        let full = virtual_bdevs.records.len() >= VIRTUAL_BDEVS_MAX;
        let given_uuid = params.to_object().remove("uuid");
        let found = self.registry.find(base);
        let created_on = match create(&self.registry, &mut params) {
            Ok(()) => Some(found.map_or(Uuid::nil(), |base| base.uuid())),
            Err(BdevError::NotFound { name: missing }) if missing == base => {
                if self.registry.find(name).is_some() {
                    return Err(BdevError::Exists { name: name.to_string() }.into());
                }
                if full {
                    let message =
                        format!("{VIRTUAL_BDEVS_MAX} virtual bdevs exist, or wait for their bases, already");
                    return Err(RpcError::new(RpcError::ENOMEM, message));
                }
                log::info!(target: "bdev", "{name} is created when its base {base} appears");
                None
            }
            Err(error) => return Err(error.into()),
        };
        self.created.record(name, method, &params);
        let own_name = name.to_string();
        let create_again = move |bdevs: &BdevModule, is_same_base: bool| {
            // As it is saved: what was changed after its creation, such as a latency, still holds.
            let mut object = bdevs.created.parameters(&own_name).unwrap_or_default();
            if !is_same_base {
                set_uuid(&mut object, given_uuid.clone());
            }
            let mut params = P::from_object(object, &mut DecodeLog::default())?;
            create(&bdevs.registry, &mut params)?;
            bdevs.created.record(&own_name, method, &params);
            Ok(())
        };
        let record = VirtualBdevRecord { base: base.to_string(), created_on, create: Box::new(create_again) };
        virtual_bdevs.insert(name, record);
        Ok(())
    }

    /// Creates the virtual bdevs that wait for a device, or the one of that name if its base is there.
    pub(super) fn create_pending(&self, appeared: &str) {
        let mut virtual_bdevs = self.virtual_bdevs();
        for name in virtual_bdevs.on_device(&self.registry, appeared) {
            let Some(record) = virtual_bdevs.records.get_mut(&name) else { continue };
            let Some(base) = self.registry.find(&record.base) else { continue };
            if self.registry.find(&name).is_some() {
                continue;
            }
            let is_same_base = record.created_on.is_none_or(|uuid| uuid == base.uuid());
            match (record.create)(self, is_same_base) {
                Ok(()) => record.created_on = Some(base.uuid()),
                Err(error) => {
                    log::warn!(target: "bdev", "{name} cannot be created on {}: {error}", base.name());
                    if record.created_on.is_none() {
                        virtual_bdevs.remove(&name);
                        self.created.remove(&name);
                    }
                }
            }
        }
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
        self.on_base.entry(record.base.clone()).or_default().insert(name.to_string());
        self.records.insert(name.to_string(), record);
    }

    fn remove(&mut self, name: &str) -> bool {
        let Some(record) = self.records.remove(name) else { return false };
        if let Some(names) = self.on_base.get_mut(&record.base) {
            names.remove(name);
            if names.is_empty() {
                self.on_base.remove(&record.base);
            }
        }
        true
    }

    /// Names of those that are based on a device, by one of its names; if there is none, of that which has
    /// this name.
    fn on_device(&self, registry: &Registry, name: &str) -> BTreeSet<String> {
        let Some(device) = registry.find(name) else { return BTreeSet::from([name.to_string()]) };
        let uuid = device.uuid().to_string();
        let bases = [device.name(), &uuid].into_iter().chain(device.aliases().iter().map(String::as_str));
        bases.filter_map(|base| self.on_base.get(base)).flatten().cloned().collect()
    }
}

fn set_uuid(object: &mut Map<String, Value>, uuid: Option<Value>) {
    match uuid {
        Some(uuid) => _ = object.insert("uuid".to_string(), uuid),
        None => _ = object.remove("uuid"),
    }
}

//! The block devices of a configuration, in pages that successive configurations share.

use std::sync::Arc;

use bdev::Descriptor;

/// Devices of a page: a change copies one page and the list of pages, both of a few hundred bytes for 4,096 devices.
pub(crate) const PAGE_DEVICES: usize = 64;

pub(crate) type DevicePage = [Option<Arc<Descriptor>>; PAGE_DEVICES];

/// The open block devices of a target, by a key that the target assigns. Keys are indices: they should be small.
///
/// A clone shares its pages with the original until one of them changes, so that the next configuration costs what
/// differs, and a core finds that by comparing pages. A key may be used for another device only after all cores have
/// applied a configuration without it.
#[derive(Clone, Debug, Default)]
pub struct DeviceMap {
    pages: Vec<Arc<DevicePage>>,
}

impl DeviceMap {
    /// A map without devices.
    pub fn new() -> DeviceMap {
        DeviceMap::default()
    }

    /// The device with this key.
    pub fn get(&self, key: &u32) -> Option<&Arc<Descriptor>> {
        let (page, offset) = position(*key);
        self.pages.get(page)?[offset].as_ref()
    }

    /// Adds a device; returns the one that had the key.
    pub fn insert(&mut self, key: u32, device: Arc<Descriptor>) -> Option<Arc<Descriptor>> {
        let (page, offset) = position(key);
        if self.pages.len() <= page {
            self.pages.resize_with(page + 1, || Arc::new([const { None }; PAGE_DEVICES]));
        }
        Arc::make_mut(&mut self.pages[page])[offset].replace(device)
    }

    /// Removes a device.
    pub fn remove(&mut self, key: &u32) -> Option<Arc<Descriptor>> {
        self.get(key)?;
        let (page, offset) = position(*key);
        Arc::make_mut(&mut self.pages[page])[offset].take()
    }

    pub(crate) fn pages(&self) -> &[Arc<DevicePage>] {
        &self.pages
    }
}

fn position(key: u32) -> (usize, usize) {
    (key as usize / PAGE_DEVICES, key as usize % PAGE_DEVICES)
}

impl FromIterator<(u32, Arc<Descriptor>)> for DeviceMap {
    fn from_iter<I: IntoIterator<Item = (u32, Arc<Descriptor>)>>(devices: I) -> DeviceMap {
        let mut map = DeviceMap::new();
        for (key, device) in devices {
            map.insert(key, device);
        }
        map
    }
}

impl<const N: usize> From<[(u32, Arc<Descriptor>); N]> for DeviceMap {
    fn from(devices: [(u32, Arc<Descriptor>); N]) -> DeviceMap {
        devices.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use bdev::{Access, Registry, null};

    use super::*;

    #[test]
    fn a_change_copies_one_page_and_leaves_earlier_maps_as_they_are() {
        let registry = Registry::new();
        null::create(&registry, null::NullConfig::new("N", 8, 512)).unwrap();
        let device = Arc::new(registry.open("N", Access::ReadOnly).unwrap());
        let before: DeviceMap = (0..200).map(|key| (key, device.clone())).collect();
        let mut after = before.clone();
        after.remove(&70);
        assert!(after.remove(&1000).is_none());
        let shared = |index: usize| Arc::ptr_eq(&before.pages[index], &after.pages[index]);
        assert_eq!([0, 1, 2, 3].map(shared), [true, false, true, true]);
        assert_eq!(
            (before.get(&70).is_some(), after.get(&70).is_some(), after.get(&71).is_some()),
            (true, false, true)
        );
        after.insert(5000, device.clone());
        assert_eq!(
            (after.get(&5000).is_some(), before.get(&5000).is_none(), after.get(&4999).is_none()),
            (true, true, true)
        );
    }
}

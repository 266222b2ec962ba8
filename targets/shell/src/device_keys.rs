//! The keys of a [`DeviceMap`](crate::DeviceMap).

use std::collections::{BTreeMap, BTreeSet};

/// Assigns the keys of a [`DeviceMap`](crate::DeviceMap), the smallest first.
///
/// A key that is [retired](Self::retire) is free when every core has applied the configuration that lacks its device:
/// until then a core may use the device.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceKeys {
    /// The smallest key that was never assigned.
    next: u32,
    free: BTreeSet<u32>,
    /// Keys with the generation of the configuration that lacks them.
    retired: BTreeMap<u32, u64>,
}

impl DeviceKeys {
    /// Assigns a key. `applied_by_all` is the generation that all cores have applied
    /// ([`Publisher::applied_by_all`](crate::Publisher::applied_by_all)).
    pub(crate) fn assign(&mut self, applied_by_all: u64) -> u32 {
        self.retired.retain(|key, generation| {
            let is_free = *generation <= applied_by_all;
            if is_free {
                self.free.insert(*key);
            }
            !is_free
        });
        self.free.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Gives a key back; the configuration of this generation lacks its device. A later call for the same key replaces
    /// an earlier one.
    pub(crate) fn retire(&mut self, key: u32, generation: u64) {
        self.retired.insert(key, generation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_free_when_all_cores_have_applied_its_end() {
        let mut keys = DeviceKeys::default();
        assert_eq!([keys.assign(0), keys.assign(0), keys.assign(0)], [0, 1, 2]);
        keys.retire(1, 5);
        assert_eq!(keys.assign(4), 3);
        assert_eq!(keys.assign(5), 1);
        assert_eq!(keys.assign(5), 4);
        keys.retire(2, 6);
        keys.retire(2, 7);
        assert_eq!([keys.assign(6), keys.assign(7), keys.assign(7)], [5, 2, 6]);
    }
}

//! The memory that all devices in memory share, and what of it is allocated.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use dma::SharedRegion;

use crate::BdevError;

/// The memory for devices in memory. Pages are allocated by the first write: without a limit, devices larger
/// than the machine's memory would be created, and the process killed when they fill.
#[derive(Clone, Default)]
pub(crate) struct MemoryBudget(Arc<Mutex<BudgetState>>);

struct BudgetState {
    limit_bytes: u64,
    reserved_bytes: u64,
}

/// The contents of a device in memory, zeroed at first. It counts against the budget of its registry until it
/// is dropped.
pub struct DeviceMemory {
    region: SharedRegion,
    // Dropped after the region.
    _reservation: MemoryReservation,
}

struct MemoryReservation {
    budget: MemoryBudget,
    bytes: u64,
}

impl MemoryBudget {
    pub(crate) fn set_limit(&self, limit_bytes: u64) {
        sync::lock(&self.0).limit_bytes = limit_bytes;
    }

    /// With `shared`, memory that a device in another process, or one that pins it, can reach.
    pub(crate) fn allocate(&self, name: &str, bytes: u64, shared: bool) -> Result<DeviceMemory, BdevError> {
        let reservation = self.reserve(name, bytes)?;
        let region = if shared { SharedRegion::new_shared(bytes)? } else { SharedRegion::new(bytes)? };
        Ok(DeviceMemory { region, _reservation: reservation })
    }

    fn reserve(&self, name: &str, bytes: u64) -> Result<MemoryReservation, BdevError> {
        let mut state = sync::lock(&self.0);
        let limit_bytes = state.limit_bytes;
        let left_bytes = limit_bytes.saturating_sub(state.reserved_bytes);
        if bytes > left_bytes {
            return Err(BdevError::NoMemoryLeft { name: name.to_string(), bytes, left_bytes, limit_bytes });
        }
        state.reserved_bytes += bytes;
        Ok(MemoryReservation { budget: self.clone(), bytes })
    }
}

impl Default for BudgetState {
    fn default() -> BudgetState {
        BudgetState { limit_bytes: u64::MAX, reserved_bytes: 0 }
    }
}

impl Deref for DeviceMemory {
    type Target = SharedRegion;

    #[inline]
    fn deref(&self) -> &SharedRegion {
        &self.region
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        sync::lock(&self.budget.0).reserved_bytes -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use dma::RegionError;

    use super::*;

    fn left(budget: &MemoryBudget, bytes: u64) -> Option<u64> {
        match budget.reserve("M", bytes).err()? {
            BdevError::NoMemoryLeft { left_bytes, .. } => Some(left_bytes),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn devices_share_the_memory_and_return_it() {
        let budget = MemoryBudget::default();
        budget.set_limit(3 << 20);
        let first = budget.allocate("A", 1 << 20, false).unwrap();
        let second = budget.allocate("B", 2 << 20, false).unwrap();
        assert_eq!(left(&budget, 1), Some(0));
        drop(first);
        assert_eq!(left(&budget, (1 << 20) + 1), Some(1 << 20));
        // What cannot be mapped is not reserved either: a region has at least one byte.
        assert!(matches!(budget.allocate("C", 0, false), Err(BdevError::Memory(RegionError::Size(0)))));
        drop(second);
        assert_eq!(left(&budget, 3 << 20), None);
        assert_eq!(left(&budget, u64::MAX), Some(3 << 20));
        // A limit below what is reserved rejects what is new.
        let third = budget.allocate("D", 2 << 20, false).unwrap();
        budget.set_limit(1 << 20);
        assert_eq!(left(&budget, 1), Some(0));
        assert_eq!(third.len(), 2 << 20);
    }
}

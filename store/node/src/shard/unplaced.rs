//! The memory of entries that are not in place.

use std::cell::Cell;
use std::rc::Rc;

use reactor::Core;

/// What a shard has at most: enough to keep the device busy, also if all writes are for one shard.
const SHARD_MAX: u64 = 8 << 20;
/// What the shards of a core have at most together. While a checkpoint keeps a shard from writing in place, its entries wait: with
/// more memory they only wait longer.
const CORE_MAX: u64 = 16 << 20;
/// What a shard may have however much the others have: a group whose replicas do not answer keeps its own, and must not slow
/// down others.
const SHARD_RESERVED: u64 = 512 << 10;
/// Buffers that are longer are whole pages: a block with the header of its entry takes two.
const PAGE: u64 = 4096;

/// What the shards of a core have.
#[derive(Default)]
struct CoreUnplaced(Cell<u64>);

/// What one shard has.
pub(super) struct UnplacedMemory {
    bytes: u64,
    of_core: Rc<CoreUnplaced>,
}

impl UnplacedMemory {
    pub(super) fn new(core: &Core) -> UnplacedMemory {
        UnplacedMemory { bytes: 0, of_core: core.local() }
    }

    /// An entry of so many bytes is not in place.
    pub(super) fn add(&mut self, entry_bytes: u64) {
        let bytes = memory_of(entry_bytes);
        self.bytes += bytes;
        self.of_core.0.update(|all| all + bytes);
    }

    /// Such an entry is in place, or given up.
    pub(super) fn remove(&mut self, entry_bytes: u64) {
        let bytes = memory_of(entry_bytes);
        self.bytes -= bytes;
        self.of_core.0.update(|all| all - bytes);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Another entry must wait until one is in place. A shard without any always has room: else nothing would end its wait.
    pub(super) fn is_full_for(&self, entry_bytes: u64) -> bool {
        let bytes = memory_of(entry_bytes);
        let is_core_full = self.bytes + bytes > SHARD_RESERVED && self.of_core.0.get() + bytes > CORE_MAX;
        self.bytes > 0 && (self.bytes + bytes > SHARD_MAX || is_core_full)
    }

    /// Entries go in place now, however few they are.
    pub(super) fn is_half_full(&self) -> bool {
        self.bytes > SHARD_MAX / 2 || (self.bytes > 0 && self.of_core.0.get() > CORE_MAX / 2)
    }
}

impl Drop for UnplacedMemory {
    fn drop(&mut self) {
        self.of_core.0.update(|all| all - self.bytes);
    }
}

/// The memory of an entry that takes so many bytes of the log.
fn memory_of(entry_bytes: u64) -> u64 {
    if entry_bytes > PAGE { entry_bytes.next_multiple_of(PAGE) } else { entry_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shards<const COUNT: usize>() -> [UnplacedMemory; COUNT] {
        let of_core = Rc::<CoreUnplaced>::default();
        std::array::from_fn(|_| UnplacedMemory { bytes: 0, of_core: of_core.clone() })
    }

    #[test]
    fn a_shard_has_a_limit_and_all_of_a_core_have_one_together() {
        let [mut one, mut other, mut third] = shards();
        one.add(SHARD_MAX / 2);
        assert!(!one.is_half_full() && !one.is_full_for(SHARD_MAX / 2) && one.is_full_for(SHARD_MAX / 2 + 1));
        one.add(SHARD_MAX / 2);
        assert!(one.is_half_full() && !other.is_half_full());
        other.add(CORE_MAX - SHARD_MAX - PAGE);
        // One that has nothing has room for an entry of any size.
        assert!(!third.is_full_for(SHARD_MAX) && !third.is_half_full());
        third.add(PAGE);
        assert!(third.is_half_full());
        // What is reserved for it does not depend on the others.
        assert!(!third.is_full_for(SHARD_RESERVED - PAGE) && third.is_full_for(SHARD_RESERVED));
        drop(one);
        assert!(!third.is_full_for(SHARD_MAX / 2));
        other.remove(CORE_MAX - SHARD_MAX - PAGE);
        assert!(!third.is_half_full());
    }

    #[test]
    fn entries_are_counted_by_their_buffers() {
        let [mut shard] = shards();
        for (entry_bytes, memory) in [(512, 512), (4096, 4096), (4608, 8192), ((128 << 10) + 512, 132 << 10)]
        {
            shard.add(entry_bytes);
            assert_eq!(shard.bytes(), memory);
            shard.remove(entry_bytes);
            assert_eq!(shard.bytes(), 0);
        }
    }
}

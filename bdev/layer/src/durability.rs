//! Durability classes: what a write survives once it is durable.

/// What a write to a device survives, once it was completed with FUA or flushed; the weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// Nothing is stored.
    None,
    /// Nothing: it is in the memory of this process. Its class is `memory`, as that of [`Memory`](Self::Memory).
    Process,
    /// The end of the process. It is in memory of the machine, which a boot or a power failure empties: a file on tmpfs, a
    /// RAM disk.
    Memory,
    /// A power failure. It is on the medium of a device.
    Disk,
    /// A power failure. It is in persistent memory, flushed from the caches of the processors.
    Pmem,
}

impl Durability {
    /// The name of the class: `none`, `memory`, `disk` or `pmem`.
    pub fn name(self) -> &'static str {
        match self {
            Durability::None => "none",
            Durability::Process | Durability::Memory => "memory",
            Durability::Disk => "disk",
            Durability::Pmem => "pmem",
        }
    }

    /// Whether a power failure loses it.
    pub fn is_volatile(self) -> bool {
        self < Durability::Disk
    }
}

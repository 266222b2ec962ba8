//! Faults of the engine `error`.

use std::collections::HashMap;

use crate::AccelOp;

control::choices! {
    /// What becomes of an operation that is hit.
    pub enum InjectType {
        /// Nothing: no operation is hit.
        Disable = "disable",
        /// It succeeds with a wrong result: one bit of it, or of a checksum, is changed.
        Corrupt = "corrupt",
        /// It fails.
        Failure = "failure",
    }
}

/// Which operations are hit, and by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// What becomes of them.
    pub kind: InjectType,
    /// Most hits on each core.
    pub count: u64,
    /// Every nth is hit; 0 and 1 are each one.
    pub interval: u64,
    /// Linux error number of a failure, positive; 0 is `EIO`.
    pub errno: i32,
}

impl Injection {
    pub(crate) const NONE: Injection =
        Injection { kind: InjectType::Disable, count: 0, interval: 0, errno: 0 };
}

/// The faults, and how often each core was hit. Behind a lock: only operations of the engine `error` take it.
pub(crate) struct Injections([OpInjection; AccelOp::COUNT]);

struct OpInjection {
    injection: Injection,
    /// Hits, and operations since the last one, by core.
    cores: HashMap<usize, (u64, u64)>,
}

impl Default for Injections {
    fn default() -> Injections {
        Injections(std::array::from_fn(|_| OpInjection { injection: Injection::NONE, cores: HashMap::new() }))
    }
}

impl Injections {
    pub(crate) fn set(&mut self, op: AccelOp, injection: Injection) {
        self.0[op.index()] = OpInjection { injection, cores: HashMap::new() };
    }

    /// What an operation on this core is hit by.
    pub(crate) fn hit(&mut self, op: AccelOp, core: usize) -> Option<Injection> {
        let OpInjection { injection, cores } = &mut self.0[op.index()];
        if injection.kind == InjectType::Disable {
            return None;
        }
        let (hits, since) = cores.entry(core).or_default();
        *since += 1;
        if *since < injection.interval || *hits >= injection.count {
            return None;
        }
        (*hits, *since) = (*hits + 1, 0);
        Some(*injection)
    }
}

//! Which engine executes an operation.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use crate::inject::Injections;
use crate::stats::CoreCounts;
use crate::{AccelChannel, AccelOp, CryptoKeys, Injection, OpStats};

/// What executes operations: SPDK's accel modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Engine {
    /// The CPU.
    Software,
    /// The CPU, with injected errors.
    Error,
}

impl Engine {
    /// All engines, in the order of their preference.
    pub const ALL: [Engine; 2] = [Engine::Software, Engine::Error];

    /// SPDK's name.
    pub const fn name(self) -> &'static str {
        match self {
            Engine::Software => "software",
            Engine::Error => "error",
        }
    }

    /// The engine of this name.
    pub fn from_name(name: &str) -> Option<Engine> {
        Engine::ALL.into_iter().find(|engine| engine.name() == name)
    }

    /// Whether it executes an operation.
    pub const fn supports(self, op: AccelOp) -> bool {
        match self {
            Engine::Software | Engine::Error => !matches!(op, AccelOp::Compress | AccelOp::Decompress),
        }
    }
}

/// The framework of a program: engines, keys, faults and statistics. Clones are the same.
#[derive(Clone, Default)]
pub struct Accel(Arc<AccelInner>);

#[derive(Default)]
pub(crate) struct AccelInner {
    pub(crate) assigned: Assignments,
    pub(crate) injections: Mutex<Injections>,
    /// Kept for the life of the program: there are as many as cores.
    cores: Mutex<BTreeMap<usize, Arc<CoreCounts>>>,
    keys: CryptoKeys,
}

/// The engine of each operation. Channels read it with each operation, so that a change is in force at once.
#[derive(Default)]
pub(crate) struct Assignments([AtomicU8; AccelOp::COUNT]);

impl Assignments {
    /// Whether the CPU executes an operation without faults.
    #[inline]
    pub(crate) fn is_plain(&self, op: AccelOp) -> bool {
        self.0[op.index()].load(Ordering::Relaxed) == Engine::Software as u8
    }
}

impl Accel {
    /// The channel of a core, by its index. Only that core's thread may use it: others lose counts.
    pub fn channel(&self, core: usize) -> AccelChannel {
        let counts = sync::lock(&self.0.cores).entry(core).or_default().clone();
        AccelChannel::new(self.0.clone(), core, counts)
    }

    /// The keys.
    pub fn keys(&self) -> &CryptoKeys {
        &self.0.keys
    }

    /// The engine that executes an operation; `None` if there is none.
    pub fn engine(&self, op: AccelOp) -> Option<Engine> {
        let number = self.0.assigned.0[op.index()].load(Ordering::Relaxed);
        Engine::ALL.into_iter().find(|engine| *engine as u8 == number && engine.supports(op))
    }

    /// Has an engine execute an operation from now on, on all cores. Returns whether it supports it.
    pub fn assign(&self, op: AccelOp, engine: Engine) -> bool {
        if engine.supports(op) {
            self.0.assigned.0[op.index()].store(engine as u8, Ordering::Relaxed);
        }
        engine.supports(op)
    }

    /// Has operations fail or give wrong results, as far as they are [assigned](Self::assign) to
    /// [`Engine::Error`]. Replaces what was set for the operation before, and counts from 0.
    pub fn inject(&self, op: AccelOp, injection: Injection) {
        sync::lock(&self.0.injections).set(op, injection);
    }

    /// The statistics of all cores together, by [`AccelOp::index`].
    pub fn stats(&self) -> [OpStats; AccelOp::COUNT] {
        let mut total = [OpStats::default(); AccelOp::COUNT];
        for (_, counts) in self.core_stats() {
            total.iter_mut().zip(counts).for_each(|(total, counts)| total.add(counts));
        }
        total
    }

    /// The statistics of each core that has had a channel, by its index.
    pub fn core_stats(&self) -> Vec<(usize, [OpStats; AccelOp::COUNT])> {
        sync::lock(&self.0.cores).iter().map(|(core, counts)| (*core, counts.read())).collect()
    }
}

//! The framework of a program.

use std::sync::Arc;

use ioat::{IoatAddress, IoatOpenError};

use crate::engine::AccelInner;
use crate::{
    AccelChannel, AccelOp, AccelOpStats, AccelQueue, CryptoKeys, Engine, Injection, IoatChannelInfo,
};

/// The framework of a program: engines, keys, faults and statistics. Clones are the same.
#[derive(Clone, Default)]
pub struct Accel(Arc<AccelInner>);

impl Accel {
    /// The channel of a core, by its index. Only that core's thread may use it: others lose counts.
    pub fn channel(&self, core: usize) -> AccelChannel {
        let counts = sync::lock(&self.0.cores).entry(core).or_default().clone();
        AccelChannel::new(self.0.clone(), core, counts)
    }

    /// A core's requests to devices, for one user.
    pub fn queue(&self, core: &reactor::Core) -> AccelQueue {
        AccelQueue::new(self.0.clone(), core)
    }

    /// Opens functions of the engine `ioat`: those at these addresses; or without, every PCI function of the
    /// kind that is bound for user space, as far as it can be opened. Returns the number of those that were
    /// not open. It may wait.
    ///
    /// # Errors
    /// One of the addresses cannot be opened; those before it are.
    pub fn scan_ioat(&self, addresses: &[IoatAddress]) -> Result<usize, IoatOpenError> {
        self.0.ioat.scan(addresses)
    }

    /// The functions of the engine `ioat`, in the order in which they were found.
    pub fn ioat_channels(&self) -> Vec<IoatChannelInfo> {
        self.0.ioat.list()
    }

    /// Whether an engine can be assigned operations: `ioat` after a [scan](Self::scan_ioat), others always.
    pub fn is_enabled(&self, engine: Engine) -> bool {
        engine != Engine::Ioat || self.0.ioat.is_enabled()
    }

    /// The keys.
    pub fn keys(&self) -> &CryptoKeys {
        &self.0.keys
    }

    /// The engine that executes an operation; `None` if there is none.
    pub fn engine(&self, op: AccelOp) -> Option<Engine> {
        self.0.assigned.get(op)
    }

    /// Has an engine execute an operation from now on, on all cores. Returns whether it supports it.
    pub fn assign(&self, op: AccelOp, engine: Engine) -> bool {
        if engine.supports(op) {
            self.0.assigned.set(op, engine);
        }
        engine.supports(op)
    }

    /// Has operations fail or give wrong results, as far as they are [assigned](Self::assign) to
    /// [`Engine::Error`]. Replaces what was set for the operation before, and counts from 0.
    pub fn inject(&self, op: AccelOp, injection: Injection) {
        sync::lock(&self.0.injections).set(op, injection);
    }

    /// The statistics of all cores together, by [`AccelOp::index`].
    pub fn stats(&self) -> [AccelOpStats; AccelOp::COUNT] {
        let mut total = [AccelOpStats::default(); AccelOp::COUNT];
        for (_, counts) in self.core_stats() {
            total.iter_mut().zip(counts).for_each(|(total, counts)| total.add(counts));
        }
        total
    }

    /// The statistics of each core that has had a channel, by its index.
    pub fn core_stats(&self) -> Vec<(usize, [AccelOpStats; AccelOp::COUNT])> {
        sync::lock(&self.0.cores).iter().map(|(core, counts)| (*core, counts.read())).collect()
    }
}

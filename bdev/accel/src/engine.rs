//! Which engine executes an operation, and what all cores share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use crate::inject::Injections;
use crate::ioat_engine::IoatFunctions;
use crate::stats::CoreCounts;
use crate::{AccelOp, CryptoKeys};

/// What executes operations: SPDK's accel modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Engine {
    /// The CPU.
    Software,
    /// The CPU, with injected errors.
    Error,
    /// Intel's I/OAT DMA engine, and the CPU for what that does not reach.
    Ioat,
}

impl Engine {
    /// All engines.
    pub const ALL: [Engine; 3] = [Engine::Software, Engine::Error, Engine::Ioat];

    /// SPDK's name.
    pub const fn name(self) -> &'static str {
        match self {
            Engine::Software => "software",
            Engine::Error => "error",
            Engine::Ioat => "ioat",
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
            Engine::Ioat => matches!(op, AccelOp::Copy | AccelOp::Fill),
        }
    }
}

/// What the clones of a framework share.
#[derive(Default)]
pub(crate) struct AccelInner {
    pub(crate) assigned: Assignments,
    pub(crate) injections: Mutex<Injections>,
    pub(crate) ioat: IoatFunctions,
    /// Kept for the life of the program: there are as many as cores.
    pub(crate) cores: Mutex<BTreeMap<usize, Arc<CoreCounts>>>,
    pub(crate) keys: CryptoKeys,
}

/// The engine of each operation. Channels read it with each operation, so that a change is in force at once.
#[derive(Default)]
pub(crate) struct Assignments([AtomicU8; AccelOp::COUNT]);

impl Assignments {
    /// Whether an operation is this engine's.
    #[inline]
    pub(crate) fn is(&self, op: AccelOp, engine: Engine) -> bool {
        self.0[op.index()].load(Ordering::Relaxed) == engine as u8
    }

    /// The engine of an operation; `None` if there is none.
    pub(crate) fn get(&self, op: AccelOp) -> Option<Engine> {
        let number = self.0[op.index()].load(Ordering::Relaxed);
        Engine::ALL.into_iter().find(|engine| *engine as u8 == number && engine.supports(op))
    }

    pub(crate) fn set(&self, op: AccelOp, engine: Engine) {
        self.0[op.index()].store(engine as u8, Ordering::Relaxed);
    }
}

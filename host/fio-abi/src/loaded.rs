//! The engine of this library, once fio has loaded it.

use std::sync::OnceLock;

use crate::engine::EngineDefinition;
use crate::version::FioVersion;

/// The definition of this library, and the version of the fio that has loaded it.
pub(crate) struct LoadedEngine {
    pub(crate) definition: &'static EngineDefinition,
    pub(crate) version: FioVersion,
}

static LOADED: OnceLock<LoadedEngine> = OnceLock::new();

/// Keeps the engine that is loaded; the first stays.
pub(crate) fn load(definition: &'static EngineDefinition, version: FioVersion) -> &'static LoadedEngine {
    LOADED.get_or_init(|| LoadedEngine { definition, version })
}

/// The engine, once fio has loaded it.
pub(crate) fn loaded() -> Option<&'static LoadedEngine> {
    LOADED.get()
}

//! fio's engine for everything that Ringbolt opens: `fio --ioengine=external:libringbolt_fio.so
//! --filename=URI`.
//!
//! The job's thread is the reactor: it submits to a channel of its own and polls it when fio asks for
//! completions. Nothing else runs. README.md beside this crate says how it is used.
//!
//! fio is licensed under the GPL, version 2 only, and this engine under the Apache License: it is built by
//! its user and is in no package. It contains nothing of fio's headers; `fio_abi` declares the layouts.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod devices;
mod engine;

use fio_abi::{EngineDefinition, EngineOption};

/// The engine as fio sees it.
pub static DEFINITION: EngineDefinition = EngineDefinition {
    name: c"ringbolt",
    options: &[
        EngineOption {
            name: c"ringbolt_cluster",
            help: c"Directory of the cluster of store:POOL/IMAGE, where the URI names none",
            set: devices::set_cluster,
        },
        EngineOption {
            name: c"ringbolt_config",
            help: c"Configuration file whose bdevs filename may name",
            set: devices::set_config,
        },
    ],
    file_bytes: devices::bytes_of,
    start: engine::start,
};

fio_abi::export_engine!(DEFINITION);

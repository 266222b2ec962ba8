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

use fio_abi::EngineDefinition;

/// The engine as fio sees it.
pub static DEFINITION: EngineDefinition = EngineDefinition {
    name: c"ringbolt",
    option: c"ringbolt_cluster",
    option_help: c"Directory of the cluster of store:POOL/IMAGE, where the URI names none",
    set_option: devices::set_cluster,
    file_bytes: devices::bytes_of,
    start: engine::start,
};

fio_abi::export_engine!(DEFINITION);

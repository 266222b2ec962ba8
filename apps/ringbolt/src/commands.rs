//! The subcommands.

pub(crate) mod blob;
pub(crate) mod blobfs;
pub(crate) mod demo;
pub(crate) mod image;
pub(crate) mod lab;
pub(crate) mod lvol;
pub(crate) mod model;
pub(crate) mod nvme;
pub(crate) mod nvmf;
pub(crate) mod objects;
pub(crate) mod perf;
pub(crate) mod rpc;
pub(crate) mod serve;
pub(crate) mod store;
pub(crate) mod trace;

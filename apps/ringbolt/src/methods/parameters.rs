//! Parameters that several methods share, and those that are known but not offered.

use serde::Deserialize;

use crate::rpc::RpcError;

/// No parameters.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Nothing {}

/// A device by name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ByName {
    pub(super) name: String,
}

/// Metadata and protection information, which SPDK's tools and files always send, as a rule as "off".
pub(super) struct Metadata {
    pub(super) md_size: Option<u32>,
    pub(super) md_interleave: Option<bool>,
    pub(super) dif_type: Option<i32>,
    pub(super) dif_is_head_of_md: Option<bool>,
    pub(super) dif_pi_format: Option<u32>,
}

impl Metadata {
    /// Refuses whatever asks for metadata.
    pub(super) fn refuse(&self) -> Result<(), RpcError> {
        off("md_size", self.md_size, 0)?;
        off("md_interleave", self.md_interleave, false)?;
        off("dif_type", self.dif_type, 0)?;
        off("dif_is_head_of_md", self.dif_is_head_of_md, false)?;
        off("dif_pi_format", self.dif_pi_format, 0)
    }
}

/// Accepts a parameter that is left out or says "off"; refuses anything else, as it would be a lie.
pub(super) fn off<T: PartialEq + std::fmt::Debug>(
    name: &str,
    value: Option<T>,
    off: T,
) -> Result<(), RpcError> {
    match value {
        Some(value) if value != off => {
            let message = format!("{name}={value:?} is not in Ringbolt; leave it out or set it to {off:?}");
            Err(RpcError::invalid_params(message))
        }
        _ => Ok(()),
    }
}

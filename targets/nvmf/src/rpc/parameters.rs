//! Types of the parameters of several methods.

use std::sync::Arc;

use control::json::Value;
use control::{DecodeLog, ParameterError, ParameterType, RpcError};
use wire_nvme::log::AnaState;

use crate::NvmfTarget;
use crate::module::{DEFAULT_TARGET, LimitedTarget, NvmfModule};

/// The name of a target that exists; `None` for the one that always does.
#[derive(Default)]
pub(super) struct TargetName(Option<String>);

impl TargetName {
    /// The target.
    ///
    /// # Errors
    /// There is none with this name.
    pub(super) fn find(&self, module: &NvmfModule) -> Result<NvmfTarget, RpcError> {
        Ok(self.limited(module)?.target.clone())
    }

    /// As a member of the parameters of a call; `None` for the target that always exists.
    pub(super) fn to_member(&self) -> Option<(String, Value)> {
        self.0.as_ref().map(|name| ("tgt_name".to_string(), name.as_str().into()))
    }

    /// The target with its limit.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(super) fn limited(&self, module: &NvmfModule) -> Result<Arc<LimitedTarget>, RpcError> {
        module.named(self.0.as_deref())
    }
}

impl ParameterType for TargetName {
    fn kind() -> String {
        format!("name of a target, `{DEFAULT_TARGET}` without")
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let name = Option::<String>::decode(value, log)?;
        Ok(TargetName(name.filter(|name| name != DEFAULT_TARGET)))
    }

    fn encode(&self) -> Value {
        self.0.encode()
    }

    fn absent() -> Option<Self> {
        Some(TargetName::default())
    }
}

/// An identifier of `N` bytes in hexadecimal; dashes are ignored.
pub(super) struct Identifier<const N: usize>(pub(super) [u8; N]);

impl<const N: usize> ParameterType for Identifier<N> {
    fn kind() -> String {
        format!("{} hexadecimal digits", 2 * N)
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let text = String::decode(value, log)?;
        let digits: Vec<u32> = text.chars().filter(|c| *c != '-').filter_map(|c| c.to_digit(16)).collect();
        let others = text.chars().any(|c| c != '-' && !c.is_ascii_hexdigit());
        if others || digits.len() != 2 * N {
            return Err(ParameterError::new(format!("expected {} hexadecimal digits", 2 * N)));
        }
        Ok(Identifier(std::array::from_fn(|index| (digits[2 * index] << 4 | digits[2 * index + 1]) as u8)))
    }

    fn encode(&self) -> Value {
        Value::String(self.0.iter().map(|byte| format!("{byte:02X}")).collect())
    }
}

control::choices! {
    /// SPDK's names of ANA states.
    pub(super) enum AnaStateName {
        Optimized = "optimized",
        NonOptimized = "non_optimized",
        Inaccessible = "inaccessible",
        PersistentLoss = "persistent_loss",
        Change = "change",
    }
}

impl From<AnaStateName> for AnaState {
    fn from(name: AnaStateName) -> AnaState {
        match name {
            AnaStateName::Optimized => AnaState::Optimized,
            AnaStateName::NonOptimized => AnaState::NonOptimized,
            AnaStateName::Inaccessible => AnaState::Inaccessible,
            AnaStateName::PersistentLoss => AnaState::PersistentLoss,
            AnaStateName::Change => AnaState::Change,
        }
    }
}

impl From<AnaState> for AnaStateName {
    fn from(state: AnaState) -> AnaStateName {
        match state {
            AnaState::Optimized => AnaStateName::Optimized,
            AnaState::NonOptimized => AnaStateName::NonOptimized,
            AnaState::Inaccessible => AnaStateName::Inaccessible,
            AnaState::PersistentLoss => AnaStateName::PersistentLoss,
            AnaState::Change => AnaStateName::Change,
        }
    }
}

control::parameters! {
    pub(super) struct ByNqn {
        /// Subsystem
        pub(super) nqn: String,
        pub(super) tgt_name: TargetName,
    }
}

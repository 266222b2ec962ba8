//! Types of the parameters of several methods.

use control::json::Value;
use control::{DecodeLog, ParameterError, ParameterType, RpcError};
use wire_nvme::log::AnaState;

/// The target's name. There is one target, `nvmf_tgt`.
#[derive(Default)]
pub(super) struct TargetName;

impl ParameterType for TargetName {
    fn kind() -> String {
        "`nvmf_tgt`".to_string()
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        match Option::<String>::decode(value, log)?.as_deref() {
            None | Some("nvmf_tgt") => Ok(TargetName),
            Some(name) => {
                let message = format!("there is no target {name}; the only one is nvmf_tgt");
                Err(ParameterError::with_code(RpcError::INTERNAL, message))
            }
        }
    }

    fn encode(&self) -> Value {
        Value::Null
    }

    fn absent() -> Option<Self> {
        Some(TargetName)
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

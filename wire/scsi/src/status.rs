//! Status codes of commands (SAM-5, section 5.3.1).

/// The status that ends a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ScsiStatus {
    /// Success.
    Good = 0x00,
    /// Sense data says more.
    CheckCondition = 0x02,
    /// Success of a PRE-FETCH whose blocks fit into the cache.
    ConditionMet = 0x04,
    /// The logical unit cannot accept the command now.
    Busy = 0x08,
    /// A reservation of another nexus forbids the command.
    ReservationConflict = 0x18,
    /// There is no room for the command now.
    TaskSetFull = 0x28,
    /// Another nexus aborted the command.
    TaskAborted = 0x40,
}

impl ScsiStatus {
    /// The code on the wire.
    pub const fn to_wire(self) -> u8 {
        self as u8
    }

    /// The status with this code; `None` if it is unknown.
    pub const fn from_wire(code: u8) -> Option<ScsiStatus> {
        Some(match code {
            0x00 => ScsiStatus::Good,
            0x02 => ScsiStatus::CheckCondition,
            0x04 => ScsiStatus::ConditionMet,
            0x08 => ScsiStatus::Busy,
            0x18 => ScsiStatus::ReservationConflict,
            0x28 => ScsiStatus::TaskSetFull,
            0x40 => ScsiStatus::TaskAborted,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_is_decoded_from_its_code() {
        let known = (0..=u8::MAX).filter_map(|code| Some((code, ScsiStatus::from_wire(code)?)));
        let known: Vec<_> = known.inspect(|(code, status)| assert_eq!(status.to_wire(), *code)).collect();
        assert_eq!(known.len(), 7);
    }
}

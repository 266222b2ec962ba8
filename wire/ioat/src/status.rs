//! The status of a channel, and its errors.

/// What a channel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelState {
    /// It executes descriptors.
    Active,
    /// It has executed all.
    Idle,
    /// It was suspended.
    Suspended,
    /// It has stopped with an error.
    Halted,
    /// It waits for a trigger, which this code does not use.
    Armed,
    /// A value without a meaning; all registers of a function that is gone read as ones.
    Unknown(u8),
}

/// A channel's status register, and the word that it writes to the completion address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelStatus {
    /// What it does.
    pub state: ChannelState,
    /// Address of the last descriptor that was completed and reported, a multiple of 64; 0 before the first.
    pub completed: u64,
}

const STATE: u64 = 0x7;
const COMPLETED: u64 = !0x3f;

impl ChannelStatus {
    /// Decodes the word. Bits that say what kind of error there was are in [`ChannelErrors`], too.
    pub const fn decode(word: u64) -> ChannelStatus {
        let state = match word & STATE {
            0 => ChannelState::Active,
            1 => ChannelState::Idle,
            2 => ChannelState::Suspended,
            3 => ChannelState::Halted,
            4 => ChannelState::Armed,
            other => ChannelState::Unknown(other as u8),
        };
        ChannelStatus { state, completed: word & COMPLETED }
    }

    /// Encodes it, without the bits of errors.
    pub const fn encode(self) -> u64 {
        let state = match self.state {
            ChannelState::Active => 0,
            ChannelState::Idle => 1,
            ChannelState::Suspended => 2,
            ChannelState::Halted => 3,
            ChannelState::Armed => 4,
            ChannelState::Unknown(value) => value as u64 & STATE,
        };
        self.completed & COMPLETED | state
    }
}

/// Why a channel has halted: the bits of its error register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelErrors(pub u32);

/// Names by bit, from 0.
const NAMES: [&str; 19] = [
    "source address",
    "destination address",
    "address of the next descriptor",
    "alignment of the next descriptor",
    "chain address",
    "command",
    "data integrity in the chipset",
    "data integrity in the engine",
    "reading data",
    "writing data",
    "control field",
    "length",
    "completion address",
    "interrupt configuration",
    "soft error",
    "unaffiliated error",
    "exclusive or, P or CRC",
    "exclusive or, Q",
    "descriptor count",
];

impl ChannelErrors {
    /// An address of the source that the engine cannot read.
    pub const SOURCE_ADDRESS: ChannelErrors = ChannelErrors(1 << 0);
    /// An address of the destination that it cannot write.
    pub const DESTINATION_ADDRESS: ChannelErrors = ChannelErrors(1 << 1);
    /// A descriptor's address that it cannot read.
    pub const NEXT_ADDRESS: ChannelErrors = ChannelErrors(1 << 2);
    /// Reading data failed.
    pub const READ_DATA: ChannelErrors = ChannelErrors(1 << 8);
    /// Writing data failed.
    pub const WRITE_DATA: ChannelErrors = ChannelErrors(1 << 9);
    /// A descriptor's control field is invalid.
    pub const CONTROL: ChannelErrors = ChannelErrors(1 << 10);
    /// The completion address cannot be written.
    pub const COMPLETION_ADDRESS: ChannelErrors = ChannelErrors(1 << 12);
    /// A descriptor's length is 0, or more than the engine takes.
    pub const LENGTH: ChannelErrors = ChannelErrors(1 << 11);
}

impl std::fmt::Display for ChannelErrors {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let set = (0..32).filter(|bit| self.0 >> bit & 1 != 0);
        for (index, bit) in set.enumerate() {
            formatter.write_str(if index == 0 { "" } else { ", " })?;
            match NAMES.get(bit) {
                Some(name) => formatter.write_str(name)?,
                None => write!(formatter, "bit {bit}")?,
            }
        }
        if self.0 == 0 {
            formatter.write_str("no error")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_an_address_and_a_state() {
        let status = ChannelStatus::decode(0x1234_5678_9abc_dec1);
        assert_eq!(status, ChannelStatus { state: ChannelState::Idle, completed: 0x1234_5678_9abc_dec0 });
        assert_eq!(ChannelStatus::decode(0x1b).state, ChannelState::Halted);
        assert_eq!(ChannelStatus::decode(u64::MAX).state, ChannelState::Unknown(7));
        for word in 0..8 {
            assert_eq!(ChannelStatus::decode(word).encode(), word);
        }
    }

    #[test]
    fn errors_are_named_and_unknown_bits_numbered() {
        assert_eq!(ChannelErrors(0).to_string(), "no error");
        assert_eq!(ChannelErrors(0x801).to_string(), "source address, length");
        assert_eq!(ChannelErrors(1 << 31).to_string(), "bit 31");
    }
}

//! The answer to a command.

use arrayvec::ArrayVec;
use dma::Data;
use wire_scsi::{SENSE_BYTES_MAX, ScsiStatus, Sense, SenseFormat};

/// Encoded sense data.
pub type SenseBytes = ArrayVec<u8, SENSE_BYTES_MAX>;

/// How a command ended.
#[derive(Debug)]
pub struct Response {
    /// Status.
    pub status: ScsiStatus,
    /// Sense data, with CHECK CONDITION.
    pub sense: Option<Sense>,
    /// The format that the unit's D_SENSE asks for.
    pub sense_format: SenseFormat,
    /// Data for the initiator, never more than it expects.
    pub data: DataIn,
    /// The difference to the length that the initiator expects.
    pub residual: Residual,
}

/// Data for the initiator.
#[derive(Debug, Default)]
pub enum DataIn {
    /// None.
    #[default]
    None,
    /// Parameter data.
    Bytes(Vec<u8>),
    /// Blocks, in the memory that the transport gave for them; so many bytes from its start.
    Data(Data, u32),
}

/// The difference between the data that a command has and the length that its initiator expects (RFC 7143, section
/// 11.4.5.1; SAM-5 calls the latter the data-in or data-out buffer size).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residual {
    /// They are equal.
    #[default]
    None,
    /// So many bytes of what the initiator expects were not transferred.
    Underflow(u32),
    /// So many bytes of the command's data did not fit.
    Overflow(u32),
}

impl Residual {
    /// The residual of a command with `actual` bytes of data whose initiator expects `expected`.
    #[inline]
    pub fn of(actual: u64, expected: u32) -> Residual {
        match actual.cmp(&u64::from(expected)) {
            std::cmp::Ordering::Equal => Residual::None,
            std::cmp::Ordering::Less => Residual::Underflow((u64::from(expected) - actual) as u32),
            std::cmp::Ordering::Greater => {
                Residual::Overflow(u32::try_from(actual - u64::from(expected)).unwrap_or(u32::MAX))
            }
        }
    }
}

impl DataIn {
    /// Number of bytes.
    pub fn len(&self) -> u32 {
        match self {
            DataIn::None => 0,
            DataIn::Bytes(bytes) => bytes.len() as u32,
            DataIn::Data(_, bytes) => *bytes,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The parameter data, if it is that.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            DataIn::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }
}

impl Response {
    /// The encoded sense data; empty if there is none.
    pub fn sense_bytes(&self) -> SenseBytes {
        let mut bytes = SenseBytes::new();
        if let Some(sense) = &self.sense {
            let mut encoded = [0; SENSE_BYTES_MAX];
            let length = sense.encode(self.sense_format, &mut encoded);
            bytes.extend(encoded[..length].iter().copied());
        }
        bytes
    }
}

/// Why a command fails: its status and sense data.
pub(crate) type Failure = (ScsiStatus, Option<Sense>);

/// A failure with CHECK CONDITION.
pub(crate) const fn check(sense: Sense) -> Failure {
    (ScsiStatus::CheckCondition, Some(sense))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn residuals_are_exact() {
        assert_eq!(Residual::of(512, 512), Residual::None);
        assert_eq!(Residual::of(0, 512), Residual::Underflow(512));
        assert_eq!(Residual::of(1024, 1000), Residual::Overflow(24));
        assert_eq!(Residual::of(u64::MAX, 0), Residual::Overflow(u32::MAX));
        assert_eq!(Residual::of(0, u32::MAX), Residual::Underflow(u32::MAX));
    }
}

//! Random numbers and sequence numbers of exchanges.

use std::sync::atomic::{AtomicU32, Ordering};

/// The system has no random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system has no random numbers")]
pub struct NoRandomness;

/// What is used once: challenges, secret exponents and sequence numbers.
pub trait Nonces {
    /// Fills the bytes with random numbers that no peer can predict.
    ///
    /// # Errors
    /// There are none.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NoRandomness>;

    /// A sequence number other than 0, greater by one than the last unless that was the greatest.
    ///
    /// # Errors
    /// There is no random number to begin with.
    fn sequence(&mut self) -> Result<u32, NoRandomness>;
}

/// The system's random numbers, and the sequence numbers of this process, which begin at random (Base 2.0, section
/// 8.13.5.3).
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemNonces;

/// The last sequence number of this process; 0 before the first.
static LAST: AtomicU32 = AtomicU32::new(0);

impl Nonces for SystemNonces {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NoRandomness> {
        getrandom::fill(bytes).map_err(|_| NoRandomness)
    }

    fn sequence(&mut self) -> Result<u32, NoRandomness> {
        let mut first = [0; 4];
        if LAST.load(Ordering::Relaxed) == 0 {
            self.fill(&mut first)?;
        }
        let next = |last| match last {
            0 => u32::from_le_bytes(first).max(1),
            u32::MAX => 1,
            last => last + 1,
        };
        Ok(next(
            LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(next(last))).unwrap_or(0),
        ))
    }
}

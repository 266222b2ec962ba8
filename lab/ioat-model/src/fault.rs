//! What a model does wrong.

use std::str::FromStr;

/// A fault of an engine. Numbers count descriptors that the model has executed, those that do nothing
/// included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoatFault {
    /// It halts at every nth descriptor, with the error "reading data".
    HaltEvery(u64),
    /// It copies half of the data of every nth descriptor, and halts with the error "writing data".
    PartialEvery(u64),
    /// After n descriptors it executes no more until it is reset, once.
    StallAfter(u64),
    /// After n descriptors it executes no more, whatever is done.
    StopAfter(u64),
    /// After n descriptors it reports that none has completed but the first of its ring.
    BackwardAfter(u64),
    /// After n descriptors it reports this word instead of its status.
    ForgeAfter(u64, u64),
    /// It does not obey the command to suspend.
    NoSuspend,
    /// It does not obey the command to reset.
    NoReset,
}

/// The text is no fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is none of halt-every=N, partial-every=N, stall-after=N, stop-after=N, backward-after=N, \
     forge-after=N:WORD, no-suspend and no-reset"
)]
pub struct InvalidIoatFault(String);

impl FromStr for IoatFault {
    type Err = InvalidIoatFault;

    fn from_str(text: &str) -> Result<IoatFault, InvalidIoatFault> {
        let invalid = || InvalidIoatFault(text.to_string());
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let number = |value: &str| value.parse::<u64>().map_err(|_| invalid());
        let every = || number(value).and_then(|every| if every == 0 { Err(invalid()) } else { Ok(every) });
        Ok(match name {
            "halt-every" => IoatFault::HaltEvery(every()?),
            "partial-every" => IoatFault::PartialEvery(every()?),
            "stall-after" => IoatFault::StallAfter(number(value)?),
            "stop-after" => IoatFault::StopAfter(number(value)?),
            "backward-after" => IoatFault::BackwardAfter(number(value)?),
            "forge-after" => {
                let (after, word) = value.split_once(':').ok_or_else(invalid)?;
                let digits = word.strip_prefix("0x").ok_or_else(invalid)?;
                let word = u64::from_str_radix(digits, 16).map_err(|_| invalid())?;
                IoatFault::ForgeAfter(number(after)?, word)
            }
            "no-suspend" if value.is_empty() => IoatFault::NoSuspend,
            "no-reset" if value.is_empty() => IoatFault::NoReset,
            _ => return Err(invalid()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed_and_others_rejected_with_the_list() {
        for (text, fault) in [
            ("halt-every=7", IoatFault::HaltEvery(7)),
            ("partial-every=1", IoatFault::PartialEvery(1)),
            ("stall-after=0", IoatFault::StallAfter(0)),
            ("stop-after=3", IoatFault::StopAfter(3)),
            ("backward-after=3", IoatFault::BackwardAfter(3)),
            ("forge-after=2:0xdead", IoatFault::ForgeAfter(2, 0xdead)),
            ("no-suspend", IoatFault::NoSuspend),
            ("no-reset", IoatFault::NoReset),
        ] {
            assert_eq!(text.parse(), Ok(fault));
        }
        for text in [
            "",
            "halt-every",
            "halt-every=0",
            "halt-every=x",
            "forge-after=2",
            "forge-after=2:17",
            "no-reset=1",
        ] {
            let error = text.parse::<IoatFault>().unwrap_err();
            assert!(error.to_string().contains("halt-every=N"), "{text}: {error}");
        }
    }
}

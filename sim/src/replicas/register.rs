//! Whether what clients saw of a block is linearizable.
//!
//! Each write has a value of its own, so a history is linearizable if three things hold of the operations that wrote or
//! read each value, where `first` is their earliest response and `last` their latest invocation (Gibbons and Korach,
//! "Testing shared memories", SIAM J. Comput. 26, 1997, section 4): no read responds before its write is invoked; values
//! with `first < last`, which are in the block from `first` to `last` at least, do not overlap each other; and none of
//! the others, which may be in the block for a moment between `last` and `first`, lies inside one of them.

use std::collections::BTreeMap;

/// Response of an operation without one: it took effect at any time after its invocation, or not.
pub(crate) const NEVER: u64 = u64::MAX;

/// The operations on one block.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegisterHistory {
    /// By value. 0 is what the block has at first.
    values: BTreeMap<u64, ValueTimes>,
}

#[derive(Clone, Debug)]
struct ValueTimes {
    written: Option<u64>,
    first_response: u64,
    first_read_response: u64,
    last_invocation: u64,
    is_read: bool,
}

impl RegisterHistory {
    fn value(&mut self, value: u64) -> &mut ValueTimes {
        self.values.entry(value).or_insert(ValueTimes {
            written: (value == 0).then_some(0),
            first_response: if value == 0 { 0 } else { NEVER },
            first_read_response: NEVER,
            last_invocation: 0,
            is_read: false,
        })
    }

    /// A write of a value, invoked and responded to at these times; [`NEVER`] without a response.
    pub(crate) fn write(&mut self, value: u64, invoked: u64, responded: u64) {
        let times = self.value(value);
        times.written = Some(invoked);
        times.first_response = times.first_response.min(responded);
        times.last_invocation = times.last_invocation.max(invoked);
    }

    /// A read that returned a value.
    pub(crate) fn read(&mut self, value: u64, invoked: u64, responded: u64) {
        let times = self.value(value);
        times.is_read = true;
        times.first_response = times.first_response.min(responded);
        times.first_read_response = times.first_read_response.min(responded);
        times.last_invocation = times.last_invocation.max(invoked);
    }

    /// Says what is wrong, if the history is not linearizable.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut lasting = Vec::new();
        let mut momentary = Vec::new();
        for (value, times) in &self.values {
            let Some(written) = times.written else {
                return Err(format!("a read returned {value:#x}, which was never written"));
            };
            if times.first_read_response < written {
                return Err(format!("a read returned {value:#x} before it was written"));
            }
            if times.first_response == NEVER && !times.is_read {
                continue;
            }
            let (first, last) = (times.first_response, times.last_invocation);
            if first < last {
                lasting.push((first, last, *value));
            } else {
                momentary.push((last, first, *value));
            }
        }
        lasting.sort_unstable();
        for pair in lasting.windows(2) {
            let ((_, last, one), (first, _, other)) = (pair[0], pair[1]);
            if first < last {
                return Err(format!("{one:#x} was there again after {other:#x}, or the other way round"));
            }
        }
        for (last, first, value) in momentary {
            // The only candidate is the one that begins last before it, as they do not overlap.
            let index = lasting.partition_point(|(begin, _, _)| *begin < last);
            if let Some((begin, end, other)) = index.checked_sub(1).map(|index| lasting[index])
                && begin < last
                && first < end
            {
                return Err(format!(
                    "{value:#x} was acknowledged or read, and lost: {other:#x} is there before and after"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether some order of the operations within their intervals explains them: tries all.
    fn explained(operations: &[(bool, u64, u64, u64)], value: u64, done: u32) -> bool {
        let left = (0..operations.len()).filter(|index| done & (1 << index) == 0);
        let left: Vec<usize> = left.collect();
        if left.iter().all(|index| operations[*index].3 == NEVER) {
            return true;
        }
        let bound = left.iter().map(|index| operations[*index].3).min().unwrap();
        left.iter().any(|index| {
            let (is_write, written, invoked, _) = operations[*index];
            let next = if is_write { written } else { value };
            invoked <= bound
                && (is_write || written == value)
                && explained(operations, next, done | (1 << index))
        })
    }

    #[test]
    fn it_agrees_with_a_search_of_all_orders() {
        let mut random = random::WyRand::new(7);
        let mut counts = [0; 2];
        for _ in 0..30_000 {
            let mut history = RegisterHistory::default();
            let mut operations = Vec::new();
            let writes = 1 + random.below(3);
            for value in 1..=writes {
                let invoked = 1 + random.below(20);
                let responded = if random.happens(200) { NEVER } else { invoked + 1 + random.below(10) };
                operations.push((true, value, invoked, responded));
                history.write(value, invoked, responded);
            }
            for _ in 0..random.below(4) {
                let invoked = 1 + random.below(25);
                let responded = invoked + 1 + random.below(8);
                let value = random.below(writes + 1);
                operations.push((false, value, invoked, responded));
                history.read(value, invoked, responded);
            }
            // Times are distinct, as in a simulation: ties would be orders of their own.
            let mut times: Vec<u64> = operations.iter().flat_map(|op| [op.2, op.3]).collect();
            times.sort_unstable();
            times.retain(|time| *time != NEVER);
            if times.windows(2).any(|pair| pair[0] == pair[1]) {
                continue;
            }
            let expected = explained(&operations, 0, 0);
            assert_eq!(history.check().is_ok(), expected, "{operations:?}");
            counts[usize::from(expected)] += 1;
        }
        assert!(counts.iter().all(|count| *count > 500), "{counts:?}");
    }
}

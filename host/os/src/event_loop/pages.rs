//! The registered buffers of an event loop that are for the pages of ublk requests.

use super::uring::{BUFFERS_MAX, PAGES_MAX};

/// Consecutive registered buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRange {
    /// Index of the first.
    pub(crate) start: u16,
    count: u16,
}

/// Which of the buffers are in use. A scan finds room for a queue: these are few.
#[derive(Default)]
pub(super) struct PageBuffers {
    /// In the order of their indexes.
    used: Vec<PageRange>,
}

const FIRST: u16 = BUFFERS_MAX as u16;
const END: u16 = (BUFFERS_MAX + PAGES_MAX) as u16;

/// Whether a registered buffer is one of them.
pub(super) fn contains(index: u16) -> bool {
    (FIRST..END).contains(&index)
}

impl PageBuffers {
    /// Takes the first `count` consecutive buffers that are free; `None` if there are not so many.
    pub(super) fn take(&mut self, count: u16) -> Option<PageRange> {
        let mut start = FIRST;
        let mut position = 0;
        for range in &self.used {
            if range.start - start >= count {
                break;
            }
            start = range.start + range.count;
            position += 1;
        }
        if END - start < count {
            return None;
        }
        let range = PageRange { start, count };
        self.used.insert(position, range);
        Some(range)
    }

    /// Gives buffers back that were taken.
    pub(super) fn give_back(&mut self, range: PageRange) {
        self.used.retain(|used| *used != range);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_taken_once_and_used_again() {
        let mut buffers = PageBuffers::default();
        let first = buffers.take(1024).unwrap();
        let second = buffers.take(512).unwrap();
        let third = buffers.take(512).unwrap();
        assert_eq!((first.start, second.start, third.start), (FIRST, FIRST + 1024, FIRST + 1536));
        assert_eq!(buffers.take(1), None);
        buffers.give_back(second);
        assert_eq!(buffers.take(513), None);
        let again = [256, 256].map(|count| buffers.take(count).unwrap().start);
        assert_eq!(again, [FIRST + 1024, FIRST + 1280]);
        buffers.give_back(first);
        assert_eq!(buffers.take(1024), Some(first));
    }

    #[test]
    fn buffers_of_pages_are_not_those_of_memory() {
        assert!(!contains(FIRST - 1) && contains(FIRST) && contains(END - 1) && !contains(END));
    }
}

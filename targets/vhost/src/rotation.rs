//! Whose turn it is among a connection's virtqueues.

/// The virtqueue that is served first: the one after the last that had its turn, so that one with long requests does not
/// delay the others for more than a poll.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rotation {
    next: usize,
}

impl Rotation {
    /// Visits `count` queues, each at most once, until `visit` returns false.
    #[inline]
    pub(crate) fn visit(&mut self, count: usize, mut visit: impl FnMut(usize) -> bool) {
        for _ in 0..count {
            let index = if self.next < count { self.next } else { 0 };
            self.next = index + 1;
            if !visit(index) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visited(rotation: &mut Rotation, count: usize, budget: usize) -> Vec<usize> {
        let mut visited = Vec::new();
        rotation.visit(count, |index| {
            visited.push(index);
            visited.len() < budget
        });
        visited
    }

    #[test]
    fn each_queue_has_its_turn_however_small_the_budget() {
        let mut rotation = Rotation::default();
        assert_eq!(visited(&mut rotation, 3, 9), [0, 1, 2]);
        assert_eq!(visited(&mut rotation, 3, 9), [0, 1, 2]);
        assert_eq!(visited(&mut rotation, 3, 2), [0, 1]);
        assert_eq!(visited(&mut rotation, 3, 2), [2, 0]);
        assert_eq!(visited(&mut rotation, 3, 1), [1]);
        assert_eq!(visited(&mut rotation, 2, 1), [0], "queues were removed");
        assert_eq!(visited(&mut rotation, 0, 1), [0; 0]);
    }
}

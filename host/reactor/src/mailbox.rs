//! A bounded lock-free MPSC queue for messages between cores.
//!
//! Every cell has a sequence number that says whether a sender or the receiver owns it. A sender claims
//! a position with one compare-and-swap; the receiver accesses only the cell at its own position. Messages
//! of one sender stay in order. If the queue is full, `send` returns the message.
//!
//! ```
//! let (sender, mut receiver) = reactor::mailbox::bounded(2);
//! sender.send("a").unwrap();
//! sender.send("b").unwrap();
//! assert_eq!(sender.send("c"), Err("c"));
//! assert_eq!(receiver.receive(), Some("a"));
//! ```

use std::mem::MaybeUninit;

use crate::sync::{Arc, AtomicUsize, Ordering, UnsafeCell};

/// The sender; it can be cloned and used on any thread.
pub struct Sender<T>(Arc<MailboxShared<T>>);

/// The only receiver of the queue.
pub struct Receiver<T> {
    shared: Arc<MailboxShared<T>>,
    head: usize,
}

struct MailboxShared<T> {
    cells: Box<[QueueCell<T>]>,
    mask: usize,
    tail: CachePadded,
}

/// Senders contend for the tail; nothing else shares its cache line.
#[repr(align(128))]
struct CachePadded(AtomicUsize);

struct QueueCell<T> {
    /// `position` if free for the sender of that position, `position + 1` if it contains a value.
    sequence: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a value is written by the one sender that claimed its position and read by the one
// receiver, each ordered by the cell's sequence; with `T: Send` it may move between threads that way.
unsafe impl<T: Send> Send for MailboxShared<T> {}
// SAFETY: as above; `&MailboxShared` gives no other access to a value.
unsafe impl<T: Send> Sync for MailboxShared<T> {}

/// Creates a queue for at least `capacity` messages, rounded up to a power of two of at least 2.
pub fn bounded<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let capacity = capacity.max(2).next_power_of_two();
    let cells = (0..capacity)
        .map(|position| QueueCell {
            sequence: AtomicUsize::new(position),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        })
        .collect();
    let shared =
        Arc::new(MailboxShared { cells, mask: capacity - 1, tail: CachePadded(AtomicUsize::new(0)) });
    (Sender(shared.clone()), Receiver { shared, head: 0 })
}

impl<T> Sender<T> {
    /// Sends a message; returns it as the error if the queue is full.
    pub fn send(&self, message: T) -> Result<(), T> {
        let shared = &*self.0;
        let mut position = shared.tail.0.load(Ordering::Relaxed);
        loop {
            let cell = &shared.cells[position & shared.mask];
            let ahead = cell.sequence.load(Ordering::Acquire).wrapping_sub(position) as isize;
            match ahead {
                0 => {
                    let next = position.wrapping_add(1);
                    let claim = shared.tail.0.compare_exchange_weak(
                        position,
                        next,
                        Ordering::Relaxed,
                        Ordering::Relaxed,
                    );
                    match claim {
                        Ok(_) => {
                            cell.value.with_mut(|value| {
                                // SAFETY: the claim made this sender the only one at `position`,
                                // and the sequence shows that the receiver has released the cell.
                                unsafe { (*value).write(message) };
                            });
                            cell.sequence.store(next, Ordering::Release);
                            return Ok(());
                        }
                        Err(now) => position = now,
                    }
                }
                behind if behind < 0 => return Err(message),
                _ => position = shared.tail.0.load(Ordering::Relaxed),
            }
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender(self.0.clone())
    }
}

impl<T> Receiver<T> {
    /// Receives the oldest message; `None` if there is none whose write has finished.
    #[inline]
    pub fn receive(&mut self) -> Option<T> {
        let cell = &self.shared.cells[self.head & self.shared.mask];
        let full = self.head.wrapping_add(1);
        if cell.sequence.load(Ordering::Acquire) != full {
            return None;
        }
        let message = cell.value.with_mut(|value| {
            // SAFETY: the pointer is the cell's own, and this is the only receiver.
            let value = unsafe { &*value };
            // SAFETY: the sequence shows that a sender wrote the value and released the cell; it is
            // read once because `head` advances.
            unsafe { value.assume_init_read() }
        });
        cell.sequence.store(full.wrapping_add(self.shared.mask), Ordering::Release);
        self.head = full;
        Some(message)
    }

    /// Whether [`receive`](Self::receive) would return `None`.
    pub fn is_empty(&self) -> bool {
        let cell = &self.shared.cells[self.head & self.shared.mask];
        cell.sequence.load(Ordering::Acquire) != self.head.wrapping_add(1)
    }
}

impl<T> Drop for Receiver<T> {
    /// Drops the messages in the queue. A message that is sent later is leaked, which is safe.
    fn drop(&mut self) {
        while self.receive().is_some() {}
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_returns_the_message_and_order_is_preserved() {
        let (sender, mut receiver) = bounded(4);
        for round in 0..10 {
            for value in 0..4 {
                sender.send(round * 4 + value).unwrap();
            }
            assert_eq!(sender.send(99), Err(99));
            let got: Vec<i32> = std::iter::from_fn(|| receiver.receive()).collect();
            assert_eq!(got, (round * 4..round * 4 + 4).collect::<Vec<_>>());
        }
        assert!(receiver.is_empty());
    }

    #[test]
    fn unreceived_messages_are_dropped() {
        let counted = std::sync::Arc::new(());
        let (sender, receiver) = bounded(4);
        sender.send(counted.clone()).unwrap();
        drop(receiver);
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
    }

    #[test]
    fn concurrent_senders_lose_and_duplicate_nothing() {
        const EACH: u64 = if cfg!(miri) { 50 } else { 20_000 };
        let (sender, mut receiver) = bounded(64);
        let threads: Vec<_> = (0..3u64)
            .map(|sender_id| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    for count in 0..EACH {
                        while sender.send((sender_id, count)).is_err() {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut next = [0; 3];
        while next.iter().sum::<u64>() < 3 * EACH {
            match receiver.receive() {
                Some((sender_id, count)) => {
                    assert_eq!(count, next[sender_id as usize], "sender {sender_id}");
                    next[sender_id as usize] += 1;
                }
                None => std::thread::yield_now(),
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

//! Model-checks all interleavings of small mailboxes. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p ringbolt-reactor --test loom --release`.
#![cfg(loom)]

use loom::thread;
use reactor::mailbox::bounded;

#[test]
fn two_senders_and_a_receiver() {
    loom::model(|| {
        let (sender, mut receiver) = bounded(2);
        let other = sender.clone();
        let first = thread::spawn(move || sender.send(1).unwrap());
        let second = thread::spawn(move || other.send(2).unwrap());
        let mut sum = 0;
        for _ in 0..2 {
            sum += loop {
                if let Some(value) = receiver.receive() {
                    break value;
                }
                thread::yield_now();
            };
        }
        first.join().unwrap();
        second.join().unwrap();
        assert_eq!((sum, receiver.receive()), (3, None));
    });
}

#[test]
fn a_full_mailbox_returns_messages_and_reuses_cells() {
    loom::model(|| {
        let (sender, mut receiver) = bounded(2);
        let thread = thread::spawn(move || {
            let mut rejected = 0;
            for value in 0..3 {
                if sender.send(value).is_err() {
                    rejected += 1;
                }
            }
            rejected
        });
        let mut received = Vec::new();
        for _ in 0..3 {
            received.extend(receiver.receive());
            thread::yield_now();
        }
        let rejected = thread.join().unwrap();
        received.extend(std::iter::from_fn(|| receiver.receive()));
        assert_eq!(received.len() + rejected, 3);
        assert!(received.windows(2).all(|pair| pair[0] < pair[1]));
    });
}

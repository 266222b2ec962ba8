use std::io::IoSliceMut;

use dma::{Arena, ArenaConfig, Pool};
use sockets::TransferResult;

use super::*;

/// A stream whose peer reads this many bytes more.
struct Reading(usize);

impl ByteStream for Reading {
    fn receive(&mut self, _: &mut [IoSliceMut<'_>]) -> TransferResult {
        TransferResult::Blocked
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        let offered: usize = parts.iter().map(|part| part.len()).sum();
        let sent = offered.min(self.0);
        self.0 -= sent;
        if sent == 0 { TransferResult::Blocked } else { TransferResult::Bytes(sent) }
    }
}

/// A head of 10 bytes.
fn head() -> OutgoingPdu {
    OutgoingPdu::new(|_| 10)
}

/// Sends what a peer that reads `bytes` more lets it, and returns the bytes of buffers that are free.
fn send(queue: &mut SendQueue, bytes: usize) -> usize {
    queue.send::<_, ()>(&mut Reading(bytes)).unwrap()
}

fn waiting(queue: &SendQueue) -> Vec<(u64, usize, usize)> {
    let mut report = TransferReport::default();
    queue.transfers(&mut report);
    report.list()
}

#[test]
fn a_buffer_in_parts_is_free_with_the_last_and_is_one_transfer() {
    let arena = Arena::new(ArenaConfig { limit_bytes: 2 << 20, hugepages: false, shared: false });
    let pool = Pool::new(&arena);
    let mut data = Data::from(pool.take(100).unwrap());
    let (mut middle, mut queue) = (data.split_off(40), SendQueue::default());
    let last = middle.split_off(40);
    queue.push(head());
    queue.push(head().with_part(PduData::Buffer(data, 0, 40), 0));
    queue.push(head().with_part(PduData::Buffer(middle, 0, 40), 0));
    queue.push(head().with_part(PduData::Buffer(last, 0, 20), 100));
    queue.push(head().with_data(PduData::Buffer(pool.take(7).unwrap().into(), 0, 5)));
    assert_eq!(waiting(&queue), [(0, 0, 0), (3, 100, 0), (4, 7, 0)]);
    assert_eq!(send(&mut queue, 10 + 50 + 20), 0, "the first part and some of the second");
    assert_eq!(waiting(&queue), [(3, 100, 40 + 20), (4, 7, 0)]);
    assert_eq!(send(&mut queue, 30 + 29), 0);
    assert_eq!(waiting(&queue)[0], (3, 100, 80 + 29));
    assert_eq!(send(&mut queue, 1), 100);
    assert_eq!(send(&mut queue, 100), 7);
    assert!(queue.is_empty() && waiting(&queue).is_empty());
}

#[test]
fn data_on_the_heap_is_counted_until_it_is_sent() {
    let mut queue = SendQueue::default();
    (0..3).for_each(|_| queue.push(head().with_data(PduData::Bytes(vec![0; 20]))));
    assert_eq!((queue.heap_bytes(), queue.len()), (60, 3));
    assert_eq!((send(&mut queue, 59), queue.heap_bytes()), (0, 40));
    assert_eq!((send(&mut queue, 100), queue.heap_bytes()), (0, 0));
}

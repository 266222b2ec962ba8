//! Every decoder of `wire/ioat`; and a channel whose engine gives any value for its registers and its
//! completion word: each request completes once or stays with the channel, and no value causes a panic.
#![no_main]

use std::cell::RefCell;

use ioat::{IoatChannel, IoatDevice, IoatOp, IoatRequest};
use libfuzzer_sys::fuzz_target;
use wire_ioat::{ChannelErrors, ChannelStatus, DESCRIPTOR_WORDS, IoatDescriptor, registers};

const RING_AT: u64 = 0x1_0000;
const ENTRIES: u32 = 8;
const REQUESTS: u64 = 24;

/// An engine whose every answer is the input.
struct Hostile(RefCell<Vec<u8>>);

impl Hostile {
    /// A plausible value, or any.
    fn next(&self, plausible: u64) -> u64 {
        let mut input = self.0.borrow_mut();
        match input.pop() {
            Some(choice) if choice & 3 == 0 => (0..8).fold(0, |word, _| word << 8 | u64::from(input.pop().unwrap_or(0))),
            // An entry of the ring, and a state.
            Some(choice) if choice & 3 == 1 => RING_AT + u64::from(choice >> 5) * 64 | u64::from(choice >> 2 & 7),
            _ => plausible,
        }
    }
}

impl IoatDevice for Hostile {
    fn read_u8(&self, register: u32) -> u8 {
        self.next(match register {
            registers::VERSION => 0x33,
            registers::TRANSFER_CAPACITY => 12,
            _ => 0,
        }) as u8
    }

    fn read_u32(&self, _: u32) -> u32 {
        self.next(registers::CAPABILITY_FILL.into()) as u32
    }

    fn read_u64(&self, _: u32) -> u64 {
        self.next(2)
    }

    fn write_u8(&mut self, _: u32, _: u8) {}

    fn write_u16(&mut self, _: u32, _: u16) {}

    fn write_u32(&mut self, _: u32, _: u32) {}

    fn write_u64(&mut self, _: u32, _: u64) {}

    fn ring_entries(&self) -> u32 {
        ENTRIES
    }

    fn ring_address(&self) -> u64 {
        RING_AT
    }

    fn write_descriptor(&mut self, index: u32, words: &[u64; DESCRIPTOR_WORDS]) {
        assert!(index < ENTRIES);
        assert!(IoatDescriptor::decode(words).is_ok());
    }

    fn completion_address(&self) -> u64 {
        RING_AT - 64
    }

    fn completion(&self) -> u64 {
        self.next(RING_AT)
    }

    fn clear_completion(&mut self) {}
}

fuzz_target!(|bytes: &[u8]| {
    for words in bytes.as_chunks::<{ DESCRIPTOR_WORDS * 8 }>().0 {
        let words: [u64; DESCRIPTOR_WORDS] =
            std::array::from_fn(|at| u64::from_le_bytes(std::array::from_fn(|byte| words[at * 8 + byte])));
        if let Ok(descriptor) = IoatDescriptor::decode(&words) {
            assert_eq!(IoatDescriptor::decode(&descriptor.encode()), Ok(descriptor));
        }
        let status = ChannelStatus::decode(words[0]);
        assert_eq!(ChannelStatus::decode(status.encode()), status);
        assert!(!ChannelErrors(words[0] as u32).to_string().is_empty());
    }

    let engine = Hostile(RefCell::new(bytes.to_vec()));
    let mut now_ns = 0;
    let Ok(mut channel) = IoatChannel::start(engine, now_ns) else { return };
    let request = |owned| {
        let op = if owned % 3 == 0 {
            IoatOp::Fill { pattern: owned, to: 0x2000, bytes: owned * 1000 }
        } else {
            IoatOp::Copy { from: 0x8000, to: u64::MAX - 5000, bytes: owned * 700 }
        };
        IoatRequest { op, owned }
    };
    let mut waiting: Vec<_> = (0..REQUESTS).map(request).collect();
    let mut done = Vec::new();
    for _ in 0..bytes.len() + 64 {
        channel.submit(&mut waiting);
        channel.poll(now_ns, &mut done);
        now_ns += 5_000_000;
    }
    let mut all: Vec<u64> = done.iter().map(|one| one.owned).collect();
    all.extend(waiting.iter().map(|one| one.owned));
    all.extend(channel.into_parts().1);
    all.sort_unstable();
    assert_eq!(all, (0..REQUESTS).collect::<Vec<_>>());
});

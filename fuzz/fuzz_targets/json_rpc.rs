//! Any bytes on the management socket: values are cut out of the stream the same however it arrives.
#![no_main]

use libfuzzer_sys::fuzz_target;

// The program is no library; this part of it stands alone.
#[allow(dead_code, unreachable_pub)]
#[path = "../../apps/ringbolt/src/rpc/framing.rs"]
mod framing;

fn cut(bytes: &[u8], piece: usize) -> (Vec<Vec<u8>>, Result<(), framing::FrameError>) {
    let (mut framer, mut values) = (framing::Framer::default(), Vec::new());
    for part in bytes.chunks(piece) {
        let pushed = framer.push(part);
        while let Some(value) = framer.next() {
            values.push(value);
        }
        if pushed.is_err() {
            return (values, pushed);
        }
    }
    (values, Ok(()))
}

fuzz_target!(|bytes: &[u8]| {
    let Some((piece, bytes)) = bytes.split_first() else { return };
    let whole = cut(bytes, bytes.len().max(1));
    assert_eq!(cut(bytes, usize::from(*piece) + 1), whole);
    for value in whole.0 {
        assert!(matches!(value.first(), Some(b'{' | b'[')) && matches!(value.last(), Some(b'}' | b']')));
    }
});

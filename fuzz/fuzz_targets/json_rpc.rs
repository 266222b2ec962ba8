//! Arbitrary bytes on the management socket: the parsed values do not depend on how the stream is split.
#![no_main]

use control::framing;
use libfuzzer_sys::fuzz_target;

fn parse_split(bytes: &[u8], piece: usize) -> (Vec<Vec<u8>>, Result<(), framing::FrameError>) {
    let (mut framer, mut values) = (framing::Framer::new(framing::FrameLimits::REQUEST), Vec::new());
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
    let whole = parse_split(bytes, bytes.len().max(1));
    assert_eq!(parse_split(bytes, usize::from(*piece) + 1), whole);
    for value in whole.0 {
        assert!(matches!(value.first(), Some(b'{' | b'[')) && matches!(value.last(), Some(b'}' | b']')));
    }
});

//! Descriptors: 64 bytes, little-endian, of which the operations here use half.

use codec::DecodeError;

/// Bytes of a descriptor, of which its address is a multiple.
pub const DESCRIPTOR_BYTES: usize = 64;
/// 64-bit words of a descriptor.
pub const DESCRIPTOR_WORDS: usize = DESCRIPTOR_BYTES / 8;

/// Words: size and control; source or pattern; destination; address of the next descriptor.
const SOURCE_WORD: usize = 1;
const DESTINATION_WORD: usize = 2;
const NEXT_WORD: usize = 3;

/// Control, in the upper half of the first word.
const CONTROL_REPORTS: u32 = 1 << 3;
const CONTROL_NULL: u32 = 1 << 5;
const CONTROL_OP_SHIFT: u32 = 24;
const OP_COPY: u32 = 0x00;
const OP_FILL: u32 = 0x01;
/// What the kernel and SPDK write as the size of a descriptor that moves nothing: 0 is an error.
const NULL_BYTES: u32 = 8;

/// What a descriptor has the engine do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorOp {
    /// Nothing: a start, to see that the channel works.
    Null,
    /// A copy between addresses of the device.
    Copy {
        /// Source.
        from: u64,
        /// Destination.
        to: u64,
        /// Not 0.
        bytes: u32,
    },
    /// A pattern, from its first byte on and again and again.
    Fill {
        /// Little-endian.
        pattern: u64,
        /// Destination.
        to: u64,
        /// Not 0.
        bytes: u32,
    },
}

/// An entry of a channel's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoatDescriptor {
    /// What it does.
    pub op: DescriptorOp,
    /// Whether the channel writes its status once it is done.
    pub reports: bool,
    /// Address of the next descriptor, a multiple of 64.
    pub next: u64,
}

impl IoatDescriptor {
    /// Encodes it as the words of an entry.
    pub const fn encode(&self) -> [u64; DESCRIPTOR_WORDS] {
        let (op, bytes, source, destination) = match self.op {
            DescriptorOp::Null => (OP_COPY << CONTROL_OP_SHIFT | CONTROL_NULL, NULL_BYTES, 0, 0),
            DescriptorOp::Copy { from, to, bytes } => (OP_COPY << CONTROL_OP_SHIFT, bytes, from, to),
            DescriptorOp::Fill { pattern, to, bytes } => (OP_FILL << CONTROL_OP_SHIFT, bytes, pattern, to),
        };
        let control = op | if self.reports { CONTROL_REPORTS } else { 0 };
        let mut words = [0; DESCRIPTOR_WORDS];
        words[0] = (control as u64) << 32 | bytes as u64;
        words[SOURCE_WORD] = source;
        words[DESTINATION_WORD] = destination;
        words[NEXT_WORD] = self.next;
        words
    }

    /// Decodes an entry.
    ///
    /// # Errors
    /// A control bit or an operation that this code does not write, or a size of 0.
    pub fn decode(words: &[u64; DESCRIPTOR_WORDS]) -> Result<IoatDescriptor, DecodeError> {
        let (bytes, control) = (words[0] as u32, (words[0] >> 32) as u32);
        let known = CONTROL_REPORTS | CONTROL_NULL | 0xff << CONTROL_OP_SHIFT;
        if control & !known != 0 {
            return Err(DecodeError::value("the control field", 4, control.into()));
        }
        if bytes == 0 {
            return Err(DecodeError::value("the size", 0, 0));
        }
        let (source, to) = (words[SOURCE_WORD], words[DESTINATION_WORD]);
        let op = match (control >> CONTROL_OP_SHIFT, control & CONTROL_NULL != 0) {
            (OP_COPY, true) => DescriptorOp::Null,
            (OP_COPY, false) => DescriptorOp::Copy { from: source, to, bytes },
            (OP_FILL, false) => DescriptorOp::Fill { pattern: source, to, bytes },
            (op, _) => return Err(DecodeError::value("the operation", 7, op.into())),
        };
        Ok(IoatDescriptor { op, reports: control & CONTROL_REPORTS != 0, next: words[NEXT_WORD] })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(descriptor: &IoatDescriptor) -> Vec<u8> {
        descriptor.encode().iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Written by hand from the layout: size at 0, control at 4, source at 8, destination at 16, next at 24.
    #[test]
    fn descriptors_have_the_bytes_of_the_documents() {
        let copy = IoatDescriptor {
            op: DescriptorOp::Copy {
                from: 0x1122_3344_5566_7788,
                to: 0x99aa_bbcc_ddee_ff00,
                bytes: 0x1_0200,
            },
            reports: true,
            next: 0x0102_0304_0506_0740,
        };
        let mut expected = vec![0; 64];
        expected[..4].copy_from_slice(&[0x00, 0x02, 0x01, 0x00]);
        expected[4..8].copy_from_slice(&[0x08, 0x00, 0x00, 0x00]);
        expected[8..16].copy_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        expected[16..24].copy_from_slice(&[0x00, 0xff, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99]);
        expected[24..32].copy_from_slice(&[0x40, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01]);
        assert_eq!(bytes_of(&copy), expected);

        let fill = DescriptorOp::Fill { pattern: 0xa5a5_a5a5_a5a5_a5a5, to: 0x1000, bytes: 4096 };
        let mut expected = vec![0; 64];
        expected[..8].copy_from_slice(&[0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01]);
        expected[8..16].fill(0xa5);
        expected[16..24].copy_from_slice(&[0x00, 0x10, 0, 0, 0, 0, 0, 0]);
        expected[24] = 0x80;
        assert_eq!(bytes_of(&IoatDescriptor { op: fill, reports: false, next: 0x80 }), expected);

        let mut expected = vec![0; 64];
        expected[..8].copy_from_slice(&[8, 0, 0, 0, 0x28, 0, 0, 0]);
        expected[24] = 0x40;
        assert_eq!(bytes_of(&IoatDescriptor { op: DescriptorOp::Null, reports: true, next: 0x40 }), expected);
    }

    #[test]
    fn what_this_code_does_not_write_is_an_error() {
        let good = IoatDescriptor { op: DescriptorOp::Null, reports: false, next: 0 }.encode();
        for (word, reason) in [
            (0x8700_0000_0000_0008u64, "an exclusive or"),
            (0x0000_0001_0000_0008, "an interrupt"),
            (0x0000_0000_0000_0000, "no bytes"),
            (0x0100_0020_0000_0008, "a fill of nothing"),
        ] {
            let mut words = good;
            words[0] = word;
            assert!(IoatDescriptor::decode(&words).is_err(), "{reason}");
        }
    }

    proptest! {
        #[test]
        fn descriptors_round_trip(words in any::<[u64; DESCRIPTOR_WORDS]>(), op in 0..3u64, reports: bool) {
            let control = [0u64, 1 << 24, 1 << 5][op as usize] | u64::from(reports) << 3;
            let mut words = words;
            words[0] = control << 32 | words[0] & 0xffff_ffff;
            if let Ok(descriptor) = IoatDescriptor::decode(&words) {
                let again = IoatDescriptor::decode(&descriptor.encode());
                prop_assert_eq!(again, Ok(descriptor));
            }
        }
    }
}

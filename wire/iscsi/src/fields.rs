//! The macro that defines a PDU's header, and how its fields are on the wire.

/// A field at an offset; `mask` selects the bits of one byte.
pub(crate) trait Field: Sized {
    fn get(bytes: &[u8], at: usize, mask: u8) -> Self;
    fn put(&self, bytes: &mut [u8], at: usize, mask: u8);
}

impl Field for bool {
    #[inline]
    fn get(bytes: &[u8], at: usize, mask: u8) -> bool {
        bytes[at] & mask != 0
    }

    #[inline]
    fn put(&self, bytes: &mut [u8], at: usize, mask: u8) {
        if *self {
            bytes[at] |= mask;
        }
    }
}

impl Field for u8 {
    #[inline]
    fn get(bytes: &[u8], at: usize, mask: u8) -> u8 {
        (bytes[at] & mask) >> mask.trailing_zeros()
    }

    #[inline]
    fn put(&self, bytes: &mut [u8], at: usize, mask: u8) {
        bytes[at] |= (self << mask.trailing_zeros()) & mask;
    }
}

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Field for $type {
            #[inline]
            fn get(bytes: &[u8], at: usize, _: u8) -> $type {
                let mut field = [0; size_of::<$type>()];
                field.copy_from_slice(&bytes[at..at + size_of::<$type>()]);
                <$type>::from_be_bytes(field)
            }

            #[inline]
            fn put(&self, bytes: &mut [u8], at: usize, _: u8) {
                bytes[at..at + size_of::<$type>()].copy_from_slice(&self.to_be_bytes());
            }
        }
    )*};
}
integer!(u16, u32, u64);

impl<const N: usize> Field for [u8; N] {
    #[inline]
    fn get(bytes: &[u8], at: usize, _: u8) -> [u8; N] {
        let mut field = [0; N];
        field.copy_from_slice(&bytes[at..at + N]);
        field
    }

    #[inline]
    fn put(&self, bytes: &mut [u8], at: usize, _: u8) {
        bytes[at..at + N].copy_from_slice(self);
    }
}

/// Defines the header of a PDU. Each has `data_length` and `initiator_task_tag`; the others are given with
/// their byte and, for those of a few bits, a mask. `F` stands for a first byte of flags that is always set.
macro_rules! pdu {
    (
        $(#[$meta:meta])*
        $name:ident, $opcode:expr, flags $flags:literal {
            $($(#[$fmeta:meta])* $field:ident: $type:ty = $at:literal $(/ $mask:literal)?,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            /// Bytes of data, without padding: at most 2^24 - 1.
            pub data_length: u32,
            /// The initiator's name of the task.
            pub initiator_task_tag: u32,
            $($(#[$fmeta])* pub $field: $type,)*
        }

        impl $name {
            /// Decodes the header's fields. Reserved bits are ignored, as RFC 7143, section 11 wants it.
            ///
            /// # Errors
            /// `from` is shorter than a header, or has another opcode.
            #[inline]
            pub fn decode(from: &[u8]) -> Result<$name, $crate::DecodeError> {
                let header = $crate::BasicHeader::decode(from)?;
                if header.opcode != $opcode {
                    return Err($crate::DecodeError::value("opcode", 0, u64::from(header.opcode as u8)));
                }
                Ok($name {
                    data_length: header.data_length,
                    initiator_task_tag: header.initiator_task_tag,
                    $($field: $crate::fields::Field::get(from, $at, $crate::fields::mask!($($mask)?)),)*
                })
            }

            /// Encodes the header; the inverse of [`decode`](Self::decode).
            #[inline]
            pub fn to_bytes(&self) -> [u8; $crate::HEADER_BYTES] {
                let mut bytes = [0; $crate::HEADER_BYTES];
                bytes[0] = $opcode as u8;
                bytes[1] = $flags;
                bytes[4..8].copy_from_slice(&self.data_length.to_be_bytes());
                bytes[4] = 0;
                bytes[16..20].copy_from_slice(&self.initiator_task_tag.to_be_bytes());
                $($crate::fields::Field::put(&self.$field, &mut bytes, $at, $crate::fields::mask!($($mask)?));)*
                bytes
            }
        }
    };
}

macro_rules! mask {
    () => {
        0xff
    };
    ($mask:literal) => {
        $mask
    };
}

pub(crate) use {mask, pdu};

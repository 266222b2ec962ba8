//! A macro for structures of packed little-endian fields, and the reading and writing of single ones.

/// Defines a structure whose integer fields are on the wire in order, little-endian and without padding, with its size,
/// `decode` and `to_bytes`.
///
/// ```
/// codec::fields! {
///     /// A range.
///     Range, 12 {
///         /// First sector.
///         sector: u64,
///         /// Number of sectors.
///         count: u32,
///     }
/// }
/// let range = Range { sector: 1, count: 2 };
/// assert_eq!(range.to_bytes(), [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
/// assert_eq!(Range::decode(&range.to_bytes())?, range);
/// # Ok::<(), codec::DecodeError>(())
/// ```
#[macro_export]
macro_rules! fields {
    (
        $(#[$meta:meta])*
        $name:ident, $size:literal {
            $($(#[$fmeta:meta])* $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$fmeta])* pub $field: $type,)* }

        impl $name {
            /// Bytes on the wire.
            pub const SIZE: usize = $size;

            /// Decodes the structure from the start of `from`; bytes after it are ignored.
            ///
            /// # Errors
            /// `from` is shorter than [`SIZE`](Self::SIZE).
            pub fn decode(from: &[u8]) -> Result<Self, $crate::DecodeError> {
                let Some(from) = from.first_chunk::<$size>() else {
                    let (what, got) = (stringify!($name), from.len());
                    return Err($crate::DecodeError::Length { what, got, need: $size });
                };
                let mut rest: &[u8] = from;
                let decoded = $name { $($field: <$type>::from_le_bytes($crate::next_field(&mut rest)),)* };
                debug_assert!(rest.is_empty());
                Ok(decoded)
            }

            /// Encodes the structure; the inverse of [`decode`](Self::decode).
            pub fn to_bytes(&self) -> [u8; $size] {
                let mut bytes = [0; $size];
                let mut rest: &mut [u8] = &mut bytes;
                $($crate::put_field(&mut rest, &self.$field.to_le_bytes());)*
                debug_assert!(rest.is_empty());
                bytes
            }
        }

        const _: () = assert!($size == 0 $(+ size_of::<$type>())*);
    };
}

/// Takes the next `N` bytes of a structure whose size was checked.
///
/// # Panics
/// If there are fewer.
#[inline]
pub fn next_field<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (field, after) = rest.split_first_chunk().expect("a structure is as long as its fields");
    *rest = after;
    *field
}

/// Writes the next field of a structure whose size is the sum of its fields.
///
/// # Panics
/// If there is no room.
#[inline]
pub fn put_field(rest: &mut &mut [u8], field: &[u8]) {
    let (here, after) = std::mem::take(rest).split_at_mut(field.len());
    here.copy_from_slice(field);
    *rest = after;
}

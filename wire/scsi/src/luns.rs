//! Logical unit numbers and the parameter data of REPORT LUNS (SAM-5, section 4.7; SPC-4, section 6.33).

/// Bytes of a logical unit number.
pub const LUN_BYTES: usize = 8;
/// Largest number that has an encoding here.
pub const LUN_MAX: u16 = 0x3fff;

/// Encodes a number: peripheral device addressing below 256, flat space addressing above.
pub fn encode_lun(lun: u16) -> [u8; LUN_BYTES] {
    debug_assert!(lun <= LUN_MAX, "LUN {lun}");
    let [high, low] = lun.to_be_bytes();
    [if high == 0 { 0 } else { 0x40 | high & 0x3f }, low, 0, 0, 0, 0, 0, 0]
}

/// Decodes a number of a single level, in peripheral device addressing on bus 0 or flat space addressing. `None` for
/// any other, among them the well-known logical units.
pub fn decode_lun(bytes: [u8; LUN_BYTES]) -> Option<u16> {
    let [high, low, rest @ ..] = bytes;
    let is_known = high == 0 || high >> 6 == 1;
    (is_known && rest == [0; 6]).then(|| u16::from_be_bytes([high & 0x3f, low]))
}

/// Encodes the parameter data of REPORT LUNS.
pub fn encode_list(luns: impl ExactSizeIterator<Item = u16>) -> Vec<u8> {
    let length = (luns.len() * LUN_BYTES) as u32;
    let mut bytes = [length.to_be_bytes(), [0; 4]].concat();
    bytes.extend(luns.flat_map(encode_lun));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_encoded_as_initiators_expect_them() {
        assert_eq!(encode_lun(3), [0, 3, 0, 0, 0, 0, 0, 0]);
        assert_eq!(encode_lun(0x102), [0x41, 2, 0, 0, 0, 0, 0, 0]);
        for lun in 0..=LUN_MAX {
            assert_eq!(decode_lun(encode_lun(lun)), Some(lun));
        }
        // Flat space addressing of a small number, as virtio-scsi sends it.
        assert_eq!(decode_lun([0x40, 7, 0, 0, 0, 0, 0, 0]), Some(7));
        // A second level, another bus, a well-known logical unit.
        for other in [[0, 1, 0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0], [0xc1, 1, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(decode_lun(other), None);
        }
    }

    #[test]
    fn a_list_begins_with_its_length() {
        let expected = [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0];
        assert_eq!(encode_list([0, 5].into_iter()), expected);
    }
}

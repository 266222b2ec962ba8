use super::*;
use proptest::prelude::*;

/// An offset and the bytes at that offset.
type Piece = (u64, Vec<u8>);

/// The names of the signatures on a device of `bytes` bytes with only these pieces.
fn detected_names(bytes: u64, pieces: &[Piece]) -> Vec<&'static str> {
    let (mut head, mut tail) =
        (vec![0; bytes.min(HEAD_BYTES) as usize], vec![0; bytes.min(TAIL_BYTES) as usize]);
    let tail_from = bytes - tail.len() as u64;
    for (offset, piece) in pieces {
        for (index, byte) in piece.iter().enumerate() {
            let at = offset + index as u64;
            if let Some(place) = head.get_mut(at as usize) {
                *place = *byte;
            }
            if let Some(place) = at.checked_sub(tail_from).and_then(|at| tail.get_mut(at as usize)) {
                *place = *byte;
            }
        }
    }
    let found = detect_signatures(DeviceExtract { bytes, head: &head, tail: &tail });
    found.into_iter().map(|signature| signature.name).collect()
}

#[test]
fn devices_formatted_by_debian_tools_are_detected() {
    let rows = include_str!("golden.txt").lines().filter(|line| !line.starts_with('#'));
    let mut devices: Vec<(&str, &str, u64, Vec<Piece>)> = Vec::new();
    for row in rows {
        let words: Vec<&str> = row.split(' ').collect();
        let [tool, name, bytes, offset, hex] = words[..] else { panic!("{row}") };
        let offset = u64::from_str_radix(offset.trim_start_matches("0x"), 16).unwrap();
        let byte = |index| u8::from_str_radix(&hex[index..index + 2], 16).unwrap();
        let piece = (offset, (0..hex.len()).step_by(2).map(byte).collect());
        match devices.iter_mut().find(|device| device.0 == tool) {
            Some(device) => device.3.push(piece),
            None => devices.push((tool, name, bytes.parse().unwrap(), vec![piece])),
        }
    }
    assert!(devices.len() >= 20, "{}", devices.len());
    for (tool, name, bytes, pieces) in devices {
        assert_eq!(detected_names(bytes, &pieces), [name], "{tool}");
    }
}

#[test]
fn luks_is_detected_by_its_second_header() {
    for shift in 14..=20 {
        assert_eq!(
            detected_names(8 << 20, &[(1 << shift, b"SKUL\xba\xbe".to_vec())]),
            ["LUKS"],
            "at 2^{shift}"
        );
    }
}

#[test]
fn signatures_relative_to_the_end_are_detected() {
    const MD: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
    let size = 10_000_000_000 / 512 * 512;
    let at = |offset: u64, bytes: &[u8]| detected_names(size, &[(offset, bytes.to_vec())]);
    assert_eq!(at((size - 8192) & !4095, &MD), ["MD RAID 1.0"]);
    assert_eq!(at(0, &MD), ["MD RAID 1.1"]);
    assert_eq!(at(4096, &MD), ["MD RAID 1.2"]);
    assert_eq!(at((size & !65535) - 65536, &MD), ["MD RAID 0.90"]);
    assert_eq!(at((size & !65535) - 65536, &0xa92b_4efc_u32.to_be_bytes()), ["MD RAID 0.90"]);
    let label = 256 << 10;
    let last = size / label * label;
    for offset in [label / 2, label + label / 2 + 8192, last - 2 * label + label / 2, last - 1024] {
        assert_eq!(at(offset, &0x00ba_b10c_u64.to_le_bytes()), ["ZFS"], "{offset}");
    }
    assert_eq!(at(label / 2 + 1024, &0x00ba_b10c_u64.to_be_bytes()), ["ZFS"]);
    assert_eq!(at(size / 4096 * 4096 - 4096 + 60, &[0x83, 0x74, 0x02, 0x6b]), ["DRBD"]);
    assert_eq!(at(size - 1024, b"Intel Raid ISM Cfg Sig. 1.3.00"), ["Intel RAID"]);
    assert_eq!(at(size - 512, &[0xde, 0x11, 0xde, 0x11]), ["DDF RAID"]);
    assert_eq!(at(size - 512, b"EFI PART"), ["GPT"]);
    assert_eq!(at(0x4000, b"SKUL\xba\xbe"), ["LUKS"]);
    assert_eq!(at(65526, b"SWAPSPACE2"), ["swap"]);
}

#[test]
fn empty_and_tiny_devices_have_no_signatures() {
    for bytes in [0, 1, 511, 512, 4096, 8191, 65536, 300_000, 2 << 20, 10_000_000_000] {
        assert_eq!(detected_names(bytes, &[]), [""; 0], "{bytes}");
    }
    assert_eq!(detected_names(4096, &[(4095, vec![1])]), [""; 0]);
}

proptest! {
    /// Every signature of the table is detected, whether start and end of the device overlap or not.
    #[test]
    fn every_signature_is_detected_on_a_device_of_any_size(bytes in 0u64..3 << 20, which in 0..SIGNATURES.len()) {
        let (signature, places, mark) = SIGNATURES[which];
        for offset in places {
            let found = detected_names(bytes, &[(*offset, mark.to_vec())]);
            let fits = offset + mark.len() as u64 <= bytes;
            prop_assert_eq!(found.contains(&signature.name), fits, "{:?} of {} bytes: {:?}", signature, bytes, found);
        }
    }

    #[test]
    fn detection_never_panics(bytes in 0u64..20_000, data in proptest::collection::vec(any::<u8>(), 0..600), offset in 0u64..20_000) {
        detected_names(bytes, &[(offset, data)]);
    }
}

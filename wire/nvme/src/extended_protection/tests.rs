use block_io::ProtectionFlags as Flags;
use proptest::prelude::*;

use super::*;
use crate::protection::{GuardFormat, InvalidFormat, MetadataFormat, check_block, generate_block};

/// The blocks of 4 KiB of the specification's examples: zeroes, ones, rising and falling bytes.
fn examples() -> [Vec<u8>; 4] {
    let rising: Vec<u8> = (0..4096).map(|at| at as u8).collect();
    [vec![0; 4096], vec![0xff; 4096], rising.clone(), rising.into_iter().rev().collect()]
}

fn format(
    guard: GuardFormat,
    kind: ProtectionType,
    bytes: u16,
    storage_tag_bits: u8,
    first: bool,
) -> MetadataFormat {
    let protection = Protection { kind, first, guard, storage_tag_bits };
    MetadataFormat { bytes, extended: false, protection: Some(protection) }
}

fn all_bits() -> ProtectionTags {
    ProtectionTags { application_mask: u16::MAX, ..ProtectionTags::default() }
}

fn all_checks() -> Flags {
    Flags::all() - Flags::ACTION
}

#[test]
fn guards_are_those_of_the_specification() {
    // NVM 1.0, sections 5.2.1.3.4 and 5.2.1.3.5: examples of the CRCs of 32 and 64 bits.
    let of_32 = [0x98f9_4189, 0x25c1_fe13, 0x9c71_fe32, 0x2149_41a8];
    let of_64 = [0x6482_d367_eb22_b64e, 0xc0dd_ba73_02ec_a3ac, 0x3e72_9f5f_6750_449c, 0x9a2d_f64b_8e9e_517e];
    for (index, data) in examples().iter().enumerate() {
        assert_eq!(GuardFormat::Crc32.guard(data, &[]), of_32[index], "{index}");
        assert_eq!(GuardFormat::Crc64.guard(data, &[]), of_64[index], "{index}");
        let (one, other) = data.split_at(1000);
        assert_eq!(GuardFormat::Crc32.guard(one, other), of_32[index], "{index}, in two parts");
        assert_eq!(GuardFormat::Crc64.guard(one, other), of_64[index], "{index}, in two parts");
    }
    assert_eq!(GuardFormat::Crc16.guard(b"12345", b"6789"), 0xd0db);
}

/// The CRC of 64 bits as the Linux kernel has it (lib/crc64.c: `crc64_rocksoft_generic`), bit by bit.
fn kernels_crc64(data: &[u8]) -> u64 {
    !data.iter().fold(!0u64, |crc, byte| {
        (0..8).fold(crc ^ u64::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 != 0 { 0x9a6c_9329_ac4b_c9b5 } else { 0 }
        })
    })
}

#[test]
fn protection_information_of_64_bits_is_that_of_the_linux_kernel() {
    // block/t10-pi.c: `struct crc64_pi_tuple` is guard, application tag and a reference tag of 48 bits, all
    // big-endian.
    let format = format(GuardFormat::Crc64, ProtectionType::Type1, 16, 0, false);
    let data: Vec<u8> = (0..512).map(|at| (at * 11 + 5) as u8).collect();
    let tags = ProtectionTags { reference: 0xffff_ffff, application: 0x1234, ..all_bits() };
    let mut metadata = [0; 16];
    generate_block(&format, &data, &mut metadata, 2, &tags);
    assert_eq!(metadata[..8], kernels_crc64(&data).to_be_bytes());
    assert_eq!(metadata[8..], [0x12, 0x34, 0, 1, 0, 0, 0, 1], "carried into bit 32");
}

#[test]
fn fields_are_where_the_specification_has_them() {
    let data = vec![0; 4096];
    let tags = ProtectionTags {
        reference: 0x1122_3344_5566_7788,
        storage: 0xaabb_ccdd_eeff_0011,
        application: 0x9876,
        ..all_bits()
    };
    let generated = |guard: GuardFormat, bits| {
        let format = format(guard, ProtectionType::Type1, 24, bits, false);
        assert_eq!(format.validate(), Ok(()));
        let mut metadata = [0; 24];
        generate_block(&format, &data, &mut metadata, 1, &tags);
        metadata[24 - guard.bytes()..].to_vec()
    };
    // Guard, application tag, then storage tag and reference tag, most significant bits first.
    let expected = |guard: &[u8], space: &[u8]| [guard, &[0x98, 0x76], space].concat();
    let guard = &generated(GuardFormat::Crc32, 16)[..4];
    assert_eq!(
        generated(GuardFormat::Crc32, 16),
        expected(guard, &[0x00, 0x11, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x89])
    );
    assert_eq!(
        generated(GuardFormat::Crc32, 64),
        expected(guard, &[0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff, 0x00, 0x11, 0x77, 0x89])
    );
    let guard = &generated(GuardFormat::Crc64, 0)[..8];
    let reference = [0x33, 0x44, 0x55, 0x66, 0x77, 0x89];
    assert_eq!(generated(GuardFormat::Crc64, 0), expected(guard, &reference));
    let space = [0x00, 0x11, 0x55, 0x66, 0x77, 0x89];
    assert_eq!(generated(GuardFormat::Crc64, 16), expected(guard, &space));
    // Four bits: the nibble of the storage tag is before 44 bits of the reference tag.
    let space = [0x13, 0x44, 0x55, 0x66, 0x77, 0x89];
    assert_eq!(generated(GuardFormat::Crc64, 4), expected(guard, &space));
    let space = [0xcc, 0xdd, 0xee, 0xff, 0x00, 0x11];
    assert_eq!(generated(GuardFormat::Crc64, 48), expected(guard, &space), "no reference tag");
}

#[test]
fn formats_that_contradict_themselves_are_errors() {
    let validate =
        |guard, metadata, bits| format(guard, ProtectionType::Type1, metadata, bits, true).validate();
    let bytes = InvalidFormat::Metadata { metadata_bytes: 8, bytes: 16 };
    assert_eq!(validate(GuardFormat::Crc64, 8, 0), Err(bytes));
    for (guard, bits, is_valid) in [
        (GuardFormat::Crc16, 0, true),
        (GuardFormat::Crc16, 32, true),
        (GuardFormat::Crc16, 33, false),
        (GuardFormat::Crc32, 15, false),
        (GuardFormat::Crc32, 64, true),
        (GuardFormat::Crc32, 65, false),
        (GuardFormat::Crc64, 0, true),
        (GuardFormat::Crc64, 49, false),
    ] {
        assert_eq!(validate(guard, 16, bits).is_ok(), is_valid, "{guard:?} {bits}");
    }
    for pif in 0..=255 {
        assert!(GuardFormat::from_wire(pif).is_none_or(|guard| guard.to_wire() == pif));
    }
}

#[test]
fn a_guard_of_16_bits_without_a_storage_tag_is_the_same_by_both_ways() {
    let data: Vec<u8> = (0..512).map(|at| (at * 7) as u8).collect();
    for first in [false, true] {
        let format = format(GuardFormat::Crc16, ProtectionType::Type2, 16, 0, first);
        let (protection, at) = (format.protection.unwrap(), format.protection_range().unwrap().start);
        let tags = ProtectionTags { reference: u32::MAX.into(), application: 0xabcd, ..all_bits() };
        let (mut one, mut other) = ([5; 16], [5; 16]);
        generate_block(&format, &data, &mut one, 3, &tags);
        generate(&protection, at, (&data, &mut other), 3, &tags);
        assert_eq!(one, other);
        assert_eq!(check(&protection, at, (&data, &one), 3, &tags, all_checks()), Ok(()));
    }
}

proptest! {
    /// Each bit of data and metadata is in one field, and its corruption fails the check of that field
    /// only.
    #[test]
    fn each_corruption_fails_its_own_check(
        pif in 0u8..3,
        kind in prop::sample::select(vec![ProtectionType::Type1, ProtectionType::Type2, ProtectionType::Type3]),
        bits in 0u8..=64,
        first: bool,
        extra in 0u16..20,
        index in 0usize..1000,
        (reference, storage) in any::<(u64, u64)>(),
        // No bit of it makes it the value that disables checks.
        application in 0u16..0x7000,
        bit in 0usize..8 * 600,
    ) {
        let guard = GuardFormat::from_wire(pif).unwrap();
        let (least, most) = guard.storage_tag_bits();
        let bits = bits.clamp(least, most);
        let width = guard.bytes() + usize::from(extra);
        let format = format(guard, kind, width as u16, bits, first);
        prop_assert_eq!(format.validate(), Ok(()));
        let at = format.protection_range().unwrap().start;
        let has_reference = format.protection.unwrap().reference_tag_bits() > 0;
        let tags = ProtectionTags { reference, storage, application, ..all_bits() };
        let mut block: Vec<u8> = (0..512 + width).map(|at| (at * 13) as u8).collect();
        let (data, metadata) = block.split_at_mut(512);
        generate_block(&format, data, metadata, index, &tags);
        prop_assert_eq!(check_block(&format, data, metadata, index, &tags, all_checks()), Ok(()));
        let next = check_block(&format, data, metadata, index + 1, &tags, Flags::CHECK_REFERENCE_TAG);
        prop_assert_eq!(next.is_ok(), kind == ProtectionType::Type3 || !has_reference);

        let bit = bit % (block.len() * 8);
        block[bit / 8] ^= 0x80 >> (bit % 8);
        let (data, metadata) = block.split_at(512);
        let failing = |checks| check_block(&format, data, metadata, index, &tags, checks).err();
        let at = (bit / 8).checked_sub(512 + at);
        let in_information = at.filter(|at| *at < guard.bytes()).map(|at| at * 8 + bit % 8);
        let guard_bits = guard.guard_bytes() * 8;
        let expected = match in_information {
            // Behind the protection information nothing is covered.
            None if at.is_some() && first => None,
            None => Some(Status::GUARD_CHECK_ERROR),
            Some(bit) if bit < guard_bits => Some(Status::GUARD_CHECK_ERROR),
            Some(bit) if bit < guard_bits + 16 => Some(Status::APPLICATION_TAG_CHECK_ERROR),
            Some(bit) if bit < guard_bits + 16 + usize::from(bits) => Some(Status::STORAGE_TAG_CHECK_ERROR),
            Some(_) if kind == ProtectionType::Type3 => None,
            Some(_) => Some(Status::REFERENCE_TAG_CHECK_ERROR),
        };
        prop_assert_eq!(failing(all_checks()), expected);
        for check in all_checks().iter() {
            let status = match check {
                Flags::CHECK_GUARD => Status::GUARD_CHECK_ERROR,
                Flags::CHECK_APPLICATION_TAG => Status::APPLICATION_TAG_CHECK_ERROR,
                Flags::CHECK_STORAGE_TAG => Status::STORAGE_TAG_CHECK_ERROR,
                _ => Status::REFERENCE_TAG_CHECK_ERROR,
            };
            prop_assert_eq!(failing(check), expected.filter(|expected| *expected == status));
        }
    }

    /// Commands have the tags where protection information has them: in dwords 2, 3 and 14.
    #[test]
    fn commands_carry_the_tags_of_every_format(
        pif in 0u8..3,
        bits in 0u8..=64,
        (reference, storage) in any::<(u64, u64)>(),
    ) {
        let guard = GuardFormat::from_wire(pif).unwrap();
        let (least, most) = guard.storage_tag_bits();
        let storage_tag_bits = bits.clamp(least, most);
        let protection = Protection { kind: ProtectionType::Type1, first: false, guard, storage_tag_bits };
        let mut sqe = crate::Sqe::default();
        crate::io::set_block_tags(&mut sqe, &protection, storage, reference);
        let expected = (storage & protection.storage_mask(), reference & protection.reference_mask());
        prop_assert_eq!(crate::io::block_tags(&sqe, &protection), expected);
    }
}

#[test]
fn commands_have_the_tags_in_the_dwords_of_the_specification() {
    let dwords = |guard, storage_tag_bits| {
        let protection = Protection { kind: ProtectionType::Type1, first: false, guard, storage_tag_bits };
        let mut sqe = crate::Sqe::default();
        crate::io::set_block_tags(&mut sqe, &protection, 0xaabb_ccdd_eeff_0011, 0x1122_3344_5566_7788);
        [sqe.cdw2, sqe.cdw3, sqe.cdw14]
    };
    // As libnvme's `nvme_set_var_size_tags` and the kernel's `nvme_set_ref_tag` have them.
    assert_eq!(dwords(GuardFormat::Crc16, 0), [0, 0, 0x5566_7788]);
    assert_eq!(dwords(GuardFormat::Crc64, 0), [0, 0x3344, 0x5566_7788]);
    assert_eq!(dwords(GuardFormat::Crc64, 16), [0, 0x0011, 0x5566_7788]);
    assert_eq!(dwords(GuardFormat::Crc32, 16), [0x0011, 0x1122_3344, 0x5566_7788]);
    assert_eq!(dwords(GuardFormat::Crc32, 64), [0xaabb, 0xccdd_eeff, 0x0011_7788]);
}

#[test]
fn the_application_tag_of_ones_disables_checks() {
    let data = [1; 512];
    for kind in [ProtectionType::Type1, ProtectionType::Type2, ProtectionType::Type3] {
        let format = format(GuardFormat::Crc64, kind, 16, 16, false);
        let tags = ProtectionTags { application: ESCAPE, ..all_bits() };
        let mut metadata = [0; 16];
        generate_block(&format, &data, &mut metadata, 0, &tags);
        metadata[0] ^= 1;
        let other = ProtectionTags { application: 5, ..tags };
        let outcome = check_block(&format, &data, &metadata, 0, &other, all_checks());
        let is_type3 = kind == ProtectionType::Type3;
        assert_eq!(outcome.is_err(), is_type3, "type 3 needs a reference tag of ones too");
        metadata[12..].fill(0xff);
        assert_eq!(check_block(&format, &data, &metadata, 0, &other, all_checks()), Ok(()), "{kind:?}");
    }
}

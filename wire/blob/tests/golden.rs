//! Bytes that SPDK 26.09-pre wrote, and what each wrong field is called.
#![allow(clippy::unwrap_used)]

use wire_blob::*;

/// A page with these bytes at these offsets, as SPDK wrote it.
fn page(parts: &[(usize, &[u8])]) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    parts.iter().for_each(|(at, part)| bytes[*at..at + part.len()].copy_from_slice(part));
    bytes
}

fn sealed(mut bytes: [u8; PAGE_BYTES]) -> [u8; PAGE_BYTES] {
    let crc = codec::crc32c(&bytes[..PAGE_BYTES - 4]);
    bytes[PAGE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn super_block_bytes() -> [u8; PAGE_BYTES] {
    page(&[
        (0, b"SPDKBLOB\x03\0\0\0\0\x10\0\0\x01\0\0\0"),
        (24, &[1]),
        (30, b"\x10\x00\x01\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x04\x00\x00\x00`\x00\x00\x00LVOLSTORE"),
        (72, &[3, 0, 0, 0, 1]),
        (83, &[6]),
        (89, &[2, 0, 0, 0, 0x10]),
        (4092, b"cGz\xee"),
    ])
}

fn super_block() -> SuperBlock {
    SuperBlock {
        version: 3,
        clean: true,
        super_blob: Some(BlobId(0x1_0000_0000)),
        cluster_bytes: 1 << 20,
        used_pages: PageRange { start: 1, pages: 1 },
        used_clusters: PageRange { start: 2, pages: 1 },
        used_blob_ids: Some(PageRange { start: 3, pages: 1 }),
        metadata: PageRange { start: 4, pages: 96 },
        store_type: *b"LVOLSTORE\0\0\0\0\0\0\0",
        size_bytes: Some(96 << 20),
        io_unit_bytes: 512,
        metadata_page_bytes: 4096,
    }
}

#[test]
fn a_super_block_of_spdk_is_decoded_and_encoded_to_the_same_bytes() {
    assert_eq!(SuperBlock::decode(&super_block_bytes()), Ok(super_block()));
    assert_eq!(super_block().encode(), super_block_bytes());
    assert_eq!(super_block().store_type_text(), "LVOLSTORE");
}

#[test]
fn a_super_block_of_version_1_has_no_mask_of_blob_ids_and_pages_of_4_kib() {
    let mut bytes = super_block_bytes();
    bytes[8] = 1;
    bytes[56..96].fill(0);
    let decoded = SuperBlock::decode(&sealed(bytes)).unwrap();
    let expected = SuperBlock {
        version: 1,
        used_blob_ids: None,
        store_type: [0; 16],
        size_bytes: None,
        io_unit_bytes: 4096,
        ..super_block()
    };
    assert_eq!(decoded, expected);
}

#[test]
fn each_wrong_field_of_a_super_block_is_named() {
    for (at, value, message) in [
        (0, b"TEST".to_vec(), "the signature of the super block at byte 0 has the value 0x54455354424c4f42"),
        (8, vec![4], "the version of the super block at byte 8 has the value 0x4"),
        (8, vec![0], "the version of the super block at byte 8 has the value 0x0"),
        (12, vec![1], "the length of the super block at byte 12 has the value 0x1001"),
        (16, vec![2], "the clean field of the super block at byte 16 has the value 0x2"),
        (28, vec![0, 1], "the cluster size at byte 28 has the value 0x100100"),
        (28, vec![0; 4], "the cluster size at byte 28 has the value 0x0"),
        (32, vec![0], "the start of the mask of pages at byte 32 has the value 0x0"),
        (40, vec![1], "the start of the mask of clusters at byte 40 has the value 0x1"),
        (72, vec![5], "the start of the mask of blob ids at byte 72 has the value 0x5"),
        (52, vec![0], "the length of the metadata region at byte 52 has the value 0x0"),
        (88, vec![1], "the I/O unit size at byte 88 has the value 0x201"),
        (92, vec![0, 0, 32], "the metadata page size at byte 92 has the value 0x200000"),
        (96, vec![7], "a reserved byte of the super block at byte 96 has the value 0x7"),
    ] {
        let mut bytes = super_block_bytes();
        bytes[at..at + value.len()].copy_from_slice(&value);
        let error = SuperBlock::decode(&sealed(bytes)).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let mut bytes = super_block_bytes();
    bytes[16] = 0;
    let error = SuperBlock::decode(&bytes).unwrap_err().to_string();
    assert_eq!(error, "the CRC of the super block at byte 4092 has the value 0xee7a4763");
    let error = SuperBlock::decode(&bytes[..4095]).unwrap_err().to_string();
    assert_eq!(error, "the super block is 4095 bytes long, but 4096 are needed");
}

#[test]
fn masks_of_spdk_are_decoded() {
    let bytes = page(&[(1, &[0x60, 0, 0, 0, 0xcf, 0xff, 0xff, 0x01])]);
    let mask = BitMask::decode(&bytes, MaskKind::Pages).unwrap();
    assert_eq!((mask.length(), mask.count_ones()), (96, 23));
    assert_eq!(mask.ones().take(6).collect::<Vec<_>>(), [0, 1, 2, 3, 6, 7]);
    assert_eq!(mask.encode(), bytes[..17]);
    let bytes = page(&[(0, &[2, 0x60, 0, 0, 0, 0x8b, 0x56, 0xab])]);
    let mask = BitMask::decode(&bytes, MaskKind::BlobIds).unwrap();
    assert!(mask.get(0) && mask.get(1) && !mask.get(2) && mask.get(3) && !mask.get(1 << 20));
    let error = BitMask::decode(&bytes, MaskKind::Clusters).unwrap_err().to_string();
    assert_eq!(error, "the mask of used clusters at byte 0 has the value 0x2");
    let error = BitMask::decode(&bytes[..16], MaskKind::BlobIds).unwrap_err().to_string();
    assert_eq!(error, "the mask of used blob ids is 16 bytes long, but 17 are needed");
}

#[test]
fn bits_after_the_end_of_a_mask_are_ignored() {
    let mask = BitMask::decode(&[1, 3, 0, 0, 0, 0xff], MaskKind::Clusters).unwrap();
    assert_eq!((mask.count_ones(), mask.encode()), (3, vec![1, 3, 0, 0, 0, 7]));
    let mut all = BitMask::decode(&[1, 16, 0, 0, 0, 0xff, 0xff], MaskKind::Clusters).unwrap();
    let mut few = mask.clone();
    few.union(&all);
    assert_eq!(few, mask);
    all.truncate(9);
    assert_eq!((all.count_ones(), all.encode()), (9, vec![1, 9, 0, 0, 0, 0xff, 1]));
    all.truncate(20);
    assert_eq!(all.length(), 9);
}

fn xattr(name: &[u8], value: &[u8]) -> Xattr {
    Xattr { name: name.to_vec(), value: value.to_vec() }
}

fn clone_bytes() -> [u8; PAGE_BYTES] {
    page(&[
        (0, &[3, 0, 0, 0, 1]),
        (16, &[3, 0x18, 0, 0, 0, 7]),
        (45, b"\x02H\0\0\0\x04\0@\0namethin"),
        (122, b"\x02-\0\0\0\x04\0%\0uuidb9100a7c-390f-4d97-8ace-75da3b1a98f5\0"),
        (172, b"\x04\x10\0\0\0\x04\0\x08\0SNAP\x09\0\0\0\x01\0\0\0\x05\x10\0\0\0\x08"),
        (210, &[1]),
        (4088, b"\xff\xff\xff\xff r\x92\xaa"),
    ])
}

#[test]
fn the_first_page_of_a_clone_of_spdk_is_decoded_and_encoded_to_the_same_bytes() {
    let mut name = b"thin".to_vec();
    name.resize(64, 0);
    let invalid = BlobFlags::THIN | BlobFlags::INTERNAL_XATTRS | BlobFlags::EXTENT_TABLE;
    let expected = MetadataPage {
        id: BlobId::from_page(3),
        sequence: 0,
        descriptors: vec![
            MetadataDescriptor::Flags(BlobFlags { invalid, ..BlobFlags::default() }),
            MetadataDescriptor::Xattr(xattr(b"name", &name)),
            MetadataDescriptor::Xattr(xattr(b"uuid", b"b9100a7c-390f-4d97-8ace-75da3b1a98f5\0")),
            MetadataDescriptor::XattrInternal(xattr(XATTR_SNAPSHOT, &[9, 0, 0, 0, 1, 0, 0, 0])),
            MetadataDescriptor::ExtentTable(ExtentTable {
                clusters: 8,
                runs: vec![ExtentTableRun { page: 0, length: 1 }],
            }),
        ],
        next: None,
    };
    assert_eq!(MetadataPage::decode(&clone_bytes(), 3), Ok(expected.clone()));
    assert_eq!(expected.encode(), Some(clone_bytes()));
    assert_eq!(expected.extent_page(), None);
    assert!(has_valid_crc(&clone_bytes()) && !has_valid_crc(&[0; PAGE_BYTES]));
}

#[test]
fn an_extent_page_of_spdk_is_decoded_and_encoded_to_the_same_bytes() {
    let bytes = page(&[
        (0, &[3, 0, 0, 0, 1]),
        (16, &[6, 0x24]),
        (25, &[7]),
        (41, &[8, 0, 0, 0, 9]),
        (4088, b"\xff\xff\xff\xff\xd6\x9d\x02\xe2"),
    ]);
    let decoded = MetadataPage::decode(&bytes, 6).unwrap();
    let expected = ExtentPage { first: 0, clusters: vec![7, 0, 0, 0, 8, 9, 0, 0] };
    assert_eq!(decoded.extent_page(), Some(&expected));
    assert_eq!(decoded.encode(), Some(bytes));
}

/// The offsets are those of the descriptor's structures in SPDK's format: type, length, then (first cluster,
/// number).
#[test]
fn runs_of_extents_are_pairs_of_32_bits() {
    let mut bytes = page(&[(0, &[3, 0, 0, 0, 1]), (4088, &[5])]);
    bytes[16..37].copy_from_slice(b"\x01\x10\0\0\0\x40\0\0\0\x03\0\0\0\0\0\0\0\xff\xff\xff\xff");
    let decoded = MetadataPage::decode(&sealed(bytes), 3).unwrap();
    let runs =
        vec![BlobClusterRun { cluster: 64, length: 3 }, BlobClusterRun { cluster: 0, length: u32::MAX }];
    assert_eq!(decoded.descriptors, [MetadataDescriptor::ExtentRuns(runs)]);
    assert_eq!(decoded.next, Some(5));
    assert_eq!(decoded.encode(), Some(sealed(bytes)));
}

#[test]
fn each_wrong_field_of_a_page_is_named_with_the_page() {
    let cases: [(&[u8], &str); 12] = [
        (b"\x03\x17\0\0\0", "the length of the flags at byte 17 has the value 0x17"),
        (b"\x01\x0c\0\0\0", "the length of the extents at byte 17 has the value 0xc"),
        (b"\x01\0\0\0\0", "the length of the extents at byte 17 has the value 0x0"),
        (b"\x01\x08\0\0\0\0\0\0\0\0\0\0\0", "the length of an extent at byte 25 has the value 0x0"),
        (
            b"\x01\x08\0\0\0\x02\0\0\0\xfe\xff\xff\xff",
            "the length of an extent at byte 25 has the value 0xfffffffe",
        ),
        (b"\x05\x09\0\0\0", "the length of the extent table at byte 17 has the value 0x9"),
        (
            b"\x05\x10\0\0\0\0\0\0\0\0\0\0\0\x05\0\0\0\x02",
            "the number of pages of an extent table's run at byte 33 has the value 0x2",
        ),
        (b"\x06\x03\0\0\0", "the length of the extent page at byte 17 has the value 0x3"),
        (b"\x02\x03\0\0\0", "the length of an xattr at byte 17 has the value 0x3"),
        (b"\x04\x05\0\0\0\x01\0\x01\0", "the length of an xattr at byte 17 has the value 0x5"),
        (b"\x00\xff\xff\xff\xff", "the length of a descriptor at byte 17 has the value 0xffffffff"),
        (b"\x09\xe4\x0f\0\0", "the length of a descriptor at byte 17 has the value 0xfe4"),
    ];
    for (descriptor, message) in cases {
        let bytes = sealed(page(&[(16, descriptor)]));
        let error = MetadataPage::decode(&bytes, 12).unwrap_err();
        assert_eq!(error.to_string(), format!("metadata page 12: {message}"));
    }
    let mut bytes = clone_bytes();
    bytes[300] = 1;
    let error = MetadataPage::decode(&bytes, 3).unwrap_err().to_string();
    assert_eq!(error, "metadata page 3: the CRC at byte 4092 has the value 0xaa927220");
    let error = MetadataPage::decode(&bytes[..100], 3).unwrap_err().to_string();
    assert_eq!(error, "metadata page 3: the page is 100 bytes long, but 4096 are needed");
}

#[test]
fn padding_is_skipped_and_unknown_descriptors_are_preserved() {
    let bytes = sealed(page(&[(16, b"\0\x02\0\0\0\xaa\xaa\x63\x03\0\0\0abc\x06\x04")]));
    let decoded = MetadataPage::decode(&bytes, 0).unwrap();
    let unknown = MetadataDescriptor::Unknown { kind: 0x63, content: b"abc".to_vec() };
    let empty = MetadataDescriptor::ExtentPage(ExtentPage { first: 0, clusters: vec![] });
    assert_eq!(decoded.descriptors, [unknown, empty]);
}

#[test]
fn a_page_that_is_full_needs_no_terminator() {
    let full = |bytes| MetadataPage {
        id: BlobId::from_page(1),
        sequence: 1,
        descriptors: vec![MetadataDescriptor::Xattr(xattr(b"x", &vec![7; bytes]))],
        next: Some(9),
    };
    let largest = DESCRIPTOR_AREA_BYTES - 10;
    for bytes in largest - 6..=largest {
        let page = full(bytes);
        assert_eq!(MetadataPage::decode(&page.encode().unwrap(), 2), Ok(page));
    }
    assert_eq!(full(largest + 1).encode(), None);
}

#[test]
fn ids_and_first_pages_name_each_other() {
    assert_eq!(BlobId::from_page(9).to_string(), "0x100000009");
    assert_eq!(BlobId(0x1_0000_0009).page(), Some(9));
    assert_eq!((BlobId(9).page(), BlobId(u64::MAX).page()), (None, None));
}

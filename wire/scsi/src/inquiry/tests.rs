use super::*;

#[test]
fn standard_data_has_the_fields_of_spc_4() {
    let inquiry = StandardInquiry {
        peripheral: DISK,
        port_groups: 3,
        third_party_copy: true,
        multiple_ports: true,
        vendor: "RINGBOLT",
        product: "Volume",
        revision: "0.1",
        versions: &[version::SAM_5, version::SPC_4],
    };
    let bytes = inquiry.encode();
    assert_eq!(bytes[..8], [0, 0, 6, 0x12, 91, 0x38, 0x10, 0x02]);
    assert_eq!(&bytes[8..36], b"RINGBOLTVolume          0.1 ");
    assert_eq!(bytes[58..64], [0, 0xa0, 4, 0x60, 0, 0]);
}

#[test]
fn texts_are_ascii_padded_and_cut() {
    let mut place = [0; 6];
    put_text(&mut place, "a\u{e4}\n");
    assert_eq!(&place, b"a???  ");
    put_text(&mut place, "12345678");
    assert_eq!(&place, b"123456");
}

#[test]
fn designators_have_the_codes_of_spc_4() {
    let encode = |designator: Designator<'_>, association| {
        let mut out = Vec::new();
        designator.encode(association, ProtocolId::Iscsi, &mut out);
        out
    };
    let t10 = encode(Designator::T10("RB", "x1"), Association::Unit);
    assert_eq!(t10, *b"\x02\x01\x00\x0aRB      x1");
    let naa = encode(Designator::LocalNaa(0xfedc_ba98_7654_3210), Association::Unit);
    assert_eq!(naa, [1, 3, 0, 8, 0x3e, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10]);
    let uuid = encode(Designator::Uuid([7; 16]), Association::Unit);
    assert_eq!(uuid, [[1, 0xa, 0, 18, 0x10, 0].as_slice(), &[7; 16]].concat());
    assert_eq!(encode(Designator::RelativePort(2), Association::Port), [0x51, 0x94, 0, 4, 0, 0, 0, 2]);
    assert_eq!(encode(Designator::PortGroup(1), Association::Port), [0x51, 0x95, 0, 4, 0, 0, 0, 1]);
    // A name of four bytes needs four more for its terminator.
    let name = encode(Designator::Name("iqn."), Association::Device);
    assert_eq!(name, *b"\x53\xa8\x00\x08iqn.\0\0\0\0");
    let long = "n".repeat(300);
    assert_eq!(encode(Designator::Name(&long), Association::Port)[3], 252);
}

#[test]
fn limits_and_provisioning_are_at_their_places() {
    let limits = BlockLimits {
        write_same_nonzero: true,
        compare_and_write_blocks: 255,
        optimal_granularity_blocks: 8,
        transfer_blocks: 0x1000,
        optimal_transfer_blocks: 0x100,
        unmap_blocks: 0xffff_ffff,
        unmap_descriptors: 256,
        unmap_granularity_blocks: 8,
        write_same_blocks: 0x1_0000_0000,
        atomic_blocks: 9,
        atomic_unit_blocks: 2,
    };
    let page = vpd_page(DISK, page::BLOCK_LIMITS, &limits.encode());
    assert_eq!(page.len(), 64);
    assert_eq!(page[..16], [0, 0xb0, 0, 60, 1, 255, 0, 8, 0, 0, 0x10, 0, 0, 0, 1, 0]);
    assert_eq!(page[20..36], [255, 255, 255, 255, 0, 0, 1, 0, 0, 0, 0, 8, 0x80, 0, 0, 0]);
    assert_eq!(page[36..48], [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9]);
    assert_eq!(page[48..], [0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0]);
    let thin = Provisioning { unmap: true, write_same: true, reads_zeroes: true, thin: true };
    assert_eq!(thin.encode(), [0, 0xe4, 2, 0]);
    assert_eq!(Provisioning::default().encode(), [0; 4]);
    assert_eq!(characteristics(false)[..5], [0, 1, 0, 0, 2]);
    assert_eq!(characteristics(true)[..5], [0, 1, 0, 0x40, 2]);
    assert_eq!(extended(true)[..4], [0, 1, 1, 1]);
}

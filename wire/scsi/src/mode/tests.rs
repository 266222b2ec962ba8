use proptest::prelude::*;

use super::*;

#[test]
fn headers_have_the_fields_of_spc_4() {
    let blocks = BlockDescriptor { blocks: 0x1_0000_0000, block_bytes: 512, long: false };
    let header = ModeHeader { device_specific: WRITE_PROTECT | DPO_FUA, blocks: Some(blocks) };
    let six = [13, 0, 0x90, 8, 0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0, 0x1c, 0];
    assert_eq!(header.encode(false, &[0x1c, 0]), six);
    let long = ModeHeader { blocks: Some(BlockDescriptor { long: true, ..blocks }), ..header };
    let ten = [0, 22, 0, 0x90, 1, 0, 0, 16, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    assert_eq!(long.encode(true, &[]), ten);
    assert_eq!(ModeHeader::default().encode(false, &[0; 300])[..4], [255, 0, 0, 0]);
}

#[test]
fn pages_have_the_bits_of_their_settings() {
    let all = ModeSettings { write_cache: true, descriptor_sense: true, write_protect: true };
    assert_eq!(all.encode(page::CACHING, 0, false).unwrap()[..3], [0x08, 0x12, 0x04]);
    assert_eq!(all.encode(page::CONTROL, 0, false).unwrap()[..5], [0x0a, 0x0a, 0x04, 0x10, 0x08]);
    assert_eq!(all.encode(page::CONTROL, 0, true).unwrap()[..5], [0x0a, 0x0a, 0x04, 0, 0x08]);
    assert_eq!(all.encode(page::CONTROL, 1, false).unwrap()[..4], [0x4a, 1, 0, 0x1c]);
    assert_eq!(all.encode(page::DISCONNECT, 0, false).unwrap().len(), 16);
    assert_eq!((all.encode(0x3e, 0, false), all.encode(page::CACHING, 1, false)), (None, None));
    for settings in [all, ModeSettings::default()] {
        let mut decoded = ModeSettings::default();
        for code in [page::CACHING, page::CONTROL, page::EXCEPTIONS] {
            let bytes = settings.encode(code, 0, false).unwrap();
            let (page, rest) = ModePage::decode(&bytes).unwrap();
            assert_eq!((page.page, page.subpage, rest), (code, 0, [].as_slice()));
            decoded = decoded.with_page(&page);
        }
        assert_eq!(decoded, settings);
    }
}

#[test]
fn lists_are_decoded_page_by_page() {
    let list = [0, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0x4a, 1, 0, 1, 9, 0x1c, 2, 7, 7];
    let pages = pages_of_list(&list, false).unwrap();
    let (extension, rest) = ModePage::decode(pages).unwrap();
    assert_eq!((extension.page, extension.subpage, extension.bytes), (0x0a, 1, &[0x4a, 1, 0, 1, 9][..]));
    let (last, rest) = ModePage::decode(rest).unwrap();
    assert_eq!((last.page, last.bytes.len(), rest.len()), (0x1c, 4, 0));
    assert!(ModePage::decode(&[0x0a, 0x0a, 0]).is_err() && ModePage::decode(&[0x4a, 1, 0]).is_err());
    assert!(pages_of_list(&[0; 7], true).is_err() && pages_of_list(&[0, 0, 0, 1], false).is_err());
}

proptest! {
    #[test]
    fn any_list_is_decoded_or_rejected(list in prop::collection::vec(any::<u8>(), 0..80), ten: bool) {
        let Ok(mut pages) = pages_of_list(&list, ten) else { return Ok(()) };
        while !pages.is_empty() {
            let Ok((page, rest)) = ModePage::decode(pages) else { return Ok(()) };
            prop_assert_eq!(page.bytes.len() + rest.len(), pages.len());
            pages = rest;
        }
    }
}

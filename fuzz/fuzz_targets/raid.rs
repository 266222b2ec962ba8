//! Superblocks and write-intent bitmaps of RAID members: every decoder of `wire/raid`, of any bytes and of
//! such with valid CRCs.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire_raid::{INTENT_OFFSETS, INTENT_PAGE_BYTES, IntentPage, RaidSuperblock, SUPERBLOCK_HEADER_BYTES};

fn superblock(bytes: &[u8]) {
    let Ok(superblock) = RaidSuperblock::decode(bytes) else { return };
    assert!(RaidSuperblock::length(bytes).is_ok_and(|length| length <= bytes.len()));
    assert!(superblock.members.iter().all(|member| member.slot < superblock.slots));
    assert_eq!(RaidSuperblock::decode(&superblock.encode()), Ok(superblock));
}

fn page(bytes: &[u8]) {
    for offset in INTENT_OFFSETS {
        let Ok(page) = IntentPage::decode(bytes, offset) else { continue };
        assert_eq!(page.bits.len(), (page.regions as usize).div_ceil(64));
        assert_eq!(IntentPage::decode(&page.encode(offset), offset), Ok(page));
    }
}

fuzz_target!(|bytes: &[u8]| {
    superblock(bytes);
    page(bytes);
    let mut sealed = bytes.to_vec();
    if sealed.len() >= SUPERBLOCK_HEADER_BYTES {
        let length = (sealed.len() as u32).to_le_bytes();
        sealed[..12].copy_from_slice(b"SPDKRAID\x01\0\0\0");
        sealed[12..16].copy_from_slice(&length);
        sealed[16..20].fill(0);
        let crc = codec::crc32c(&sealed) ^ codec::crc32c(&vec![0; sealed.len()]);
        sealed[16..20].copy_from_slice(&crc.to_le_bytes());
        superblock(&sealed);
    }
    sealed.resize(INTENT_PAGE_BYTES, 0);
    sealed[..10].copy_from_slice(b"RBINTENT\x01\0");
    sealed[16..24].copy_from_slice(&INTENT_OFFSETS[0].to_le_bytes());
    sealed[12..16].fill(0);
    let crc = codec::crc32c(&sealed);
    sealed[12..16].copy_from_slice(&crc.to_le_bytes());
    page(&sealed);
});

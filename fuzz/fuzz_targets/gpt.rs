//! Partition tables: every decoder of `wire/gpt`, and the search for the table of a device of any bytes.
#![no_main]

use bdev_gpt::{SearchStep, TableSearch};
use libfuzzer_sys::fuzz_target;
use wire_gpt::{ENTRIES_BYTES_MAX, GptEntry, GptHeader, GptTable, ProtectiveMbr};

/// With valid CRCs of a header in this block, if it can have one, and of its entries.
fn seal(device: &mut [u8], lba: usize, block: usize) {
    let header = lba * block;
    let at = |device: &[u8], at: usize| {
        u32::from_le_bytes(device[header + at..header + at + 4].try_into().expect("four bytes")) as usize
    };
    device[header..header + 16].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0");
    let (first, length) =
        (at(device, 72).saturating_mul(block), at(device, 80).saturating_mul(at(device, 84)));
    if let Some(end) = first.checked_add(length)
        && let Some(entries) = device.get(first..end)
    {
        let crc = codec::crc32(entries);
        device[header + 88..header + 92].copy_from_slice(&crc.to_le_bytes());
    }
    device[header + 16..header + 20].fill(0);
    let crc = codec::crc32(&device[header..header + 92]);
    device[header + 16..header + 20].copy_from_slice(&crc.to_le_bytes());
}

fn search(device: &[u8], block: usize, failing: u8) {
    let blocks = (device.len() / block) as u64;
    let (mut search, mut step) = TableSearch::new(blocks, block as u32);
    for read in 0.. {
        let SearchStep::Read { lba, blocks: count } = step else { break };
        assert!(read < 4 && count > 0 && count as usize * block <= 1 << 20);
        assert!(lba + u64::from(count) <= blocks);
        let at = lba as usize * block;
        let data = &device[at..at + count as usize * block];
        step = search.read((failing >> read & 1 == 0).then_some(data));
    }
    if let SearchStep::Found(found) = step {
        let (valid, rest) = found.table.valid_entries();
        assert_eq!(valid.len() + rest.len(), found.table.entries.len());
        for (_, entry) in valid {
            assert!(entry.blocks().is_some() && entry.last_lba < blocks);
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(mbr) = ProtectiveMbr::decode(bytes) {
        assert_eq!(ProtectiveMbr::decode(&mbr.encode()), Ok(mbr));
    }
    if let Ok(Some(entry)) = GptEntry::decode(bytes) {
        assert_eq!(GptEntry::decode(&entry.encode()), Ok(Some(entry)));
    }
    if let Ok(header) = GptHeader::decode(bytes) {
        assert_eq!(GptHeader::decode(&header.encode()), Ok(header));
        assert!(header.entries_bytes() <= ENTRIES_BYTES_MAX);
        let _ = GptTable::decode(&header, bytes);
    }
    let [flags, failing, rest @ ..] = bytes else { return };
    let block = if flags & 1 == 0 { 512 } else { 4096 };
    let mut device = rest.to_vec();
    device.resize(device.len().div_ceil(block).clamp(3, 64) * block, 0);
    search(&device, block, *failing);
    let blocks = device.len() / block;
    device[..512].copy_from_slice(&ProtectiveMbr::of(blocks as u64).encode());
    search(&device, block, *failing);
    seal(&mut device, blocks - 1, block);
    seal(&mut device, 1, block);
    search(&device, block, *failing);
});

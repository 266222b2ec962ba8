//! Superblocks and bitmaps that are valid by themselves and say anything: an array that fits its members, or
//! a line of the log.
#![allow(clippy::unwrap_used)]

mod rig;

use control::json::json;
use random::WyRand;
use rig::{BLOCK, OFFSET, Program, uuid};
use wire_raid::{INTENT_OFFSETS, IntentPage, MemberState, RaidLevel, RaidMember, RaidSuperblock, Uuid};

const BLOCKS: u64 = OFFSET + 512;

fn number(rng: &mut WyRand) -> u64 {
    let likely = [0, 1, 2, 8, 128, 256, 512, OFFSET, BLOCKS, BLOCKS - OFFSET, u64::from(u32::MAX), u64::MAX];
    match rng.below(4) {
        0 => rng.below(u64::MAX),
        1 => rng.below(2 * BLOCKS),
        _ => likely[rng.below(likely.len() as u64) as usize],
    }
}

fn superblock(rng: &mut WyRand) -> RaidSuperblock {
    let levels = [RaidLevel::Raid0, RaidLevel::Raid1, RaidLevel::Raid1, RaidLevel::Concat, RaidLevel::Raid5f];
    let states =
        [MemberState::Missing, MemberState::Configured, MemberState::Configured, MemberState::Failed];
    let slots = [1, 2, 2, 2, 3, 255][rng.below(6) as usize];
    let count = [0, 1, 2, 2, 2, 3][rng.below(6) as usize];
    let mut taken = Vec::new();
    let mut members = Vec::new();
    for index in 0..count {
        let slot = if rng.below(4) > 0 { index } else { rng.below(255) as u8 };
        if slot >= slots || taken.contains(&slot) {
            continue;
        }
        taken.push(slot);
        let data_offset = if rng.below(3) > 0 { OFFSET } else { number(rng) };
        let data_blocks = if rng.below(3) > 0 { 512 } else { number(rng) };
        members.push(RaidMember {
            uuid: Uuid::parse_str(&uuid(index.into())).unwrap(),
            data_offset,
            data_blocks: data_blocks.min(u64::MAX - data_offset),
            state: states[rng.below(4) as usize],
            slot,
        });
    }
    let level = levels[rng.below(5) as usize];
    let strip_blocks = [0, 8, 128, 3, u32::MAX][rng.below(5) as usize];
    RaidSuperblock {
        uuid: Uuid::from_u128(1),
        name: ["r", "m0", "a\nb"][rng.below(8).min(2) as usize % 3].to_string(),
        blocks: if rng.below(2) > 0 { 512 } else { number(rng) },
        block_bytes: if rng.below(8) > 0 { BLOCK as u32 } else { number(rng) as u32 },
        level,
        strip_blocks: if level == RaidLevel::Raid1 && rng.below(4) > 0 { 0 } else { strip_blocks },
        sequence: number(rng),
        slots,
        members,
    }
}

fn page(rng: &mut WyRand, sequence: u64) -> IntentPage {
    let regions = if rng.below(2) > 0 { 4 } else { rng.below(1000) as u32 };
    let mut bits: Vec<u64> = (0..regions.div_ceil(64)).map(|_| rng.below(u64::MAX)).collect();
    if let Some(last) = bits.last_mut().filter(|_| regions % 64 != 0) {
        *last &= (1 << (regions % 64)) - 1;
    }
    IntentPage {
        array: Uuid::from_u128(1),
        sequence: if rng.below(2) > 0 { sequence } else { number(rng) },
        complete_since: number(rng),
        generation: number(rng) >> 2,
        is_clean: false,
        region_shift: if rng.below(2) > 0 { 7 } else { rng.below(64) as u32 },
        regions,
        bits,
    }
}

#[test]
fn superblocks_that_say_anything_make_arrays_that_fit_or_none() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1u64);
    let mut rng = WyRand::new(seed);
    let program = Program::start();
    let mut online = 0;
    for round in 0..150 {
        let one = superblock(&mut rng);
        let other = if rng.below(2) > 0 { one.clone() } else { superblock(&mut rng) };
        for (index, superblock) in [one, other].iter().enumerate() {
            let name = format!("m{index}");
            program.medium(&name, BLOCKS);
            let medium = format!("{name}-medium");
            let mut image = superblock.encode();
            image.resize(image.len().next_multiple_of(BLOCK), 0);
            program.write(&medium, 0, &image).unwrap();
            for offset in INTENT_OFFSETS {
                let page = page(&mut rng, superblock.sequence).encode(offset);
                program.write(&medium, offset / BLOCK as u64, &page).unwrap();
            }
            program.insert(&name, index as u64);
        }
        for raid in program.raids("online") {
            let name = raid["name"].as_str().unwrap();
            let blocks = program.registry.find(name).unwrap().geometry().blocks;
            online += 1;
            for lba in [0, blocks - 1] {
                // A member may be of another size than its superblock says; that is an error of the request.
                _ = program.write(name, lba, &[round as u8; BLOCK]);
                _ = program.read(name, lba, BLOCK);
            }
        }
        for raid in program.raids("all") {
            program.call("bdev_raid_delete", json!({ "name": raid["name"] }));
        }
        assert!(program.raids("all").is_empty(), "seed {seed} round {round}");
        for name in ["m0", "m1"] {
            program.pull(name);
            program.call("bdev_malloc_delete", json!({ "name": format!("{name}-medium") }));
        }
        let claims = program.registry.claims();
        assert!(claims.is_empty(), "seed {seed} round {round}: {claims:?}");
    }
    // Whether any is valid depends on the seed.
    assert!(online > 0 || seed != 1, "no array was valid");
}

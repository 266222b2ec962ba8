use aes::cipher::BlockCipherEncrypt as _;
use proptest::prelude::*;

use super::*;

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        hex.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect()
}

/// Checks both directions, in place and from one slice to another.
fn check(key: &XtsKey, unit_bytes: usize, first: u128, plain: &[u8], encrypted: &[u8], what: &str) {
    let tweak_of = |unit: u64| first + u128::from(unit);
    let mut data = plain.to_vec();
    key.encrypt(&mut data, unit_bytes, tweak_of);
    assert_eq!(data, encrypted, "{what}");
    key.decrypt(&mut data, unit_bytes, tweak_of);
    assert_eq!(data, plain, "{what}");
    key.encrypt_to(&mut data, plain, unit_bytes, tweak_of);
    assert_eq!(data, encrypted, "{what}");
}

/// IEEE 1619-2007, annex B: those of whole blocks that are not all alike.
#[test]
fn the_vectors_of_the_standard_are_met() {
    let sequence: Vec<u8> = (0..512).map(|byte| byte as u8).collect();
    for (number, key, key2, unit, plain, encrypted) in [
        (
            1,
            "00000000000000000000000000000000",
            "00000000000000000000000000000000",
            0,
            vec![0; 32],
            "917cf69ebd68b2ec9b9fe9a3eadda692cd43d2f59598ed858c02c2652fbf922e",
        ),
        (
            2,
            "11111111111111111111111111111111",
            "22222222222222222222222222222222",
            0x33_3333_3333,
            vec![0x44; 32],
            "c454185e6a16936e39334038acef838bfb186fff7480adc4289382ecd6d394f0",
        ),
        (
            3,
            "fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0",
            "22222222222222222222222222222222",
            0x33_3333_3333,
            vec![0x44; 32],
            "af85336b597afc1a900b2eb21ec949d292df4c047e0b21532186a5971a227a89",
        ),
        (
            4,
            "27182818284590452353602874713526",
            "31415926535897932384626433832795",
            0,
            sequence.clone(),
            include_str!("vectors/ieee1619-4.hex"),
        ),
        (
            10,
            "2718281828459045235360287471352662497757247093699959574966967627",
            "3141592653589793238462643383279502884197169399375105820974944592",
            0xff,
            sequence.clone(),
            include_str!("vectors/ieee1619-10.hex"),
        ),
    ] {
        let xts = XtsKey::new(&bytes(key), &bytes(key2)).unwrap();
        check(&xts, plain.len(), unit, &plain, &bytes(encrypted), &format!("vector {number}"));
    }
}

/// OpenSSL 3.0.22, EVP_aes_128_xts and EVP_aes_256_xts.
#[test]
fn openssl_encrypts_the_same() {
    let key: Vec<u8> = (0..32).map(|at: u32| (at * 7 + 3) as u8).collect();
    let key2: Vec<u8> = (0..32).map(|at: u32| (at * 11 + 200) as u8).collect();
    let plain: Vec<u8> = (0..4096).map(|at: u32| (at * at + at / 251) as u8).collect();
    for (length, unit, encrypted) in [
        (16, 5, include_str!("vectors/openssl-128-4096.hex")),
        (32, (1 << 64) + 7, include_str!("vectors/openssl-256-4096.hex")),
    ] {
        let xts = XtsKey::new(&key[..length], &key2[..length]).unwrap();
        check(&xts, 4096, unit, &plain, &bytes(encrypted), &format!("AES-{}", length * 8));
    }
}

#[test]
fn keys_of_other_lengths_are_none() {
    for (data, tweak) in [(0, 0), (15, 15), (16, 32), (24, 24), (32, 16), (33, 33), (64, 64)] {
        assert!(XtsKey::new(&vec![1; data], &vec![2; tweak]).is_none(), "{data} {tweak}");
    }
}

/// The standard, block by block: the tweak is encrypted, then doubled as bytes with a carry.
fn by_the_book(data: &mut [u8], key: &[u8], key2: &[u8], unit_bytes: usize, first: u128) {
    let one = |key: &[u8], block: [u8; 16]| -> [u8; 16] {
        let mut block = Block::from(block);
        match key.len() {
            16 => Aes128Enc::new_from_slice(key).unwrap().encrypt_block(&mut block),
            _ => Aes256Enc::new_from_slice(key).unwrap().encrypt_block(&mut block),
        }
        block.into()
    };
    for (unit, data) in data.chunks_mut(unit_bytes).enumerate() {
        let mut tweak = one(key2, (first + unit as u128).to_le_bytes());
        for block in data.as_chunks_mut::<16>().0 {
            let mixed = std::array::from_fn(|at| block[at] ^ tweak[at]);
            let encrypted = one(key, mixed);
            *block = std::array::from_fn(|at| encrypted[at] ^ tweak[at]);
            let mut carry = 0;
            for byte in &mut tweak {
                (*byte, carry) = (*byte << 1 | carry, *byte >> 7);
            }
            tweak[0] ^= carry * 0x87;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn units_of_any_size_and_number_are_as_block_by_block(
        seed in any::<[u8; 32]>(),
        is_long in any::<bool>(),
        unit_blocks in prop_oneof![1usize..70, Just(32), Just(256), Just(260)],
        units in 1usize..140,
        first in any::<u64>(),
    ) {
        let units = units.min(4096 / unit_blocks).max(1);
        let length = if is_long { 32 } else { 16 };
        let other: Vec<u8> = seed.iter().map(|byte| byte ^ 0x5a).collect();
        let (key, key2) = (&seed[..length], &other[..length]);
        let plain: Vec<u8> =
            (0..unit_blocks * units * 16).map(|at| seed[at % 32].wrapping_mul(at as u8 | 1)).collect();
        let mut expected = plain.clone();
        by_the_book(&mut expected, key, key2, unit_blocks * 16, first.into());
        let xts = XtsKey::new(key, key2).unwrap();
        check(&xts, unit_blocks * 16, first.into(), &plain, &expected, "by the book");
    }
}

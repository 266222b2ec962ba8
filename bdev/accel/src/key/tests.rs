use super::*;

const KEY: &str = "000102030405060708090a0b0c0d0e0f";
const KEY2: &str = "6465666768696a6b6c6d6e6f70717273";

fn key(mode: TweakMode) -> CryptoKey {
    CryptoKey::from_hex("k", Cipher::AesXts, mode, KEY.as_bytes(), Some(KEY2.as_bytes())).unwrap()
}

#[test]
fn what_is_no_key_is_refused_by_its_parameter() {
    let long = "0".repeat(64);
    for (key, key2, field, reason) in [
        ("", KEY2, "key", "no whole bytes"),
        ("0", KEY2, "key", "no whole bytes"),
        (&KEY[1..], KEY2, "key", "31 digits"),
        ("0x0102030405060708090a0b0c0d0e0f", KEY2, "key", "other characters"),
        (KEY, "é465666768696a6b6c6d6e6f7071727", "key2", "other characters"),
        (KEY, "", "key2", "no whole bytes"),
        (KEY, &KEY2[2..], "key2", "it has 15 bytes, and key has 16"),
        (KEY, &long, "key2", "it has 32 bytes"),
        (KEY, KEY, "key2", "not secure"),
        (&KEY[..8], &KEY2[..8], "key", "32 or 64"),
        (&"ab".repeat(24), &"cd".repeat(24), "key", "32 or 64"),
        (&"ab".repeat(4000), &"cd".repeat(4000), "key", "32 or 64"),
    ] {
        let made = CryptoKey::from_hex(
            "k",
            Cipher::AesXts,
            TweakMode::SimpleLba,
            key.as_bytes(),
            Some(key2.as_bytes()),
        );
        let message = made.unwrap_err().to_string();
        assert!(message.starts_with(&format!("{field}: ")) && message.contains(reason), "{message}");
        assert!(!message.contains("0405060708"), "{message}");
    }
    let none = CryptoKey::from_hex("k", Cipher::AesXts, TweakMode::SimpleLba, KEY.as_bytes(), None);
    assert!(none.unwrap_err().to_string().starts_with("key2: "));
    let cbc = CryptoKey::from_hex("k", Cipher::AesCbc, TweakMode::SimpleLba, KEY.as_bytes(), None);
    assert_eq!(cbc.unwrap_err().to_string(), "cipher: no engine has AES_CBC; there is AES_XTS");
}

#[test]
fn a_secret_has_both_keys_one_after_the_other() {
    let mode = TweakMode::SimpleLba;
    let by_value = key(mode);
    for text in
        [format!("{KEY}{KEY2}"), format!("{KEY}\n{KEY2}\n"), format!(" {KEY} {}\t", KEY2.to_uppercase())]
    {
        let made = CryptoKey::from_secret("other", Cipher::AesXts, mode, &Secret::new(text)).unwrap();
        assert!(made.is_same(&by_value));
    }
    for text in ["", KEY, "swordfish", &"g".repeat(64)] {
        let error = CryptoKey::from_secret("k", Cipher::AesXts, mode, &Secret::new(text)).unwrap_err();
        assert!(!error.to_string().contains("sword"), "{error}");
    }
    let printed = format!("{by_value:?} {}", by_value.mask());
    assert_eq!(printed, format!("CryptoKey(\"k\") {}", "*".repeat(32)));
}

#[test]
fn tweaks_are_those_of_spdks_modes() {
    let bytes = |mode: TweakMode, unit| {
        let tweak: [u8; 16] = mode.tweak(unit).to_le_bytes();
        let (words, _) = tweak.as_chunks::<8>();
        (u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1]))
    };
    let max = u64::MAX;
    for (unit, complement) in [(0, max >> 1), (1, (max >> 1) - 1), (5, (max >> 1) - 5), (max, 0)] {
        assert_eq!(bytes(TweakMode::SimpleLba, unit), (0, unit));
        assert_eq!(bytes(TweakMode::Incr512FullLba, unit), (0, unit));
        assert_eq!(bytes(TweakMode::Incr512UpperLba, unit), (unit, 0));
        assert_eq!(bytes(TweakMode::JoinNegLbaWithLba, unit), (complement, unit));
    }
}

#[test]
fn modes_of_512_bytes_encrypt_a_large_block_as_small_ones() {
    for mode in [TweakMode::Incr512FullLba, TweakMode::Incr512UpperLba] {
        let key = key(mode);
        let (mut large, mut small) = (vec![7; 8192], vec![7; 8192]);
        key.encrypt(&mut large, 4096, 3);
        key.encrypt(&mut small, 512, 24);
        assert_eq!(large, small, "{mode:?}");
        key.decrypt(&mut large, 4096, 3);
        assert_eq!(large, [7; 8192], "{mode:?}");
    }
    let key = key(TweakMode::SimpleLba);
    let (mut large, mut small) = (vec![7; 4096], vec![7; 4096]);
    key.encrypt(&mut large, 4096, 0);
    key.encrypt(&mut small, 512, 0);
    assert!(large[..512] == small[..512] && large[512..1024] != small[512..1024]);
}

#[test]
fn any_lba_is_a_tweak() {
    for mode in [TweakMode::SimpleLba, TweakMode::JoinNegLbaWithLba, TweakMode::Incr512FullLba] {
        let mut data = vec![1; 8192];
        let key = key(mode);
        key.encrypt(&mut data, 4096, u64::MAX);
        key.decrypt(&mut data, 4096, u64::MAX);
        assert_eq!(data, [1; 8192]);
    }
}

#[test]
fn blocks_are_whole_units_of_whole_blocks_of_the_cipher() {
    let takes = |mode, sizes: [usize; 6]| sizes.map(|bytes| key(mode).takes_blocks(bytes));
    let sizes = [0, 512, 520, 528, 4096, 4224];
    assert_eq!(takes(TweakMode::SimpleLba, sizes), [false, true, false, true, true, true]);
    assert_eq!(takes(TweakMode::Incr512FullLba, sizes), [false, true, false, false, true, false]);
}

/// The value is from `openssl enc -aes-128-ecb` with the key, before and after it the XOR with the tweak that
/// the same with the second key makes of 16 bytes of FFh.
#[test]
fn the_check_value_is_that_of_the_key_in_every_mode() {
    let modes = [
        TweakMode::SimpleLba,
        TweakMode::JoinNegLbaWithLba,
        TweakMode::Incr512FullLba,
        TweakMode::Incr512UpperLba,
    ];
    for mode in modes {
        assert_eq!(key(mode).check_value(), "00d5581adc4f00ee");
    }
    let other =
        CryptoKey::from_hex("k", Cipher::AesXts, modes[0], KEY2.as_bytes(), Some(KEY.as_bytes())).unwrap();
    assert_ne!(other.check_value(), key(modes[0]).check_value());
}

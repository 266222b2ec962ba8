//! Claims: every pair of opens.
#![allow(clippy::unwrap_used)]

use bdev::{Access, BdevError, ClaimType, Registry, null};

const OPENS: [(&str, Access<'static>); 7] = [
    ("read only", Access::ReadOnly),
    ("read write", Access::ReadWrite),
    ("exclusive", Access::Exclusive { by: "e" }),
    ("one writer", Access::ReadManyWriteOne { by: "o" }),
    ("no writer", Access::ReadManyWriteNone { by: "n" }),
    ("shared 1", Access::ReadManyWriteShared { by: "s1", key: 1 }),
    ("shared 2", Access::ReadManyWriteShared { by: "s2", key: 2 }),
];

/// Rows are what is open, columns what is opened then: `+`, or the holder in the error; `w` is a writer
/// without a claim.
const TABLE: [[&str; 7]; 7] = [
    // RO   RW    excl  one   none  key 1 key 2
    ["+", "+", "+", "+", "+", "+", "+"],
    ["+", "+", "w", "w", "w", "w", "w"],
    ["+", "e", "e", "e", "e", "e", "e"],
    ["+", "o", "o", "o", "o", "o", "o"],
    ["+", "n", "n", "n", "+", "n", "n"],
    ["+", "s1", "s1", "s1", "s1", "+", "s1"],
    ["+", "s2", "s2", "s2", "s2", "s2", "+"],
];

fn one_device() -> Registry {
    let registry = Registry::new();
    null::create(&registry, null::NullConfig::new("N", 8, 512)).unwrap();
    registry
}

#[test]
fn each_pair_of_opens_is_allowed_or_refused_with_the_holders_name() {
    let registry = one_device();
    for ((first, access), row) in OPENS.iter().zip(TABLE) {
        for ((second, wanted), expected) in OPENS.iter().zip(row) {
            let open = registry.open("N", *access).unwrap();
            let result = match registry.open("N", *wanted) {
                Ok(_) => "+".to_string(),
                Err(BdevError::Claimed { by, .. }) if by == "1 other writer(s)" => "w".to_string(),
                Err(BdevError::Claimed { name, by }) if name == "N" => by,
                Err(error) => error.to_string(),
            };
            assert_eq!(result, expected, "{second} while it is open for {first}");
            drop(open);
            // Nothing of either is left.
            registry.open("N", Access::Exclusive { by: "next" }).unwrap();
        }
    }
}

#[test]
fn a_claim_lasts_until_its_last_holder_closes() {
    let registry = one_device();
    let device = registry.find("N").unwrap();
    let open = |access| registry.open("N", access).unwrap();
    for (one, other, kind) in [
        (
            Access::ReadManyWriteNone { by: "a" },
            Access::ReadManyWriteNone { by: "b" },
            ClaimType::ReadManyWriteNone,
        ),
        (
            Access::ReadManyWriteShared { by: "a", key: 7 },
            Access::ReadManyWriteShared { by: "b", key: 7 },
            ClaimType::ReadManyWriteShared,
        ),
    ] {
        let (first, second) = (open(one), open(other));
        assert_eq!(first.writes(), kind == ClaimType::ReadManyWriteShared);
        assert_eq!(device.claim(), Some((kind, vec!["a".to_string(), "b".to_string()])));
        assert_eq!(registry.open("N", Access::ReadWrite).unwrap_err().to_string(), "N is claimed by a, b");
        drop(first);
        assert_eq!(device.claim(), Some((kind, vec!["b".to_string()])));
        assert_eq!(registry.open("N", Access::ReadWrite).unwrap_err().to_string(), "N is claimed by b");
        drop(second);
        assert_eq!(device.claim(), None);
    }
    let without_key = registry.open("N", Access::ReadManyWriteShared { by: "a", key: 0 }).unwrap_err();
    assert_eq!(without_key.to_string(), "key: a shared claim needs a key that is not 0");
}

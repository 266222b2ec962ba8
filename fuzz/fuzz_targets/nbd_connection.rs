//! Arbitrary bytes as the traffic of an NBD client, from the greeting to requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nbd::testing::any_bytes(bytes));

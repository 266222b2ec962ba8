//! Arbitrary bytes as the traffic of an iSCSI initiator, from the login to commands and their data.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| iscsi::testing::any_bytes(bytes));

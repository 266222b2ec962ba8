//! Arbitrary bytes as what the kernel's ublk driver gives: devices to recover, descriptors, results of commands.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ublk::any_driver(bytes));

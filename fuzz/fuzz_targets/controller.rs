//! Any bytes as the life of a controller; see the harness for the promises that it is held to.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| controller::Harness::run(bytes));

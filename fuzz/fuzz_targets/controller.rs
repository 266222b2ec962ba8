//! Arbitrary commands and events for a controller; `nvme_controller::Harness` checks its invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nvme_controller::Harness::run(bytes));

//! Arbitrary commands, transfers and completions of an I/O queue; `QueueHarness` checks its invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nvme_controller::io_queue::harness::QueueHarness::run(bytes));

//! Any bytes as what a host sends to a target, from before ICReq to deep in an I/O queue.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nvmf::simulated::any_bytes(bytes));
